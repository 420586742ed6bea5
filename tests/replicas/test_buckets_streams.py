"""Sums of gradients that overlap with the backward, on the streams of the caller."""

import contextlib
import threading
import time

import pytest
import torch
from helpers.problems import assert_same_gradients, build_net, class_batch, gradients, plain_program
from helpers.releases import released_at_once
from helpers.streams import TOO_EARLY, stream_on
from torch import nn

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, simulate
from balanced_parallel.runtime import transport
from balanced_parallel.runtime.streams import SideStreams, on_streams


@contextlib.contextmanager
def on_other_streams(streams):
    """The program runs on streams of its own, where nothing is in order by chance."""
    for stream in streams:
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
    with on_streams({stream.device: stream for stream in streams}):
        yield


OTHER_GRADIENTS = {
    "a penalty": lambda net, again, x: sum(
        parameter.square().sum() for parameter in net.parameters()
    ),
    "a second model": lambda net, again, x: sum(
        output.square().sum().to(x.device) for output in again(x + 1)
    ),
}


@pytest.mark.parametrize("others", OTHER_GRADIENTS)
def test_other_gradients_in_the_same_backward_wait_for_the_sums(double, small_buckets, others):
    """Autograd adds them to ``grad``, and the side streams the sums. One must wait for the other."""
    x = torch.randn(7, 4)
    plain = build_net()

    (
        plain(x).square().sum() + OTHER_GRADIENTS[others](plain, lambda rows: [plain(rows)], x)
    ).backward()
    with simulate(3):
        net = build_net()
        model = DataParallelModel(net)
        again = DataParallelModel(net, [0, 2])
        losses = [output.square().sum() for output in model(x)]
        torch.autograd.backward([*losses, OTHER_GRADIENTS[others](net, again, x)])
        assert_same_gradients(gradients(net), gradients(plain))


class WithoutItsLastBucket(nn.Module):
    """No backward reaches the bucket of what is registered first, so that nothing comes after the sums of the others."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.net = build_net()

    def forward(self, inputs):
        return self.net(inputs)


@pytest.mark.parametrize("balanced", [False, True])
def test_backward_on_other_streams_than_forward_equals_the_plain_program(
    double, small_buckets, balanced
):
    inputs, targets = class_batch(7)
    _, expected = plain_program(build_net(), nn.CrossEntropyLoss(), inputs, targets)
    with simulate(3):
        model = DataParallelModel(WithoutItsLastBucket())
        criterion = DataParallelCriterion(nn.CrossEntropyLoss())
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
        model.reduce_gradients()
        for _ in range(2):
            loss().backward()
            for stream in streams:
                with stream:
                    torch.zeros(1000, device=stream.device)  # may be given what was kept
        assert_same_gradients(
            [gradient / 4 for gradient in gradients(model.module.net, optimizer=optimizer)],
            expected,
        )
        found = torch.autograd.grad(
            criterion(model(inputs), targets), list(model.module.net.parameters())
        )
        assert_same_gradients([gradient.cpu() for gradient in found], expected)
        del optimizer


def current_streams():
    return {torch.accelerator.current_stream(f"sim:{index}").stream_id for index in range(2)}


def run_backward(model, balanced):
    """Runs a backward. Returns the optimizer, if one is balanced, which owns the gradients."""
    optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=0.1) if balanced else None
    DataParallelCriterion(nn.MSELoss())(model(torch.ones(4, 4)), torch.ones(4, 5)).backward()
    return optimizer


@pytest.mark.parametrize("balanced", [False, True])
def test_sums_run_on_side_streams(small_buckets, monkeypatch, balanced):
    """All but those of the last bucket, with which nothing could overlap."""
    with simulate(2):
        streams = []
        name = "reduce_scatter" if balanced else "reduce"
        collective = getattr(transport, name)

        def watched(*args):
            streams.append(current_streams())
            # The memory of the bucket before it was let go.
            assert not model.replicas.gradients.side._pending
            collective(*args)

        monkeypatch.setattr(transport, name, watched)
        model = DataParallelModel(build_net())
        optimizer = run_backward(model, balanced)
        beside = [some for some in streams if 0 not in some]
        assert len(beside) == 3
        assert [some for some in streams if some not in beside] == [{0}]
        del optimizer


@released_at_once
@pytest.mark.parametrize("balanced", [False, True])
def test_gradients_belong_to_the_computing_streams(small_buckets, balanced):
    """Their memory is given back to these streams, where activations can use it."""
    with simulate(2):
        model = DataParallelModel(build_net())
        optimizer = run_backward(model, balanced)
        leaves = list(model.parameters())
        assert len(leaves) >= 4
        for leaf in leaves:
            part = leaf.grad.parts[0] if balanced else leaf.grad
            device = part.device
            other = torch.Stream(device=device)
            other.wait_stream(torch.accelerator.current_stream(device))
            with other:
                part.sum()
            leaf.grad = None
            assert optimizer is None or optimizer.param_groups  # the owners let it go
            del part
            with pytest.raises(RuntimeError, match="reuses memory that was freed"):
                torch.ones(4, device=device)  # This is the computing stream.


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


@released_at_once
@pytest.mark.parametrize(
    ("method", "broken"),
    [
        ("entered", let_go_at_once),
        ("_side_stream", no_wait_before),
        ("join", no_wait_after),
        ("join", None),
    ],
)
def test_missing_stream_synchronization_is_detected(small_buckets, monkeypatch, method, broken):
    reduced.clear()

    def watch(module, inputs, output):
        """The second replica goes on when the first sums have been started, and what they use was let go."""
        if output.device.index == 1 and method == "entered":
            output.register_hook(
                lambda gradient: (
                    time.sleep(0.2) if reduced.wait(20) else pytest.fail("nothing was summed")
                )
            )

    monkeypatch.setattr(SideStreams, method, broken or getattr(SideStreams, method))
    with simulate(2):
        model = DataParallelModel(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]))
        model.module[0].register_forward_hook(watch)
        criterion = DataParallelCriterion(nn.MSELoss())
        with pytest.raises(RuntimeError, match=TOO_EARLY) if broken else contextlib.nullcontext():
            criterion(model(torch.ones(9, 8)), torch.ones(9, 8)).backward()
            sum(parameter.grad.sum() for parameter in model.parameters())
