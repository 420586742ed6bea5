"""Streams: simulated devices find what a GPU might do too early, and sums of gradients beside the backward are in order."""

import contextlib
import threading
import time

import pytest
import torch
from helpers.problems import assert_same_gradients, build_net, class_targets, gradients, plain_program
from torch import nn

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, TrainStep, memory, simulate
from balanced_parallel.memory import estimation
from balanced_parallel.replicas import gradient_buckets
from balanced_parallel.runtime import transport
from balanced_parallel.runtime.streams import SideStreams, on_streams

TOO_EARLY = "without having waited for it"


@pytest.fixture
def small_buckets(monkeypatch):
    """A bucket for each parameter: the sums of all but the last run beside the backward."""
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 1)


def stream_on(index=0):
    return torch.Stream(device=f"sim:{index}")


def read_before(other, tensor):
    with other:
        return tensor + 1


def write_before(other, tensor):
    with other:
        tensor += 1


def write_while_it_is_read(other, tensor):
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        tensor.sum()
    tensor += 1


def read_what_another_wrote(other, tensor):
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        tensor += 1
    return tensor.sum()


def copy_to_the_host(other, tensor):
    with other:
        return tensor.cpu()


def read_a_number(other, tensor):
    with other:
        return tensor[0].item()


def made_here_and_read_on(other):
    fresh = torch.ones(4, device="sim:0")
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        fresh.sum()
    return fresh


def free_too_early(other, tensor):
    made_here_and_read_on(other)
    return tensor * 3  # may be given the same memory


WRONG = [
    read_before,
    write_before,
    write_while_it_is_read,
    read_what_another_wrote,
    copy_to_the_host,
    read_a_number,
    free_too_early,
]


@pytest.mark.parametrize("program", WRONG)
def test_what_a_gpu_might_do_too_early_is_an_error(program):
    with simulate(2):
        tensor = torch.ones(4, device="sim:0")
        with pytest.raises(RuntimeError, match=TOO_EARLY):
            program(stream_on(), tensor)
    with simulate(2, strict=False):
        program(stream_on(), torch.ones(4, device="sim:0"))


def test_what_has_waited_is_in_order():
    with simulate(2):
        mine, other = torch.accelerator.current_stream(), stream_on()
        tensor = torch.ones(4, device="sim:0")
        other.wait_stream(mine)
        with other:
            assert torch.accelerator.current_stream() == other
            tensor += 1
            event = other.record_event()
            halves = tensor.to("sim:1") / 2  # a copy between devices has both wait for each other
        mine.wait_event(event)
        assert tensor.tolist() == [2] * 4
        assert halves.sum().item() == 4
        with other:
            tensor += 1
        other.synchronize()  # the host has waited, so what it calls next comes after
        assert tensor.sum().item() == 12
        with other:
            tensor += 1
        torch.sim.synchronize("sim:0")
        assert tensor.sum().item() == 16
        with other:
            tensor += 1
        torch.sim.synchronize("sim:1")  # the wrong one
        with pytest.raises(RuntimeError, match=TOO_EARLY):
            tensor.sum()


def test_the_allocator_waits_for_streams_it_was_told_of():
    with simulate(1):
        mine, other = torch.accelerator.current_stream(), stream_on()
        made_here_and_read_on(other).record_stream(other)
        assert torch.zeros(4, device="sim:0").sum() == 0
        made_here_and_read_on(other)
        mine.wait_stream(other)
        assert torch.zeros(4, device="sim:0").sum() == 0


def test_views_and_shapes_touch_no_memory():
    with simulate(1):
        tensor = torch.ones(4, 4, device="sim:0")
        with stream_on():
            assert tensor[1:].view(-1, 2).t().detach().shape == (2, 6)
            assert torch.empty_like(tensor).shape == tensor.shape


@contextlib.contextmanager
def on_other_streams(streams):
    """The program runs on streams of its own, where nothing is in order by chance."""
    for stream in streams:
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
    with on_streams({stream.device: stream for stream in streams}):
        yield


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("balanced", [False, True])
def test_steps_on_any_streams_equal_the_plain_program(double, small_buckets, balanced, micro_batch_size):
    inputs, targets = torch.randn(14, 4), class_targets(14, ignored=5)
    plain = build_net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(inputs), targets).backward()
        optimizer.step()
    with simulate(3), on_other_streams([stream_on(index) for index in range(3)]):
        model = DataParallelModel(build_net())
        kind = torch.optim.AdamW
        optimizer = BalancedOptimizer(model, kind, lr=0.1) if balanced else kind(model.parameters(), lr=0.1)
        step = TrainStep(model, DataParallelCriterion(nn.CrossEntropyLoss()), optimizer, micro_batch_size=micro_batch_size)
        for _ in range(3):
            step(inputs, targets)
        assert len(model.replicas.gradients.buckets) == 4
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-9, atol=1e-10)


