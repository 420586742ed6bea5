"""Parts of Lightning with ``BalancedStrategy``: results are those of Lightning with the whole batch on one device."""

import collections
import functools

import pytest
import torch
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
    SharpeRatio,
    SimulatedAccelerator,
    assert_same_state,
    fit,
    load,
    quiet,
)
from helpers.pages import blocks  # noqa: E402
from helpers.processes import run_script  # noqa: E402
from lightning.pytorch import LightningDataModule, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    BaseFinetuning,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException  # noqa: E402

from balanced_parallel import (  # noqa: E402
    DataParallelCriterion,
    DataParallelModel,
    Rows,
    TrainStep,
    convert_sync_batchnorm,
    simulate,
)
from balanced_parallel.integrations.lightning import BalancedStrategy  # noqa: E402


def fit_both(make, devices=3, batches=2, **settings):
    """Fits a module with the whole batch on one device, and another on several. Returns trainers and modules."""
    expected = make()
    module = make()
    plain = fit(expected, **settings)
    trainer = fit(module, BalancedStrategy(["cpu"] * devices), batches, **settings)
    assert_same_state(module, expected)
    assert trainer.global_step == plain.global_step
    return (plain, expected), (trainer, module)


@pytest.mark.parametrize("batches", [1, 2])
def test_replicas_with_weights_of_their_own(batches):
    expected = Classifier()
    module = Classifier()
    fit(expected)
    with simulate(3) as cluster:
        strategy = BalancedStrategy(cluster.devices)
        fit(module, strategy, batches, accelerator=SimulatedAccelerator())
    assert_same_state(module.cpu(), expected)


class Columns(LightningModule):
    """A module whose batches are lists of two columns of one shape, the last one of two rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        assert type(batch) is list
        inputs, targets = batch
        return F.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


def test_as_many_rows_as_columns():
    rows = torch.utils.data.TensorDataset(torch.randn(10, 1), torch.randn(10, 1))
    expected = Columns()
    module = Columns()
    for network, strategy in (expected, "auto"), (module, BalancedStrategy(["cpu"] * 2)):
        trainer = Trainer(strategy=strategy, **quiet(max_epochs=2))
        trainer.fit(network, torch.utils.data.DataLoader(rows, batch_size=4))
    assert_same_state(module, expected)


class Normed(Classifier):
    """A module with batch norm, whose statistics are those of all rows with ``sync_batchnorm=True``."""

    def __init__(self):
        super().__init__()
        self.text = torch.nn.Sequential(torch.nn.Linear(3, 8, bias=False), torch.nn.BatchNorm1d(8))

    def on_before_optimizer_step(self, optimizer):
        pass  # Averages of weights have no gradients.


class Compiled(Classifier):
    """A module with a compiled part, which has means of its own."""

    def __init__(self):
        super().__init__()
        self.text = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.LayerNorm(8))
        self.text.compile(backend="aot_eager")


class Annealed(Classifier):
    """A module whose loss has a second term from the second update on."""

    def loss(self, batch, outputs):
        return super().loss(batch, outputs) + self.global_step / 3 * outputs.square().mean()


class PerClass(Classifier):
    """A loss of sums over the rows for each class, and of a root."""

    def loss(self, batch, outputs):
        labels = F.one_hot(batch["label"].clamp(min=0), 5)
        shares = outputs.softmax(1)
        dice = (2 * (shares * labels).sum(0) + 1) / (shares.sum(0) + labels.sum(0) + 1)
        return 1 - dice.mean() + outputs.square().mean().sqrt()


class SumsOfLosses(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("total", loss, reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("largest", loss, reduce_fx=torch.max, on_step=False, on_epoch=True)
        rows = float(len(batch["image"]))
        self.log("rows", rows, reduce_fx="sum", on_step=False, on_epoch=True)
        return loss


class OwnSteps(Classifier):
    """Hooks that warm up, clip by a limit of their own, and step by the loss of a batch."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)
        optimizer.param_groups[0]["lr"] = 0.01 * min(self.trainer.global_step, 4)

    def configure_gradient_clipping(self, optimizer, **settings):
        self.clip_gradients(optimizer, 0.03, "norm")


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.text)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.text, optimizer, lr=0.01)


