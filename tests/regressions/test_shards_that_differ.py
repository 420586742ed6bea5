"""Shards whose programs differ: other branches, other factors, other devices, other state. Exact, or an error."""

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import on_ranks
from torch import nn

from balanced_parallel import (
    ByCost,
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    parallelize,
    simulate,
)


def make_net():
    torch.manual_seed(0)
    return nn.Linear(4, 5).double()


def make_batch(rows=8):
    torch.manual_seed(1)
    return torch.randn(rows, 4).double(), torch.randn(rows, 5).double()


def step_of(net, criterion, devices=("cpu",) * 2, rows=None):
    model = DataParallelModel(net, [*devices])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return TrainStep(model, DataParallelCriterion(criterion), optimizer, micro_batch_size=rows)


def smaller_of_two(output, target):
    return min(F.mse_loss(output, target), F.mse_loss(output, target.flip(1)))


def larger_of_two(output, target):
    errors = (output - target).square().sum(1)
    mask = (target[:, 0] > 0).double()
    one = (errors * mask).sum() / mask.sum()
    other = (errors * (1 - mask)).sum() / (1 - mask).sum()
    return one if one > other else other


@pytest.mark.parametrize("rows", [None, 1])
@pytest.mark.parametrize("criterion", [smaller_of_two, larger_of_two])
def test_a_choice_of_two_losses_of_one_kind_is_refused(criterion, rows):
    """Both have one text, "mse_loss" or "sum / sum", so shards that chose others were added up."""
    step = step_of(make_net(), criterion, rows=rows and 4)
    inputs, target = make_batch()
    target = torch.arange(5).double().repeat(8, 1)
    target[:, 0] = torch.tensor([1, -1] * 4)
    with torch.no_grad():
        step.model.module.weight.zero_()
        step.model.module.bias.copy_(target[0])
    step(inputs, target)
    target[4:] = target[4:].flip(1)
    target[4:, 0] *= 30
    with pytest.raises(ValueError, match=r"for some rows, and .* for others|does not add up"):
        [step(inputs, target) for _ in range(3)]


def test_a_factor_of_some_micro_batches_is_refused_in_one_pass():
    """The first updates show one count. Later ones compared the shards of one forward alone."""

    def criterion(output, target):
        loss = F.mse_loss(output, target)
        return loss * 2 if (target > 50).any() else loss

    step = step_of(make_net(), criterion, rows=2)
    inputs, target = make_batch()
    for _ in range(2):
        step(inputs, target)
    target[-1] = 100.0
    with pytest.raises(ValueError, match=r"mse_loss for some rows, and mse_loss \* 2 for others"):
        step(inputs, target)


def test_a_factor_may_change_between_updates():
    factor = 1.0
    net, (inputs, target) = make_net(), make_batch()
    step = step_of(net, lambda output, target: F.mse_loss(output, target) * factor, rows=2)
    for factor in (1.0, 0.5, 0.25, 0.125):
        expected = F.mse_loss(net(inputs), target) * factor
        torch.testing.assert_close(step(inputs, target), expected)


def count_by_truth(output, target):
    counted = sum(1 for row in target if row[0] > 0)
    return (output - target).square().sum() / max(counted, 1)


def choose_by_truth(output, target):
    rows = [row for row in range(len(target)) if target[row, 0] > 0]
    return (output[rows] - target[rows]).square().sum() / max(len(rows), 1)


@pytest.mark.parametrize("criterion", [count_by_truth, choose_by_truth])
def test_a_count_of_true_rows_is_a_number_read_from_values(criterion):
    step = step_of(make_net(), criterion)
    with pytest.raises(ValueError, match="number that was read from values"):
        step(*make_batch())


def test_a_branch_on_any_row_leaves_numbers_known():
    def criterion(output, target):
        if (target[:, 0] > 1e9).any():
            raise AssertionError
        return (output - target).square().sum() / len(target)

    net, (inputs, target) = make_net(), make_batch()
    expected = criterion(net(inputs), target).detach()
    torch.testing.assert_close(step_of(net, criterion)(inputs, target), expected)