class WithoutItsLastBucket(nn.Module):
    """No backward reaches the bucket of what is registered first, so that nothing comes after the sums of the others."""

    def __init__(self):
        super().__init__()
        self.unused, self.net = nn.Parameter(torch.ones(3)), build_net()

    def forward(self, inputs):
        return self.net(inputs)


@pytest.mark.parametrize("balanced", [False, True])
def test_backward_may_be_called_on_other_streams_than_forward(double, small_buckets, balanced):
    inputs, targets = torch.randn(7, 4), class_targets(7)
    _, expected = plain_program(build_net(), nn.CrossEntropyLoss(), inputs, targets)
    with simulate(3):
        model, criterion = DataParallelModel(WithoutItsLastBucket()), DataParallelCriterion(nn.CrossEntropyLoss())
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=0.1) if balanced else None
        streams = [stream_on(index) for index in range(3)]

        def loss():
            with on_other_streams(streams):
                found = criterion(model(inputs), targets)
                for stream in streams:
                    stream.synchronize()  # the loss and the outputs are used outside
            return found

        with model.no_sync():
            for _ in range(2):
                loss().backward()
        model.replicas.gradients.scale(1.0)  # as TrainStep does for float16
        model.reduce_gradients()
        for _ in range(2):
            loss().backward()
            for stream in streams:
                with stream:
                    torch.zeros(1000, device=stream.device)  # may be given what was kept
        assert_same_gradients([gradient.cpu() / 4 for gradient in gradients(model.module.net)], expected)
        found = torch.autograd.grad(criterion(model(inputs), targets), list(model.module.net.parameters()))
        assert_same_gradients([gradient.cpu() for gradient in found], expected)
        del optimizer


@pytest.mark.parametrize("balanced", [False, True])
def test_gradients_are_ready_on_the_streams_of_who_called_backward(double, small_buckets, balanced):
    inputs, targets = torch.randn(7, 4), class_targets(7)
    _, expected = plain_program(build_net(), nn.CrossEntropyLoss(), inputs, targets)
    with simulate(3):
        model, criterion = DataParallelModel(WithoutItsLastBucket()), DataParallelCriterion(nn.CrossEntropyLoss())
        kind = torch.optim.SGD
        optimizer = BalancedOptimizer(model, kind, lr=0.0) if balanced else kind(model.parameters(), lr=0.0)
        for _ in range(2):
            loss = criterion(model(inputs), targets)
            for index in range(3):
                torch.accelerator.synchronize(index)
            with on_other_streams([stream_on(index) for index in range(3)]):
                loss.backward()
                optimizer.step()
                assert_same_gradients([gradient.cpu() for gradient in gradients(model.module.net)], expected)
                optimizer.zero_grad()
                for index in range(3):
                    torch.accelerator.synchronize(index)


def current_streams():
    return {torch.accelerator.current_stream(f"sim:{index}").stream_id for index in range(2)}


@pytest.mark.parametrize("balanced", [False, True])
def test_sums_run_beside_the_backward(small_buckets, monkeypatch, balanced):
    """All but those of the last bucket, with which nothing could overlap."""
    with simulate(2):
        streams, name = [], "reduce_scatter" if balanced else "reduce"
        collective = getattr(transport, name)

        def watched(*args):
            streams.append(current_streams())
            assert not model.replicas.gradients.side._pending  # what the bucket before it used was let go
            collective(*args)

        monkeypatch.setattr(transport, name, watched)
        model = DataParallelModel(build_net())
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=0.1) if balanced else None
        DataParallelCriterion(nn.MSELoss())(model(torch.ones(4, 4)), torch.ones(4, 5)).backward()
        beside = [some for some in streams if 0 not in some]
        assert len(beside) == 3
        assert [some for some in streams if some not in beside] == [{0}]
        del optimizer


@pytest.mark.parametrize("balanced", [False, True])
def test_gradients_belong_to_the_computing_streams(small_buckets, balanced):
    """Their memory is given back to these streams, where activations can use it."""
    with simulate(2):
        model = DataParallelModel(build_net())
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=0.1) if balanced else None
        DataParallelCriterion(nn.MSELoss())(model(torch.ones(4, 4)), torch.ones(4, 5)).backward()
        leaves = list(model.parameters()) if optimizer is None else optimizer.param_groups[0]["params"]
        assert len(leaves) >= 4
        for leaf in leaves:
            other = torch.Stream(device=leaf.device)
            other.wait_stream(torch.accelerator.current_stream(leaf.device))
            with other:
                leaf.grad.sum()
            leaf.grad = None
            with pytest.raises(RuntimeError, match="reuses memory that was freed"):
                torch.ones(4, device=leaf.device)  # on the computing stream


