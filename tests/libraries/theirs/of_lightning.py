"""Runs Lightning's own tests with the strategies of this package in place of those that its Trainer would choose.

``lightning`` 2.6.6 has no tag. 2.6.5 (be98784a1a) differs from it in one file, ``core/saving.py``::

    git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning
    python tests/libraries/theirs/of_lightning.py pytorch-lightning

With ``OURS=2`` a Trainer that chooses one CPU has ``BalancedStrategy(["cpu"] * 2)``. With ``OURS=ddp`` one that is told
``"ddp_spawn"`` or ``"ddp_fork"`` has a ``BalancedDDPStrategy``. Tests that give a strategy object run as they are. Others
start no process, so ``--kinds ddp`` alone runs the tests that name such a strategy, of more files.
"""

import inspect
import os
import sys

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from suite import Suite, main

from balanced_parallel.integrations.lightning import BalancedDDPStrategy, BalancedStrategy

FILES = {
    "callbacks": "early_stopping finetuning_callback gradient_accumulation_scheduler lambda_function lr_monitor "
    "model_checkpoint_additional_cases model_checkpoint_edge_cases model_checkpoint_manual_opt stochastic_weight_avg",
    "checkpointing": "checkpoint_callback_frequency model_checkpoint torch_saving trainer_checkpoint",
    "core": "datamodules lightning_module lightning_optimizer metric_result_integration results saving",
    "loops": "double_iter_in_iterable_dataset evaluation_loop evaluation_loop_flow fetchers flow_warnings loop_state_dict loops "
    "prediction_loop progress training_epoch_loop training_loop training_loop_flow_dict training_loop_flow_scalar",
    "loops/optimization": "automatic_loop closure manual_loop",
    "models": "amp cpu fabric_integration hooks hparams restore",
    "plugins": "amp_plugins async_checkpoint checkpoint_io_plugin",
    "plugins/precision": "all amp double half",
    ".": "cli",
    "trainer/connectors": "callback_connector checkpoint_connector data_connector logger_connector",
    "trainer/flags": "barebones check_val_every_n_epoch fast_dev_run inference_mode limit_batches min_max_epochs "
    "overfit_batches val_check_interval",
    "trainer/logging_": "eval_loop_logging logger_connector train_loop_logging",
    "trainer": "trainer",
    "trainer/optimization": "backward_calls manual_optimization multiple_optimizers optimizers",
}
# More files with tests that start processes.
PROCESSES = (
    "callbacks/test_pruning callbacks/test_spike callbacks/test_weight_averaging loggers/test_all profilers/test_profiler "
    "plugins/test_cluster_integration serve/test_servable_module_validator trainer/test_dataloaders trainer/test_trainer "
    "trainer/logging_/test_distributed_logging trainer/properties/test_get_model"
)
REASONS = {
    "automatic_optimization=False": "Several devices refuse manual optimization and compiled modules by name",
    "updates a torchmetrics.Metric": "Several devices refuse a torchmetrics.Metric that `training_step` updates by name",
    "evaluates the loss several times": "Optimizers with closures, such as LBFGS, are refused by name",
    "leaves gradients, expected": "An `optimizer_zero_grad` that clears nothing, as a mock of the test, is refused by name",
    "accumulate_grad_batches_with_callback|batches_zero_grad": "The test replaces `SGD.zero_grad`, and counts its calls",
    r"e-0[5-9], but|is 0, but": "The loss had converged to rounding errors before the run was resumed, "
    "and its rows differ by these: it is refused",
    "does not add up over the rows: the total|trainer_spike_detection": "`training_step` computes the loss from `batch[0]`, "
    "the first row, or from no row at all, which is refused by name",
    "half of the rows raises AssertionError": "`training_step` asserts the number of its rows, and runs on others too",
    "have different counts, and had one": "`training_step` adds `batch_idx` to the loss, which changes its formula: refused",
    "_DataFetcherWrapper": "`training_step(self, dataloader_iter)`, which takes batches itself, is refused by name",
    "dataloader_iter": "`training_step` takes batches from an iterator, of which the rows cannot be split",
    "more than 1 value per channel|swa_resume.*Regex": "Batch norm needs two rows, and each device has one",
    "test_log_works_in_train_callback": "The logged loss is computed from sums over the shards, and differs in its last bit",
    "result_collection_reload": "The test reads what is logged inside of `training_step`, and values are logged after the update",
    "hook_system_fit|resume_max|test_train_loop_system": "The test lists all calls: `optimizer_zero_grad` comes first, "
    "and `training_step` runs for each shard",
    "train_eval_mode_restored": "The test asserts the training mode in `training_step`, and rows are compared in evaluation mode",
    "Default process group": "The test tells of two ranks without a process group",
    "Timeout": "The test ran out of time on a loaded machine",
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


def pytest_collection_modifyitems(config, items):
    """Selects tests that may start processes, if ``ONLY`` says so."""
    if os.environ.get("ONLY") == "processes":
        items[:] = filter(starts_processes, items)


def starts_processes(item):
    """Returns True if a test names such a strategy: in its parameters, or in the functions that it calls."""
    function = inspect.unwrap(item.function)
    functions = [function, *map(vars(item.module).get, function.__code__.co_names)]
    texts = [inspect.getsource(each) for each in functions if inspect.isfunction(each)]
    parameters = getattr(item, "callspec", None)
    texts += [item.nodeid, repr(parameters and parameters.params)]
    return any(name in "".join(texts) for name in ("ddp_spawn", "ddp_fork", "ddp_notebook"))


def change(kind):
    """Makes Lightning choose strategies of this package."""
    choose = _AcceleratorConnector._choose_strategy
    get = StrategyRegistry.get
    if kind == "ddp":
        StrategyRegistry.get = lambda name: ours(get(name), kind)
    else:
        _AcceleratorConnector._choose_strategy = lambda self: ours(choose(self), kind)


if __name__ == "__main__":
    kinds = {"2": "two devices", "1": "one device", "ddp": "ranks"}
    names = [
        f"tests_pytorch/{folder}/test_{name}.py".replace("/./", "/")
        for folder, each in FILES.items()
        for name in each.split()
    ]
    if sys.argv[-2:] == ["--kinds", "ddp"]:
        os.environ["ONLY"] = "processes"
        names += [f"tests_pytorch/{name}.py" for name in PROCESSES.split()]
    main(Suite("of_lightning", "tests", names, kinds, REASONS))