# The module, the batches of an update, and settings of the Trainer, but for callbacks.
PROGRAMS = {
    "sync_batchnorm": (Normed, 1, {"sync_batchnorm": True}),
    "SWA": (Normed, 1, {"sync_batchnorm": True, "max_epochs": 4}),
    "compiled part": (Compiled, 2, {}),
    "another loss": (Annealed, 2, {}),
    "classes": (PerClass, 2, {}),
    "sums": (SumsOfLosses, 2, {}),
    "hooks": (OwnSteps, 2, {}),
    "unfreezing": (Classifier, 2, {"max_epochs": 3}),
    "interval": (Classifier, 1, {"val_check_interval": 2, "limit_train_batches": 2}),
    "64-true": (Classifier, 2, {"precision": "64-true"}),
}
CALLBACKS = {"SWA": lambda: StochasticWeightAveraging(0.01, 1), "unfreezing": Unfreeze}


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, device):
    make, batches, settings = PROGRAMS[name]
    callbacks = [[CALLBACKS[name]()] if name in CALLBACKS else [] for _ in range(2)]
    expected = make()
    module = make()
    plain = fit(expected, callbacks=callbacks[0], **settings)
    with simulate(3) as cluster:
        if device == "sim":
            settings = {"accelerator": SimulatedAccelerator(), **settings}
        strategy = BalancedStrategy(["cpu"] * 3 if device == "cpu" else cluster.devices)
        trainer = fit(module, strategy, batches, callbacks=callbacks[1], **settings)
        module.cpu()
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    assert_same_state(module, expected, 1e-9)
    assert trainer.global_step == plain.global_step
    for key in plain.callback_metrics.keys() - {"size", "size_step", "size_epoch"}:
        assert metrics[key] == pytest.approx(float(plain.callback_metrics[key]), 1e-6), key


class TwoInputs(LightningDataModule):
    def __init__(self, rows=12):
        super().__init__()
        self.rows = rows

    def train_dataloader(self):
        return load(self.rows)

    def val_dataloader(self):
        return load(12)

    predict_dataloader = val_dataloader

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch | {"text": batch["text"] * 2}


def test_a_data_module():
    expected = Classifier()
    module = Classifier()
    Trainer(**quiet(max_epochs=2)).fit(expected, datamodule=TwoInputs())
    strategy = BalancedStrategy(["cpu"] * 3)
    trainer = Trainer(strategy=strategy, accumulate_grad_batches=2, **quiet(max_epochs=2))
    trainer.fit(module, datamodule=TwoInputs(6))
    assert_same_state(module, expected)


def test_the_command_line():
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    settings = {
        "trainer_defaults": quiet(max_epochs=2),
        "save_config_callback": None,
        "seed_everything_default": False,
    }
    plain = LightningCLI(Classifier, TwoInputs, args=["fit"], **settings)
    name = "balanced_parallel.integrations.lightning.BalancedStrategy"
    arguments = [
        f"--trainer.strategy={name}",
        "--trainer.strategy.device_ids=[cpu,cpu,cpu]",
        "--trainer.accumulate_grad_batches=2",
        "--data.rows=6",
    ]
    ours = LightningCLI(Classifier, TwoInputs, args=["fit", *arguments], **settings)
    assert len(ours.trainer.strategy.replica_devices) == 3
    assert_same_state(ours.model, plain.model)


def test_overfit_batches():
    expected = Classifier()
    module = Classifier()
    fit(expected, overfit_batches=2)
    fit(module, BalancedStrategy(["cpu"] * 3), 2, overfit_batches=4)
    assert_same_state(module, expected)


def test_validation_and_prediction():
    class Predicting(Classifier):
        def predict_step(self, batch, batch_idx):
            return self(batch)

    results = fit_both(Predicting)
    predictions = [
        torch.cat(trainer.predict(module, load(12), weights_only=False))
        for trainer, module in results
    ]
    losses = [trainer.validate(module, load(12))[0]["val_loss"] for trainer, module in results]
    assert_close(*predictions)
    assert losses[0] == pytest.approx(losses[1])


def test_a_resume_in_the_middle_of_an_epoch(tmp_path):
    results = []
    for strategies, batches in (
        (["auto", "auto"], 1),
        ([BalancedStrategy(["cpu"] * count) for count in (2, 3)], 2),
    ):
        saved = ModelCheckpoint(tmp_path / str(batches), every_n_train_steps=4, save_top_k=-1)
        settings = {"callbacks": [saved], "enable_checkpointing": True, "max_steps": 5}
        fit(Classifier("step"), strategies[0], batches, **settings)
        state = torch.load(saved.best_model_path, weights_only=False)
        assert (state["epoch"], state["global_step"]) == (1, 4)
        module = Classifier("step")
        resumed = {"max_epochs": 3, "checkpoint": saved.best_model_path}
        results.append((module, fit(module, strategies[1], batches, **resumed).global_step))
    (expected, steps), (module, ours) = results
    assert_same_state(module, expected)
    assert ours == steps > 4