def sum_from_zeros(output, target):
    loss = torch.zeros((), device=output.device, dtype=output.dtype)
    loss = loss + F.mse_loss(output, target)
    return loss + torch.full((), 0.5, device=output.device) * output.abs().mean()


@pytest.mark.parametrize("rows", [None, 1])
def test_a_loss_may_begin_with_zeros_on_its_device(rows):
    """The text of a constant had its device, which differs between replicas."""
    net, (inputs, target) = make_net(), make_batch()
    expected = sum_from_zeros(net(inputs), target).item()
    with simulate(3) as machine:
        step = step_of(net, sum_from_zeros, machine.devices, rows)
        assert step(inputs, target).item() == pytest.approx(expected, rel=1e-12)


class Weighed(nn.Module):
    """A criterion with a trained parameter, and class weights that its graph keeps."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.arange(5).double() + 1)
        self.temperature = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, output, target):
        classes = target.argmax(1)
        return F.cross_entropy(output, classes, self.weight) * self.temperature.exp()


def test_a_criterion_may_have_a_parameter_and_a_buffer_of_its_graph():
    """A comparison on another device wrote the buffer back, although nothing had changed it."""
    net, (inputs, target) = make_net(), make_batch()
    plain = Weighed()
    expected = plain(net(inputs), target)
    expected.backward()
    with simulate(3) as machine:
        model = DataParallelModel(net, machine.devices)
        criterion = DataParallelCriterion(Weighed())
        net.zero_grad()
        loss = criterion(model(inputs), target)
        loss.backward()
        found = criterion.module.temperature.grad
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        assert found.item() == pytest.approx(plain.temperature.grad.item(), rel=1e-12)


class Counting(nn.Module):
    """A model whose loss depends on the number of its forwards."""

    def __init__(self):
        super().__init__()
        self.layer = make_net()
        self.forwards = 0

    def forward(self, inputs, target):
        self.forwards += 1
        output = self.layer(inputs)
        return F.mse_loss(output, target) + 0.5**self.forwards * output.square().mean()


@pytest.mark.parametrize(("devices", "rows"), [(1, None), (1, 2), (3, None)])
def test_rows_that_are_compared_leave_counters_as_they_are(devices, rows):
    plain, net = Counting(), Counting()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    step = step_of(net, lambda loss: loss, ["cpu"] * devices, rows)
    batch = make_batch()
    for number in range(1, 6):
        loss = plain(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(batch), loss.detach())
        assert net.forwards == number


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = make_net()
        self.fails = []
        self.register_buffer("forwards", torch.zeros((), dtype=torch.float64))

    def forward(self, inputs):
        self.forwards += 1
        if self.fails:
            raise ValueError(self.fails.pop())
        return self.layer(inputs) * (1 + 0.1 * self.forwards)


@pytest.mark.parametrize("kind", ["one pass", "two passes"])
@on_ranks(2)
def test_a_step_that_failed_leaves_the_state_of_forwards(rank, kind):
    """Ranks went on from other numbers of forwards, so that the loss was that of neither."""
    net = Counter()
    criterion = nn.MSELoss()
    if kind == "two passes":
        criterion = lambda output, target: F.mse_loss(output, target)  # noqa: E731
    model, criterion = parallelize(net, criterion)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    step = TrainStep(model, criterion, optimizer, micro_batch_size=1)
    inputs, target = make_batch()
    mine = slice(rank * 4, rank * 4 + 4)
    net.fails += ["a forward fails"] * (rank == 0)
    with pytest.raises((ValueError, RuntimeError), match="fail"):
        step(inputs[mine], target[mine])
    expected = F.mse_loss(make_net()(inputs) * 1.1, target)
    torch.testing.assert_close(step(inputs[mine], target[mine]), expected.detach())
    assert net.forwards == 1


@on_ranks(2)
def test_a_rank_without_rows_refuses_a_later_layer_too(rank):
    """It made its update, while the other rank raised."""
    net = nn.Sequential(make_net())
    model, criterion = parallelize(net, nn.MSELoss())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = TrainStep(model, criterion, optimizer)
    inputs, target = make_batch()
    step(inputs, target)
    net.append(nn.Linear(5, 5).double())
    optimizer.add_param_group({"params": [*net[1].parameters()]})
    before = net[0].weight.detach().clone()
    rows = 0 if rank else 8
    with pytest.raises(ValueError, match=r"1\.weight came after parallelize"):
        step(inputs[:rows], target[:rows])
    torch.testing.assert_close(net[0].weight, before, rtol=0, atol=0)


def train_by_hand(net, model, criterion, rows, change, updates=4):
    """Returns the losses of a loop that changes gradients behind each backward."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    losses = []
    for number in range(updates):
        torch.manual_seed(number)
        inputs, target = torch.randn(8, 4).double(), torch.randn(8, 5).double()
        loss = criterion(model(inputs[rows]), target[rows])
        optimizer.zero_grad()
        loss.backward()
        for parameter in net.parameters():
            change(parameter)
        optimizer.step()
        losses.append(loss.item())
    return losses