@contextlib.contextmanager
def let_go_at_once(self, computing, uses, entered=SideStreams.entered):
    with entered(self, computing, []):
        yield
    reduced.set()


def no_wait_before(self, device, stream):
    return self._streams.setdefault(device, torch.Stream(device))


def no_wait_after(self):
    self._pending.clear()


reduced = threading.Event()


@pytest.mark.parametrize(
    ("method", "broken"),
    [("entered", let_go_at_once), ("_side_stream", no_wait_before), ("join", no_wait_after), ("join", None)],
)
def test_each_wait_is_needed(small_buckets, monkeypatch, method, broken):
    reduced.clear()

    def watch(module, inputs, output):
        """The second replica goes on when the first sums have been started, and what they use was let go."""
        if output.device.index == 1 and method == "entered":
            output.register_hook(lambda gradient: time.sleep(0.2) if reduced.wait(20) else pytest.fail("nothing was summed"))

    monkeypatch.setattr(SideStreams, method, broken or getattr(SideStreams, method))
    with simulate(2):
        model = DataParallelModel(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]))
        model.module[0].register_forward_hook(watch)
        criterion = DataParallelCriterion(nn.MSELoss())
        with pytest.raises(RuntimeError, match=TOO_EARLY) if broken else contextlib.nullcontext():
            criterion(model(torch.ones(9, 8)), torch.ones(9, 8)).backward()
            sum(parameter.grad.sum() for parameter in model.parameters())


@pytest.mark.parametrize("balanced", [False, True])
def test_what_is_kept_for_other_streams_is_estimated(monkeypatch, balanced):
    """To one small gradient: how far the devices' threads are apart is not known. What is kept is 1.7 MiB here."""
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 2**20)

    def build():
        return nn.Sequential(nn.Linear(64, 500), nn.Linear(500, 900), nn.Linear(900, 64))

    batch = torch.ones(12, 64), torch.ones(12, 64)
    settings = {"layout": "replicas", "devices": 3, "device_kind": "sim", "balanced_optimizer": balanced}
    report = memory.estimate(build(), nn.MSELoss(), *batch, micro_batch_size=2, **settings)
    with simulate(3) as cluster:
        model, criterion = DataParallelModel(build()), DataParallelCriterion(nn.MSELoss())
        optimizer = BalancedOptimizer(model, torch.optim.AdamW) if balanced else torch.optim.AdamW(model.parameters())
        step = TrainStep(model, criterion, optimizer, micro_batch_size=2)
        for _ in range(2):
            cluster.reset_peak()
            step(*batch)
        assert len(model.replicas.gradients.buckets) == 3
        assert report.peak == pytest.approx(cluster.peak, abs=300 * 2**10)


@pytest.mark.parametrize("balanced", [False, True])
def test_a_trace_knows_the_memory_of_side_streams(monkeypatch, balanced):
    """They have what they received until it is added, and no gradient."""
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 2**20)
    traces, run = [], estimation.run_traces
    monkeypatch.setattr(estimation, "run_traces", lambda jobs: traces.extend(found := run(jobs)) or found)
    net = nn.Sequential(nn.Linear(64, 500), nn.Linear(500, 900), nn.Linear(900, 64))
    settings = {"layout": "replicas", "devices": 3, "device_kind": "sim", "balanced_optimizer": balanced}
    memory.estimate(net, nn.MSELoss(), torch.ones(12, 64), torch.ones(12, 64), **settings)
    blocks = traces[0].blocks
    beside = [block for block in blocks if block.stream]
    assert beside
    assert {block.kind for block in beside} == {"temporaries"}
    assert any(block.kind == "gradients" for block in blocks)


@pytest.mark.parametrize("balanced", [False, True])
def test_two_parameters_with_one_gradient_are_two_gradients(double, balanced):
    """Autograd gives both the same tensor. Where no other replica has a gradient, nothing is added to it, and it would be
    divided twice."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.one, self.other = (nn.Parameter(torch.ones(rows, 4)) for rows in (3, 1, 1))

        def forward(self, inputs):
            return self.always.sum(0) * ((inputs + 1) * (self.one + self.other) if inputs[0, 0] == 0 else inputs)

    inputs = torch.cat([torch.zeros(1, 4), torch.randn(3, 4)])
    plain = Shared()
    (sum(plain(row).sum() for row in inputs.split(1)) / 4).backward()
    with simulate(2):
        model = DataParallelModel(Shared())
        kind = torch.optim.SGD
        optimizer = BalancedOptimizer(model, kind, lr=0.1) if balanced else kind(model.parameters(), lr=0.1)
        criterion = DataParallelCriterion(lambda output, target: output.sum() / len(output), weight=lambda output, _: len(output))
        TrainStep(model, criterion, optimizer, micro_batch_size=1)(inputs, torch.zeros(4))
        assert_same_gradients([gradient.cpu() for gradient in gradients(model)], gradients(plain))
