"""Models and losses whose updates were wrong once, or an error: those of the plain program in every layout."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.coupled import KINDS
from helpers.fsdp import WORDS, Language, language_batch
from helpers.layouts import LAYOUTS, assert_exact_in_one_process, assert_exact_on_ranks
from helpers.ranks import on_ranks
from helpers.slow import pairs, slow
from torch import nn
from torch.utils.checkpoint import checkpoint

from balanced_parallel import DataParallelCriterion

pytestmark = pytest.mark.usefixtures("double")


class Clock:
    """The number of the batch that was made last, which losses read that change from update to update."""

    update = 0


def make_batches(count=4, rows=7):
    for Clock.update in range(count):
        torch.manual_seed(Clock.update)
        yield torch.randn(rows, 4), torch.rand(rows, 5)


def alone(batches):
    """Makes the targets inputs of a model that computes its own loss."""
    return ((batch, ()) for batch in batches)


def anchors_of(batches):
    """Makes targets of a detector: of four rows, the first two have no positive anchor."""
    for inputs, target in batches:
        positives = torch.zeros_like(target[:4])
        positives[3, Clock.update] = positives[2, 1] = 1
        yield inputs[:4], positives


def branch_on_any_row(output, target):
    if (target[:, 0] > 1e9).any():
        raise AssertionError
    return (output - target).square().sum() / len(target)


def sum_from_zeros(output, target):
    loss = torch.zeros((), device=output.device, dtype=output.dtype)
    loss = loss + F.mse_loss(output, target)
    return loss + torch.full((), 0.5, device=output.device) * output.abs().mean()


class Weighed(nn.Module):
    """A criterion with a trained parameter, and class weights that its graph keeps."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.arange(5).double() + 1)
        self.temperature = nn.Parameter(torch.zeros(()).double())

    def forward(self, output, target):
        classes = target.argmax(1)
        return F.cross_entropy(output, classes, self.weight) * self.temperature.exp()


def changing_factor(output, target):
    return F.mse_loss(output, target) * 0.5**Clock.update


def warm_up(output, target):
    loss = F.mse_loss(output, target)
    if Clock.update < 2:
        return loss
    mask = (target > 0.4).double()
    return loss + ((output - target).abs() * mask).sum() / mask.sum()


def alternate(output, target):
    return F.mse_loss(output, target) if Clock.update % 2 else F.l1_loss(output, target).sqrt()


def mean_in_checkpoint(output, target):
    return checkpoint(F.mse_loss, output, target, use_reentrant=False)


def root_in_checkpoint(output, target):
    part = checkpoint(lambda *given: F.l1_loss(*given).sqrt(), output, target, use_reentrant=False)
    return part + output.square().mean()


def anchors(output, target):
    """The sum of all anchors over the number of positives."""
    return F.binary_cross_entropy_with_logits(output, target, reduction="sum") / target.sum()


def anchors_with_penalty(output, target):
    return anchors(output, target) + 0.5


def dice(output, target):
    return 1 - 2 * (output.sigmoid() * target).sum() / (output.sigmoid().sum() + target.sum())


def over_confidence(output, target):
    return (output.sigmoid() * target).sum() / output.sigmoid().sum().clamp(min=1e-6)


def over_temperature(output, target):
    return (output * target).sum() / (output.square().sum() + 1).sqrt()


def writes_to_its_output(output, target):
    output[target > 0.9] = 0.0
    output.mul_(2)
    return F.mse_loss(output, target).sqrt() + output.square().mean()


def properties_of_sums(output, target):
    total = output.square().sum()
    assert total.grad_fn is None or total.requires_grad
    return (total / (1 + total.data)).real + total.T * 0.1 + F.mse_loss(output, target)


def positives_of(output, target):
    return (target[:, 0] > 0.8).sum()


def over_positives(output, target):
    """The sum of all rows over the number of positives, as detectors divide."""
    count = positives_of(output, target)
    return F.mse_loss(output, target, reduction="sum") / count.clamp(min=1)


class OwnLoss(nn.Module):
    """A model that computes its loss with a layer of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, inputs, target):
        return self.loss(inputs, target, self.layer(inputs))


class Counting(OwnLoss):
    """A loss that depends on the number of its forwards, and on a buffer that they advance."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.spectral_norm(self.layer)
        self.calls = 0
        self.register_buffer("forwards", torch.zeros(()))

    def loss(self, inputs, target, output):
        self.calls += 1
        self.forwards += 1
        factor = 1 - 0.5 ** (self.forwards + self.calls)
        return F.mse_loss(output, target) + factor * output.square().mean()