def assign_data(parameter):
    parameter.grad.data = parameter.grad.data + 0.01 * parameter.data


@on_ranks(2)
def test_data_of_a_gradient_may_be_assigned(rank):
    """The gradient was the tensor of the reducer, which then reduced other memory."""
    plain, net = make_net(), make_net()
    expected = train_by_hand(plain, plain, nn.MSELoss(), slice(None), assign_data)
    model, criterion = parallelize(net, nn.MSELoss())
    found = train_by_hand(net, model, criterion, slice(4 * rank, 4 * rank + 4), assign_data)
    assert found == pytest.approx(expected, rel=1e-9)


@on_ranks(2)
def test_data_of_a_gradient_may_be_assigned_between_steps(rank):
    plain, net = make_net(), make_net()
    model, criterion = parallelize(net, nn.MSELoss())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (plain, net)]
    step = TrainStep(model, criterion, optimizers[1], micro_batch_size=2)
    inputs, target = make_batch()
    mine = slice(4 * rank, 4 * rank + 4)
    for _ in range(4):
        loss = F.mse_loss(plain(inputs), target)
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
        torch.testing.assert_close(step(inputs[mine], target[mine]), loss.detach())
        assign_data(net.weight)


class OneOfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = make_net()
        self.unused = make_net()

    def forward(self, inputs):
        return self.used(inputs)


@pytest.mark.parametrize("rows", [0, 3])
@on_ranks(2)
def test_a_hook_of_a_parameter_is_called_with_gradients_alone(rank, rows):
    """On a rank without rows it was called with None, and the other rank waited."""
    plain, net = OneOfTwo(), OneOfTwo()
    for each in (plain, net):
        for parameter in each.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)
    inputs, target = make_batch()
    F.mse_loss(plain(inputs), target).backward()
    model, criterion = parallelize(net, nn.MSELoss())
    mine = slice(8 - rows, 8) if rank else slice(0, 8 - rows)
    criterion(model(inputs[mine]), target[mine]).backward()
    torch.testing.assert_close(net.used.weight.grad, plain.used.weight.grad)
    assert net.unused.weight.grad is None


@pytest.mark.parametrize("rows", [0, 4])
@on_ranks(2)
def test_a_layer_of_two_models_is_refused_in_one_backward(rank, rows):
    """torch's error named a bucket view. A backward for each model is right."""
    first = make_net()
    one, other = nn.Sequential(first), nn.Sequential(first, nn.Tanh())
    model, criterion = parallelize(one, nn.MSELoss())
    second = parallelize(other)
    inputs, target = make_batch()
    mine = slice(8 - rows, 8) if rank else slice(0, 8 - rows)
    for _ in range(3):
        first.zero_grad()
        (F.mse_loss(one(inputs), target) + F.mse_loss(other(inputs), target)).backward()
        expected = first.weight.grad.clone()
        first.zero_grad()
        for each in (model, second):
            criterion(each(inputs[mine]), target[mine]).backward()
        torch.testing.assert_close(first.weight.grad, expected)
    loss = criterion(model(inputs[mine]), target[mine])
    both = loss + criterion(second(inputs[mine]), target[mine])
    with pytest.raises(ValueError, match="share a parameter, .* expected one model of both"):
        both.backward()


