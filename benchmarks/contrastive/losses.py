"""Losses whose rows depend on each other: those of open_clip and pytorch-metric-learning as they are, and functions of sums."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from balanced_parallel import AdditiveLoss, DataParallelCriterion, DiceLoss, JaccardLoss, TverskyLoss

WIDTH, CLASSES = 12, 5


class Towers(nn.Module):
    """Two towers with a temperature and a bias, as those of CLIP and SigLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, WIDTH)) for _ in range(2))
        self.scale, self.bias = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([-2.0]))

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """Returns features of both views, temperature and bias."""
        left, right = F.normalize(self.left(inputs), dim=1), F.normalize(self.right(inputs.flip(1)), dim=1)
        return left, right, self.scale[0].exp(), self.bias[0]


class Encoder(nn.Module):
    """One tower."""

    def __init__(self, outputs: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns features or logits."""
        features: Tensor = self.layers(inputs)
        return features


def open_clip_losses() -> Any:
    """Returns the module with the losses of open_clip. The package itself needs torchvision, which its losses do not."""
    found = importlib.util.find_spec("open_clip")
    assert found is not None
    assert found.origin is not None
    spec = importlib.util.spec_from_file_location("open_clip_loss", Path(found.origin).with_name("loss.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["open_clip_loss"] = module
    spec.loader.exec_module(module)
    return module


def correlation_sums(output: Tensor, target: Tensor) -> tuple[Any, ...]:
    """Returns the sums of Pearson's and of the concordance correlation."""
    x, y = output.flatten(), F.one_hot(target, CLASSES).to(output).flatten()
    return len(x), x.sum(), y.sum(), (x * y).sum(), x.square().sum(), y.square().sum()


def pearson(total: tuple[Any, ...]) -> Tensor:
    """Returns one minus Pearson's correlation."""
    rows, x, y, xy, xx, yy = total
    loss: Tensor = 1 - (xy - x * y / rows) / ((xx - x * x / rows) * (yy - y * y / rows)).sqrt()
    return loss


def concordance(total: tuple[Any, ...]) -> Tensor:
    """Returns one minus the concordance correlation (Lin, 1989)."""
    rows, x, y, xy, xx, yy = total
    x, y = x / rows, y / rows
    loss: Tensor = 1 - 2 * (xy / rows - x * y) / (xx / rows - x * x + yy / rows - y * y + (x - y).square())
    return loss


def view_products(left: Tensor, right: Tensor, *_: Any) -> tuple[Any, ...]:
    """Returns the sums of the cross-correlation of two views."""
    return len(left), left.sum(0), right.sum(0), left.square().sum(0), right.square().sum(0), left.T @ right


def barlow_twins(total: tuple[Any, ...]) -> Tensor:
    """Returns the loss of Barlow Twins (Zbontar et al., 2021, arXiv:2103.03230)."""
    rows, a, b, aa, bb, ab = total
    deviations = (aa / rows - (a / rows) ** 2).sqrt(), (bb / rows - (b / rows) ** 2).sqrt()
    correlation = (ab / rows - torch.outer(a, b) / rows**2) / torch.outer(*deviations)
    weights = torch.full_like(correlation, 5e-3).fill_diagonal_(1.0)
    loss: Tensor = (weights * (correlation - torch.eye(len(a), dtype=a.dtype)).square()).sum()
    return loss


def without(count: int, criterion: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a criterion that is not given the last outputs of :class:`Towers`, nor labels."""
    return lambda *arguments: criterion(*arguments[: 4 - count])


def losses() -> dict[str, tuple[type[nn.Module], DataParallelCriterion]]:
    """Returns model and criterion by name."""
    from pytorch_metric_learning import losses as metric
    from pytorch_metric_learning import miners

    clip = open_clip_losses()
    hard, triplet = miners.BatchHardMiner(), metric.TripletMarginLoss(margin=0.2)
    whole: dict[str, tuple[type[nn.Module], Callable[..., Tensor]]] = {
        "open_clip ClipLoss": (Towers, without(1, clip.ClipLoss())),
        "open_clip SigLipLoss": (Towers, without(0, clip.SigLipLoss())),
        "metric NTXentLoss": (Encoder, metric.NTXentLoss(temperature=0.1)),
        "metric SupConLoss": (Encoder, metric.SupConLoss(temperature=0.1)),
        "metric MultiSimilarityLoss": (Encoder, metric.MultiSimilarityLoss()),
        "metric TripletMarginLoss, hard": (Encoder, lambda output, labels: triplet(output, labels, hard(output, labels))),
    }
    sums: dict[str, tuple[Callable[[], nn.Module], AdditiveLoss]] = {
        "DiceLoss": (lambda: Encoder(CLASSES), DiceLoss()),
        "JaccardLoss": (lambda: Encoder(CLASSES), JaccardLoss()),
        "TverskyLoss": (lambda: Encoder(CLASSES), TverskyLoss(0.3, 0.7)),
        "Pearson": (lambda: Encoder(CLASSES), AdditiveLoss(correlation_sums, pearson)),
        "concordance": (lambda: Encoder(CLASSES), AdditiveLoss(correlation_sums, concordance)),
        "Barlow Twins": (Towers, AdditiveLoss(view_products, barlow_twins)),
    }
    every: dict[str, Any] = {name: (make, DataParallelCriterion(loss, whole=True)) for name, (make, loss) in whole.items()}
    return every | {name: (make, DataParallelCriterion(loss)) for name, (make, loss) in sums.items()}
