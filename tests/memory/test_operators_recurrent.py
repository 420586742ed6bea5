"""Recurrent layers: exact on the CPU without oneDNN, an upper bound on other devices."""

import functools

import pytest
import torch
from helpers.allocations import assert_equals_the_allocator
from helpers.slow import slow, slow_but
from torch import nn
from torch.nn import functional as F

from balanced_parallel import DataParallelCriterion, DataParallelModel, memory, simulate

STEPS = 8


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
    return torch.zeros(rows, STEPS, 16), torch.zeros(rows, dtype=torch.int64)


RECURRENT = {
    "lstm": functools.partial(Last, nn.LSTM),
    "bidirectional lstm": functools.partial(Last, nn.LSTM, bidirectional=True),
    "gru": functools.partial(Last, nn.GRU, dropout=0.1),
    "rnn": functools.partial(Last, nn.RNN),
}


# nn.RNN in bf16 has memory of oneDNN on processors with instructions for it, which the estimate does not count
@pytest.mark.parametrize(
    ("name", "precision"), [("gru", "fp32"), ("rnn", "fp32"), slow("gru", "bf16")]
)
@pytest.mark.usefixtures("one_trace")
def test_recurrent_layers_equal_the_allocator(name, precision):
    assert_equals_the_allocator(RECURRENT[name], lambda: sequences(12), precision=precision)


def test_an_lstm_on_the_cpu_raises_an_error():
    with pytest.raises(ValueError, match="oneDNN.*device_kind='h200'"):
        memory.estimate(RECURRENT["lstm"](), F.cross_entropy, *sequences(12), device_kind="cpu")


@pytest.mark.parametrize("name", slow_but(["lstm", "gru", "rnn"], "lstm"))
@pytest.mark.usefixtures("one_trace")
def test_simulated_devices_need_less(name):
    settings = {"device_kind": "sim", "optimizer": torch.optim.SGD}
    report = memory.estimate(RECURRENT[name](), nn.CrossEntropyLoss(), *sequences(96), **settings)
    with simulate(1) as cluster:
        model = DataParallelModel(RECURRENT[name]())
        criterion = DataParallelCriterion(nn.CrossEntropyLoss())
        criterion(model(sequences(96)[0]), sequences(96)[1]).backward()
        assert cluster.peak[0] <= report.allocated[0] <= 1.6 * cluster.peak[0]


@pytest.mark.slow
def test_recurrent_layers_extrapolate_to_other_batches():
    report = memory.estimate(
        RECURRENT["lstm"](), F.cross_entropy, *sequences(13), device_kind="h200"
    )
    for rows in (5, 100):
        assert report.at(rows)[0] == pytest.approx(
            report.batches.trace(rows).allocated_by_device(rows)[0], rel=1e-4
        )


@pytest.mark.parametrize(
    ("name", "values"),
    [("lstm", 5), slow("bidirectional lstm", 10), slow("gru", 6), slow("rnn", 1)],
)
@pytest.mark.usefixtures("one_trace")
def test_steps_on_a_gpu_keep_more_than_cudnn_reserves_in_pytorch_2895(name, values):
    """It prints the bytes of 5 values per step, layer and unit for an LSTM, and of 6 for a GRU."""
    report = memory.estimate(RECURRENT[name](), F.cross_entropy, *sequences(96), device_kind="h200")
    assert report.parts[0]["saved activations"] >= 96 * STEPS * 2 * 24 * values * 4
    assert "only a GPU tells" in report.assumed["recurrent layers"]
