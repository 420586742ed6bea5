"""Small models, losses and batches that several tests share, and the plain program that they are compared with."""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from balanced_parallel import DataParallelCriterion, DataParallelModel

CLASSES = 5


def build_net(outputs=CLASSES):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


def class_targets(rows, ignored=0):
    """Class indices, the first ``ignored`` of them to be left out of the loss."""
    targets = torch.randint(CLASSES, (rows,), generator=torch.Generator().manual_seed(2))
    targets[:ignored] = -100
    return targets


def _weights():
    return torch.linspace(0.5, 2.0, CLASSES)


# Each: a name, a function that makes the criterion (the default dtype is set by then), and the kind of targets it takes.
LOSSES = {
    "CrossEntropyLoss": (lambda: nn.CrossEntropyLoss(), "classes"),
    "CrossEntropyLoss, weight": (lambda: nn.CrossEntropyLoss(weight=_weights()), "classes"),
    "CrossEntropyLoss, smoothing": (lambda: nn.CrossEntropyLoss(label_smoothing=0.2), "classes"),
    "CrossEntropyLoss, weight, smoothing": (
        lambda: nn.CrossEntropyLoss(_weights(), label_smoothing=0.2),
        "classes",
    ),
    "CrossEntropyLoss, sum": (lambda: nn.CrossEntropyLoss(reduction="sum"), "classes"),
    "CrossEntropyLoss, probabilities": (
        lambda: nn.CrossEntropyLoss(weight=_weights()),
        "probabilities",
    ),
    "cross_entropy": (lambda: F.cross_entropy, "classes"),
    "cross_entropy, partial": (
        lambda: functools.partial(F.cross_entropy, weight=_weights(), label_smoothing=0.1),
        "classes",
    ),
    "cross_entropy, partial sum": (
        lambda: functools.partial(F.cross_entropy, reduction="sum"),
        "classes",
    ),
    "NLLLoss": (lambda: nn.NLLLoss(), "classes"),
    "NLLLoss, weight": (lambda: nn.NLLLoss(_weights(), ignore_index=-100), "classes"),
    "nll_loss": (lambda: F.nll_loss, "classes"),
    "BCELoss": (lambda: nn.BCELoss(), "unit"),
    "BCELoss, weight": (lambda: nn.BCELoss(weight=_weights()), "unit"),
    "binary_cross_entropy": (lambda: F.binary_cross_entropy, "unit"),
    "BCEWithLogitsLoss": (lambda: nn.BCEWithLogitsLoss(pos_weight=_weights()), "probabilities"),
    "BCEWithLogitsLoss, sum": (lambda: nn.BCEWithLogitsLoss(reduction="sum"), "probabilities"),
    "binary_cross_entropy_with_logits": (
        lambda: F.binary_cross_entropy_with_logits,
        "probabilities",
    ),
    "MSELoss": (lambda: nn.MSELoss(), "probabilities"),
    "MSELoss, sum": (lambda: nn.MSELoss(reduction="sum"), "probabilities"),
    "mse_loss": (lambda: F.mse_loss, "probabilities"),
    "L1Loss": (lambda: nn.L1Loss(), "probabilities"),
    "l1_loss": (lambda: F.l1_loss, "probabilities"),
    "SmoothL1Loss": (lambda: nn.SmoothL1Loss(beta=0.3), "probabilities"),
    "smooth_l1_loss": (lambda: F.smooth_l1_loss, "probabilities"),
    "PoissonNLLLoss": (lambda: nn.PoissonNLLLoss(full=True), "probabilities"),
    "PoissonNLLLoss, no log": (lambda: nn.PoissonNLLLoss(log_input=False), "unit"),
    "poisson_nll_loss": (lambda: F.poisson_nll_loss, "probabilities"),
    "GaussianNLLLoss": (lambda: nn.GaussianNLLLoss(full=True), "variance"),
    "gaussian_nll_loss": (lambda: F.gaussian_nll_loss, "one variance"),
    "KLDivLoss, batchmean": (lambda: nn.KLDivLoss(reduction="batchmean"), "probabilities"),
    "KLDivLoss, sum": (lambda: nn.KLDivLoss(reduction="sum", log_target=True), "probabilities"),
    "kl_div, batchmean": (
        lambda: functools.partial(F.kl_div, reduction="batchmean"),
        "probabilities",
    ),
    "SoftMarginLoss": (lambda: nn.SoftMarginLoss(), "signs"),
    "soft_margin_loss": (lambda: F.soft_margin_loss, "signs"),
    "HingeEmbeddingLoss": (lambda: nn.HingeEmbeddingLoss(margin=0.5), "signs"),
    "hinge_embedding_loss": (lambda: F.hinge_embedding_loss, "signs"),
    "MultiLabelMarginLoss": (lambda: nn.MultiLabelMarginLoss(), "label lists"),
    "multilabel_margin_loss": (lambda: F.multilabel_margin_loss, "label lists"),
    "MultiLabelSoftMarginLoss": (lambda: nn.MultiLabelSoftMarginLoss(weight=_weights()), "binary"),
    "multilabel_soft_margin_loss": (lambda: F.multilabel_soft_margin_loss, "binary"),
    "MultiMarginLoss": (lambda: nn.MultiMarginLoss(p=2, weight=_weights()), "all classes"),
    "multi_margin_loss": (lambda: F.multi_margin_loss, "all classes"),
    "CosineEmbeddingLoss": (lambda: nn.CosineEmbeddingLoss(margin=0.2), "pair"),
    "cosine_embedding_loss": (lambda: F.cosine_embedding_loss, "pair"),
    "MarginRankingLoss": (lambda: nn.MarginRankingLoss(margin=0.2), "ranking"),
    "margin_ranking_loss": (lambda: F.margin_ranking_loss, "ranking"),
    "TripletMarginLoss": (lambda: nn.TripletMarginLoss(swap=True), "triplet"),
    "triplet_margin_loss": (lambda: F.triplet_margin_loss, "triplet"),
    "TripletMarginWithDistanceLoss": (lambda: nn.TripletMarginWithDistanceLoss(), "triplet"),
    "TripletMarginWithDistanceLoss, own": (
        lambda: nn.TripletMarginWithDistanceLoss(distance_function=_distance),
        "triplet",
    ),
    "triplet_margin_with_distance_loss": (lambda: F.triplet_margin_with_distance_loss, "triplet"),
    "CTCLoss": (lambda: nn.CTCLoss(), "sequences"),
    "CTCLoss, sum": (lambda: nn.CTCLoss(reduction="sum"), "sequences"),
    "ctc_loss": (lambda: F.ctc_loss, "sequences"),
    "AdaptiveLogSoftmaxWithLoss": (lambda: _adaptive(), "all classes"),
    "HuberLoss": (lambda: nn.HuberLoss(delta=0.3), "probabilities"),
    "huber_loss": (lambda: F.huber_loss, "probabilities"),
    "savings.LinearCrossEntropy": (lambda: _head(), "classes"),
    "savings.LinearCrossEntropy, weight, smoothing": (
        lambda: _head(weight=_weights(), label_smoothing=0.1),
        "classes",
    ),
}


