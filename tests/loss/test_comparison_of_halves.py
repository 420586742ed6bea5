"""Samples of rows: outputs without rows, rows of earlier updates, and complex outputs."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers.layouts import assert_exact_in_one_process
from helpers.steps import make_step
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    DataParallelCriterion,
    DiceLoss,
    Rows,
    Whole,
)
from balanced_parallel.loss.coupled import WholeLoss
from balanced_parallel.loss.means import LossOfSums

pytestmark = pytest.mark.usefixtures("double")


class Prototypes(nn.Module):
    """Returns embeddings, and prototypes of classes."""

    def __init__(self, classes=7):
        super().__init__()
        self.embed = nn.Linear(4, 3)
        self.prototypes = nn.Parameter(torch.randn(classes, 3))

    def forward(self, inputs):
        return self.embed(inputs), 1.0 * self.prototypes


LAYOUTS = [
    {"devices": 3},
    {"devices": 1, "micro_batch_size": 2},
    {"devices": 2, "micro_batch_size": 1},
]


class Spectrum(nn.Linear):
    def forward(self, inputs):
        return torch.fft.fft(super().forward(inputs))


def linear():
    return nn.Linear(4, 3)


# Each: a net, a loss, and a function that makes targets.
EXACT = {
    # Halves of the rows had halves of the prototypes, whose labels were out of bounds.
    "prototypes": (
        Prototypes,
        lambda output, prototypes, target: F.cross_entropy(output @ prototypes.T, target),
        lambda: torch.randint(7, (9,)),
    ),
    # A complex output had no graph: "inputs argument to grad() cannot be empty".
    "a spectrum": (
        lambda: Spectrum(4, 3),
        lambda output, target: (output.abs() - target).square().mean().sqrt(),
        lambda: torch.rand(9, 3),
    ),
    # One target counts all pairs.
    "pairs": (
        linear,
        lambda output, other: F.cosine_embedding_loss(output, other, torch.ones(1)),
        lambda: torch.randn(9, 3),
    ),
}


def assert_exact(layout, net, loss, make_target):
    batches = [(torch.randn(9, 4), make_target()) for _ in range(2)]
    assert_exact_in_one_process(layout, net, DataParallelCriterion(loss), batches)


@pytest.mark.parametrize("layout", [(3, None), (1, 2), (2, 1)])
@pytest.mark.parametrize("name", EXACT)
def test_outputs_that_are_not_real_rows_of_the_batch_are_exact(name, layout):
    make_net, loss, make_target = EXACT[name]
    torch.manual_seed(0)
    assert_exact(layout, make_net(), loss, make_target)


class Averaged(nn.Linear):
    """Returns rows, and a mean over those of the shard in one element."""

    def __init__(self):
        super().__init__(4, 3)

    def forward(self, inputs):
        output = super().forward(inputs)
        return output, output.square().mean().unsqueeze(0)


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean])
@pytest.mark.parametrize(
    ("net", "layout"),
    [
        *((Prototypes, layout) for layout in LAYOUTS),
        *((Averaged, layout) for layout in LAYOUTS[:2]),
    ],
)
def test_terms_of_outputs_without_rows_name_the_output(net, reduce, layout):
    """A mean of a shard's rows had the text "start (1) + length (2) exceeds dimension size"."""

    def criterion(output, other, target):
        return F.mse_loss(output, target) + reduce(other.square())

    step = make_step(net(), criterion, **layout)
    with pytest.raises(ValueError, match=r"output\[1\] has no entry for each row"):
        step(torch.randn(8, 4), torch.randn(8, 3))


def test_rows_that_are_equal_in_all_shards_by_chance_are_rows():
    """They look like an output without rows beside another output."""

    class Two(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs[:, :4]), inputs[:, 4:]

    inputs = torch.cat([torch.randn(2, 4).repeat(2, 1), torch.randn(4, 2)], dim=1)
    target = torch.randn(4, 3)

    def criterion(output, other, target):
        return F.mse_loss(output, target) + other.sum(1).square().mean()

    net = Two(4, 3)
    expected = criterion(*net(inputs), target)
    assert_close(make_step(net, criterion, lr=0.0)(inputs, target), expected.detach())


