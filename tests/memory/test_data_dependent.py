"""Operators whose memory depends on values, or hides in a library: an exact rule, the worst case, or an error that names them."""

import functools

import pytest
import torch
from helpers.allocations import used
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from balanced_parallel import memory
from balanced_parallel.memory.operators import rnn
from balanced_parallel.memory.operators.workspaces import Call, Like, scratch_of


class Applying(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, inputs):
        return self.function(self.layer(inputs))


@torch.library.custom_op("test_memory::without_a_fake", mutates_args=())
def without_a_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


REFUSED = {
    "reads a value": lambda h: h * h.sum().item(),
    "reads a value of a tensor": lambda h: h if h.sum() > 0 else -h,
    "aten.unique_dim": lambda h: h + torch.unique(h.long(), dim=0).sum(),
    "aten.repeat_interleave": lambda h: h + torch.repeat_interleave(h[:, 0].long().abs()).sum(),
    "without_a_fake": without_a_fake,
    "aten._pack_padded_sequence.default packs sequences": lambda h: pack_padded_sequence(h[None], [6]).data,
}


@pytest.mark.parametrize("message", REFUSED)
def test_operators_that_depend_on_values_are_refused_by_name(message):
    with pytest.raises(ValueError, match=message):
        memory.estimate(
            Applying(REFUSED[message]), lambda out, _: out.sum(), torch.zeros(6, 8), torch.zeros(6), device_kind="cpu"
        )


def test_scalar_is_the_result_of_reading_a_value():
    net = Applying(lambda h: h[: h.sum().int().item()] * 2)
    report = memory.estimate(net, lambda out, _: out.sum(), torch.zeros(6, 8), torch.zeros(6), scalar=3)
    assert report.peak
    with pytest.raises(ValueError, match="scalar="):
        memory.estimate(net, lambda out, _: out.sum(), torch.zeros(6, 8), torch.zeros(6))


SELECTIONS = {
    "mask": lambda h: h[h > 0].sum() + h.sum(),
    "nonzero": lambda h: h.abs().nonzero().sum() + h.sum(),
    "masked_select": lambda h: h.masked_select(h > 0).sum() + h.sum(),
    "unique": lambda h: torch.unique(h.long()).sum() + h.sum(),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_selection_selects_everything(name):
    """No batch selects more, so the estimate is never below the memory in use."""
    found = used_by_all_ones(SELECTIONS[name])
    net = Applying(SELECTIONS[name])
    report = memory.estimate(net, lambda out, _: out, torch.zeros(500, 8), torch.zeros(500), device_kind="cpu")
    assert found <= report.peak[0] <= 3 * found


def used_by_all_ones(function):
    def batch():
        return torch.ones(500, 8), torch.zeros(500)

    return used(lambda: Applying(function), batch, torch.optim.AdamW, criterion=lambda out, _: out)


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


def has_bf16_lstm():
    with torch.autocast("cpu", torch.bfloat16):
        try:
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
        except RuntimeError:  # "could not create a primitive descriptor"
            return False
    return True


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_need_what_the_allocator_says(name, precision):
    build = RECURRENT[name]
    if name.endswith("lstm") and precision == "bf16" and not has_bf16_lstm():
        pytest.skip("oneDNN has no bfloat16 LSTM for this processor")
    found = used(build, lambda: sequences(12), torch.optim.AdamW, precision)
    report = memory.estimate(build(), F.cross_entropy, *sequences(12), precision=precision, device_kind="cpu")
    assert abs(report.peak[0] - found) <= 0.001 * found


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_recurrent_layers_of_simulated_devices_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} runs other operators on simulated devices.*device_kind='cpu'"):
        memory.estimate(RECURRENT[name](), nn.CrossEntropyLoss(), *sequences(12), device_kind="sim")


def test_other_batches_of_a_recurrent_layer():
    build = RECURRENT["lstm"]
    report = memory.estimate(build(), F.cross_entropy, *sequences(12), device_kind="cpu")
    for rows in (5, 40, 100):
        direct = memory.estimate(build(), F.cross_entropy, *sequences(rows), device_kind="cpu")
        assert report.at(rows)[0] == pytest.approx(direct.peak[0], rel=1e-4)


def test_a_large_lstm_is_measured_on_fewer_rows(monkeypatch):
    settings = {"device_kind": "cpu"}
    whole = memory.estimate(RECURRENT["lstm"](), F.cross_entropy, *sequences(400), **settings)
    monkeypatch.setattr(rnn, "LARGEST", 2**18)
    assert memory.estimate(RECURRENT["lstm"](), F.cross_entropy, *sequences(400), **settings).peak == pytest.approx(
        whole.peak, rel=0.001
    )


