"""Replicas that live between steps: what is kept, what is refreshed, and what of the module's changes reaches them."""

import contextlib
import copy
import gc
import pickle
import threading
import warnings
import weakref

import pytest
import torch
from helpers.problems import BODIES, CLASSES, assert_same_gradients, build_net, gradients, plain_program
from torch import nn

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, TrainStep, gather, simulate
from balanced_parallel.replicas import gradient_buckets
from balanced_parallel.replicas.checksums import CHUNK, _differing
from balanced_parallel.replicas.gradient_buckets import make_buckets
from balanced_parallel.replicas.gradient_sums import GradientSum

CPUS = ["cpu"] * 3
pytestmark = pytest.mark.usefixtures("buckets")


def outputs_of(model, x):
    return gather(model(x), "cpu").detach()


def settled(net, rows=6):
    """A model that has run once, and its batch."""
    model, x = DataParallelModel(net.to("sim:0")), torch.randn(rows, 4)
    model(x)
    return model, x


def assert_follows(model, net, x):
    torch.testing.assert_close(outputs_of(model, x), net(x.to("sim:0")).detach().cpu())


CHANGES = {
    "an optimizer's step": lambda net: torch.optim.SGD(net.parameters(), 1.0).step(),
    "assignment of .data": lambda net: setattr(net[0].weight, "data", torch.ones_like(net[0].weight) / 3),
    "a write in place": lambda net: net[2].bias.detach().add_(1),
    "load_state_dict": lambda net: net.load_state_dict({name: value * 2 for name, value in net.state_dict().items()}),
    "load_state_dict, assigned": lambda net: net.load_state_dict(
        {name: value * 2 for name, value in net.state_dict().items()}, assign=True
    ),
    "a parameter replaced": lambda net: setattr(net[0], "bias", nn.Parameter(torch.full((6,), 0.7, device="sim:0"))),
    "a parameter of another size": lambda net: (
        setattr(net[0].weight, "data", torch.ones(8, 4, device="sim:0")),
        setattr(net[0].bias, "data", torch.ones(8, device="sim:0")),
        setattr(net[2].weight, "data", torch.ones(5, 8, device="sim:0")),
    ),
    "a parameter removed": lambda net: net[0].register_parameter("bias", None),
    "a submodule replaced": lambda net: net.__setitem__(1, nn.ReLU()),
    "a submodule added": lambda net: net.append(nn.Linear(5, 2).to("sim:0")),
    "a submodule removed": lambda net: net.__delitem__(2),
    "weights tied": lambda net: setattr(net[2], "weight", nn.Parameter(torch.ones(5, 6, device="sim:0"))),
    "a forward hook": lambda net: net[0].register_forward_hook(lambda module, inputs, output: output * 3),
    "another dtype": lambda net: net.double().float(),
    "a plain attribute": lambda net: setattr(net[1], "scale", 3.0),
    "a method": lambda net: setattr(net[1], "forward", torch.sigmoid),
}


class Scaled(nn.Module):
    scale = 1.0

    def forward(self, x):
        return torch.tanh(x) * self.scale


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_the_module_reach_the_replicas_at_the_next_forward(name):
    with simulate(3):
        net = build_net()
        net[1] = Scaled()
        model, x = settled(net)
        gather(model(x)).sum().backward()
        before = outputs_of(model, x)
        CHANGES[name](net)
        assert_follows(model, net, x)
        changed = outputs_of(model, x)
        assert name == "another dtype" or changed.shape != before.shape or not changed.equal(before)
        net.zero_grad()
        gather(model(x)).sum().backward()


def test_modes_requires_grad_and_buffers_reach_the_replicas():
    with simulate(3):
        net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))
        model, x = settled(net)
        net.eval()
        assert_follows(model, net, x)
        net[1].running_mean.add_(3)
        assert_follows(model, net, x)
        net[1].running_mean = torch.full((5,), 2.0, device="sim:0")
        assert_follows(model, net, x)
        net[0].requires_grad_(False)
        gather(model(x)).sum().backward()
        assert net[0].weight.grad is None
        assert net[1].weight.grad is not None
        net[0].requires_grad_(True)
        gather(model(x)).sum().backward()
        assert net[0].weight.grad is not None