def test_as_many_prototypes_as_rows_of_a_shard_have_no_rows():
    """Each shard added their penalty."""

    def criterion(output, prototypes, target):
        return F.mse_loss(output, target) + prototypes.square().sum()

    step = make_step(Prototypes(classes=4), criterion)
    with pytest.raises(ValueError, match=r"output\[1\] has no entry for each row"):
        step(torch.randn(8, 4), torch.randn(8, 3))


def test_an_output_that_has_rows_of_its_own_names_its_size():
    def boxes_of_all_images(inputs):
        return inputs.repeat(3, 1)[:10]

    class Detector(nn.Linear):
        def forward(self, inputs):
            return super().forward(boxes_of_all_images(inputs))

    step = make_step(Detector(4, 3), lambda out, target: F.mse_loss(out[: len(target)], target))
    with pytest.raises(ValueError, match="output has no entry for each row"):
        step(torch.randn(8, 4), torch.randn(8, 3))


def test_a_row_of_an_earlier_update_is_not_joined_with_another_queue():
    """It waited for another row, and was compared with the queue of the first."""
    net = nn.Linear(4, 3)

    def criterion(output, queue):
        logits = output @ queue.T
        return F.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.int64))

    step = make_step(net, criterion, devices=1, micro_batch_size=1)
    for rows in (1, 1, 3, 1, 3, 1, 3, 3):
        inputs = torch.randn(rows, 4)
        queue = torch.randn(6, 3)
        expected = criterion(net(inputs), queue).detach()
        assert_close(step(inputs, Whole(queue)), expected)


class Actor(nn.Module):
    """Returns a distribution, and a value."""

    def __init__(self):
        super().__init__()
        self.choose = nn.Linear(4, 3)
        self.value = nn.Linear(4, 1)

    def forward(self, inputs):
        choices = torch.distributions.Categorical(logits=self.choose(inputs))
        return choices, self.value(inputs).squeeze(-1)


def policy_and_value(choices, value, action):
    return -choices.log_prob(action).mean() + F.mse_loss(value, action.double())


def test_the_gradient_through_an_object_is_that_of_its_second_pass():
    """The first pass saw no graph behind it, and the policy was never trained."""
    assert_exact((1, 2), Actor(), policy_and_value, lambda: torch.randint(3, (9,)))


@pytest.mark.parametrize("layout", [{"devices": 2}, {"devices": 1, "micro_batch_size": 3}])
def test_an_object_that_cannot_be_cut_is_named(layout):
    step = make_step(Actor(), policy_and_value, **layout)
    with pytest.raises(ValueError, match="the output has an object of type Categorical, which"):
        step(torch.randn(9, 4), torch.randint(3, (9,)))


def test_several_losses_of_an_object_have_no_graph_that_tells_them_from_values_to_log():
    def criterion(choices, value, action):
        return -choices.log_prob(action).mean(), F.mse_loss(value, action.double())

    step = make_step(Actor(), criterion, devices=1, micro_batch_size=2)
    with pytest.raises(ValueError, match="expected the loss in an entry 'loss'"):
        step(torch.randn(4, 4), torch.randint(3, (4,)))


def test_a_row_of_an_update_that_has_failed_is_forgotten():
    """It waited for another row, whose loss has another formula, and a right update was refused."""

    def criterion(output, target):
        if target.min() < 0:
            raise KeyError("a negative target")
        loss = F.l1_loss if target.max() > 10 else F.mse_loss
        return loss(output, target)

    step = make_step(nn.Linear(4, 3), criterion, devices=1, micro_batch_size=1)
    step(torch.randn(4, 4), torch.rand(4, 3))
    with pytest.raises(KeyError, match="a negative target"):
        step(torch.randn(2, 4), torch.tensor([[20.0], [-1.0]]).expand(2, 3))
    step(torch.randn(4, 4), torch.rand(4, 3))