class LossWithPenalty(nn.Module):
    """A model whose loss has a penalty on a parameter, which FSDP2 refuses."""

    def __init__(self):
        super().__init__()
        self.layer = make_net()

    def forward(self, inputs, target):
        return F.mse_loss(self.layer(inputs), target) + self.layer.weight.square().mean()


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("limit", [None, 2])
@on_ranks(2)
def test_a_criterion_may_fail_in_the_first_update_of_shards(rank, rows, limit):
    """The rank that had not failed waited in the first update until the timeout."""
    fails = [rank == 0]

    def criterion(output, target):
        if fails[0]:
            raise ValueError("the criterion fails")
        return F.mse_loss(output, target)

    net = nn.Sequential(make_net(), nn.Tanh(), nn.Linear(5, 5).double())
    model, criterion = parallelize(net, criterion, strategy="fsdp")
    step = TrainStep(model, criterion, torch.optim.SGD(net.parameters()), micro_batch_size=limit)
    inputs, target = make_batch()
    mine = slice(8 - rows, 8) if rank else slice(0, 8 - rows)
    text = "1 of 2 ranks failed" if rank else "the criterion fails"
    with pytest.raises((ValueError, RuntimeError), match=text):
        step(inputs[mine], target[mine])
    fails[0] = False
    losses = [step(inputs[mine], target[mine]) for _ in range(2)]
    assert losses[1] < losses[0]


@pytest.mark.parametrize("limit", [None, 2])
@on_ranks(2)
def test_a_penalty_in_the_loss_of_a_sharded_model_fails_on_all_ranks(rank, limit):
    """A rank without rows waited until the timeout."""
    net = LossWithPenalty()
    model, criterion = parallelize(net, lambda loss: loss, strategy="fsdp")
    step = TrainStep(model, criterion, torch.optim.SGD(net.parameters()), micro_batch_size=limit)
    inputs, target = make_batch(8 * (rank == 0))
    text = "1 of 2 ranks failed" if rank else "FSDP2 has gathered, as a penalty does"
    with pytest.raises((ValueError, RuntimeError), match=text):
        step((inputs, target))


class Queue(nn.Module):
    """A contrastive loss with a queue of earlier keys."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(5, 5, dtype=torch.float64))

    def forward(self, output, target):
        logits = output @ torch.cat([target, self.keys]).T
        with torch.no_grad():
            self.keys.copy_(torch.cat([self.keys, target])[-5:])
        return F.cross_entropy(logits, torch.arange(len(output), device=output.device))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("limit", [None, 2])
@on_ranks(2)
def test_the_state_of_a_criterion_of_all_rows_is_that_of_all_ranks(rank, strategy, limit):
    """A rank without rows did not advance its queue, and computed another loss later."""
    plain, net, queue = make_net(), make_net(), Queue()
    model, criterion = parallelize(
        net, DataParallelCriterion(Queue(), whole=True), strategy=strategy
    )
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (plain, net)]
    step = TrainStep(model, criterion, optimizers[1], micro_batch_size=limit)
    for number in range(4):
        torch.manual_seed(number)
        inputs, target = torch.randn(6, 4).double(), torch.randn(6, 5).double()
        loss = queue(plain(inputs), target)
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
        rows = slice(6 * (rank != number % 2), 6)
        torch.testing.assert_close(step(inputs[rows], target[rows]), loss.detach())


class Orthogonal(nn.Module):
    """A model whose loss has a penalty with an identity matrix."""

    def __init__(self):
        super().__init__()
        self.layer = make_net()

    def forward(self, inputs, target):
        weight = self.layer.weight
        identity = torch.eye(4, device=weight.device, dtype=weight.dtype)
        penalty = (weight.T @ weight - identity).square().mean()
        return F.mse_loss(self.layer(inputs), target) + penalty


class OneElement(Orthogonal):
    """Returns its loss as a vector, as ``nn.DataParallel`` needs it."""

    def forward(self, inputs, target):
        return super().forward(inputs, target).unsqueeze(0)


@pytest.mark.parametrize("kind", [Orthogonal, OneElement])
@pytest.mark.parametrize("devices", [1, 3])
def test_a_loss_of_a_model_may_have_a_constant_matrix_or_one_element(kind, devices):
    """Both were refused by hand: "The rows depend on each other"."""
    net, batch = kind(), make_batch()
    expected = net(*batch).sum()
    expected.backward()
    gradient = net.layer.weight.grad.clone()
    net.zero_grad()
    model = DataParallelModel(net, ["cpu"] * devices)
    loss = DataParallelCriterion(lambda loss: loss.mean())(model(*batch))
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(net.layer.weight.grad, gradient)
    step = step_of(net, lambda loss: loss.mean(), ["cpu"] * devices, 2)
    torch.testing.assert_close(step(batch), expected.detach())


class Flat(nn.Module):
    """Returns the tokens of all rows in one dimension."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 5).double()

    def forward(self, inputs):
        return self.layer(inputs.view(-1, 2))


