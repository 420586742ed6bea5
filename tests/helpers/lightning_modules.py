"""LightningModules, and fits of them that tests compare."""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset


class RowsOfMappings(Dataset):
    """Rows with two inputs, a label that may be ignored, and a name."""

    def __init__(self, count=32):
        generator = torch.Generator().manual_seed(3)
        self.images = torch.randn(count, 4, generator=generator)
        self.texts = torch.randn(count, 3, generator=generator)
        self.labels = torch.randint(5, (count,), generator=generator)
        self.labels[torch.rand(count, generator=generator) < 0.4] = -100

    def __len__(self):
        return len(self.images)

    def __getitem__(self, row):
        return {
            "image": self.images[row],
            "text": self.texts[row],
            "label": self.labels[row],
            "name": f"row {row}",
        }


class Classifier(LightningModule):
    """A frozen part, a buffer, class weights, and a result with more than the loss."""

    def __init__(self, schedule=None):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.frozen = nn.Linear(4, 8).requires_grad_(False)
        self.text = nn.Linear(3, 8)
        self.head = nn.Linear(8, 5)
        self.register_buffer("weights", torch.arange(1.0, 6.0))
        self.seen = 0
        self.results = []
        self.gradients = []

    def forward(self, batch):
        return self.head(torch.tanh(self.frozen(batch["image"])) + self.text(batch["text"]))

    def loss(self, batch, outputs):
        return F.cross_entropy(outputs, batch["label"], self.weights, ignore_index=-100)

    def training_step(self, batch, batch_idx):
        assert self.device == batch["image"].device
        self.seen += len(batch["image"])
        outputs = self(batch)
        loss = self.loss(batch, outputs)
        self.log_dict(
            {"train_loss": loss, "size": outputs.square().mean()}, on_step=True, on_epoch=True
        )
        self.log("number", loss.item(), on_step=True)
        return {"loss": loss, "outputs": outputs.detach()}

    def on_train_batch_end(self, results, batch, batch_idx):
        self.results.append((float(results["loss"]), results.get("outputs")))

    def on_before_optimizer_step(self, optimizer):
        gradients = [
            parameter.grad for parameter in self.parameters() if parameter.grad is not None
        ]
        self.gradients.append(torch.cat([gradient.flatten() for gradient in gradients]))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch, self(batch)))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(
            filter(lambda parameter: parameter.requires_grad, self.parameters()), lr=0.05
        )
        if self.hparams.schedule == "step":
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }
        if self.hparams.schedule == "epoch":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
        if self.hparams.schedule == "plateau":
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, threshold=10.0
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
            }
        return optimizer


class SeveralMeans(Classifier):
    """Means of three counts, one of them over a mask."""

    def loss(self, batch, outputs):
        mask = batch["label"] != -100
        errors = (outputs - 1).square().mean(-1)
        masked = (errors * mask).sum() / mask.sum().clamp(min=1)
        return (
            super().loss(batch, outputs)
            + masked
            + 0.1 * F.l1_loss(outputs, torch.zeros_like(outputs))
        )


class Unfreezing(Classifier):
    """A module whose frozen part has gradients from the second update on."""

    def on_train_batch_start(self, batch, batch_idx):
        self.frozen.requires_grad_(batch_idx > 0)


class Contrastive(Classifier):
    def loss(self, batch, outputs):
        return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


class WithConstant(Classifier):
    def loss(self, batch, outputs):
        return F.cross_entropy(outputs, batch["label"], reduction="sum") / 12


class SharpeRatio(Classifier):
    def loss(self, batch, outputs):
        return outputs.mean() / outputs.std()


def load(rows, selected=None):
    data = RowsOfMappings()
    return DataLoader(
        data if selected is None else torch.utils.data.Subset(data, selected), batch_size=rows
    )


class SimulatedAccelerator(CPUAccelerator):
    """The accelerator of a Trainer on simulated devices."""

    def setup_device(self, device):
        pass


def quiet(**settings):
    """Returns settings of a Trainer on the CPU that writes nothing."""
    silent = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    }
    return {"accelerator": "cpu", "devices": 1, **silent, **settings}


def fit(module, strategy="auto", batches=1, rows=12, checkpoint=None, selected=None, **settings):
    """Trains a module. An update has ``rows`` rows, of ``batches`` batches."""
    settings = quiet(**{"max_epochs": 2, **settings})
    trainer = Trainer(strategy=strategy, accumulate_grad_batches=batches, **settings)
    trainer.fit(
        module, load(rows // batches, selected), load(12), ckpt_path=checkpoint, weights_only=False
    )
    return trainer


def assert_same_state(module, expected, tolerance=1e-12):
    assert_close(module.state_dict(), expected.state_dict(), rtol=tolerance, atol=tolerance)


def fit_on_a_rank(folder, kind, batches):
    """Trains on the rows of this rank of two, and writes gradients and logged values of rank 0."""
    from balanced_parallel.integrations.lightning import BalancedDDPStrategy

    torch.set_default_dtype(torch.float64)
    strategy = BalancedDDPStrategy()
    module = kind()
    rank = int(__import__("os").environ.get("LOCAL_RANK", 0))
    # an update has rows 0 to 11, 12 to 23, 24 to 31, of which rank 0 has 4, 4 and 4
    selected = [row for row in range(32) if (row % 3 == 0) == (rank == 0)][
        : 10 if rank == 0 else 20
    ]
    rows = 4 if rank == 0 else 8
    trainer = fit(
        module,
        strategy,
        batches,
        rows,
        selected=selected,
        devices=2,
        use_distributed_sampler=False,
        max_epochs=1,
    )
    if rank == 0:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        torch.save((module.gradients, metrics, list(module.state_dict())), f"{folder}/result.pt")