@pytest.mark.parametrize("kind", [WholeLoss, LossOfSums])
def test_a_loss_of_an_update_is_in_no_cycle(kind):
    """A cycle kept its tensors on the device until the garbage collector ran, and the next peak was higher."""
    criterion = DataParallelCriterion(DiceLoss())
    loss = kind(criterion.copies, torch.device("cpu"))
    reference = weakref.ref(loss)
    gc.disable()
    try:
        del loss
        assert reference() is None
    finally:
        gc.enable()


class OfImages(nn.Module):
    """Returns a list of the outputs of images, whose sizes differ."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, images):
        return [self.layer(image) for image in images]


@pytest.mark.parametrize("layout", [*LAYOUTS, {"devices": 4}])
@pytest.mark.parametrize("sizes", [(2, 3, 1, 4, 4, 2, 5), (1, 1, 1, 1), (3, 3, 3)])
def test_an_output_may_be_a_list_with_an_entry_for_each_row(layout, sizes):
    """The entries were compared as tensors with rows: "output[1] has [4] rows for [2] rows of the batch"."""
    net = OfImages()
    plain = copy.deepcopy(net)

    def criterion(outputs, targets):
        return F.mse_loss(torch.cat(outputs), torch.cat(targets))

    step = make_step(net, criterion, lr=0.0, **layout)
    for _ in range(2):
        images = [torch.randn(size, 4) for size in sizes]
        targets = [torch.randn(size, 3) for size in sizes]
        expected = criterion(plain(images), targets)
        assert_close(step(Rows(images), Rows(targets)), expected.detach())
        expected.backward()
        assert_close(net.layer.weight.grad, plain.layer.weight.grad)
        plain.zero_grad()


def test_scales_of_a_list_are_no_rows():
    """A list of as many tensors as a shard has rows."""

    class Pyramid(OfImages):
        def forward(self, rows):
            return [self.layer(rows), self.layer(rows.exp()), self.layer(-rows)]

    def criterion(outputs, target):
        return sum(F.mse_loss(output, target) for output in outputs)

    for rows in (3, 6, 7):
        net = Pyramid()
        step = make_step(net, criterion, devices=2, lr=0.0)
        inputs, target = torch.randn(rows, 4), torch.randn(rows, 3)
        assert_close(step(inputs, target), criterion(net(inputs), target).detach())


def weights_of_counts(output, target):
    counts = torch.bincount(target[target >= 0], minlength=3).to(output)
    return F.cross_entropy(output, target, weight=1 / (1 + counts))


def pairs_of_labels(output, target):
    rows = output[target >= 0]
    return output.square().mean() + (rows @ rows.T).square().sum() / (target >= 0).sum().clamp(
        min=1
    )


def hardest(output, target):
    errors = F.cross_entropy(output, target, reduction="none")
    return output.square().mean() + errors.topk(min(3, len(errors))).values.sum() / len(output)


def mixed(output, target):
    """A mean whose rows without labels are no zeros."""
    counts = torch.bincount(target[target >= 0], minlength=3).to(output)
    errors = F.cross_entropy(output, target.clamp(min=0), reduction="none")
    weighted = errors / (1 + counts)[target.clamp(min=0)]
    return torch.where(target >= 0, weighted, output.square().mean(1)).mean()


@pytest.mark.parametrize("loss", [weights_of_counts, pairs_of_labels, hardest, mixed])
@pytest.mark.parametrize("layout", [{"devices": 4}, {"devices": 1, "micro_batch_size": 8}])
def test_rows_with_labels_behind_others_are_compared(loss, layout):
    """The sums of the first rows were zero together and in halves, and wrong losses went on."""
    target = torch.cat([torch.full((40,), -100), torch.arange(24) % 3])
    step = make_step(nn.Linear(4, 3), loss, **layout)
    with pytest.raises(ValueError, match="add up over the rows|not a function of sums"):
        step(torch.randn(64, 4), target)


@pytest.mark.filterwarnings("ignore:no target of this batch")
def test_the_first_update_with_labels_is_compared():
    """Updates without labels had counted."""
    step = make_step(nn.Linear(4, 3), weights_of_counts)
    step(torch.randn(6, 4), torch.full((6,), -100))
    step(torch.randn(6, 4), torch.full((6,), -100))
    with pytest.raises(ValueError, match="does not add up over the rows"):
        step(torch.randn(6, 4), torch.arange(6) % 3)


@pytest.mark.filterwarnings("ignore:no target of this batch")
def test_an_update_behind_one_that_has_failed_is_compared():
    def criterion(output, target):
        if target.max() > 2:
            raise KeyError("a class that is unknown")
        return weights_of_counts(output, target) + output.square().mean()

    step = make_step(nn.Linear(4, 3), criterion, devices=1, micro_batch_size=3)
    for _ in range(5):
        step(torch.randn(6, 4), torch.full((6,), -100))
    with pytest.raises(KeyError, match="a class that is unknown"):
        step(torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 3]))
    with pytest.raises(ValueError, match="does not add up over the rows"):
        step(torch.randn(6, 4), torch.arange(6) % 3)


@pytest.mark.parametrize("layout", [*LAYOUTS, {"devices": 8}])
def test_layers_in_a_mapping_are_no_rows(layout):
    """Layers were taken for rows if a shard had as many, and ``len(target)`` for a value of the batch."""

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

        def forward(self, rows):
            first, *others = [{"logits": layer(rows)} for layer in self.layers]
            return {**first, "aux_outputs": others}

    def criterion(outputs, target):
        losses = [F.cross_entropy(outputs["logits"], target)]
        for each in outputs["aux_outputs"]:
            losses.append(each["logits"].square().sum() / len(target))
            losses.append(F.cross_entropy(each["logits"], target))
        return sum(losses)

    for rows in (3, 4, 7):
        net = Decoder()
        step = make_step(net, criterion, lr=0.0, **layout)
        inputs, target = torch.randn(rows, 4), torch.randint(3, (rows,))
        assert_close(step(inputs, target), criterion(net(inputs), target).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [*LAYOUTS, {"devices": 2, "micro_batch_size": 2}])
def test_sums_in_half_precision_are_not_rounded(layout, dtype):
    """Sums of the rows together differed from those of halves by the rounding of bfloat16."""

    def criterion(output, target):
        mask = (target > 0).to(output)
        return ((output - target).abs() * mask).sum() / mask.sum() + output.square().sum() / len(
            output
        )

    net = nn.Linear(4, 3).to(dtype)
    step = make_step(net, criterion, lr=0.0, **layout)
    for _ in range(2):
        inputs, target = (5 * torch.randn(64, size).to(dtype) for size in (4, 3))
        expected = criterion(net(inputs).double(), target.double()).detach()
        assert_close(step(inputs, target).double(), expected, rtol=2e-2, atol=0)


@pytest.mark.parametrize("layout", [*LAYOUTS, {"devices": 2}])
def test_a_derivative_of_outputs_names_the_forward(layout):
    """The text of torch came alone: a differentiated tensor is not used in the graph."""

    class WithInputs(nn.Linear):
        def forward(self, inputs):
            inputs = inputs.detach().requires_grad_()
            return super().forward(inputs).tanh(), inputs

    def residual(output, inputs, target):
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        return F.mse_loss(output, target) + slope.square().mean()

    step = make_step(WithInputs(4, 3), residual, **layout)
    with pytest.raises(RuntimeError, match="require grad|used in the graph") as error:
        step(torch.randn(8, 4), torch.randn(8, 3))
    assert any("from the forward, in a block of" in note for note in error.value.__notes__)
