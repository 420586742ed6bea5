"""Shards whose programs differ: other branches, other factors, other devices, other state. Exact, or an error."""

import pytest
import torch
import torch.nn.functional as F
from helpers.layouts import make_update
from helpers.plain import Plain
from helpers.ranks import on_ranks
from helpers.steps import make_step, parallel_step
from torch import nn
from torch.testing import assert_close

from balanced_parallel import ByCost, parallelize

pytestmark = pytest.mark.usefixtures("double")


def make_net():
    torch.manual_seed(0)
    return nn.Linear(4, 5)


def make_batch(rows=8):
    torch.manual_seed(1)
    return torch.randn(rows, 4), torch.randn(rows, 5)


def make_batches(rows=8, count=4):
    for number in range(count):
        torch.manual_seed(number)
        yield torch.randn(rows, 4), torch.randn(rows, 5)


def step_of(net, criterion, devices=2, rows=None):
    return make_step(net, criterion, devices=devices, micro_batch_size=rows)


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
    target = torch.arange(5.0).repeat(8, 1)
    target[:, 0] = torch.tensor([1.0, -1.0] * 4)
    with torch.no_grad():
        step.model.module.weight.zero_()
        step.model.module.bias.copy_(target[0])
    step(inputs, target)
    target[4:] = target[4:].flip(1)
    target[4:, 0] *= 30
    with pytest.raises(ValueError, match=r"takes another branch .* of all rows .*torch\.maximum"):
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


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = make_net()
        self.fails = []
        self.register_buffer("forwards", torch.zeros(()))

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
    criterion = {"one pass": nn.MSELoss(), "two passes": lambda *pair: F.mse_loss(*pair)}[kind]
    step = parallel_step(net, criterion, lr=0.0, micro_batch_size=1)
    inputs, target = make_batch()
    mine = slice(rank * 4, rank * 4 + 4)
    net.fails += ["a forward fails"] * (rank == 0)
    with pytest.raises((ValueError, RuntimeError), match="fail"):
        step(inputs[mine], target[mine])
    expected = F.mse_loss(make_net()(inputs) * 1.1, target)
    assert_close(step(inputs[mine], target[mine]), expected.detach())
    assert net.forwards == 1


@on_ranks(2)
def test_a_rank_without_rows_refuses_a_later_layer_too(rank):
    """It made its update, while the other rank raised."""
    net = nn.Sequential(make_net())
    step = parallel_step(net, nn.MSELoss())
    inputs, target = make_batch()
    step(inputs, target)
    net.append(nn.Linear(5, 5))
    step.optimizer.add_param_group({"params": [*net[1].parameters()]})
    before = net[0].weight.detach().clone()
    rows = 0 if rank else 8
    with pytest.raises(ValueError, match=r"1\.weight came after parallelize"):
        step(inputs[:rows], target[:rows])
    assert_close(net[0].weight, before, rtol=0, atol=0)


def assign_data(parameter):
    parameter.grad.data = parameter.grad.data + 0.01 * parameter.data


@on_ranks(2)
def test_data_of_a_gradient_may_be_assigned(rank):
    """The gradient was the tensor of the reducer, which then reduced other memory. Steps come behind a loop by hand."""
    net = make_net()
    mine = slice(4 * rank, 4 * rank + 4)
    plain = Plain(net, nn.MSELoss(), torch.optim.AdamW)
    step = parallel_step(net, nn.MSELoss(), kind=torch.optim.AdamW, micro_batch_size=2)
    for inputs, target in make_batches():
        for loss in (
            step.criterion(step.model(inputs[mine]), target[mine]),
            plain.loss(inputs, target),
        ):
            loss.backward()
        for each, optimizer in ((net, step.optimizer), (plain.module, plain.optimizer)):
            for parameter in each.parameters():
                assign_data(parameter)
            optimizer.step()
            optimizer.zero_grad()
    for inputs, target in make_batches():
        assert_close(step(inputs[mine], target[mine]), plain(inputs, target))
        assign_data(net.weight)