def test_tokens_of_rows_in_one_dimension_are_an_error_of_their_own():
    """It began with "does not add up over the rows" and ended with "The rows depend on each other"."""
    net, inputs = Flat(), make_batch(7)[0]
    target = torch.arange(14).view(7, 2) % 5
    step = step_of(net, lambda output, target: F.cross_entropy(output, target.view(-1)))
    with pytest.raises(ValueError, match=r"^output has \[8\] rows for \[4\] .* flat targets too$"):
        step(inputs, target)
    expected = F.cross_entropy(net(inputs), target.view(-1)).detach()
    step = step_of(net, lambda output, target: F.cross_entropy(output, target))
    torch.testing.assert_close(step(inputs, target.view(-1)), expected)


LONGER = "computes mean over .* elements for each of some rows, .* pads to its own longest row"
SAMPLES = [9, 8, 7, 9, 2, 3, 2, 1]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(11, 4).double()
        self.tags = make_net()

    def forward(self, words):
        return self.tags(self.words(words))


def words_of(lengths):
    """Returns rows of these numbers of words, padded to the longest, and their labels."""
    words = torch.zeros(len(lengths), max(lengths, default=1), dtype=torch.long)
    for row, length in enumerate(lengths):
        words[row, :length] = torch.arange(length) + 1
    return words, torch.where(words > 0, words % 5, -100)


def mean_over_positions(output, labels):
    errors = F.cross_entropy(output.transpose(1, 2), labels, reduction="none")
    return (errors * (labels != -100)).mean()


def flat_mean_over_positions(output, labels):
    labels = labels.flatten()
    errors = F.cross_entropy(output.flatten(0, 1), labels, reduction="none")
    return (errors * (labels != -100)).sum() / errors.numel()


def masked_mean(output, labels):
    errors = F.cross_entropy(output.transpose(1, 2), labels, reduction="none")
    return (errors * (labels != -100)).sum() / (labels != -100).sum()


def mean_of_rows(output, labels):
    errors = F.cross_entropy(output.transpose(1, 2), labels, reduction="none")
    return (errors * (labels != -100)).sum(1).mean()


def mean_of_chosen(output, labels):
    return output[labels != -100].square().mean()


POSITIONS = [mean_over_positions, flat_mean_over_positions]


def cut_of_words(devices, collate=words_of):
    """Returns a cut of samples that are numbers of words."""
    return ByCost(int, collate=collate, limit=30 if devices == 1 else None)


@pytest.mark.parametrize("devices", [1, 3])
def test_a_loss_of_torch_over_positions_that_shards_pad_is_refused(devices):
    net = Tagger()

    def collate(lengths):
        words, labels = words_of(lengths)
        return words, torch.zeros(*labels.shape, 5).double()

    step = TrainStep(
        DataParallelModel(net, ["cpu"] * devices),
        DataParallelCriterion(nn.MSELoss()),
        torch.optim.SGD(net.parameters()),
        cut=cut_of_words(devices, collate),
    )
    with pytest.raises(ValueError, match=LONGER.replace("mean", "mse_loss")):
        step(SAMPLES)


FREE = [masked_mean, mean_of_rows, mean_of_chosen]


