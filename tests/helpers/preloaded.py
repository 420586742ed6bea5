"""Imports that processes of :mod:`helpers.processes` need not repeat. Their server imports this module.

The garbage collector would visit all objects many times. It neither runs meanwhile, nor visits them later.
"""

import gc
import importlib

MODULES = """
    torch torch.distributed.optim torch.distributed.checkpoint.state_dict torch._dynamo
    balanced_parallel.memory balanced_parallel.simulation
    safetensors.torch sklearn.datasets pytest hypothesis
"""

gc.disable()
for name in MODULES.split():
    importlib.import_module(name)
gc.freeze()
gc.enable()
