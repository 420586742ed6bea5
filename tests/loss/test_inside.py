"""Losses that a model computes itself, without ``weight=``: what is refused, and what their forwards leave.

``regressions/test_exact_problems.py`` has those that are exact.
"""

import copy
import dataclasses
import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers.layouts import make_update
from helpers.optimizers import sgd
from helpers.plain import Plain
from helpers.ranks import run_ranks
from helpers.slow import pairs
from helpers.steps import make_step
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    convert_sync_batchnorm,
    parallelize,
    simulate,
)
from balanced_parallel.loss.names import UnknownMeanError

pytestmark = pytest.mark.usefixtures("double")

WORDS = 11
WIDTH = 8


@dataclasses.dataclass
class Output:
    """The output of a language model, with the loss if it had labels."""

    loss: torch.Tensor | None
    logits: torch.Tensor


class Language(nn.Module):
    """A model that computes its loss, as those of transformers do."""

    def __init__(self, more="nothing"):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if more == "batch norm" else nn.Identity()
        self.drop = nn.Dropout(0.1 if more == "dropout" else 0.0)
        self.head = nn.Linear(WIDTH, WORDS)
        self.more = more
        self.forwards = []  # A number would be put back.

    def forward(self, tokens, labels=None):
        self.forwards.append(None)
        hidden = self.drop(self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2))
        logits = self.head(hidden)
        if labels is None:
            return Output(None, logits)
        return Output(self.loss_of(hidden, logits, labels), logits)

    def loss_of(self, hidden, logits, labels):
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.more == "root":
            loss = loss + hidden.square().mean().sqrt()
        if self.more == "penalty":
            loss = loss + 0.1 * self.head.weight.square().sum()
        if self.more == "contrastive":
            pooled = hidden.mean(1)
            loss = loss + F.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))
        if self.more == "no graph":
            with torch.no_grad():
                size = (2 * loss).sqrt()
            loss = loss / size + hidden.square().mean()
        if self.more == "neighbours":
            pooled = hidden.mean(1)
            loss = loss + (pooled - pooled.roll(1, 0)).square().mean()
        if self.more == "hardest":
            loss = loss + logits.square().mean((1, 2)).topk(min(4, len(logits))).values.mean()
        return loss


def loss_inside(output):
    return output.loss


def problem(more):
    torch.manual_seed(0)
    tokens, labels = torch.randint(WORDS, (2, 7, 5)).unbind()
    labels[:3, :4] = -100
    labels[5] = -100
    return Language(more), tokens, labels


def expected_of(more, updates=3):
    """Returns the losses of the plain program, and its parameters after some updates."""
    net, *inputs = problem(more)
    plain = Plain(net, loss_inside)
    losses = [plain(tuple(inputs)).item() for _ in range(updates)]
    return losses, [parameter.detach() for parameter in plain.parameters]


def train(model, criterion, inputs, way, updates=3, lr=0.1):
    """Returns the losses of some updates: by hand, or of a step with micro-batches of so many rows."""
    update = make_update(model, criterion, way, lr)
    return [update(inputs).item() for _ in range(updates)]


WAYS = ["by hand", None, 1, 3]


@pytest.mark.parametrize(
    ("more", "way", "devices"), pairs(["contrastive", "hardest", "neighbours"], WAYS, [2, 7])
)
def test_a_loss_whose_rows_depend_on_each_other_is_refused(more, way, devices):
    net, *inputs = problem(more)
    model = DataParallelModel(net, ["cpu"] * devices)
    with pytest.raises(UnknownMeanError, match="add up|not a function of sums"):
        train(model, DataParallelCriterion(loss_inside), tuple(inputs), way)


def test_an_operation_without_a_graph_is_exact_by_hand_and_refused_in_two_passes():
    losses, _ = expected_of("no graph")
    net, *inputs = problem("no graph")
    model = DataParallelModel(net, ["cpu"] * 2)
    criterion = DataParallelCriterion(loss_inside)
    assert train(model, criterion, tuple(inputs), "by hand") == pytest.approx(losses)
    with pytest.raises(UnknownMeanError, match=r"torch.no_grad\(\) block in the model's forward"):
        train(model, DataParallelCriterion(loss_inside), tuple(inputs), 2)


