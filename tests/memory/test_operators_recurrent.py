"""Recurrent layers: exact on the CPU without oneDNN, assumed on a GPU."""

import functools

import pytest
import torch
from helpers.allocations import used
from helpers.slow import slow
from torch import nn
from torch.nn import functional as F

from balanced_parallel import memory
from balanced_parallel.memory.operators import KEPT


class Last(nn.Module):
    """Ten classes from the last step of a recurrent layer."""

    def __init__(self, kind, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.layer = kind(16, 24, num_layers=2, batch_first=True, **settings)
        self.output = nn.Linear(24 * (1 + self.layer.bidirectional), 10)

    def forward(self, inputs):
        return self.output(self.layer(inputs)[0][:, -1])


def sequences(rows):
    return torch.zeros(rows, 20, 16), torch.zeros(rows, dtype=torch.int64)


RECURRENT = {
    "lstm": functools.partial(Last, nn.LSTM),
    "bidirectional lstm": functools.partial(Last, nn.LSTM, bidirectional=True),
    "gru": functools.partial(Last, nn.GRU, dropout=0.1),
    "rnn": functools.partial(Last, nn.RNN),
}


# nn.RNN in bf16 has memory of oneDNN on processors with instructions for it, which the estimate does not count
@pytest.mark.parametrize(("name", "precision"), [("gru", "fp32"), ("rnn", "fp32"), slow("gru", "bf16")])
@pytest.mark.usefixtures("one_trace")
def test_recurrent_layers_equal_the_allocator(name, precision):
    build = RECURRENT[name]
    found = used(build, lambda: sequences(12), torch.optim.AdamW, precision)
    report = memory.estimate(build(), F.cross_entropy, *sequences(12), precision=precision, device_kind="cpu")
    assert abs(report.allocated[0] - found) <= 0.001 * found


@pytest.mark.parametrize(("name", "kind"), [("lstm", "cpu"), ("lstm", "sim"), ("gru", "sim")])
def test_recurrent_layers_without_known_memory_raise_an_error(name, kind):
    reason = "oneDNN" if kind == "cpu" else f"{name} runs other operators on simulated devices"
    with pytest.raises(ValueError, match=f"{reason}.*device_kind='h200'"):
        memory.estimate(RECURRENT[name](), nn.CrossEntropyLoss(), *sequences(12), device_kind=kind)


def test_recurrent_layers_extrapolate_to_other_batches():
    report = memory.estimate(RECURRENT["lstm"](), F.cross_entropy, *sequences(13), device_kind="h200")
    for rows in (5, 40, 100):
        assert report.at(rows)[0] == pytest.approx(report.batches.trace(rows).allocated_by_device(rows)[0], rel=1e-4)


@pytest.mark.parametrize(("name", "printed"), [("lstm", 736_000_000), ("gru", 864_000_000)])
def test_cudnn_reserve_equals_the_sizes_of_pytorch_2895(name, printed):
    """pytorch#2895: 4 layers of 320 units."""
    steps = torch.empty(250, 100, 123, device="meta")
    weights = [torch.empty(1, device="meta")]
    hidden = [torch.empty(4, 100, 320, device="meta")] * (2 if name == "lstm" else 1)
    *_, kept = torch.ops.balanced_parallel.recurrence(steps, hidden, weights, KEPT[name], 1)
    assert kept.nbytes == printed


@pytest.mark.parametrize("precision", ["fp32", slow("bf16")])
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.usefixtures("one_trace")
def test_recurrent_layers_on_a_gpu_are_reported_as_assumed(name, precision):
    build = RECURRENT[name]
    report = memory.estimate(build(), F.cross_entropy, *sequences(12), precision=precision, device_kind="h200")
    assert report.parts[0]["saved activations"] > 12 * 20 * 24 * 11 * (2 if precision == "bf16" else 4) // 3
    assert "pytorch#2895" in report.assumed["recurrent layers"]


@pytest.mark.usefixtures("one_trace")
def test_other_layers_on_a_gpu_have_no_such_assumption():
    report = memory.estimate(nn.Linear(4, 2), F.cross_entropy, torch.zeros(3, 4), torch.zeros(3).long())
    assert "recurrent layers" not in report.assumed