@pytest.mark.parametrize("rows", [0, 4])
@on_ranks(2)
def test_a_layer_of_two_models_is_refused_in_one_backward(rank, rows):
    """torch's error named a bucket view. A backward for each model is right."""
    first = make_net()
    one = nn.Sequential(first)
    other = nn.Sequential(first, nn.Tanh())
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
        assert_close(first.weight.grad, expected)
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

    net = nn.Sequential(make_net(), nn.Tanh(), nn.Linear(5, 5))
    step = parallel_step(net, criterion, strategy="fsdp", micro_batch_size=limit)
    inputs, target = make_batch()
    mine = slice(8 - rows, 8) if rank else slice(0, 8 - rows)
    text = "1 of 2 ranks failed" if rank else "the criterion fails"
    with pytest.raises((ValueError, RuntimeError), match=text):
        step(inputs[mine], target[mine])
    fails[0] = False
    losses = [step(inputs[mine], target[mine]) for _ in range(2)]
    assert losses[1] < losses[0]


@pytest.mark.parametrize("way", [None, 2, "by hand"])
@on_ranks(2)
def test_a_penalty_in_the_loss_of_a_sharded_model_fails_on_all_ranks(rank, way):
    """A rank without rows waited until the timeout."""
    model, criterion = parallelize(LossWithPenalty(), lambda loss: loss, strategy="fsdp")
    update = make_update(model, criterion, way)
    text = "FSDP2 has gathered, as a penalty does|1 of 2 ranks failed"
    batch = make_batch(8 * (way == "by hand" or rank == 0))
    with pytest.raises((ValueError, RuntimeError), match=text):
        update(batch)


