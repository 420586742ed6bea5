"""Runs peft's own tests of adapters with the forward of a ``PeftModel`` on two devices.

The source distribution of ``peft`` 0.21.2 has its tests. They train by hand, so that the outputs of a ``DataParallelModel``
are gathered, with gradients::

    pip download --no-deps --no-binary peft peft==0.21.2 && tar xf peft-0.21.2.tar.gz
    mkdir theirs && mv peft-0.21.2/tests theirs && touch theirs/tests/__init__.py theirs/pytest.ini
    python tests/libraries/theirs/of_peft.py theirs

With ``OURS=2`` the devices are ``["cpu"] * 2``. A batch of one row has one.
"""

import os

from suite import Suite, main

REASONS = {
    "is invalid for input of size|mat1 and mat2": "The model makes images of several rows of its input",
    "target_parameters": "Replicas in one process refuse `target_parameters` of an adapter by name",
    "forward wrote to a parameter": "Constrained OFT writes its weights in each forward: refused on one device by name",
}
SELECTED = (
    "only_params_are_updated or training_custom_models or parameters_after_loading_model "
    "or multiple_active_adapters_forward"
)


def pytest_configure(config):
    """Changes the call of a model with adapters."""
    for name in ("single_gpu_tests", "multi_gpu_tests", "regression", "bitsandbytes"):
        config.addinivalue_line("markers", f"{name}: as in peft")
    if os.environ.get("OURS"):
        change()


def change():
    """Makes models with adapters run on two devices."""
    import peft
    from torch import nn

    from balanced_parallel import DataParallelModel
    from balanced_parallel.batch.rows import count_rows

    running = []

    def call(self, *inputs, **settings):
        if running or (count_rows((inputs, settings)) or 0) < 2:
            return nn.Module.__call__(self, *inputs, **settings)
        running.append(self)
        try:
            return DataParallelModel(self, ["cpu"] * 2)(*inputs, **settings).gather("cpu")
        finally:
            running.clear()

    peft.PeftModel.__call__ = call


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", PYTEST_ADDOPTS=f"-k '{SELECTED}'")
    main(Suite("of_peft", ".", ["tests/test_custom_models.py"], {"2": "two devices"}, REASONS))