def test_metrics_from_the_results_of_a_batch():
    class WithMetric(Classifier):
        def __init__(self):
            super().__init__()
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(5, ignore_index=-100)
            self.values = []

        def on_train_batch_end(self, results, batch, batch_idx):
            self.accuracy(results["outputs"], batch["label"])

        def on_train_epoch_end(self):
            self.values.append(self.accuracy.compute())
            self.accuracy.reset()

    (_, expected), (_, module) = fit_both(WithMetric, batches=1)
    assert_close(module.values, expected.values)


@pytest.mark.parametrize(
    "callback",
    [
        lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1),
        lambda: EMAWeightAveraging(decay=0.5),
    ],
    ids=["SWA", "EMA"],
)
def test_averages_of_weights(callback):
    expected = Classifier()
    module = Classifier()
    fit(expected, max_epochs=4, callbacks=[callback()])
    strategy = BalancedStrategy(["cpu"] * 3)
    fit(module, strategy, 2, max_epochs=4, callbacks=[callback()])
    assert_same_state(module, expected)


class Skipping(Classifier):
    """A module that skips the second batch of each epoch."""

    returned = None

    def training_step(self, batch, batch_idx):
        self.log("batch", float(batch_idx))
        return self.returned if batch_idx == 1 else super().training_step(batch, batch_idx)

    def on_train_batch_end(self, results, batch, batch_idx):
        assert bool(results) == (batch_idx != 1)

    def on_before_optimizer_step(self, optimizer):
        if self.head.weight.grad is not None:
            super().on_before_optimizer_step(optimizer)


@pytest.mark.parametrize("devices", [1, 3])
def test_a_batch_is_skipped(devices):
    (plain, expected), (trainer, module) = fit_both(Skipping, devices, 1)
    assert len(module.gradients) == len(expected.gradients)
    assert trainer.callback_metrics["batch"] == plain.callback_metrics["batch"] == 2


class SkippingFirst(Skipping):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, 1 - min(batch_idx, 1))

    def on_train_batch_end(self, results, batch, batch_idx):
        assert bool(results) == bool(batch_idx)


class WithoutOptimizers(Classifier):
    def configure_optimizers(self):
        return None


def test_a_module_without_optimizers_stays_as_it_is():
    module = WithoutOptimizers()
    trainer = fit(module, BalancedStrategy(["cpu"] * 2), 2)
    plain = fit(WithoutOptimizers())
    assert_close(module.state_dict(), WithoutOptimizers().state_dict())
    loss = trainer.callback_metrics["train_loss_epoch"]
    assert_close(loss, plain.callback_metrics["train_loss_epoch"], rtol=1e-6, atol=1e-9)


def test_the_first_batch_is_skipped():
    fit_both(SkippingFirst, 3, 1)


def test_a_module_without_a_loss_in_evaluation_mode():
    class Detector(Classifier):
        def loss(self, batch, outputs):
            return super().loss(batch, outputs) if self.head.training else {}["loss"]

        def validation_step(self, batch, batch_idx):
            pass

    fit_both(Detector)


class SkippingRows(Classifier):
    def training_step(self, batch, batch_idx):
        return None if "row 0" in batch["name"] else super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("make", "batches", "message"),
    [
        (Skipping, 2, "no loss for 2 of 2 shards of a batch, with accumulate_grad_batches=2"),
        (SkippingRows, 1, "no loss for 1 of 2 shards of a batch, with accumulate_grad_batches=1"),
    ],
)
def test_skips_that_are_refused(make, batches, message):
    with pytest.raises(TypeError, match=message):
        fit(make(), BalancedStrategy(["cpu"] * 2), batches)


