"""Runs Lightning's own tests with the strategies of this package in place of those that its Trainer would choose.

``lightning`` 2.6.6 has no tag. 2.6.5 (be98784a1a) differs from it in one file, ``core/saving.py``::

    git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning
    python tests/libraries/theirs/of_lightning.py pytorch-lightning

With ``OURS=2`` a Trainer that chooses one CPU has ``BalancedStrategy(["cpu"] * 2)``. With ``OURS=ddp`` one that is told
``"ddp_spawn"`` or ``"ddp_fork"`` has a ``BalancedDDPStrategy``. Tests that give a strategy object run as they are.
"""

import os

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from suite import Suite, main

from balanced_parallel.integrations.lightning import BalancedDDPStrategy, BalancedStrategy

FILES = []
REASONS = {
    "automatic_optimization=False": "Several devices refuse manual optimization by name",
}


def ours(strategy, kind):
    """Returns a strategy of this package in place of one that Lightning has made."""
    if kind == "ddp":
        is_plain = type(strategy) is DDPStrategy and not strategy._ddp_kwargs
        method = strategy._start_method if is_plain else "popen"
        return strategy if method == "popen" else BalancedDDPStrategy(start_method=method)
    is_one_cpu = type(strategy) is SingleDeviceStrategy and strategy.root_device.type == "cpu"
    return BalancedStrategy(["cpu"] * int(kind)) if is_one_cpu else strategy


def pytest_configure(config):
    """Changes what Lightning makes, in the processes that tests spawn too."""
    config.addinivalue_line("markers", "flaky: of pytest-rerunfailures, which is not needed")
    if kind := os.environ.get("OURS"):
        change(kind)


def change(kind):
    """Makes Lightning choose strategies of this package."""
    choose, get = _AcceleratorConnector._choose_strategy, StrategyRegistry.get
    if kind == "ddp":
        StrategyRegistry.get = lambda name: ours(get(name), kind)
    else:
        _AcceleratorConnector._choose_strategy = lambda self: ours(choose(self), kind)


if __name__ == "__main__":
    kinds = {"2": "two devices", "1": "one device", "ddp": "ranks"}
    main(Suite("of_lightning", "tests", FILES, kinds, REASONS))