def updates_on_ranks(rank, more, sizes, way, strategy):
    net, *inputs = problem(more)
    model, criterion = parallelize(net, loss_inside, ["cpu"], strategy=strategy)
    rows = tuple(tensor.split(sizes)[rank] for tensor in inputs)
    losses = train(model, criterion, rows, way)
    whole = [getattr(each, "full_tensor", each.detach)() for each in model.parameters()]
    return losses, [each.detach() for each in whole]


def refusal_on_ranks(rank, more, sizes, way, strategy):
    with pytest.raises(UnknownMeanError) as caught:
        updates_on_ranks(rank, more, sizes, way, strategy)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "way", "strategy"), pairs([(4, 3), (7, 0)], ["by hand", None], ["ddp", "fsdp"])
)
def test_a_contrastive_loss_of_a_model_is_refused_on_ranks(sizes, way, strategy):
    for text in run_ranks(2, refusal_on_ranks, "contrastive", sizes, way, strategy):
        assert "does not add up over the rows" in text


def test_the_first_forward_by_hand_runs_again_and_leaves_no_trace():
    plain, *inputs = problem("batch norm")
    net = copy.deepcopy(plain)
    plain(*inputs)
    model = DataParallelModel(net, ["cpu"])
    criterion = DataParallelCriterion(loss_inside)
    random = torch.get_rng_state()
    criterion(model(*inputs))
    assert torch.equal(torch.get_rng_state(), random)
    assert len(net.forwards) == 2
    assert_close(net.norm.running_mean, plain.norm.running_mean)
    assert net.norm.num_batches_tracked == 1
    criterion(model(*inputs))
    assert len(net.forwards) == 3


def test_outputs_of_one_forward_may_be_used_twice():
    losses, _ = expected_of("root", updates=1)
    net, *inputs = problem("root")
    model = DataParallelModel(net, ["cpu"] * 3)
    criterion = DataParallelCriterion(loss_inside)
    criterion(model(*inputs))
    outputs = model(*inputs)
    assert [criterion(outputs).item() for _ in range(2)] == pytest.approx(losses * 2)
    assert criterion(outputs.map(lambda output: output)).item() == pytest.approx(losses[0])
    assert pickle.loads(pickle.dumps(outputs.map(lambda output: output.logits.detach()))).sizes == (
        outputs.sizes
    )


def test_outputs_are_those_of_the_forward_that_the_loss_is_of():
    net, *inputs = problem("dropout")
    model = DataParallelModel(net, ["cpu"] * 2)
    criterion = DataParallelCriterion(loss_inside)
    outputs = model(*inputs)
    losses = [criterion(outputs).item() for _ in range(2)]
    # Each loss is compared with those of halves of the rows, after a forward of one row.
    assert len(net.forwards) == 2 * 2 + 2 * 4
    logits = outputs.logits.gather()
    labels = inputs[1]
    assert losses == pytest.approx(
        [F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()] * 2
    )


class Denoiser(nn.Module):
    """A model that draws random numbers for each row, and computes its loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs):
        share = torch.randint(10, (len(inputs), 1)) / 10
        noise = torch.randn_like(inputs)
        return F.mse_loss(self.layer(inputs * (1 - share) + noise * share), noise)


class Contrast(Denoiser):
    """A model that compares two random views of all rows."""

    def forward(self, inputs):
        first, second = (self.layer(inputs + torch.randn_like(inputs)) for _ in range(2))
        return F.cross_entropy(first @ second.T, torch.arange(len(inputs)))


@pytest.mark.parametrize("size", [None, 2])
def test_a_model_that_draws_random_numbers_has_a_loss_of_its_rows(size):
    net = Denoiser()
    inputs = torch.randn(7, 4)
    losses = []
    for devices, rows in ((1, None), (3, size)):
        copied = copy.deepcopy(net)
        torch.manual_seed(0)
        step = TrainStep(
            DataParallelModel(copied, ["cpu"] * devices),
            DataParallelCriterion(lambda loss: loss),
            sgd(copied),
            micro_batch_size=rows,
            reproducible=True,
        )
        losses.append([step(inputs).item() for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1])


def test_a_contrastive_loss_of_random_views_is_refused():
    model = DataParallelModel(Contrast(), ["cpu"] * 2)
    with pytest.raises(UnknownMeanError, match="does not add up over the rows") as caught:
        DataParallelCriterion(lambda loss: loss)(model(torch.randn(7, 4)))
    assert "return what the loss needs" in str(caught.value)  # whole=True alone would not help


class Temperature(nn.Module):
    """A model whose output has a number that is no loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.forwards = []  # A number would be put back.

    def forward(self, inputs):
        self.forwards.append(None)
        return self.layer(inputs), self.scale.exp()


