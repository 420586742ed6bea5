"""Parameters of ranks outside of their forward: penalties by hand, and forwards that write to them."""

import copy

import pytest
import torch
from helpers.fsdp import whole
from helpers.layouts import make_update
from helpers.optimizers import sgd
from helpers.plain import Plain
from helpers.problems import assert_equal
from helpers.ranks import on_ranks
from helpers.steps import parallel_step
from torch import nn
from torch.nn.utils import parametrize

from balanced_parallel import TrainStep, convert_sync_batchnorm, parallelize

pytestmark = pytest.mark.usefixtures("double")
STRATEGIES = ("ddp", "fsdp")


class Net(nn.Module):
    """The embedding and the head are of the root of FSDP2. The bias of the head is smaller than the number of ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(6, 4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, inputs):
        hidden = inputs @ self.embedding
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return self.head(hidden)


def penalty(net):
    return (
        0.1 * sum(parameter.square().sum() for parameter in net.parameters())
        + net.embedding.norm(3) ** 3
    )


def batch_of(rows, features=6):
    torch.manual_seed(1)
    return torch.randn(rows, features), torch.randn(rows, 1)


def assert_gradients(module, plain):
    for parameter, expected in zip(module.parameters(), plain.parameters(), strict=True):
        assert_equal(whole(parameter.grad), expected.grad)


@on_ranks(2)
def test_a_penalty_with_a_backward_of_its_own_equals_the_plain_program(rank):
    """So does one in a hook of ``TrainStep``, and with a rank without rows, which counts as much as the other."""
    for strategy in STRATEGIES:
        for sizes in ([3, 2], [5, 0], [0, 5]):
            plain = Net()
            inputs, targets = batch_of(sum(sizes))
            (nn.functional.mse_loss(plain(inputs), targets) + penalty(plain)).backward()
            rows = inputs.split(sizes)[rank], targets.split(sizes)[rank]
            model, criterion = parallelize(Net(), nn.MSELoss(), strategy=strategy)
            criterion(model(rows[0]), rows[1]).backward()
            penalty(model.module).backward()
            assert_gradients(model.module, plain)
            step = TrainStep(model, criterion, sgd(model, lr=0.0))
            for parameter in model.parameters():
                parameter.register_hook(
                    lambda gradient, parameter=parameter: gradient + parameter.detach()
                )
            step(*rows)
            for each in plain.parameters():
                each.grad = None
            (
                nn.functional.mse_loss(plain(inputs), targets)
                + 5 * (penalty(plain) - plain.embedding.norm(3) ** 3)
            ).backward()
            assert_gradients(model.module, plain)


@on_ranks(2)
def test_a_penalty_of_gathered_parameters_counts_on_a_rank_without_rows(rank):
    """The root has its parameters whole after a forward. Shards in a loss are an error on all ranks."""
    plain = Net()
    inputs, targets = batch_of(5)
    (nn.functional.mse_loss(plain(inputs), targets) + plain.embedding.square().sum()).backward()
    rows = inputs[5 * rank :], targets[5 * rank :]
    model, criterion = parallelize(Net(), nn.MSELoss(), strategy="fsdp")
    loss = criterion(model(rows[0]), rows[1]) + model.module.embedding.square().sum()
    loss.backward()
    assert_gradients(model.module, plain)
    for name in ("before", "after"):
        model, criterion = parallelize(Net(), nn.MSELoss(), strategy="fsdp")
        module = model.module if name == "before" else model.module.blocks[0]
        early = sum(parameter.square().sum() for parameter in module.parameters())
        loss = criterion(model(rows[0]), rows[1])
        late = sum(parameter.square().sum() for parameter in module.parameters())
        with pytest.raises(
            RuntimeError,
            match=r"a loss uses sharded parameters.*penalty\(model.module\).backward\(\)",
        ):
            (loss + (early if name == "before" else late)).backward()
    module = Net()
    step = parallel_step(
        module,
        lambda output, target: (
            nn.functional.mse_loss(output, target) + module.blocks[0].weight.norm()
        ),
        strategy="fsdp",
    )
    with pytest.raises(RuntimeError, match="a loss uses sharded parameters"):
        step(inputs, targets)


class Bounded(nn.Linear):
    """Bounds its weights in the forward, in one of several spellings."""

    spelling = ""

    def forward(self, inputs):
        bounded = self.weight.detach().renorm(2, 0, 0.3)
        if self.spelling == "data":
            self.weight.data = bounded
        elif self.spelling == "in place of data":
            self.weight.data.copy_(bounded)
        elif self.spelling == "no_grad":
            with torch.no_grad():
                self.weight.copy_(bounded)
        elif self.spelling == "out":
            with torch.no_grad():
                torch.clamp(self.weight, -0.2, 0.2, out=self.weight)
        elif self.spelling == "foreach":
            with torch.no_grad():
                torch._foreach_mul_([self.weight], 0.9)
        return super().forward(inputs)


class Renorm(nn.Module):
    def forward(self, weight):
        return weight.renorm(2, 0, 0.3)


def bounded(spelling):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), Bounded(4, 4), nn.Tanh(), Bounded(4, 1))
    for layer in (net[1], net[3]):
        layer.spelling = spelling
        if spelling == "parametrization":
            parametrize.register_parametrization(layer, "weight", Renorm())
    return net


@on_ranks(2)
def test_a_forward_that_writes_to_gathered_parameters_is_an_error(rank):
    """FSDP2 would lose it. The ways that the error names are right."""
    for spelling in ("data", "in place of data", "no_grad", "out", "foreach"):
        for by_hand in (True, False):
            step = parallel_step(bounded(spelling), nn.MSELoss(), strategy="fsdp")
            with pytest.raises(
                RuntimeError, match=r"a forward writes to [13].weight, .*after the update"
            ):
                step.model(torch.ones(3, 4)) if by_hand else step(
                    torch.ones(3, 4), torch.ones(3, 1)
                )
    inputs, targets = batch_of(5, 4)
    for sizes in ([3, 2], [5, 0]):
        plain = bounded("parametrization")
        nn.functional.mse_loss(plain(inputs), targets).backward()
        model, criterion = parallelize(bounded("parametrization"), nn.MSELoss(), strategy="fsdp")
        criterion(model(inputs.split(sizes)[rank]), targets.split(sizes)[rank]).backward()
        assert_gradients(model.module, plain)


@on_ranks(2)
def test_parameters_that_a_forward_writes_are_those_of_ranks_with_rows(rank):
    """Ranks of DDP do not part where one has no rows, in its first update and later."""
    for spelling in ("data", "in place of data", "no_grad"):
        for way in ("by hand", None):
            net = bounded(spelling)
            plain = Plain(net, nn.MSELoss(), lr=0.3)
            model, criterion = parallelize(net, nn.MSELoss(), strategy="ddp")
            update = make_update(model, criterion, way, lr=0.3)
            for sizes in ([5, 0], [2, 3], [0, 5], [0, 4]):
                batch = batch_of(sum(sizes), 4)
                update(*(tensor.split(sizes)[rank] for tensor in batch))
                plain(*batch)
                plain.assert_same(net, gradients=False)


@on_ranks(2)
def test_a_write_that_begins_later_is_seen(rank):
    """Only the first forward was watched: FSDP2 lost later writes, and ranks of DDP parted where one had no rows."""
    for strategy in STRATEGIES:
        net = bounded("")
        plain = Plain(net, nn.MSELoss(), lr=0.3)
        model, criterion = parallelize(net, nn.MSELoss(), strategy=strategy)
        update = make_update(model, criterion, None, lr=0.3)
        for number, sizes in enumerate(([2, 3], [3, 2], [4, 1], [5, 0], [0, 5])):
            if number == 3:
                net[1].spelling = net[3].spelling = "no_grad"
                plain.module[1].spelling = plain.module[3].spelling = "no_grad"
            batch = batch_of(5, 4)
            rows = [tensor.split(sizes)[rank] for tensor in batch]
            if number == 3 and strategy == "fsdp":
                with pytest.raises(RuntimeError, match="a forward writes to 1.weight"):
                    update(*rows)
                break
            update(*rows)
            plain(*batch)
            plain.assert_same(net, gradients=False)


class Chunks(nn.Module):
    """Ghost batch norm: normalises chunks of some rows. With ``size=0``, all rows twice, and some rows once."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.norm = nn.BatchNorm1d(4)

    def forward(self, inputs):
        if not self.size:
            chosen = inputs[:, 0] > 0
            return self.norm(self.norm(inputs)).index_put(
                (chosen,), self.norm(inputs[chosen]), accumulate=True
            )
        return torch.cat([self.norm(chunk) for chunk in inputs.split(self.size)])