def test_the_first_replica_writes_to_the_module_and_the_others_to_themselves():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.calls = 0

        def forward(self, x):
            self.seen += len(x)
            self.calls += 1
            self.last = x.sum()
            return x

    with simulate(3):
        net = Counts()
        model, _ = settled(net, rows=6)
        model(torch.ones(9, 4))
        assert (net.seen.item(), net.calls, net.last.device.index) == (2 + 3, 2, 0)


def test_parameters_move_only_when_they_changed():
    with simulate(3) as cluster:
        net = build_net()
        model, x = settled(net)
        size = sum(parameter.nbytes for parameter in net.parameters())

        def moved_out():
            before = cluster.moved
            gather(model(x)).sum().backward()
            return (cluster.moved - before)["sim:0", "sim:1"]

        still = moved_out()
        assert still < size
        with torch.no_grad():
            net[0].weight.mul_(2)
        assert moved_out() == still + net[0].weight.nbytes
        torch.optim.SGD(net.parameters(), 0.1).step()
        assert moved_out() == still + size
        assert moved_out() == still


def write_unseen(parameter, factor):
    """Writes as a kernel would that torch knows nothing of."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(parameter):
        parameter.mul_(factor)


def test_writes_that_nothing_records_are_followed_with_a_warning():
    with simulate(3):
        net = build_net()
        model, x = settled(net)  # its second forward is compared
        for parameter in net.parameters():
            write_unseen(parameter, 3)
        with pytest.warns(UserWarning, match=r"4 parameters were written to without torch's version counter"):
            for _ in range(2):
                model(x)
        for factor in (0.5, -1, 3):
            for parameter in net.parameters():
                write_unseen(parameter, factor)
            assert_follows(model, net, x)


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("balanced", [False, True])
def test_an_optimizer_that_writes_through_data_trains_all_replicas(micro_batch_size, balanced):
    class Old(torch.optim.Optimizer):  # as many were written, and still are
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self):
            for parameter in self.param_groups[0]["params"]:
                parameter.data.sub_(parameter.grad)

    losses = {}
    for devices in (None, 3):
        with simulate(devices) if devices else contextlib.nullcontext():
            net = build_net()
            model = DataParallelModel(net, None if devices else ["cpu"])
            optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=1.0) if balanced else Old(net.parameters())
            step = TrainStep(model, DataParallelCriterion(nn.MSELoss()), optimizer, micro_batch_size=micro_batch_size)
            torch.manual_seed(2)
            x = torch.randn(12, 4)
            y = torch.randn(12, CLASSES)
            losses[devices] = []
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(5):
                    losses[devices].append(float(step(x, y)))
                    if balanced:
                        for parameter in net.parameters():
                            parameter.data.clamp_(-0.2, 0.2)
            assert not caught
    torch.testing.assert_close(losses[None], losses[3])


def test_looking_for_unrecorded_writes_moves_only_checksums():
    with simulate(2) as cluster:
        model = DataParallelModel(nn.Linear(512, 512).to("sim:0"))
        x = torch.ones(2, 512)
        for _ in range(9):
            before = cluster.moved
            model(x)
            size = (cluster.moved - before)["sim:0", "sim:1"]
        assert size < 3000


def test_every_place_and_every_bit_counts_in_a_checksum():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool):
        tensor = torch.arange(6).to(dtype).reshape(2, 3)
        tensor[1, 1] = 0
        copies = [tensor.clone() for _ in range(4)]
        copies[1][1, 2] = 0
        copies[2] = copies[2].flip(0) if dtype is not torch.bool else ~copies[2]
        found = _differing([tensor] * 4, copies)
        assert found == [1, 2]
    large = torch.zeros(2 * CHUNK + 1)
    moved = large.clone()
    large[0], moved[CHUNK] = 1, 1
    assert _differing([large], [moved]) == [0]
    assert _differing([torch.empty(0)], [torch.empty(0)]) == []


def test_after_a_write_that_torch_does_not_count_the_replicas_can_be_refreshed():
    with simulate(3):
        net = build_net()
        model, x = settled(net)
        for parameter in net.parameters():
            write_unseen(parameter, 3)
        model.refresh_replicas()
        assert_follows(model, net, x)


def test_replicas_on_one_device_share_the_values():
    with simulate(1) as cluster:
        net = nn.Linear(512, 512).to("sim:0")
        size = cluster.live[0]
        model = DataParallelModel(net, [0, 0, 0])
        model(torch.ones(3, 512))
        gc.collect()
        assert cluster.live[0] < 1.1 * size


def test_replicas_have_real_parameters():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList([torch.randn(3), torch.randn(3)])
            self.rnn = nn.LSTM(3, 3)

        def forward(self, x):
            first = next(self.parameters())
            assert isinstance(first, nn.Parameter)
            assert first.device == x.device
            assert len(list(self.parameters())) == 6
            self.rnn.flatten_parameters()
            return self.rnn(x * self.weights[0] + self.weights[1])[0]

    with simulate(3):
        net = Asks()
        model = DataParallelModel(net.to("sim:0"))
        for _ in range(2):
            gather(model(torch.ones(6, 3))).sum().backward()
        assert all(parameter.grad is not None for parameter in net.parameters())
        assert all(type(parameter) is nn.Parameter and parameter.is_leaf for parameter in net.parameters())


@pytest.mark.parametrize("body", BODIES)
def test_two_forwards_before_one_backward(double, body):
    net, x = BODIES[body](), torch.randn(6, 4)
    (net(x).sum() * net(x.flip(0)).pow(2).mean()).backward()
    expected = gradients(net)
    net.zero_grad()
    with simulate(3):
        model = DataParallelModel(net.to("sim:0"))
        (gather(model(x)).sum() * gather(model(x.flip(0))).pow(2).mean()).backward()
        assert_same_gradients([gradient if gradient is None else gradient.cpu() for gradient in gradients(net)], expected)


def test_double_backward_partial_backward_and_autograd_grad(double):
    net, x = build_net(), torch.randn(6, 4)

    def everything(forward, parameters):
        found = torch.autograd.grad(forward(x).pow(2).sum(), parameters, create_graph=True)
        sum(gradient.pow(2).sum() for gradient in found).backward()
        some = torch.autograd.grad(forward(x).sum(), [parameters[0], parameters[3]])
        forward(x).sum().backward(inputs=parameters[:1])
        result = [gradient.cpu() for gradient in (*gradients(net), *found, *some)]
        net.zero_grad()
        return [gradient.detach() for gradient in result]

    expected = everything(net, list(net.parameters()))
    with simulate(3):
        model = DataParallelModel(net.to("sim:0"))
        found = everything(lambda x: gather(model(x)), list(net.parameters()))
        with model.no_sync():  # what is asked for by name is not kept back
            asked = torch.autograd.grad(gather(model(x)).sum(), list(net.parameters())[:1])
        torch.testing.assert_close(asked[0].cpu(), expected[-2])
    assert_same_gradients(found, expected)


def test_sparse_gradients(double):
    net = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2))
    x = torch.randint(7, (6,))
    net(x).pow(2).sum().backward()
    expected = [parameter.grad.to_dense() for parameter in net.parameters()]
    net.zero_grad()
    model = DataParallelModel(net, CPUS)
    gather(model(x)).pow(2).sum().backward()
    assert net[0].weight.grad.is_sparse
    assert_same_gradients([parameter.grad.to_dense() for parameter in net.parameters()], expected)


def test_no_grad_and_inference_mode_build_no_graph_and_training_goes_on():
    with simulate(3):
        net = build_net()
        model = DataParallelModel(net.to("sim:0"))
        x = torch.randn(6, 4)
        with torch.inference_mode():
            assert all(output.is_inference() for output in model(x))
        with torch.no_grad():
            assert not any(output.requires_grad for output in model(x))
        gather(model(x)).sum().backward()
        assert all(parameter.grad is not None for parameter in net.parameters())


def test_gradients_can_stay_with_the_replicas_and_move_once(double):
    net, x, target = build_net(), torch.randn(12, 4), torch.randint(5, (12,))
    _, expected = plain_program(net, nn.CrossEntropyLoss(reduction="sum"), x, target)
    with simulate(3) as cluster:
        model, criterion = DataParallelModel(net.to("sim:0")), DataParallelCriterion(nn.CrossEntropyLoss(reduction="sum"))
        size = sum(parameter.nbytes for parameter in net.parameters())

        def run(start):
            criterion(model(x[start : start + 3]), target[start : start + 3]).backward()

        run(0)  # the copies are there
        net.zero_grad()
        before = cluster.moved
        with model.no_sync():
            for start in (0, 3, 6):
                run(start)
        assert (cluster.moved - before)["sim:1", "sim:0"] < 200
        run(9)
        assert size <= (cluster.moved - before)["sim:1", "sim:0"] < size + 200
        assert_same_gradients([gradient.cpu() for gradient in gradients(net)], expected)
        net.zero_grad()
        with model.no_sync():
            for start in (0, 3, 6, 9):
                run(start)
        model.reduce_gradients()
        assert_same_gradients([gradient.cpu() for gradient in gradients(net)], expected)


def test_what_stayed_with_the_replicas_comes_with_a_backward_that_makes_a_graph(double):
    net, x = build_net(), torch.randn(6, 4)
    with simulate(3):
        model = DataParallelModel(net)
        gather(model(x), "cpu").square().sum().backward()
        expected = [gradient.cpu() * 2 for gradient in gradients(net)]
        model.zero_grad()
        with model.no_sync():
            gather(model(x), "cpu").square().sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of what create_graph=True keeps
            gather(model(x), "cpu").square().sum().backward(create_graph=True)
        assert_same_gradients([gradient.detach().cpu() for gradient in gradients(net)], expected)
        model.zero_grad()


@pytest.mark.parametrize("deferred", [False, True])
def test_gradients_are_added_to_in_place_as_autograd_does(deferred):
    with simulate(3):
        model, x = settled(build_net())
        gather(model(x)).sum().backward()
        first = [parameter.grad for parameter in model.parameters()]
        expected = [gradient.cpu() * 2 for gradient in first]
        with model.no_sync() if deferred else contextlib.nullcontext():
            gather(model(x)).sum().backward()
        model.reduce_gradients()
        assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), first, strict=True))
        assert_same_gradients([gradient.cpu() for gradient in first], expected)


def test_a_step_over_micro_batches_moves_gradients_once():
    with simulate(4) as cluster:
        net = nn.Linear(64, 512).to("sim:0")
        model, criterion = DataParallelModel(net), DataParallelCriterion(nn.CrossEntropyLoss())
        step = TrainStep(model, criterion, torch.optim.SGD(net.parameters(), 0.1), micro_batch_size=2)
        size = sum(parameter.nbytes for parameter in net.parameters())
        x, target = torch.randn(64, 64), torch.randint(512, (64,))
        step(x, target)
        before = cluster.moved
        step(x, target)
        moved = cluster.moved - before
        assert size <= moved["sim:2", "sim:0"] <= size + 8 * 16
        assert size <= moved["sim:0", "sim:2"] <= size + 8 * 16
        for start in range(0, 64, 16):
            step.add(x[start : start + 16], target[start : start + 16])
        before = cluster.moved
        step.apply()
        assert (cluster.moved - before)["sim:2", "sim:0"] == size


def test_a_window_that_failed_leaves_nothing_with_the_replicas(double):
    net, x, target = build_net(), torch.randn(12, 4), torch.randint(5, (12,))
    model = DataParallelModel(net, CPUS)
    step = TrainStep(model, DataParallelCriterion(nn.CrossEntropyLoss()), torch.optim.SGD(net.parameters(), 0.1))
    step.add(x, target)
    with pytest.raises(IndexError):
        step.add(x, target + 100)
    _, expected = plain_program(copy.deepcopy(net), nn.CrossEntropyLoss(), x, target)
    step(x, target)
    assert_same_gradients(gradients(net), expected)


def test_results_are_the_same_bit_for_bit_from_run_to_run():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            return (x @ self.weight).tanh() @ self.weight + x @ self.weight

    with simulate(4):
        net = Twice().to("sim:0")
        model, x = DataParallelModel(net), torch.randn(64, 64)
        found = set()
        for _ in range(20):
            net.zero_grad()
            gather(model(x)).pow(2).sum().backward()
            found.add(net.weight.grad.cpu().numpy().tobytes())
        assert len(found) == 1


def test_replicas_are_freed_with_the_wrapper():
    with simulate(3) as cluster:
        net = nn.Linear(64, 64).to("sim:0")
        alone = cluster.live
        model = DataParallelModel(net)
        gather(model(torch.ones(6, 64))).sum().backward()
        net.zero_grad()
        assert cluster.live[1] >= net.weight.nbytes
        shell = weakref.ref(model.replicas._skeletons[0][0][1])
        gc.collect()
        gc.disable()
        try:
            del model
            assert shell() is None
            assert cluster.live == alone
        finally:
            gc.enable()


def test_copies_and_pickles_of_the_wrapper_carry_no_replicas():
    model, x = DataParallelModel(build_net(), CPUS), torch.randn(6, 4)
    gather(model(x)).sum().backward()
    size = len(pickle.dumps(DataParallelModel(build_net(), CPUS)))
    model.zero_grad()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.replicas.tree is None
        assert outputs_of(other, x).equal(outputs_of(model, x))
        assert other.module[0].weight is not model.module[0].weight
    assert len(pickle.dumps(model)) < size * 1.1


def test_buckets_are_bounded_of_one_dtype_and_last_layers_first(monkeypatch):
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 25 * 2**20)
    parameters = [nn.Parameter(torch.empty(2**21)) for _ in range(7)]  # 8 MiB each
    parameters.insert(3, nn.Parameter(torch.empty(4, dtype=torch.float64)))
    buckets = make_buckets(parameters)
    assert [len(bucket.parameters) for bucket in buckets] == [3, 3, 1, 1]
    assert buckets[0].parameters[0] is parameters[-1]
    assert all(len({parameter.dtype for parameter in bucket.parameters}) == 1 for bucket in buckets)


def test_a_bucket_is_reduced_as_soon_as_every_replica_has_its_gradients(monkeypatch):
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 25 * 2**20)
    with simulate(2):
        net = nn.Sequential(nn.Linear(4, 2600), nn.Linear(2600, 2600), nn.Linear(2600, 4)).to("sim:0")  # 27 MB in the middle
        model = DataParallelModel(net)
        events = []
        compute = GradientSum.compute
        last = threading.Event()

        def watched(gradient_sum):
            sums = compute(gradient_sum)
            events.append(len(sums))
            if len(events) == 1:
                last.set()
            return sums

        monkeypatch.setattr(GradientSum, "compute", watched)

        def watch(module, inputs, output):
            """The first layer of the second replica waits until the last layers were reduced."""
            if output.device.index == 1:
                output.register_hook(lambda gradient: events.append("waited" if last.wait(20) else "in vain"))

        net[0].register_forward_hook(watch)
        gather(model(torch.ones(4, 4))).sum().backward()
        assert events[0] == 3
        assert "in vain" not in events


def test_reentrant_checkpointing_reaches_every_gradient(double):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self, use_reentrant):
            super().__init__()
            self.net, self.use_reentrant = build_net(), use_reentrant

        def forward(self, x):
            return checkpoint(self.net, x.requires_grad_(), use_reentrant=self.use_reentrant)

    x = torch.randn(6, 4)
    for use_reentrant in (False, True):
        net = Checkpointed(use_reentrant)
        net.net(x).pow(2).sum().backward()
        expected = gradients(net)
        net.zero_grad()
        with simulate(3):
            gather(DataParallelModel(net.to("sim:0"))(x.detach())).pow(2).sum().backward()
            assert_same_gradients([gradient.cpu() for gradient in gradients(net)], expected)


class WithALearnedBuffer(nn.Module):
    """Two names for one buffer that learns, and one that does not."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(4, 4)
        self.register_buffer("prompt", torch.linspace(1, 2, 4).requires_grad_())
        self.register_buffer("again", self.prompt)
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x):
        return (self.scale(x) * self.prompt + self.offset) * self.again


@pytest.mark.parametrize("devices", [["cpu"] * 3, None])
def test_buffers_that_require_a_gradient_have_that_of_all_replicas(double, devices):
    x = torch.randn(7, 4)
    net = WithALearnedBuffer()
    net(x).square().sum().backward()
    expected = [*gradients(net), net.prompt.grad]
    with simulate(3):
        parallel = copy.deepcopy(net)
        parallel.zero_grad()
        parallel.prompt = parallel.again = parallel.prompt.detach().to("cpu" if devices else "sim:0").requires_grad_()
        model = DataParallelModel(parallel, devices)
        with torch.no_grad():
            assert not any(output.requires_grad for output in model(x))
        gather(model(x)).square().sum().backward()
        assert_same_gradients([gradient.cpu() for gradient in (*gradients(parallel), parallel.prompt.grad)], expected)