def test_a_model_without_a_loss_is_not_noted_for_long():
    net = Temperature()
    inputs = torch.randn(7, 4)
    expected = (net(inputs)[0] * net.scale.exp()).square().mean()
    model = DataParallelModel(net, ["cpu"])
    criterion = DataParallelCriterion(lambda output, scale: (output * scale).square().mean())
    net.forwards.clear()
    for forwards in (2, 3, 4):
        assert_close(criterion(model(inputs)), expected)
        assert len(net.forwards) == forwards
    assert not any(model(inputs).notes)


def test_the_loss_of_a_compiled_model_is_refused():
    net, *inputs = problem("nothing")
    model = DataParallelModel(net, ["cpu"] * 2)
    model.compile(backend="eager")
    step = TrainStep(
        model,
        DataParallelCriterion(loss_inside),
        sgd(net),
    )
    with pytest.raises(UnknownMeanError, match="without torch.compile"):
        step(tuple(inputs))


def test_a_compiled_model_with_a_number_runs_once():
    net = Temperature()
    inputs = torch.randn(7, 4)
    model = DataParallelModel(net, ["cpu"])
    model.compile(backend="eager")
    model(inputs)  # The first forward may run the code of the module twice.
    criterion = DataParallelCriterion(lambda output, scale: (output * scale).square().mean())
    outputs = model(inputs)
    entry = outputs[0]
    criterion(outputs)
    assert outputs[0] is entry


class Normed(nn.Sequential):
    """A model that computes its loss behind batch norm."""

    def forward(self, inputs, labels):
        return F.cross_entropy(super().forward(inputs), labels)


def test_the_loss_behind_batch_norm_over_all_rows():
    net = Normed(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 5))
    plain = Plain(net, lambda loss: loss)
    convert_sync_batchnorm(net)
    inputs = torch.randn(7, 4), torch.tensor([0, 1, -100, -100, 2, 3, 4])
    step = TrainStep(
        DataParallelModel(net, ["cpu"] * 3), DataParallelCriterion(lambda loss: loss), sgd(net)
    )
    for _ in range(2):
        assert_close(step(inputs), plain(inputs))
    assert_close(net.state_dict(), plain.module.state_dict())


def test_targets_beside_a_loss_of_the_model_are_refused():
    net, *inputs = problem("nothing")
    outputs = DataParallelModel(net, ["cpu"] * 2)(*inputs)
    criterion = DataParallelCriterion(lambda output, labels: output.loss)
    with pytest.raises(UnknownMeanError, match="a criterion of the output alone"):
        criterion(outputs, inputs[1])


@pytest.mark.parametrize("way", ["by hand", None])
def test_a_model_can_be_copied_after_its_loss_was_noted(way):
    net, *inputs = problem("root")
    model = DataParallelModel(net, ["cpu"] * 2)
    criterion = DataParallelCriterion(loss_inside)
    losses = train(model, criterion, tuple(inputs), way, updates=1, lr=0.0)
    for copied in copy.deepcopy(model), pickle.loads(pickle.dumps(model)):
        assert criterion(copied(*inputs)).item() == pytest.approx(losses[0])


