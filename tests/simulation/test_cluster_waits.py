"""Waits of the host: found on simulated devices, with the line of the caller, and forbidden."""

import inspect
import re
import threading

import pytest
import torch
from torch import nn

from balanced_parallel import simulate
from balanced_parallel.simulation import cluster as module

LENGTHS = torch.tensor([1, 2, 1])

WAITS = {
    "item": ("item", lambda x: x[0, 0].item()),
    "if": ("item", lambda x: 1 if x[0, 0] > 0 else 2),
    "allclose": ("item", lambda x: torch.allclose(x, x)),
    "an index that is a number": (
        "item",
        lambda x: x[torch.ones((), dtype=torch.long, device=x.device)],
    ),
    "full of a number on the device": ("item", lambda x: torch.full((2,), x[0, 0])),
    "masked_fill with a number on the device": ("item", lambda x: x.masked_fill(x > 0, x[0, 0])),
    "tolist": ("copy to the host", lambda x: x.tolist()),
    "to cpu": ("copy to the host", lambda x: x.to("cpu", torch.float64)),
    "into pinned memory, blocking": (
        "copy to the host",
        lambda x: torch.empty(4, 4, pin_memory=True).copy_(x),
    ),
    "into pageable memory": (
        "pageable copy to the host",
        lambda x: torch.empty(4, 4).copy_(x, non_blocking=True),
    ),
    "from the host": ("copy from the host", lambda x: torch.ones(4).to(x.device)),
    "from pinned memory, blocking": (
        "copy from the host",
        lambda x: torch.ones(4).pin_memory().to(x.device),
    ),
    "tensor": ("copy from the host", lambda x: torch.tensor(2.0, device=x.device)),
    "copy_": ("copy from the host", lambda x: x.copy_(torch.tensor(1.0))),
    "an index on the host": ("copy from the host", lambda x: x[torch.tensor([0, 2])]),
    "assigning to an index on the host": (
        "copy from the host",
        lambda x: x.index_put_((torch.tensor([0, 2]),), x[0] + 1),
    ),
    "where with a number on the host": (
        "copy from the host",
        lambda x: torch.where(x > 0, x, torch.tensor(2.0)),
    ),
    "pageable": (
        "pageable copy from the host",
        lambda x: torch.ones(4).to(x.device, non_blocking=True),
    ),
    "pinned columns": (
        "pageable copy from the host",
        lambda x: torch.ones(4, 4).pin_memory()[:, :2].to(x.device, non_blocking=True),
    ),
    "nonzero": ("nonzero", lambda x: x.nonzero()),
    "mask": ("boolean mask", lambda x: x[x > 0]),
    "assigning to a mask": (
        "boolean mask",
        lambda x: x.index_put_((x[:, 0] > -9,), torch.ones(4, 4, device=x.device)),
    ),
    "unique": ("_unique2", lambda x: x.unique()),
    "equal": ("equal", lambda x: torch.equal(x, x)),
    "repeat_interleave": (
        "repeat_interleave",
        lambda x: x[:3].repeat_interleave(LENGTHS.to("cpu").to(x.device), 0),
    ),
    "synchronize": ("synchronize", lambda x: torch.accelerator.synchronize(x.device)),
    "synchronize a stream": (
        "synchronize",
        lambda x: torch.accelerator.current_stream(x.device).synchronize(),
    ),
    "synchronize an event": (
        "synchronize",
        lambda x: torch.accelerator.current_stream(x.device).record_event().synchronize(),
    ),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_found_with_its_kind_its_device_and_the_line_of_the_caller(name):
    kind, call = WAITS[name]
    with simulate(2) as cluster:
        x = torch.ones(4, 4, device="sim:1")
        assert cluster.waits == []
        call(x)
        wait = cluster.waits[-1]
    assert (wait.kind, wait.device, wait.file) == (kind, torch.device("sim:1"), __file__)
    _, first = inspect.getsourcelines(call)
    assert first <= wait.line < first + 4
    assert cluster.waits[-1] == wait
    if name != "repeat_interleave":  # The argument of that one is copied too.
        assert len(cluster.waits) == 1


NO_WAITS = {
    "arithmetic": lambda x: (x * 2 + x @ x).softmax(1).sum(),
    "a number on the host": lambda x: x * torch.tensor(2.0) + torch.tensor(1.0),
    "where with a Python number": lambda x: torch.where(x > 0, x, 2.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 2.0),
    "masked_fill by a number on the host": lambda x: x.masked_fill_(x > 0, torch.tensor(2.0)),
    "assigning a number to a mask": lambda x: x.__setitem__(x > 0, 2.0),
    "assigning a number to a row": lambda x: x.__setitem__(1, 3.0),
    "indices on the device": lambda x: x[torch.zeros(3, dtype=torch.long, device=x.device)],
    "full": lambda x: torch.full((2, 2), 3.0, device=x.device).fill_(torch.tensor(2.0)),
    "foreach": lambda x: torch._foreach_mul_([x, x], x.sum()),
    "another device": lambda x: x.to("sim:0").to("sim:1", non_blocking=True),
    "pinned": lambda x: torch.ones(4).pin_memory().to(x.device, non_blocking=True),
    "pinned rows": lambda x: torch.ones(8, 4).pin_memory()[2:4].to(x.device, non_blocking=True),
    "pinned, transposed": lambda x: (
        torch.ones(8, 4).pin_memory().t().to(x.device, non_blocking=True)
    ),
    "pinned, cast": lambda x: (
        torch.ones(8, 4).pin_memory().to(x.device, torch.float64, non_blocking=True)
    ),
    "nothing": lambda x: torch.ones(0).to(x.device),
    "to the host": lambda x: x.to("cpu", non_blocking=True),  # torch pins the result
    "events": lambda x: torch.accelerator.current_stream(x.device).record_event().query(),
    "nonzero_static": lambda x: x.nonzero_static(size=3),
    "repeat_interleave": lambda x: x.repeat_interleave(x[:, 0].long(), 0, output_size=4),
    "tensors on the host": lambda x: torch.ones(4).nonzero().tolist(),
}


@pytest.mark.parametrize("name", NO_WAITS)
def test_what_cuda_does_without_the_host_is_not_a_wait(name):
    with simulate(2) as cluster:
        x = torch.ones(4, 4, device="sim:1")
        with cluster.forbidding_waits():
            NO_WAITS[name](x)
        assert cluster.waits == []


def test_the_first_wait_raises_where_waits_are_forbidden():
    with simulate(1) as cluster:
        x = torch.ones(4, device="sim:0")
        with cluster.forbidding_waits():
            place = f"{__file__}:{inspect.currentframe().f_lineno + 2}"
            with pytest.raises(RuntimeError, match="forbidding_waits") as caught:
                x.sum().item()
        assert f"item on sim:0 in {place}. To avoid it, keep the number in a tensor" in str(
            caught.value
        )
        assert x.sum().item() == 4
        assert [wait.kind for wait in cluster.waits] == ["item", "item"]
        with (
            pytest.raises(RuntimeError, match="nonzero on sim:0.*use an operator whose result"),
            cluster.forbidding_waits(),
        ):
            x.nonzero()
    with (
        pytest.raises(RuntimeError, match="pin the memory"),
        simulate(1) as cluster,
        cluster.forbidding_waits(),
    ):
        torch.ones(3).to("sim:0", non_blocking=True)
    assert str(cluster.waits[0]).startswith("pageable copy from the host on sim:0 in ")


def test_nothing_is_recorded_after_the_block():
    with simulate(1) as cluster:
        x = torch.ones(4, device="sim:0")
    assert x.cpu().sum() == 4
    assert cluster.waits == []
    with simulate(1) as later:
        torch.ones(4, device="sim:0").cpu()
    assert (len(cluster.waits), len(later.waits)) == (0, 1)


class Peeking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient.sum().item()
        return gradient


def test_waits_in_a_backward():
    with simulate(2) as cluster:
        x = torch.ones(4, device="sim:1", requires_grad=True)
        Peeking.apply(x).sum().backward()
        (wait,) = cluster.waits
        assert (wait.file, wait.line) == (__file__, inspect.getsourcelines(Peeking.backward)[1] + 2)
        host = torch.ones(4, requires_grad=True)
        host.to("sim:1").sum().backward()
        *_, up, down = cluster.waits
        assert (up.kind, up.file) == ("copy from the host", __file__)
        assert (down.kind, down.file, down.line) == ("copy to the host", "backward", 0)
        y = host.to("sim:1").sum()
        with (
            pytest.raises(RuntimeError, match="copy to the host on sim:1 in backward"),
            cluster.forbidding_waits(),
        ):
            y.backward()
        assert x.grad.sum().item() == 4


def test_many_threads_wait_at_once():
    with simulate(4) as cluster:

        def work(index):
            for _ in range(50):
                torch.ones(4, device=f"sim:{index}").sum().item()

        threads = [threading.Thread(target=work, args=[index]) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(wait.device.index for wait in cluster.waits) == sorted([0, 1, 2, 3] * 50)
        assert {wait.file for wait in cluster.waits} == {__file__}


def test_the_table_has_the_waits_of_each_step():
    with simulate(2) as cluster:
        net = nn.Linear(4, 2).to("sim:0")  # two parameters from the host
        optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in net.parameters()]
        for number in range(4):
            inputs = torch.ones(3, 4, device="sim:0")
            net(inputs).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            if number == 3:
                inputs.sum().item()
            inputs.sum().item()
        assert [wait.step for wait in cluster.waits] == [1, 1, 1, 2, 3, 4, 4]
        lines = [re.split(r"\s{2,}", line.strip()) for line in str(cluster).splitlines()]
    assert lines[0][-1] == "waits of the host"
    assert [line[-1] for line in lines[2:4]] == ["3, 1, 1, 2", "0, 0, 0, 0"]
    assert lines[-1][0].startswith("waits of the host: calls for which it would wait for this GPU")


def test_a_long_run_keeps_the_last_waits(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITS", 5)
    with simulate(1) as cluster:
        parameter = torch.ones(4, device="sim:0", requires_grad=True)
        layer = nn.Flatten(0)
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for _ in range(6):
            layer(parameter).sum().backward()
            optimizer.step()
            parameter.detach().sum().item()
            parameter.detach().sum().item()
        assert [wait.step for wait in cluster.waits] == [4, 5, 5, 6, 6]
        assert "0, 0, 0, 1, 2, 2" in str(cluster)