@pytest.mark.parametrize(("name", "printed"), [("lstm", 736_000_000), ("gru", 864_000_000)])
def test_cudnn_keeps_what_it_printed(name, printed):
    """pytorch#2895: 4 layers of 320 units."""
    steps = torch.empty(250, 100, 123, device="meta")
    weights = [torch.empty(1, device="meta")]
    hidden = [torch.empty(4, 100, 320, device="meta")] * (2 if name == "lstm" else 1)
    *_, kept = torch.ops.balanced_parallel.recurrence(steps, hidden, weights, rnn.KEPT[name], 1)
    assert kept.nbytes == printed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_on_a_gpu_are_assumed_and_say_so(name, precision):
    build = RECURRENT[name]
    report = memory.estimate(build(), F.cross_entropy, *sequences(12), precision=precision, device_kind="h200")
    assert report.parts[0]["saved activations"] > 12 * 20 * 24 * 11 * (2 if precision == "bf16" else 4) // 3
    assert "pytorch#2895" in report.assumed["recurrent layers"]
    assert (
        "recurrent layers"
        not in memory.estimate(nn.Linear(4, 2), F.cross_entropy, torch.zeros(3, 4), torch.zeros(3).long()).assumed
    )


class Spelling(nn.Module):
    """Log-probabilities of characters, and the CTC loss of all-ones."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 12)

    def forward(self, inputs):
        return self.layer(inputs).log_softmax(-1).transpose(0, 1)


def spelled(scores, targets):
    rows, longest = targets.shape
    return F.ctc_loss(scores, targets, torch.full((rows,), len(scores)), torch.full((rows,), longest))


def test_the_ctc_loss_has_tables_for_the_longest_target():
    def batch():
        return torch.zeros(6, 50, 8), torch.ones(6, 20, dtype=torch.int64)

    found = used(Spelling, batch, torch.optim.AdamW, criterion=spelled)
    report = memory.estimate(Spelling(), spelled, *batch(), device_kind="cpu")
    assert abs(report.peak[0] - found) <= 0.001 * found


def test_scratch_is_measured_by_running():
    like = Like((256, 256), (256, 1), torch.float32)
    assert scratch_of(Call(0, "cpu", "aten.mm.default", (like, like), (), like.bytes)) == 0
    twice = Call(0, "cpu", "aten.mm.default", (Like((512, 256), (256, 1), torch.float32), like))
    assert Call(0, "cpu", "aten.mm.default", (like, like)).between(twice, 1, 2).args[0].shape == (384, 256)


BORROWERS = {
    "upsample": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "instance norm": lambda: nn.InstanceNorm2d(16, affine=True),
    "group norm": lambda: nn.GroupNorm(4, 16),
    "mish": nn.Mish,
    "unfold": lambda: nn.Sequential(nn.Unfold(3), nn.Unflatten(1, (16, 9)), nn.Flatten(1, 2), nn.Unflatten(1, (16, 9))),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", BORROWERS)
def test_what_operators_take_for_themselves_is_counted(name, precision):
    """Copies of what is not contiguous, or not of the type that is computed in."""

    def build():
        torch.manual_seed(0)
        ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(10)
        net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), BORROWERS[name](), *ends)
        net(batch()[0])
        return net

    def batch():
        return torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.int64)

    found = used(build, batch, torch.optim.AdamW, precision)
    report = memory.estimate(build(), F.cross_entropy, *batch(), precision=precision, device_kind="cpu")
    assert abs(report.peak[0] - found) <= 0.002 * found


@pytest.mark.parametrize("name", ["NAdam", "RAdam", "Adafactor", "Adagrad", "Adadelta", "Adamax", "RMSprop"])
def test_optimizers_that_read_their_counts(name):
    def build():
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    kind = getattr(torch.optim, name)
    found = used(build, lambda: (torch.zeros(32, 64), torch.zeros(32).long()), kind)
    report = memory.estimate(
        build(), F.cross_entropy, torch.zeros(32, 64), torch.zeros(32).long(), optimizer=kind, device_kind="cpu"
    )
    assert abs(report.peak[0] - found) <= 0.001 * found


def test_a_module_of_one_batch_size_is_estimated_for_it():
    net = Applying(lambda h: h.view(6, 8))
    with pytest.warns(UserWarning, match="with 12 rows the module raises RuntimeError: shape"):
        report = memory.estimate(net, lambda out, _: out.sum(), torch.zeros(6, 8), torch.zeros(6), device_kind="cpu")
    assert report.at(6) == report.peak
    with pytest.raises(RuntimeError, match="shape"):
        report.at(7)
    with pytest.raises(ValueError, match=r"RuntimeError: shape.*any number of rows"):
        memory.plan(net, lambda out, _: out.sum(), torch.zeros(6, 8), torch.zeros(6), batch_size=6, capacity="1GiB")