@on_ranks(2)
def test_a_converted_batch_norm_of_chunks_is_an_error(rank):
    """Ranks would wait for as many calls. Layers that are called several times with all rows, and once with some, are right."""
    torch.manual_seed(1)
    inputs = torch.randn(11, 4)
    targets = torch.randn(11, 4)
    rows = slice(0, 6) if rank == 0 else slice(6, 11)
    for size in (2, 0):
        for strategy in STRATEGIES:
            nets = [nn.Sequential(nn.Linear(4, 4), Chunks(size)) for _ in range(2)]
            nets[0].load_state_dict(nets[1].state_dict())
            model, criterion = parallelize(
                convert_sync_batchnorm(nets[0]), nn.MSELoss(), strategy=strategy
            )
            if size:
                with pytest.raises(
                    ValueError,
                    match="called again in a forward of [56] rows, with 2 of them, expected all rows",
                ):
                    model(inputs[rows])
                continue
            nets[1].load_state_dict(
                {name: whole(value) for name, value in nets[0].state_dict().items()}
            )
            nn.functional.mse_loss(nets[1](inputs), targets).backward()
            criterion(model(inputs[rows]), targets[rows]).backward()
            assert_gradients(model.module, nets[1])


class Outside(nn.Module):
    """Returns a penalty of the weight of a block of FSDP2, after its forward."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, inputs):
        return self.net(inputs), self.net[0].weight.square().sum().expand(len(inputs))


@on_ranks(2)
def test_an_output_that_is_a_shard_is_an_error(rank):
    """It aborted gloo: its rows are not those of the other ranks."""

    def criterion(output, size, target):
        return nn.functional.mse_loss(output, target) + size.mean()

    inputs, targets = torch.randn(5, 4), torch.randn(5, 1)
    rows = slice(0, 3) if rank == 0 else slice(3, 5)
    for by_hand in (True, False):
        step = parallel_step(Outside(), criterion, strategy="fsdp")
        with pytest.raises(RuntimeError, match="a loss uses sharded parameters, as a penalty"):
            step.model(inputs[rows]) if by_hand else step(inputs[rows], targets[rows])


class Forces(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, inputs):
        inputs = inputs.detach().requires_grad_()
        return torch.autograd.grad(self.net(inputs).sum(), inputs, create_graph=True)[0]


@on_ranks(2)
def test_errors_of_sharded_parameters_say_what_to_do(rank):
    """Other uses of parameters: gradients inside of a forward, and a block by hand."""
    inputs = torch.randn(3, 4)
    for by_hand in (True, False):
        step = parallel_step(Forces(), nn.MSELoss(), strategy="fsdp")
        with pytest.raises(
            RuntimeError, match="gradients were asked for in a forward.* expected strategy='ddp'"
        ):
            step.model(inputs) if by_hand else step(inputs, inputs)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    step = parallel_step(net, nn.MSELoss(), strategy="fsdp")
    net[2](inputs)
    with pytest.raises(RuntimeError, match="FSDP state has already been lazily initialized for 2"):
        step(inputs, inputs)


@on_ranks(2)
def test_hooks_of_parameters_are_called_or_refused(rank):
    """FSDP2 replaces parameters, and calls no hook in a backward by hand. A reducer calls those without a gradient too."""
    inputs = torch.ones(3, 4)
    targets = torch.zeros(3, 4)

    def double(parameter):
        parameter.grad.mul_(2)

    net = nn.Linear(4, 4)
    net.bias.register_post_accumulate_grad_hook(double)
    with pytest.raises(ValueError, match="bias has a hook .* expected hooks after parallelize"):
        parallelize(net, nn.MSELoss(), strategy="fsdp")
    model, criterion = parallelize(nn.Linear(4, 4), nn.MSELoss(), strategy="fsdp")
    model.module.bias.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(RuntimeError, match="a parameter has a hook .*, or use TrainStep"):
        criterion(model(inputs), targets).backward()
    gradients = []
    for is_hooked in (True, False):
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        net.unused = nn.Parameter(torch.ones(2))
        model, criterion = parallelize(net, nn.MSELoss(), strategy="ddp")
        if is_hooked:
            net.bias.register_post_accumulate_grad_hook(double)
            net.unused.register_hook(lambda gradient: gradient * 2)
            net.weight.register_hook(lambda gradient: gradient * 2)
        rows = slice(0) if rank == 0 else slice(3)  # The first rank has no rows, and no gradient.
        criterion(model(inputs[rows]), targets[rows]).backward()
        assert net.unused.grad is None
        gradients.append(torch.cat([net.bias.grad, net.weight.grad.flatten()]))
    assert_equal(gradients[0], gradients[1] * 2)


@on_ranks(2)
def test_another_state_on_one_rank_is_an_error(rank):
    """Each rank would take its shards of its own state."""
    for strategy in STRATEGIES:
        step = parallel_step(Net(), nn.MSELoss(), strategy=strategy)
        inputs, targets = batch_of(3)
        states = []
        for _ in range(2):
            step(inputs, targets)
            states.append(copy.deepcopy(step.state_dict()))
        step.load_state_dict(states[0])
        step(inputs, targets)
        step.load_state_dict(states[rank])
        with pytest.raises(
            ValueError, match="number of updates of the loaded state: 1 on rank 0 and 2 on rank 1"
        ):
            step(inputs, targets)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@on_ranks(2)
def test_another_dtype_after_parallelize_is_an_error_and_not_another_gradient(rank, strategy):
    """Buckets of the reducer have the dtype of before."""
    net = nn.Linear(4, 3)
    step = parallel_step(net, nn.MSELoss(), ["cpu"], strategy=strategy)
    step.model.float()
    inputs, targets = torch.randn(2, 4).float(), torch.randn(2, 3).float()
    expected = r"weight came after parallelize, was frozen there, or had another dtype"
    with pytest.raises((ValueError, RuntimeError), match=expected):
        step(inputs, targets)
    with pytest.raises(ValueError, match=expected):
        step.model(inputs)
