"""Train with the batch you want on the GPUs you have.

However a batch is split (over devices, over processes, over time), the loss and the gradients are
those of the one big batch, and no device carries more than its share.

Replace ``nn.DataParallel``: :class:`DataParallelModel`, :class:`DataParallelCriterion`,
:func:`gather`. Train in micro-batches: :class:`TrainStep`. Run under torchrun: :func:`parallelize`.
Spread optimizer state: :class:`BalancedOptimizer`. Predict memory: :func:`memory.estimate`,
:func:`memory.plan`. Lower it: :mod:`savings`. Try it without GPUs: :func:`simulate`.

Training does without the planner, the simulator, ``verify``, :class:`Checkpoints`, the savings, the
samplers and :class:`ByCost`. They are loaded when they are first used: some imports take seconds.
"""

import importlib
from typing import TYPE_CHECKING, Any, NoReturn

# Modules that are imported below read it.
__version__ = "0.1.0"

from .batch.marks import Along, Rows, Whole
from .batch.outputs import PerReplica, gather
from .batch.rows import scatter
from .loss.additive import AdditiveLoss
from .loss.criterion import DataParallelCriterion
from .loss.overlap import DiceLoss, JaccardLoss, TverskyLoss
from .loss.rules import loss_weight
from .loss.sums import weighted_mean
from .optim.balanced import BalancedOptimizer
from .replicas.all_rows import SumOverRows
from .replicas.batchnorm import convert_sync_batchnorm
from .replicas.model import DataParallelModel
from .runtime.values import Precision
from .strategies.parallelize import parallelize
from .training.step import TrainStep

if TYPE_CHECKING:
    from . import memory, savings
    from .data.by_cost import ByCost
    from .data.samplers import BalancedBatchSampler, RankBatchSampler
    from .diagnostics.verify import verify
    from .simulation import simulate
    from .state.checkpoint import Checkpoints

__all__ = [
    "AdditiveLoss",
    "Along",
    "BalancedBatchSampler",
    "BalancedOptimizer",
    "ByCost",
    "Checkpoints",
    "DataParallelCriterion",
    "DataParallelModel",
    "DiceLoss",
    "JaccardLoss",
    "PerReplica",
    "Precision",
    "RankBatchSampler",
    "Rows",
    "SumOverRows",
    "TrainStep",
    "TverskyLoss",
    "Whole",
    "convert_sync_batchnorm",
    "gather",
    "loss_weight",
    "memory",
    "parallelize",
    "savings",
    "scatter",
    "simulate",
    "verify",
    "weighted_mean",
]

# Names of other libraries, and what to use.
_ELSEWHERE = {
    "BalancedDDPStrategy": "import it from balanced_parallel.integrations.lightning",
    "BalancedStrategy": "import it from balanced_parallel.integrations.lightning",
    "BalancedTrainer": "import it from balanced_parallel.integrations.transformers",
    "DataParallel": "use DataParallelModel and DataParallelCriterion",
    "Trainer": "use TrainStep, or BalancedTrainer of balanced_parallel.integrations.transformers",
}
_PLACES = {
    "BalancedBatchSampler": ".data.samplers",
    "ByCost": ".data.by_cost",
    "Checkpoints": ".state.checkpoint",
    "RankBatchSampler": ".data.samplers",
    "simulate": ".simulation",
    "verify": ".diagnostics.verify",
}


def __getattr__(name: str) -> Any:
    """Loads the module of a public name at its first use."""
    if name in ("memory", "savings"):
        return importlib.import_module(f".{name}", __name__)
    if name == "sum_over_rows":  # A program that imports it may not call it.
        return _refuse_sum_over_rows
    if name not in _PLACES:
        text = f"module {__name__!r} has no attribute {name!r}"
        if name in _ELSEWHERE:
            # Only an ImportError reaches "from balanced_parallel import DataParallel". Lightning's
            # command line looks for strategies by their names, and expects the other one.
            kind = AttributeError if name.endswith("Strategy") else ImportError
            raise kind(f"{text}: {_ELSEWHERE[name]}")
        raise AttributeError(text)
    value = globals()[name] = getattr(importlib.import_module(_PLACES[name], __name__), name)
    return value


def _refuse_sum_over_rows(*arguments: object) -> NoReturn:
    raise TypeError(
        "sum_over_rows is gone, expected SumOverRows: write self.add = SumOverRows() in the module and self.add(x.sum(0)) in "
        "its forward; give DataParallelCriterion(function, sums_rows=True) for a function that calls one"
    )


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return __all__