class Flat(nn.Module):
    """Returns the tokens of all rows in one dimension."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 5)

    def forward(self, inputs):
        return self.layer(inputs.view(-1, 2))


def test_tokens_of_rows_in_one_dimension_are_an_error_of_their_own():
    """It began with "does not add up over the rows" and ended with "The rows depend on each other"."""
    net = Flat()
    inputs = make_batch(7)[0]
    target = torch.arange(14).view(7, 2) % 5
    step = step_of(net, lambda output, target: F.cross_entropy(output, target.view(-1)))
    with pytest.raises(ValueError, match=r"^output has \[8\] rows for \[4\] .* flat targets too$"):
        step(inputs, target)
    expected = F.cross_entropy(net(inputs), target.view(-1)).detach()
    step = step_of(net, lambda output, target: F.cross_entropy(output, target))
    assert_close(step(inputs, target.view(-1)), expected)


LONGER = (
    "computes mean over .* elements for each of some rows, .* pads to its own longest row"
    r".*sum\(\) / mask\.sum\(\)"
)
SAMPLES = [9, 8, 7, 9, 2, 3, 2, 1]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(11, 4)
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


def mean_of_means(output, labels):
    errors = F.cross_entropy(output.transpose(1, 2), labels, reduction="none")
    return (errors * (labels != -100)).mean(1).mean()


def mean_of_quotients(output, labels):
    errors = F.cross_entropy(output.transpose(1, 2), labels, reduction="none")
    return ((errors * (labels != -100)).sum(1) / errors.size(1)).mean()


def means_in_a_loop(output, labels):
    losses = []
    for scores, label in zip(output, labels, strict=True):
        penalty = scores.square().sum(0).mean()  # over classes
        errors = F.cross_entropy(scores, label, reduction="none")
        losses.append((errors * (label != -100)).mean() + 0.1 * penalty)
    return torch.stack(losses).mean()


def quotients_in_a_loop(output, labels):
    total = 0
    for scores, label in zip(output, labels, strict=True):
        errors = F.cross_entropy(scores, label, reduction="none")
        total = total + (errors * (label != -100)).sum() / len(errors)
    return total / len(output)


def loss_in_a_loop(output, labels):
    known = (labels != -100).double()
    pairs = zip(output[..., 0], known, strict=True)
    return sum(F.binary_cross_entropy_with_logits(*pair) for pair in pairs) / len(output)


POSITIONS = [
    loss_in_a_loop,
    mean_over_positions,
    flat_mean_over_positions,
    mean_of_means,
    mean_of_quotients,
    means_in_a_loop,
    quotients_in_a_loop,
]


def masked_means_in_a_loop(output, labels):
    losses = []
    for scores, label in zip(output, labels, strict=True):
        loss = F.nll_loss(scores, label) + scores[label != -100].square().mean()
        known = (label != -100).unsqueeze(1)
        losses.append(loss + F.mse_loss(scores * known, scores.detach(), reduction="sum") * 0)
    return torch.stack(losses).mean()


def cut_rows_in_a_loop(output, labels):
    losses = []
    for scores, label in zip(output, labels, strict=True):
        length = int((label != -100).sum())
        losses.append(scores[:length].square().mean() + scores[:length].abs().sum() / length)
    return torch.stack(losses).mean()


FREE = [masked_mean, mean_of_rows, mean_of_chosen, masked_means_in_a_loop, cut_rows_in_a_loop]


def step_by_cost(net, criterion, devices, collate=words_of):
    """Returns a step of samples that are numbers of words, whose shards each have their own longest row."""
    cut = ByCost(int, collate=collate, limit=30 if devices == 1 else None)
    return make_step(net, criterion, devices=devices, cut=cut)


@pytest.mark.parametrize("criterion", [nn.MSELoss(), *POSITIONS])
@pytest.mark.parametrize("devices", [1, 3])
def test_a_mean_over_positions_that_shards_pad_is_refused(criterion, devices):
    """The mean was up to 2.5 times as large."""

    def collate(lengths):
        words, labels = words_of(lengths)
        return words, labels if criterion in POSITIONS else torch.zeros(*labels.shape, 5)

    with pytest.raises(ValueError, match=LONGER.replace("mean", "(mean|mse_loss|sum|a sum)")):
        step_by_cost(Tagger(), criterion, devices, collate)(SAMPLES)


@pytest.mark.parametrize(("devices", "rows"), [(3, None), (1, 1)])
def test_a_mean_over_positions_that_the_model_trims_is_refused(devices, rows):
    class Trimming(Tagger):
        def forward(self, words):
            return super().forward(words[:, : words.count_nonzero(1).max()])

    def criterion(output, labels):
        labels = labels[:, : output.size(1)]
        errors = F.cross_entropy(output.transpose(1, 2), labels, reduction="none")
        return errors.mean(1).mean()

    with pytest.raises(ValueError, match=LONGER):
        step_of(Trimming(), criterion, devices, rows)(*words_of(SAMPLES))


@pytest.mark.parametrize("criterion", FREE)
@pytest.mark.parametrize("devices", [1, 3])
def test_means_that_do_not_count_padding_are_exact(criterion, devices):
    net = Tagger()
    plain = Plain(net, criterion)
    step = step_by_cost(net, criterion, devices)
    for _ in range(3):
        assert_close(step(SAMPLES), plain(*words_of(SAMPLES)))


@pytest.mark.parametrize("limit", [None, 2])
@on_ranks(2)
def test_a_mean_over_positions_that_ranks_pad_is_refused(rank, limit):
    """Also in a later update, of one pass, and in a loop by hand."""
    for criterion in (*FREE, *POSITIONS):
        net = Tagger()
        step = parallel_step(net, criterion, lr=0.0, micro_batch_size=limit)
        model = step.model
        loss = step.criterion
        even = [9] * 8
        uneven = SAMPLES
        mine = slice(4 * rank, 4 * rank + 4)
        for _ in range(2):
            expected = criterion(net(words_of(even)[0]), words_of(even)[1])
            assert_close(step(*words_of(even[mine])), expected.detach())
        batch = words_of(uneven[mine])
        if criterion in FREE:
            expected = criterion(net(words_of(uneven)[0]), words_of(uneven)[1])
            assert_close(step(*batch), expected.detach())
            assert_close(loss(model(batch[0]), batch[1]), expected)
            continue
        before = net.tags.weight.detach().clone()
        with pytest.raises(ValueError, match=LONGER.replace("mean", "(mean|sum|a sum)")):
            step(*batch)
        with pytest.raises(ValueError, match=LONGER.replace("mean", "(mean|sum|a sum)")):
            loss(model(batch[0]), batch[1])
        assert_close(net.tags.weight, before, rtol=0, atol=0)


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
    inputs = torch.randn(16, 200)
    target = torch.randn(16, 7)
    step = step_of(net, lambda loss: loss) if of_model else step_of(net.layer, net.loss)
    with pytest.raises(ValueError, match="does not add up over the rows"):
        step((inputs, target)) if of_model else step(inputs, target)


class Forces(nn.Module):
    """A model whose loss has a derivative with respect to its inputs, of a mean or outside of enable_grad()."""

    def __init__(self, reduce=torch.sum, enabled=True):
        super().__init__()
        self.energy = nn.Linear(4, 1)
        self.reduce = reduce
        self.enabled = enabled

    def forward(self, inputs, target):
        inputs = inputs.detach().requires_grad_()
        with torch.set_grad_enabled(self.enabled or torch.is_grad_enabled()):
            energy = self.energy(inputs).tanh()
            (forces,) = torch.autograd.grad(self.reduce(energy), inputs, create_graph=True)
        return F.mse_loss(energy, target[:, :1]) + F.mse_loss(forces, target[:, 1:])


@pytest.mark.parametrize(
    ("net", "text"),
    [
        (lambda: Forces(torch.mean), "is not a function of sums over the rows"),
        (lambda: Forces(enabled=False), "does not require grad"),
    ],
)
def test_forces_of_a_mean_or_without_a_graph_are_an_error(net, text):
    step = step_of(net(), lambda loss: loss, rows=2)
    with pytest.raises((ValueError, RuntimeError), match=text) as error:
        step(make_batch())
    notes = "".join(getattr(error.value, "__notes__", []))
    assert "block of torch.enable_grad()" in notes or isinstance(error.value, ValueError)


class Trims(nn.Module):
    """Trims its outputs to the longest row of the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, words, lengths):
        return self.head(self.words(words[:, : int(lengths.max())]))