if hasattr(nn, "LinearCrossEntropyLoss"):  # new in torch 2.13
    LOSSES |= {
        "LinearCrossEntropyLoss": (lambda: _linear(), "classes"),
        "LinearCrossEntropyLoss, weight": (
            lambda: _linear(weight=_weights(), ignore_index=-100, label_smoothing=0.1),
            "classes",
        ),
    }


def _distance(one, other):
    return (one - other).abs()  # one distance per element, not per row


def _adaptive():
    torch.manual_seed(4)
    return nn.AdaptiveLogSoftmaxWithLoss(CLASSES, CLASSES, cutoffs=[2, 3], div_value=1.0)


def _head(**settings):
    torch.manual_seed(4)
    from balanced_parallel.savings import LinearCrossEntropy  # The tests of the core have none.

    return LinearCrossEntropy(CLASSES, CLASSES, bias=True, **settings)


def _linear(**settings):
    torch.manual_seed(4)
    return nn.LinearCrossEntropyLoss(
        CLASSES, CLASSES, bias=True, **{"ignore_index": -100} | settings
    )


def build_conv():
    layers = (
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.Flatten(),
    )
    return nn.Sequential(*layers, nn.Linear(36, CLASSES))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)
        self.output = nn.Linear(3, CLASSES)

    def forward(self, inputs):
        return self.output(self.lstm(inputs.unflatten(1, (2, 2)))[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(2, 1, 4, 0.0, batch_first=True)
        self.output = nn.Linear(4, CLASSES)

    def forward(self, inputs):
        return self.output(self.layer(inputs.unflatten(1, (2, 2))).flatten(1))


class Sometimes(nn.Module):
    """One layer is never used, and one only for some rows."""

    def __init__(self):
        super().__init__()
        self.net = build_net()
        self.never = nn.Linear(2, 2)
        self.sometimes = nn.Linear(4, CLASSES)

    def forward(self, inputs):
        outputs = self.net(inputs)
        few = inputs[:, 0] > 1
        return outputs + few.unsqueeze(1) * self.sometimes(inputs) if few.any() else outputs


BODIES = {
    "mlp": build_net,
    "conv": build_conv,
    "recurrent": Recurrent,
    "attention": Attention,
    "sometimes": Sometimes,
}


class OnTop(nn.Module):
    """A network with what a loss wants its outputs to be: log-probabilities, or numbers between 0 and 1."""

    def __init__(self, name, body="mlp"):
        super().__init__()
        torch.manual_seed(1)
        self.net = BODIES[body]()
        self.name = name

    def forward(self, inputs):
        outputs = self.net(inputs)
        if self.name.lower().startswith(("nll", "kl")):
            return outputs.log_softmax(1)
        if (
            self.name.startswith(("BCELoss", "PoissonNLLLoss, no log"))
            or self.name == "binary_cross_entropy"
        ):
            return outputs.sigmoid()
        if "ctc" in self.name.lower():  # [time, rows, classes]
            return torch.stack([outputs, outputs * 2, outputs + 1, outputs * 3]).log_softmax(2)
        return outputs


def make_targets(kind, rows, ignored=0):
    """Returns the arguments of the criterion that follow the output, as a tuple."""
    numbers = torch.Generator().manual_seed(3)
    rand = torch.rand(rows, CLASSES, generator=numbers)
    signs = torch.rand(rows, CLASSES, generator=numbers).sub(0.5).sign()
    return {
        "classes": (class_targets(rows, ignored),),
        "all classes": (class_targets(rows),),
        "probabilities": (rand,),
        "unit": (rand,),
        "binary": (rand.round(),),
        "signs": (signs,),
        "variance": (rand, rand.flip(1) + 0.5),
        "one variance": (rand, rand[:, :1] + 0.5),
        "label lists": (torch.tensor([[3, 1, -1, 0, 2]]).expand(rows, CLASSES),),
        "pair": (rand, signs[:, 0]),
        "ranking": (rand, signs),
        "triplet": (rand, rand.flip(1)),
        "sequences": (
            torch.tensor([[1, 2, 3]]).expand(rows, 3),
            torch.full((rows,), 4),
            torch.arange(rows) % 3 + 1,
        ),
    }[kind]


def whole_loss(criterion, output, targets):
    result = criterion(output, *targets)
    return getattr(result, "loss", result)


def gradients(*modules, optimizer=None):
    """Copies of the gradients of all parameters on the CPU. Those of a ``BalancedOptimizer`` are read from it."""
    read = getattr(optimizer, "gradient", lambda parameter: parameter.grad)
    parameters = [
        parameter
        for module in modules
        if isinstance(module, nn.Module)
        for parameter in module.parameters()
    ]
    return [
        None if (gradient := read(parameter)) is None else gradient.detach().clone().cpu()
        for parameter in parameters
    ]


def whole_gradients(parameters):
    """Copies of the gradients of all ranks."""
    found = [parameter.grad for parameter in parameters]
    return [
        None if gradient is None else getattr(gradient, "full_tensor", gradient.clone)()
        for gradient in found
    ]


def plain_program(module, criterion, inputs, targets):
    """Loss and gradients (the module's, then the criterion's) of the whole batch on one device."""
    zero_gradients(module, criterion)
    loss = whole_loss(
        criterion, module(inputs), targets if isinstance(targets, tuple) else (targets,)
    )
    loss.backward()
    found = gradients(module, criterion)
    zero_gradients(module, criterion)
    return loss.detach(), found


def split_program(module, criterion, inputs, targets, model=None, **settings):
    """Loss and gradients, as those of ``plain_program``, of three replicas or of another model with the module."""
    zero_gradients(module, criterion)
    model = model or DataParallelModel(module, ["cpu"] * 3)
    loss = DataParallelCriterion(criterion, **settings)(model(inputs), *targets)
    loss.backward()
    return loss.detach(), gradients(module, criterion)


def assert_exact(module, criterion, inputs, *targets, plain=None, **settings):
    """Compares loss and gradients of three replicas with those of the plain program. ``settings`` are of the criterion."""
    loss, expected = plain_program(module, plain or criterion, inputs, targets)
    found, found_gradients = split_program(module, criterion, inputs, targets, **settings)
    assert_close(found, loss, rtol=1e-10, atol=1e-10, equal_nan=True)
    assert_same_gradients(found_gradients, expected)


def assert_exact_update(step, module, criterion, inputs, targets):
    """Compares loss and gradients of a step that does not change the parameters with those of the plain program."""
    loss, expected = plain_program(module, criterion, inputs, targets)
    assert_equal(step(inputs, targets), loss)
    assert_same_gradients(gradients(module, criterion), expected)


def class_batch(rows, ignored=0):
    """Returns random rows and their classes, the first of which are ignored."""
    return torch.randn(rows, 4), class_targets(rows, ignored)


def assert_equal(found, expected):
    """Compares numbers in float64, or lists of them."""
    assert_close(found, expected, rtol=1e-10, atol=1e-10)


def zero_gradients(*modules):
    for module in modules:
        if isinstance(module, nn.Module):
            module.zero_grad()


def assert_same_gradients(found, expected, tolerance=1e-10):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


class Calls(TorchDispatchMode):
    """Counts how often an operator is called in a block."""

    def __init__(self, operator):
        super().__init__()
        self.operator = operator
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += func is self.operator
        return func(*args, **kwargs or {})
