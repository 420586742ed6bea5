"""Losses of the overlap of predictions and targets over the whole batch: Tversky, Dice, Jaccard."""

import torch
from torch import Tensor

from ..runtime.values import check_number, naming_arguments
from .additive import AdditiveLoss
from .sums import widen


class TverskyLoss(AdditiveLoss):
    r"""One minus the Tversky index of predictions and targets, over all rows, in the mean over
    classes.

    The index of a class is ``(TP + s) / (TP + alpha FP + beta FN + s)``, with sums of
    probabilities as counts of true positives, false positives and false negatives (Salehi et al.,
    2017, arXiv:1706.05721).

    Integer targets without a dimension of classes are class indices: output ``(rows, classes,
    ...)``, target ``(rows, ...)``, and probabilities are the softmax over classes. Targets of the
    shape of the output are binary: probabilities are the sigmoid, and all elements are one class.

    Args:
        alpha: weight of false positives.
        beta: weight of false negatives. Above ``alpha`` it favours recall.
        smooth: added to numerator and denominator, so that a class without targets has a small
            loss.
        ignore_index: target of elements that do not count.

    Example:
        >>> output, target = torch.zeros(2, 4, 8, 8), torch.zeros(2, 8, 8, dtype=torch.long)
        >>> TverskyLoss(alpha=0.3, beta=0.7, smooth=0.0)(output, target).shape
        torch.Size([])
    """

    @naming_arguments
    def __init__(
        self, alpha: float = 0.5, beta: float = 0.5, smooth: float = 1.0, ignore_index: int = -100
    ) -> None:
        AdditiveLoss.__init__(self)
        for name, value in (("alpha", alpha), ("beta", beta), ("smooth", smooth)):
            check_number(name, value, "a number that is not negative", at_least=0)
        check_number(
            "ignore_index",
            ignore_index,
            "an integer, the target of elements that do not count",
            whole=True,
        )
        self.alpha = alpha
        self.beta = beta
        self.smooth = smooth
        self.ignore_index = ignore_index

    def statistics(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns sums over the elements of each class: of products, of probabilities, and of
        targets.
        """
        counted = target != self.ignore_index
        if target.shape == output.shape:
            mask = counted.to(widen(output).dtype)
            probabilities = widen(output).sigmoid() * mask
            wanted = target * mask
            return (probabilities * wanted).sum(), probabilities.sum(), wanted.sum()
        if target.shape != output.shape[:1] + output.shape[2:] or target.is_floating_point():
            raise ValueError(
                f"the output has shape {tuple(output.shape)} and the target {tuple(target.shape)} of {target.dtype}, expected "
                "class indices of shape (rows, ...) for an output (rows, classes, ...), or a target of the output's shape"
            )
        probabilities = widen(output).softmax(1) * counted.unsqueeze(1)
        indices = torch.where(counted, target, 0).unsqueeze(1)
        wanted = torch.zeros_like(probabilities).scatter(1, indices, 1.0) * counted.unsqueeze(1)
        others = [dim for dim in range(output.dim()) if dim != 1]
        return (probabilities * wanted).sum(others), probabilities.sum(others), wanted.sum(others)

    def finish(self, total: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Returns the loss of the sums over all rows."""
        both, predicted, wanted = total
        errors = self.alpha * (predicted - both) + self.beta * (wanted - both)
        return (1 - (both + self.smooth) / (both + errors + self.smooth)).mean()

    def extra_repr(self) -> str:
        """Returns the settings, for ``repr``."""
        return f"alpha={self.alpha}, beta={self.beta}, smooth={self.smooth}, ignore_index={self.ignore_index}"


class DiceLoss(TverskyLoss):
    r"""One minus the Dice coefficient ``(2 TP + s) / (2 TP + FP + FN + s)`` over all rows, in
    the mean over classes.

    Inputs and settings are those of :class:`TverskyLoss` (Drozdzal et al., 2016, arXiv:1608.04117).

    Example:
        >>> criterion = DataParallelCriterion(DiceLoss(smooth=0.0))
        >>> outputs = PerReplica([torch.tensor([[20.0, -20.0]]), torch.tensor([[20.0, 20.0]])], [1, 1])
        >>> criterion(outputs, torch.tensor([[1.0, 0.0], [1.0, 0.0]]))  # two of three predictions are right
        tensor(0.2000)
    """

    @naming_arguments
    def __init__(self, smooth: float = 1.0, ignore_index: int = -100) -> None:
        super().__init__(0.5, 0.5, smooth, ignore_index)
        self.smooth = smooth / 2  # the counts of Dice are twice those of Tversky


class JaccardLoss(TverskyLoss):
    r"""One minus the Jaccard index (IoU) ``(TP + s) / (TP + FP + FN + s)`` over all rows, in
    the mean over classes.

    Inputs and settings are those of :class:`TverskyLoss`.

    Example:
        >>> JaccardLoss(smooth=0.0)(torch.tensor([20.0, -20.0, 20.0, 20.0]), torch.tensor([1.0, 0.0, 1.0, 0.0]))
        tensor(0.3333)
    """

    @naming_arguments
    def __init__(self, smooth: float = 1.0, ignore_index: int = -100) -> None:
        super().__init__(1.0, 1.0, smooth, ignore_index)