def over_words(output, labels, lengths):
    longest = int(lengths.max())
    mask = torch.arange(longest) < lengths[:, None]
    losses = F.cross_entropy(output.flatten(0, 1), labels[:, :longest].flatten(), reduction="none")
    return (losses.view(mask.shape) * mask).sum() / mask.sum()


def over_pairs(output, labels, lengths):
    """Needs an even number of rows, and compares the first half of them with the second."""
    first, second = output[:, 0, 0].view(2, -1)
    return (first - second).square().mean()


def lines_of(number):
    torch.manual_seed(number)
    lengths = torch.randint(1, 9, (8,))
    return (torch.randint(11, (8, 8)), lengths), (torch.randint(3, (8, 8)), lengths)


@pytest.mark.parametrize(("devices", "limit"), [(4, None), (1, 2), (2, 2)])
@pytest.mark.usefixtures("double")
def test_a_criterion_that_needs_the_longest_row_of_its_shard(devices, limit):
    """It was refused, since a half of the rows raises."""
    plain = Plain(Trims(), over_words)
    step = make_step(Trims(), over_words, devices=devices, micro_batch_size=limit)
    for number in range(5):
        assert_close(step(*lines_of(number)), plain(*lines_of(number)))


@pytest.mark.parametrize(("devices", "limit"), [(4, None), (1, 2), (2, 2)])
def test_rows_that_depend_on_each_other_are_refused_where_halves_raise(devices, limit):
    step = make_step(Trims(), over_pairs, devices=devices, micro_batch_size=limit)
    with pytest.raises(ValueError, match="does not add up over the rows"):
        [step(*lines_of(number)) for number in range(2)]