@pytest.mark.parametrize("criterion", POSITIONS)
@pytest.mark.parametrize("devices", [1, 3])
def test_a_mean_over_positions_that_shards_pad_is_refused(criterion, devices):
    """Each shard of a cut by cost has its own longest row, so the mean was up to 2.5 times as large."""
    net = Tagger()
    step = TrainStep(
        DataParallelModel(net, ["cpu"] * devices),
        DataParallelCriterion(criterion),
        torch.optim.SGD(net.parameters()),
        cut=cut_of_words(devices),
    )
    with pytest.raises(ValueError, match=LONGER.replace("mean", "(mean|a sum)")):
        step(SAMPLES)


@pytest.mark.parametrize("criterion", FREE)
@pytest.mark.parametrize("devices", [1, 3])
def test_means_that_do_not_count_padding_are_exact(criterion, devices):
    net = Tagger()
    batch = words_of(SAMPLES)
    step = TrainStep(
        DataParallelModel(net, ["cpu"] * devices),
        DataParallelCriterion(criterion),
        torch.optim.SGD(net.parameters(), lr=0.1),
        cut=cut_of_words(devices),
    )
    for _ in range(3):
        expected = criterion(net(batch[0]), batch[1]).detach()
        torch.testing.assert_close(step(SAMPLES), expected)


@pytest.mark.parametrize("limit", [None, 2])
@on_ranks(2)
def test_a_mean_over_positions_that_ranks_pad_is_refused(rank, limit):
    """Also in a later update, of one pass, and in a loop by hand."""
    for criterion in (*FREE, *POSITIONS):
        net = Tagger()
        model, loss = parallelize(net, criterion)
        step = TrainStep(
            model, loss, torch.optim.SGD(net.parameters(), lr=0.0), micro_batch_size=limit
        )
        even, uneven = [9] * 8, SAMPLES
        mine = slice(4 * rank, 4 * rank + 4)
        for _ in range(2):
            expected = criterion(net(words_of(even)[0]), words_of(even)[1])
            torch.testing.assert_close(step(*words_of(even[mine])), expected.detach())
        batch = words_of(uneven[mine])
        if criterion in FREE:
            expected = criterion(net(words_of(uneven)[0]), words_of(uneven)[1])
            torch.testing.assert_close(step(*batch), expected.detach())
            torch.testing.assert_close(loss(model(batch[0]), batch[1]), expected)
            continue
        before = net.tags.weight.detach().clone()
        with pytest.raises(ValueError, match=LONGER.replace("mean", "(mean|a sum)")):
            step(*batch)
        with pytest.raises(ValueError, match=LONGER.replace("mean", "(mean|a sum)")):
            loss(model(batch[0]), batch[1])
        torch.testing.assert_close(net.tags.weight, before, rtol=0, atol=0)


class Converged(nn.Module):
    """A model that computes a loss of rounding errors."""

    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 7))
        self.loss = loss

    def forward(self, inputs, target):
        return self.loss(self.layer(inputs), target)


def one_minus_cosine(output, target):
    return (1 - F.cosine_similarity(output, target)).mean()


def contrast(output, target):
    logits = output @ target.T
    return F.cross_entropy(logits, torch.arange(len(logits)))


LOSSES = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "cosine": one_minus_cosine,
    "written": lambda output, target: (output - target).pow(2).sum() / len(output),
}


@pytest.mark.parametrize("of_model", [False, True])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_run_may_begin_with_a_loss_of_rounding_errors(kind, of_model):
    """A run that was resumed was refused: "The rows depend on each other"."""
    net = Converged(LOSSES[kind])
    inputs = torch.randn(16, 200)
    target = net.layer(inputs).detach()
    if of_model:
        step = step_of(net, lambda loss: loss, rows=4)
        losses = [step((inputs, target)) for _ in range(3)]
    else:
        step = step_of(net.layer, LOSSES[kind], rows=4)
        losses = [step(inputs, target) for _ in range(3)]
    assert max(losses) < 1e-5


