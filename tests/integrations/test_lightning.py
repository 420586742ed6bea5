"""Fits of LightningModules by ``BalancedStrategy`` against those of Lightning with the whole batch on one device."""

import subprocess
import sys

import pytest
import torch
from helpers.pages import ROOT
from torch.testing import assert_close

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("double"),
]

pytest.importorskip("lightning")

import torch.nn.functional as F  # noqa: E402
import torchmetrics  # noqa: E402
from helpers.lightning_modules import (  # noqa: E402
    Classifier,
    Contrastive,
    SeveralMeans,
    SharpeRatio,
    Unfreezing,
    WithConstant,
    assert_same_state,
    fit,
    load,
)
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep  # noqa: E402
from balanced_parallel.integrations.lightning import BalancedStrategy  # noqa: E402

SHAPES = [(["cpu"], 2), (["cpu"] * 3, 1), (["cpu"] * 3, 2), (["cpu"] * 5, 3)]


def check_fit(
    make,
    devices,
    batches,
    names=("train_loss_step", "train_loss_epoch", "number", "val_loss"),
    **settings,
):
    expected = make()
    module = make()
    plain = fit(expected, **settings)
    trainer = fit(module, BalancedStrategy(devices), batches, **settings)
    assert_same_state(module, expected)
    for name in names:
        assert_close(
            trainer.callback_metrics[name], plain.callback_metrics[name], rtol=1e-6, atol=1e-9
        )
    assert trainer.global_step == plain.global_step
    return module, expected


@pytest.mark.parametrize(("devices", "batches"), SHAPES)
@pytest.mark.parametrize("kind", [Classifier, SeveralMeans])
def test_updates_and_logged_losses(kind, devices, batches):
    module, _ = check_fit(kind, devices, batches)
    assert torch.stack(module.gradients).isfinite().all()


def test_lightning_itself_differs():
    expected = Classifier()
    module = Classifier()
    fit(expected)
    fit(module, batches=2)
    assert (module.gradients[0] - expected.gradients[0]).norm() > 0.02 * expected.gradients[
        0
    ].norm()


def test_results_of_a_batch_have_all_rows_and_the_loss_of_the_update():
    module, expected = check_fit(Classifier, ["cpu"] * 3, 2)
    assert module.seen < expected.seen == 64  # the first replica is the module
    for number, (loss, outputs) in enumerate(expected.results[:2]):
        assert_close(module.results[2 * number + 1][0], loss)
        assert module.results[2 * number][0] == 0
        if number == 0:
            assert_close(torch.cat([module.results[0][1], module.results[1][1]]), outputs)


def test_a_step_leaves_no_trace_in_attributes():
    module, expected = check_fit(SeveralMeans, ["cpu"], 2)
    assert module.seen == expected.seen == 64


@pytest.mark.parametrize("schedule", ["step", "epoch", "plateau"])
def test_schedulers(schedule):
    check_fit(lambda: Classifier(schedule), ["cpu"] * 3, 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"max_steps": 4},
        {"detect_anomaly": True},
    ],
    ids=str,
)
def test_settings_of_the_trainer(settings):
    check_fit(Classifier, ["cpu"] * 3, 2, **settings)


def test_early_stopping_on_the_loss():
    trainer = fit(
        Classifier(),
        BalancedStrategy(["cpu"] * 2),
        2,
        max_epochs=9,
        callbacks=[EarlyStopping("train_loss", 0.5, 1)],
    )
    plain = fit(Classifier(), max_epochs=9, callbacks=[EarlyStopping("train_loss", 0.5, 1)])
    assert trainer.current_epoch == plain.current_epoch < 9


def test_checkpoints_are_those_of_lightning_and_both_resume(tmp_path):
    states = []
    paths = []
    for name, strategy, batches in (
        ("plain", "auto", 1),
        ("ours", BalancedStrategy(["cpu"] * 3), 2),
    ):
        saved = ModelCheckpoint(tmp_path / name, monitor="val_loss", save_last=True)
        loggers = [CSVLogger(tmp_path, name), TensorBoardLogger(tmp_path, name)]
        settings = {
            "callbacks": [saved, LearningRateMonitor("step")],
            "enable_checkpointing": True,
            "logger": loggers,
        }
        fit(Classifier("step"), strategy, batches, log_every_n_steps=1, **settings)
        paths.append(saved.last_model_path)
        states.append(torch.load(paths[-1], weights_only=False))
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        assert_close(states[1][key], states[0][key], rtol=1e-10, atol=1e-12)
    assert states[0].keys() == states[1].keys()
    for path in paths:
        expected = Classifier("step")
        module = Classifier("step")
        fit(expected, max_epochs=3, checkpoint=path)
        fit(module, BalancedStrategy(["cpu"] * 2), 2, max_epochs=3, checkpoint=path)
        assert_same_state(module, expected)