class Orthogonal(OwnLoss):
    """A loss with an identity matrix. It is a vector of one element, as ``nn.DataParallel`` needs it."""

    def loss(self, inputs, target, output):
        weight = self.layer.weight
        identity = torch.eye(4, device=weight.device, dtype=weight.dtype)
        penalty = (weight.T @ weight - identity).square().mean()
        return (F.mse_loss(output, target) + penalty).unsqueeze(0)


class Detector(OwnLoss):
    """A loss that is not there in evaluation, of a mean and a root."""

    def loss(self, inputs, target, output):
        if not self.training:
            return None
        return F.mse_loss(output, target) + output.square().mean().sqrt()


class MaskedSum(OwnLoss):
    def loss(self, inputs, target, output):
        kept = (target > 0.4).double()
        return ((output - target).abs() * kept).sum() / kept.sum().clamp(min=1)


class InCheckpoint(OwnLoss):
    def loss(self, inputs, target, output):
        classes = target.argmax(1)
        return checkpoint(
            lambda hidden: F.cross_entropy(hidden.tanh(), classes), output, use_reentrant=False
        )


class Forces(OwnLoss):
    """A loss with the derivative of an energy with respect to the inputs."""

    def forward(self, inputs, target):
        inputs = inputs.detach().requires_grad_()
        with torch.enable_grad():
            energy = self.layer(inputs).tanh().sum(1, keepdim=True)
            (forces,) = torch.autograd.grad(energy.sum(), inputs, create_graph=True)
        return F.mse_loss(energy, target[:, :1]) + F.mse_loss(forces, target[:, 1:])


class EqualRows(nn.Module):
    """A layer that begins with zeros has the same value for all rows, as a mask of ones has."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(4, 5)
        nn.init.zeros_(self.second.weight)
        nn.init.constant_(self.second.bias, 0.5)

    def forward(self, inputs):
        return self.first(inputs), self.second(inputs), inputs.new_ones(len(inputs))


def masked_errors(first, second, mask, target):
    errors = (first - target).square().mean(1) + (second - target).square().mean(1)
    return (errors * mask).sum() / mask.sum() + 0.1 * mask.sum() / mask.sum()


class Policy(nn.Module):
    """A mean for each row, and a learned deviation that is a view of a parameter for all rows."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Linear(4, 5)
        self.log_std = nn.Parameter(torch.linspace(-0.2, 0.2, 5))

    def forward(self, inputs):
        mean = self.mean(inputs)
        return mean, self.log_std.expand_as(mean)


class Balanced(Policy):
    """Also returns a penalty, for each row."""

    def forward(self, inputs):
        balance = self.mean.weight.square().mean()
        return *super().forward(inputs), balance.expand(len(inputs))


def likelihood(mean, log_std, *others):
    errors = ((mean - others[-1]) / log_std.exp()).square() / 2 + log_std
    return errors.sum(1).mean() + 0.1 * sum(each.mean() for each in others[:-1])


class Queue(nn.Module):
    """A contrastive loss with a queue of earlier keys."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(5, 5).double())

    def forward(self, output, target):
        logits = output @ torch.cat([target, self.keys]).T
        with torch.no_grad():
            self.keys.copy_(torch.cat([self.keys, target])[-5:])
        return F.cross_entropy(logits, torch.arange(len(output), device=output.device))


class Words(nn.Module):
    """A sparse gradient, which a reducer refuses where there is none."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 4, sparse=True)
        self.last = nn.Linear(4, 5)

    def forward(self, words):
        return self.last(self.embedding(words).mean(1))


class Sum(nn.Module):
    """Counts its forwards in a buffer that it replaces, one that it writes in place, and a number."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("whole", torch.zeros((), dtype=torch.long))

    def forward(self, inputs):
        self.steps = self.steps + 1
        self.whole += 1
        self.calls += 1
        return inputs * (1 + 0.1 * self.steps + 0.05 * self.calls)


class Annealed(nn.Module):
    """A criterion whose weight grows with each call."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("weight", torch.ones((), dtype=torch.float64))

    def forward(self, output, target):
        self.calls += 1
        self.weight += 0.1
        return F.mse_loss(output, target) * self.weight * (1 + 0.05 * self.calls)