class Collecting(Classifier):
    """A module with a list of the results of each batch."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def training_step(self, batch, batch_idx):
        self.sizes.append(len(batch["image"]))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_list_of_the_module_has_an_entry_for_each_shard(shards):
    class Three(Collecting):
        def loss(self, batch, outputs):  # It takes two passes.
            return F.cross_entropy(outputs, batch["label"]) + outputs.square().mean()

    for kind in (Collecting, Three):
        module = kind()
        fit(module, BalancedStrategy(["cpu"] * shards), 2, max_epochs=1)
        sizes = [6, 6, 6, 6, 6, 2] if shards == 1 else [3] * 10 + [1, 1]
        assert module.sizes == sizes


class ListsOfRows(Columns):
    """A module whose batches are lists of rows."""

    def training_step(self, batch, batch_idx):
        inputs, targets = (torch.stack(column) for column in zip(*batch, strict=True))
        return F.mse_loss(self.layer(inputs), targets)


@pytest.mark.parametrize("batches", [1, 2])
def test_lists_of_rows(batches):
    """The rows of a shard were counted in a list that tells nothing of them."""
    rows = torch.utils.data.TensorDataset(torch.randn(10, 1), torch.randn(10, 1))
    expected = ListsOfRows()
    module = ListsOfRows()
    Trainer(**quiet(max_epochs=2)).fit(
        expected, torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=list)
    )
    strategy = BalancedStrategy(["cpu"] * 2)
    trainer = Trainer(strategy=strategy, accumulate_grad_batches=batches, **quiet(max_epochs=2))
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4 // batches, collate_fn=Rows))
    assert_same_state(module, expected)


@pytest.mark.parametrize("loaders", [1, 2])
def test_a_list_of_loaders(loaders):
    class First(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[0], batch_idx)

        def on_train_batch_end(self, results, batch, batch_idx):
            assert type(batch) is list

    expected = First()
    module = First()
    Trainer(**quiet(max_epochs=1)).fit(expected, [load(12)] * loaders)
    trainer = Trainer(strategy=BalancedStrategy(["cpu"] * 2), **quiet(max_epochs=1))
    trainer.fit(module, [load(12)] * loaders)
    assert_same_state(module, expected)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"size": torch.ones(())}, "the 'loss' key needs to be present"),
        (3, "must return a Tensor, a dict, or None"),
    ],
)
def test_a_result_without_a_loss_is_the_error_of_lightning(devices, returned, message):
    module = Skipping()
    module.returned = returned
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, BalancedStrategy(["cpu"] * devices))


@pytest.mark.parametrize("strategy", ["auto", BalancedStrategy(["cpu"] * 2)])
def test_a_logged_value_that_is_none_is_the_error_of_lightning(strategy):
    class LoggingNone(Classifier):
        def training_step(self, batch, batch_idx):
            self.log("nothing", None)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="`self.log\\(nothing, None\\)` was called"):
        fit(LoggingNone(), strategy)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_own_zero_grad_of_a_module_is_called(set_to_none):
    class Clearing(Classifier):
        def __init__(self):
            super().__init__()
            self.calls = collections.Counter()

        def on_before_zero_grad(self, optimizer):
            self.calls["before"] += 1

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            self.calls["zero"] += 1
            optimizer.zero_grad(set_to_none)

    (_, expected), (_, module) = fit_both(Clearing)
    assert module.calls == expected.calls == {"before": 6, "zero": 6}


def test_a_zero_grad_that_leaves_gradients_is_refused():
    class Leaving(Classifier):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            pass

    with pytest.raises(ValueError, match="optimizer_zero_grad of Leaving leaves gradients"):
        fit(Leaving(), BalancedStrategy(["cpu"] * 2))


def test_another_number_of_devices_is_refused():
    with pytest.raises(ValueError, match="has 2 devices, expected none given"):
        Trainer(strategy=BalancedStrategy(["cpu"] * 4), accelerator="cpu", devices=2)
    assert Trainer(strategy=BalancedStrategy(["cpu"] * 4), accelerator="cpu", devices=4)


class ByHand(SharpeRatio):
    """Manual optimization with several optimizers."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch, self(batch))
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        self.log("train_loss", loss)

    def on_train_batch_end(self, results, batch, batch_idx):
        assert results == {}

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=0.05) for part in (self.text, self.head)]


def test_manual_optimization_on_one_device():
    fit_both(ByHand, 1, 1)
    with pytest.raises(TypeError, match="has automatic_optimization=False"):
        fit(ByHand(), BalancedStrategy(["cpu"] * 2))