@pytest.mark.parametrize("of_model", [False, True])
@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_a_small_loss_of_rows_that_depend_on_each_other_is_refused(scale, of_model):
    net = Converged(lambda output, target: scale * contrast(output, target))
    inputs, target = torch.randn(16, 200), torch.randn(16, 7)
    step = step_of(net, lambda loss: loss) if of_model else step_of(net.layer, net.loss)
    with pytest.raises(ValueError, match="does not add up over the rows"):
        step((inputs, target)) if of_model else step(inputs, target)


class Stateful(nn.Module):
    """A model whose loss depends on a buffer and a number that its forwards advance."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.spectral_norm(nn.Linear(4, 5).double())
        self.calls = 0
        self.register_buffer("forwards", torch.zeros((), dtype=torch.float64))

    def forward(self, inputs, target=None):
        output = self.layer(inputs)
        if target is None:
            return output
        self.calls += 1
        self.forwards += 1
        factor = 1 - 0.5 ** (self.forwards + self.calls)
        return F.mse_loss(output, target) + factor * output.square().mean()


def train_stateful(net, model, criterion, rows=slice(None)):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    inputs, target = make_batch()
    model(inputs[rows])
    losses = []
    for _ in range(3):
        loss = criterion(model(inputs[rows], target[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, net.calls, net.forwards.item()


@pytest.mark.parametrize("devices", [1, 3])
def test_the_first_forward_by_hand_advances_its_state_once(devices):
    """It ran again for its loss, from the state behind itself."""
    nets = [Stateful() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    expected = train_stateful(nets[0], nets[0], lambda loss: loss)
    model = DataParallelModel(nets[1], ["cpu"] * devices)
    losses, *state = train_stateful(nets[1], model, DataParallelCriterion(lambda loss: loss))
    assert losses == pytest.approx(expected[0], rel=1e-9)
    assert (*state,) == expected[1:]


@on_ranks(2)
def test_the_first_forward_by_hand_advances_its_state_once_on_ranks(rank):
    torch.manual_seed(0)
    nets = [Stateful() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    expected = train_stateful(nets[0], nets[0], lambda loss: loss)
    model, criterion = parallelize(nets[1], lambda loss: loss)
    rows = slice(3 * rank, 8 if rank else 3)
    losses, *state = train_stateful(nets[1], model, criterion, rows)
    assert losses == pytest.approx(expected[0], rel=1e-9)
    assert (*state,) == expected[1:]


class Forces(nn.Module):
    """A model whose loss has a derivative with respect to its inputs."""

    def __init__(self, reduce=torch.sum, enabled=True):
        super().__init__()
        torch.manual_seed(0)
        self.energy = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        self.reduce, self.enabled = reduce, enabled

    def forward(self, inputs, target):
        inputs = inputs.detach().requires_grad_()
        with torch.set_grad_enabled(self.enabled or torch.is_grad_enabled()):
            energy = self.energy(inputs)
            (forces,) = torch.autograd.grad(self.reduce(energy), inputs, create_graph=True)
        return F.mse_loss(energy, target[:, :1]) + F.mse_loss(forces, target[:, 1:])


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("devices", [1, 3])
def test_forces_in_the_loss_of_a_model_are_exact(devices, limit):
    """They were no function of sums."""
    net, batch = Forces(), make_batch()
    expected = net(*batch)
    expected.backward()
    gradient = net.energy[0].weight.grad.clone()
    net.zero_grad()
    model = DataParallelModel(net, ["cpu"] * devices)
    loss = DataParallelCriterion(lambda loss: loss)(model(*batch))
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(net.energy[0].weight.grad, gradient)
    step = step_of(net, lambda loss: loss, ["cpu"] * devices, limit)
    torch.testing.assert_close(step(batch), expected.detach())


@pytest.mark.parametrize(
    ("net", "text"),
    [
        (Forces(torch.mean), "is not a function of sums over the rows"),
        (Forces(enabled=False), "does not require grad"),
    ],
)
def test_forces_of_a_mean_or_without_a_graph_are_an_error(net, text):
    step = step_of(net, lambda loss: loss, rows=2)
    with pytest.raises((ValueError, RuntimeError), match=text) as error:
        step(make_batch())
    notes = "".join(getattr(error.value, "__notes__", []))
    assert "block of torch.enable_grad()" in notes or isinstance(error.value, ValueError)