class Cached(nn.Module):
    """Makes a cache in its first forward, sets a flag, and notes a number of rows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 5)
        self.rows = 0
        self.register_buffer("cache", None)
        self.register_buffer("is_ready", torch.tensor(False))

    def forward(self, inputs):
        if not self.is_ready:
            self.cache = torch.arange(5.0, dtype=inputs.dtype, device=inputs.device)
            self.is_ready.fill_(True)
        self.rows = len(inputs)
        return self.layer(inputs) + self.cache


class Scalars(nn.Module):
    """Parameters without a dimension, one that is frozen, and one that nobody uses."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(4, 5)
        self.shift = nn.Parameter(torch.tensor(0.2), requires_grad=False)
        self.never = nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs):
        return self.temperature.exp() * F.normalize(self.head(inputs), dim=1) + self.shift


class Towers(nn.Module):
    """Two embeddings of each row, and a temperature, as in CLIP."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs, target):
        return self.first(inputs), self.second(target), self.scale.exp()


def contrast(first, second, scale):
    logits = scale * first @ second.T
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def counted():
    return nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6)), Sum(), nn.Linear(6, 5)
    )


def frozen_language():
    """Freezes the embedding, whose output needs a gradient for the checkpoints, as ``enable_input_require_grads`` does."""
    language = Language()
    language.embedding.requires_grad_(False)
    language.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    return language


def sentences(batches):
    """Makes words, and words behind them. In each second batch, the first three sentences count nothing."""
    for inputs, _ in batches:
        words, targets = language_batch(len(inputs))
        targets[: 3 * (Clock.update % 2)] = -100
        yield words, targets


def classes_of_sentences(batches):
    return ((words, words[:, 0] % 5) for words, _ in sentences(batches))


def classes_of(batches):
    return ((inputs, target.argmax(1)) for inputs, target in batches)


def linear():
    return nn.Linear(4, 5)


def own(loss):
    return loss.mean()


# Each: a model, a criterion, a change of the batches, and what was wrong.
PROBLEMS = {
    # It was a number that was read from values.
    "a branch on any row": (linear, branch_on_any_row, iter),
    # The text of a constant had its device, which differs between replicas.
    "zeros on its device": (linear, sum_from_zeros, iter),
    # A comparison on another device wrote the buffer back, although nothing had changed it.
    "parameters of a criterion": (linear, Weighed(), iter),
    # A divisor that learns is no count.
    "Dice": (linear, dice, iter),
    "over confidence": (linear, over_confidence, iter),
    "over a temperature": (linear, over_temperature, iter),
    "a criterion that writes to its output": (linear, writes_to_its_output, iter),
    "properties of sums": (linear, properties_of_sums, iter),
    "a factor that changes": (linear, changing_factor, iter),
    # A loss that was one mean was the same mean for ever.
    "another function later": (linear, warm_up, iter),
    "two functions in turn": (linear, alternate, iter),
    # The mean was replaced by its sum and its count in the forward, and not in the recomputation.
    "a mean in a checkpoint": (linear, mean_in_checkpoint, iter),
    "a root in a checkpoint": (linear, root_in_checkpoint, iter),
    "a checkpoint in the model": (InCheckpoint, own, alone),
    "a detector": (Detector, own, alone),
    "a masked sum in the model": (MaskedSum, own, alone),
    "a minimum of the divisor": (
        linear,
        DataParallelCriterion(over_positives, weight=positives_of, minimum=1),
        iter,
    ),
    # A shard without positives has a sum, and no count.
    "anchors": (linear, anchors, anchors_of),
    "anchors and a number": (linear, anchors_with_penalty, anchors_of),
    # The first forward by hand ran again for its loss, from the state behind itself.
    "counters of forwards": (Counting, own, alone),
    # The rows depended on each other, it said.
    "a constant matrix": (Orthogonal, own, alone),
    "forces": (Forces, own, alone),
    "equal rows": (EqualRows, masked_errors, iter),
    # Rows of as many values as the batch has. FSDP2 frees their memory behind the forward.
    "a view of a parameter": (Policy, likelihood, iter),
    "a number for each row": (Balanced, likelihood, iter),
    # A rank without rows did not advance its queue, and computed another loss later.
    "a queue": (linear, DataParallelCriterion(Queue(), whole=True), iter),
    "sparse gradients": (Words, nn.CrossEntropyLoss(), classes_of_sentences),
    # Counters of a rank without rows stayed behind, and power iterations did.
    "counters and power iterations": (counted, nn.MSELoss(), iter),
    "a criterion that counts": (linear, Annealed(), iter),
    "caches and flags": (Cached, nn.MSELoss(), iter),
    "parameters without a dimension": (Scalars, nn.MSELoss(), iter),
    # Its gradient came from each rank, also from those without rows.
    "a temperature": (Towers, DataParallelCriterion(contrast, whole=True), alone),
    # Tied weights, checkpointed blocks, and a layer that nobody uses.
    "a language model": (Language, nn.CrossEntropyLoss(), sentences),
    # The first block runs again in the backward, with an input that no operator has made.
    "a frozen embedding": (frozen_language, nn.CrossEntropyLoss(), sentences),
    # Rows depend on each other.
    **{kind: (make, criterion().double(), classes_of) for kind, (make, criterion) in KINDS.items()},
}


def problem_of(name, updates=4):
    make_net, loss, change = PROBLEMS[name]
    torch.manual_seed(0)
    loss = copy.deepcopy(loss)
    criterion = loss if isinstance(loss, DataParallelCriterion) else DataParallelCriterion(loss)
    return make_net(), criterion, change(make_batches(updates))


# Rows that were added before are those of another loss, which is an error.
CHANGE = ("another function later", "two functions in turn")
CASES = [
    (name, layout)
    for name in PROBLEMS
    for layout in LAYOUTS
    if (name, layout[0]) != ("sparse gradients", "simulated")
    and not (name in CHANGE and layout[1] == "added")
]
# Each problem in every third layout, and each layout with every third problem. Slow runs have another third.
THIRDS = [(number + number // len(LAYOUTS)) % 3 for number in range(len(CASES))]
IN_ONE_PROCESS = [
    slow(*case) if third else case for third, case in zip(THIRDS, CASES, strict=True) if third < 2
]


@pytest.mark.filterwarnings("ignore:Tensor.T is deprecated")
@pytest.mark.parametrize(("name", "layout"), IN_ONE_PROCESS, ids=str)
def test_devices_of_one_process(name, layout):
    assert_exact_in_one_process(layout, *problem_of(name))


# FSDP2 has the parameters of a layer alone while it runs, and no second derivatives.
PENALTIES = ("a constant matrix", "a number for each row")
NOT_SHARDED = (*PENALTIES, "forces", "parameters of a criterion", "pairs", "sparse gradients")
CUTS = [(3, 3, 3), (7, 7, 7), (3, 0, 7)]


def is_refused(name, strategy, way, cuts):
    """Returns True for what ranks refuse with an error of its own."""
    if strategy == "fsdp" and name in NOT_SHARDED:
        return True
    if name == "caches and flags" and 7 in cuts:
        return True  # A rank needs rows first to know that there are buffers.
    if name == "sparse gradients" and way == "asked":
        return True  # They are dense.
    return name in CHANGE or (name in PENALTIES and way in ("by hand", "asked") and 7 in cuts)


# FSDP2 refuses gradients that are asked for.
WAYS = [
    case
    for case in pairs(["ddp", "fsdp"], [None, 2, "by hand", "asked"], CUTS)
    if case[:2] != ("fsdp", "asked")
]
# Each half of the problems in three layouts of the default run, and in the others of a slow one.
IN_RANKS = [
    (*case, half) if number < 6 else slow(*case, half)
    for number, case in enumerate(WAYS)
    for half in (0, 1)
    if number >= 6 or number % 2 == half
]


@pytest.mark.parametrize(("strategy", "way", "cuts", "half"), IN_RANKS, ids=str)
@on_ranks(2)
def test_ranks(rank, strategy, way, cuts, half):
    """The other rank has no rows where the cut is that of all rows, or of none."""
    for name in [*PROBLEMS][half::2]:
        if not is_refused(name, strategy, way, cuts):
            try:
                assert_exact_on_ranks(rank, strategy, way, cuts, *problem_of(name, len(cuts)))
            except Exception as error:
                error.add_note(name)
                raise