class Labelled(nn.Module):
    """A model whose output is one mean, to which a penalty comes later."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.later = ""
        self.modes = []  # The modes of torch in each forward with a graph.

    def forward(self, inputs, labels):
        if torch.is_grad_enabled():
            self.modes.append(torch._C._len_torch_function_stack())
        outputs = self.layer(inputs)
        self.norm(inputs)
        loss = F.cross_entropy(
            outputs, labels, label_smoothing=0.1 if self.later == "smoothing" else 0.0
        )
        if self.later == "a factor":
            return loss * 0.5
        if self.later == "another mean":
            return loss + 0.1 * F.nll_loss(outputs.log_softmax(1), labels)
        return loss + outputs.square().mean() if self.later == "a penalty" else loss


def labelled_rows():
    torch.manual_seed(0)
    inputs, labels = torch.randn(12, 4).double(), torch.randint(3, (12,))
    labels[:3] = labels[5] = -100  # The first micro-batch has no labels.
    return inputs, labels


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("later", ["", "smoothing", "a factor", "another mean", "a penalty"])
def test_a_mean_runs_without_notes_until_it_is_another_loss(later, devices):
    rows = labelled_rows()
    net = Labelled().double()
    plain = Plain(net, lambda loss: loss)
    model = DataParallelModel(net, ["cpu"] * devices)
    update = make_update(model, DataParallelCriterion(lambda loss: loss), 3, 0.1)
    for number in range(7):
        net.later = plain.module.later = later if number > 4 else ""
        net.modes.clear()
        assert update(rows).item() == pytest.approx(plain(rows).item(), rel=1e-12)
        for found, parameter in zip(net.parameters(), plain.parameters, strict=True):
            assert_close(found, parameter, rtol=1e-10, atol=1e-12)
        if number in (1, 2, 3, 4):
            assert not any(net.modes)
        if number == 5 and later:
            assert any(net.modes)
        if number == 6 and later:
            assert all(net.modes)
    if later != "a penalty":  # It has two counts, so that the update is made anew in two passes.
        assert net.norm.num_batches_tracked == 28 // devices


class Wide(nn.Module):
    """A model with a large output for each row, which returns its loss alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 2**18)

    def forward(self, inputs, labels):
        return F.cross_entropy(self.layer(inputs), labels)


def test_rows_that_are_compared_need_no_more_memory_than_those_of_a_forward():
    inputs, labels = torch.randn(4, 1), torch.randint(2**18, (4,))
    peaks = []
    with simulate(1) as simulated:
        net = Wide().to("sim:0")
        model = DataParallelModel(net, [0])
        criterion = DataParallelCriterion(lambda loss: loss)
        step = TrainStep(model, criterion, sgd(net), micro_batch_size=2)
        for _ in range(5):
            simulated.reset_peak()
            step({"inputs": inputs, "labels": labels})
            peaks += simulated.peak
    assert max(peaks) < 1.3 * min(peaks)


class Masked(nn.Module):
    """A model that selects all elements of a table by their numbers, as masks of attention do, and reads a maximum."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs):
        rows = torch.arange(len(inputs)).view(-1, 1, 1)
        hidden = self.layer(inputs[rows, torch.arange(4).view(1, 1, -1)][:, 0])
        assert hidden.max() < 99
        return hidden.square().sum() / len(inputs)


def test_elements_that_are_all_of_a_table_tell_no_number_of_rows():
    net = Masked()
    plain = Plain(net, lambda loss: loss)
    model = DataParallelModel(net, ["cpu"] * 2)
    update = make_update(model, DataParallelCriterion(lambda loss: loss), 3, 0.1)
    for _ in range(3):
        rows = (torch.randn(7, 4),)
        assert update(rows).item() == pytest.approx(plain(rows).item(), rel=1e-12)


class Balanced(nn.Module):
    """Computes a loss with weights of the counts of its labels."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs, labels):
        output = self.layer(inputs)
        counts = torch.bincount(labels[labels >= 0], minlength=3).to(output)
        loss = F.cross_entropy(output, labels, weight=1 / (1 + counts), reduction="sum")
        return {"loss": loss / (labels >= 0).sum().clamp(min=1)}


@pytest.mark.parametrize("layout", [(3, None), (1, 8), (2, 4), (1, 2)])
@pytest.mark.parametrize("rows", [slice(12), slice(16, 28), slice(36, 48), slice(1, 4)])
def test_rows_with_labels_among_others_are_compared(rows, layout):
    """Sums of the first row and of the last one were zero."""
    devices, size = layout
    labels = torch.full((48,), -100)
    labels[rows] = torch.arange(48)[rows] % 3
    step = make_step(
        Balanced(), lambda output: output["loss"], devices=devices, micro_batch_size=size
    )
    with pytest.raises(ValueError, match="does not add up over the rows"):
        step((torch.randn(48, 4), labels))