class Adversarial(LightningModule):
    """Two networks that train by hand, each with the whole batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.maker = torch.nn.Linear(3, 4)
        self.judge = torch.nn.Linear(4, 1)

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters()) for net in (self.maker, self.judge)]

    def training_step(self, batch, batch_idx):
        noise = torch.randn(len(batch[0]), 3)
        ones = torch.ones(len(batch[0]), 1)
        labels = torch.cat([ones, 0 * ones])
        first, second = self.optimizers()
        loss = F.binary_cross_entropy_with_logits(self.judge(self.maker(noise)), ones)
        self.log("maker_loss", loss)
        self.train_by_hand(first, loss)
        rows = torch.cat([batch[0], self.maker(noise).detach()])
        self.train_by_hand(second, F.binary_cross_entropy_with_logits(self.judge(rows), labels))

    def train_by_hand(self, optimizer, loss):
        self.toggle_optimizer(optimizer)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)


class Images(Adversarial):
    """The same with convolutions and batch norm over all rows, as DCGAN."""

    def __init__(self):
        super().__init__()
        self.maker = torch.nn.Sequential(
            torch.nn.Unflatten(1, (3, 1, 1)),
            torch.nn.ConvTranspose2d(3, 4, 4, bias=False),
            torch.nn.BatchNorm2d(4),
            torch.nn.ReLU(),
            torch.nn.ConvTranspose2d(4, 1, 4, stride=2, padding=1),
            torch.nn.Tanh(),
        )
        self.judge = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 4, stride=2, padding=1, bias=False),
            torch.nn.BatchNorm2d(4),
            torch.nn.LeakyReLU(0.2),
            torch.nn.Conv2d(4, 1, 4),
            torch.nn.Flatten(),
        )
        for net in (self.maker, self.judge):
            convert_sync_batchnorm(net)


@pytest.mark.parametrize(("base", "shape"), [(Adversarial, (4,)), (Images, (1, 8, 8))])
def test_the_adversarial_networks_of_the_page(base, shape):
    _, methods = blocks("docs/recipes/lightning.md", "py")
    names = {
        "DataParallelModel": functools.partial(DataParallelModel, device_ids=["cpu"] * 3),
        "DataParallelCriterion": DataParallelCriterion,
        "TrainStep": TrainStep,
        "torch": torch,
    }
    exec(methods, names, ours := {})
    assert {*ours} == {"on_fit_start", "training_step"}
    compare_by_hand(base, type("Ours", (base,), ours), shape)


def compare_by_hand(plain, ours, shape):
    """Trains two modules of one kind, and compares them."""
    results = []
    rows = torch.utils.data.TensorDataset(torch.randn(20, *shape))
    for kind in (plain, ours):
        torch.manual_seed(0)
        module = kind()
        trainer = Trainer(**quiet(max_epochs=2))
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=7))
        results.append((module, trainer.global_step, trainer.callback_metrics["maker_loss"]))
    (expected, *numbers), (module, *own) = results
    assert numbers[0] == own[0] > 6  # each step of an optimizer
    assert_same_state(module, expected)
    assert_close(own[1], numbers[1])


class Penalized(torch.nn.Module):
    """Scores of rows, and the norms of the gradients between them."""

    def __init__(self, judge):
        super().__init__()
        self.judge = judge

    def forward(self, real, fake, share):
        with torch.enable_grad():  # The first update has a forward without a graph.
            mixed = (share * real + (1 - share) * fake).requires_grad_()
            (gradients,) = torch.autograd.grad(self.judge(mixed).sum(), mixed, create_graph=True)
        return self.judge(real), self.judge(fake), gradients.norm(dim=1)


def critic_loss(real, fake, norms):
    return fake.mean() - real.mean() + 10 * (norms - 1).square().mean()


class Wasserstein(Adversarial):
    """WGAN-GP: a penalty of gradients, and two updates of the judge for one of the maker."""

    def training_step(self, batch, batch_idx):
        noise, share = torch.randn(len(batch[0]), 3), torch.rand(len(batch[0]), 1)
        fake = self.maker(noise).detach()
        self.train_judge(batch[0], fake, share)
        if batch_idx % 2:
            self.train_maker(noise)

    def train_judge(self, *rows):
        self.train_by_hand(self.optimizers()[1], critic_loss(*Penalized(self.judge)(*rows)))

    def train_maker(self, noise):
        loss = -self.judge(self.maker(noise)).mean()
        self.log("maker_loss", loss)
        self.train_by_hand(self.optimizers()[0], loss)


class WassersteinSteps(Wasserstein):
    """The same with a step for each optimizer."""

    def on_fit_start(self):
        def step(net, loss, optimizer):
            model = DataParallelModel(net, ["cpu"] * 3)
            return TrainStep(model, DataParallelCriterion(loss), optimizer)

        maker, judge = self.optimizers()
        both = torch.nn.Sequential(self.maker, self.judge)
        self.steps = [
            step(both, lambda scores: -scores.mean(), maker),
            step(Penalized(self.judge), critic_loss, judge),
        ]

    def train_judge(self, *rows):
        self.steps[1](rows)

    def train_maker(self, noise):
        self.log("maker_loss", self.steps[0](noise))


def test_a_penalty_of_gradients_by_hand():
    compare_by_hand(Wasserstein, WassersteinSteps, (4,))


def test_the_program_of_the_page(tmp_path):
    program, _ = blocks("docs/recipes/lightning.md", "py")
    (tmp_path / "program.py").write_text(program)
    done = run_script(tmp_path / "program.py", cwd=tmp_path, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [*tmp_path.glob("runs/**/events*")]