@pytest.mark.parametrize("scale", [2.0**10, 2.0**40], ids=["fits", "overflows"])
def test_mixed_precision_with_a_scaler(scale):
    torch.set_default_dtype(torch.float32)
    modules = []
    scalers = []
    for strategy, batches in (("auto", 1), (BalancedStrategy(["cpu"] * 3), 2)):
        scalers.append(torch.amp.GradScaler("cpu", init_scale=scale))
        modules.append(Classifier())
        fit(
            modules[-1], strategy, batches, plugins=[MixedPrecision("16-mixed", "cpu", scalers[-1])]
        )
    assert scalers[0].get_scale() == scalers[1].get_scale()
    if scale > 2.0**20:  # all updates are skipped
        assert_same_state(modules[1], modules[0], 0)
    else:
        assert_close(modules[1].gradients[0], modules[0].gradients[0], rtol=2e-2, atol=2e-3)


def test_bfloat16():
    torch.set_default_dtype(torch.float32)
    modules = [Classifier(), Classifier()]
    fit(modules[0], precision="bf16-mixed")
    fit(modules[1], BalancedStrategy(["cpu"] * 3), 2, precision="bf16-mixed")
    assert_close(modules[1].gradients[0], modules[0].gradients[0], rtol=5e-2, atol=1e-2)


class WithMetric(Classifier):
    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(5, ignore_index=-100)

    def training_step(self, batch, batch_idx):
        self.accuracy(self(batch), batch["label"])
        self.log("accuracy", self.accuracy, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_metrics():
    check_fit(WithMetric, ["cpu"], 2, ["accuracy"])
    with pytest.raises(
        TypeError, match=r"updates a torchmetrics.Metric, of which each replica has a copy"
    ):
        fit(WithMetric(), BalancedStrategy(["cpu"] * 2))


class WithClosure(Classifier):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.head.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Contrastive, "does not add up over the rows"),
        (WithConstant, "a sum over a number"),
        (SharpeRatio, "is not a function of sums over the rows"),
        (lambda: torch.compile(Classifier(), backend="eager"), "is compiled"),
        (WithClosure, "LBFGS evaluates the loss several times per step"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fit(make(), BalancedStrategy(["cpu"] * 2))


def test_a_trainer_trains_one_module_after_the_other():
    trainer = fit(Classifier(), BalancedStrategy(["cpu"] * 2), 2)
    expected = Classifier()
    module = Classifier()
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, load(6), load(12))
    fit(expected)
    assert_same_state(module, expected)


def test_one_shard_may_have_any_loss():
    check_fit(SharpeRatio, ["cpu"], 1, ["val_loss"])


@pytest.mark.parametrize(
    ("kind", "batches"),
    [("Classifier", 1), ("Classifier", 2), ("SeveralMeans", 2), (Unfreezing.__name__, 1)],
)
def test_ranks(kind, batches, tmp_path):
    """Lightning starts the second process itself. Ranks have different numbers of rows."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        f"from helpers.lightning_modules import {kind}, fit_on_a_rank\nfit_on_a_rank({str(tmp_path)!r}, {kind}, {batches})\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=150, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    gradients, metrics, names = torch.load(tmp_path / "result.pt", weights_only=False)
    expected = globals()[kind]()
    fit(expected, max_epochs=1, selected=range(30))
    # Gradients of a part that is not optimized add up after the second update.
    assert_close(gradients[:2], expected.gradients[:2], rtol=1e-9, atol=1e-12)
    assert_close(metrics["train_loss_step"], expected.results[-1][0], rtol=1e-5, atol=1e-8)
    assert names == [*expected.state_dict()]


class Manual(Classifier):
    """A module that calls a ``TrainStep`` with a loss of all rows."""

    def __init__(self, devices):
        super().__init__()
        self.automatic_optimization = False
        self.devices = devices

    def on_fit_start(self):
        model = DataParallelModel(self.head, self.devices)
        criterion = DataParallelCriterion(contrastive, whole=True)
        self.step = TrainStep(model, criterion, self.optimizers(), micro_batch_size=3)

    def training_step(self, batch, batch_idx):
        loss = self.step(self.text(batch["text"]).detach())
        self.log("train_loss", loss)
        return {"loss": loss}


def contrastive(outputs):
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def test_a_module_with_manual_optimization_calls_a_step():
    one = Manual(["cpu"])
    three = Manual(["cpu"] * 3)
    assert fit(one).global_step == fit(three).global_step == 6
    assert not torch.equal(one.head.weight, Manual([]).head.weight)
    assert_same_state(one, three)
