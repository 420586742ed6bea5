"""Operators on simulated devices: results of the CPU, optimizers, missing and custom operators."""

import copy

import pytest
import torch
from helpers.updates import values_of
from torch import nn
from torch.testing import assert_close

from balanced_parallel import simulate


def image(net):
    return lambda: nn.Sequential(nn.Unflatten(1, (2, 6, 6)), net(), nn.Flatten())


def text(net):
    return lambda: nn.Sequential(nn.Unflatten(1, (9, 8)), net())


class Embedded(nn.Module):
    def __init__(self, kind, **settings):
        super().__init__()
        self.table = kind(11, 4, **settings)

    def forward(self, inputs):
        return self.table((inputs[:, :5] * 100).long() % 11)


class Mixer(nn.Module):
    """Indexing, einsum, where, cumsum, sort, in-place writes, and a copy between dtypes."""

    def forward(self, inputs):
        outputs = torch.einsum("ij,kj->ik", inputs, inputs)
        outputs = torch.where(outputs > 0, outputs, outputs * 0.1).cumsum(1)
        outputs[:, 0] += outputs[:, 1]
        outputs = outputs.sort(1).values[[0, 2, 1]]
        return outputs.double().float() + outputs[outputs > 0].sum()


NETWORKS = {
    "grouped, strided, dilated conv": image(
        lambda: nn.Conv2d(2, 4, 3, stride=2, dilation=2, groups=2, padding=2)
    ),
    "transposed conv": image(lambda: nn.ConvTranspose2d(2, 3, 3, stride=2)),
    "conv3d": lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 6, 6)), nn.Conv3d(1, 2, 2)),
    "batch norm": image(lambda: nn.BatchNorm2d(2)),
    "group norm": image(lambda: nn.GroupNorm(2, 2)),
    "layer norm": lambda: nn.LayerNorm(72),
    "rms norm": lambda: nn.RMSNorm(72),
    "pooling": image(
        lambda: nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2))
    ),
    "upsampling": image(lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
    "activations": lambda: nn.Sequential(
        nn.GELU(), nn.SiLU(), nn.ReLU(), nn.Softplus(), nn.PReLU(), nn.LogSoftmax(1)
    ),
    "embedding": lambda: Embedded(nn.Embedding, padding_idx=3),
    "embedding bag": lambda: Embedded(nn.EmbeddingBag, mode="mean"),
    "attention": text(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)),
    "lstm": text(lambda: nn.LSTM(8, 3, 2, bidirectional=True, batch_first=True)),
    "gru": text(lambda: nn.GRU(8, 3, 2, batch_first=True)),
    "gru without bias": text(lambda: nn.GRU(8, 3, bias=False)),
    "rnn": text(lambda: nn.RNN(8, 3, nonlinearity="relu")),
    "lstm cell": lambda: nn.LSTMCell(72, 4),
    "mixer": Mixer,
}


def run(net, inputs):
    inputs = inputs.detach().requires_grad_()
    outputs = net(inputs)
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    gradients = torch.autograd.grad(
        first.pow(2).sum(), [inputs, *net.parameters()], allow_unused=True
    )
    return [first.detach(), *gradients, *net.buffers()]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_give_the_results_of_the_cpu(name, training):
    net = NETWORKS[name]().train(training)
    inputs = torch.randn(3, 72)
    expected = run(copy.deepcopy(net), inputs)
    with simulate(2):
        found = run(net.to("sim:1"), inputs.to("sim:1"))
        assert {tensor.device for tensor in found if tensor is not None} == {torch.device("sim:1")}
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert_close(one.cpu(), other, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            evaluated = net.eval()(
                inputs.to("sim:1")
            )  # the fast path of nn.TransformerEncoderLayer
        assert (evaluated[0] if isinstance(evaluated, tuple) else evaluated).device == torch.device(
            "sim:1"
        )


PLAIN = [
    "AdamW",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "Rprop",
    "ASGD",
    "Adafactor",
    "LBFGS",
]
OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "RMSprop": {"momentum": 0.5, "centered": True},
} | {name: {} for name in PLAIN}


@pytest.mark.parametrize("way", [{"foreach": True}, {"fused": True}, {}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_give_the_results_of_the_cpu(name, way):
    try:
        getattr(torch.optim, name)([nn.Parameter(torch.ones(1))], lr=0.1, **OPTIMIZERS[name], **way)
    except (TypeError, RuntimeError):
        return  # this optimizer has no such implementation

    def trained(device):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(device)
        optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.1, **OPTIMIZERS[name], **way)

        def closure():
            optimizer.zero_grad()
            loss = net(torch.ones(3, 4).to(device)).pow(2).mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return values_of(net)

    expected = trained("cpu")
    with simulate(2):
        found = trained("sim:1")
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_inference_mode_and_double_backward_work():
    with simulate(1):
        net = nn.LSTM(3, 3).to("sim:0")
        with torch.inference_mode():
            assert net(torch.ones(2, 3, device="sim:0"))[0].is_inference()
        x = torch.ones(3, device="sim:0", requires_grad=True)
        (first,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert second.eq(6).all()


def test_complex_tensors_and_lazy_conjugates_give_the_results_of_the_cpu():
    with simulate(1):
        x = torch.randn(8)
        there = x.to("sim:0")
        conjugate = lambda x: torch.fft.fft(x).conj()  # noqa: E731
        for function in (torch.fft.rfft, torch.fft.ihfft, conjugate, lambda x: conjugate(x).imag):
            assert_close(function(there).cpu(), function(x))


def test_missing_operators_raise_an_error_with_name_and_fix():
    with simulate(1):
        x = torch.ones(3, device="sim:0")
        with pytest.raises(
            NotImplementedError,
            match=r"'aten::_to_sparse' has none.*torch.library.impl\('aten::_to_sparse', 'PrivateUse1'\)",
        ):
            x.to_sparse()
        with pytest.raises(NotImplementedError, match=r"aten::_cudnn_init_dropout_state"):
            torch.ops.aten._cudnn_init_dropout_state(
                0.1, True, 0, dtype=torch.uint8, device="sim:0"
            )


def test_missing_operators_can_be_added_with_torch_library():
    with simulate(1), torch.library._scoped_library("aten", "IMPL") as library:
        x = torch.ones(3, device="sim:0")
        with pytest.raises(NotImplementedError, match="batch_norm_stats"):
            torch.batch_norm_stats(x[None], 1e-5)
        library.impl(
            "batch_norm_stats",
            lambda x, eps: (x.mean(0), (x.var(0, correction=0) + eps).rsqrt()),
            "PrivateUse1",
        )
        assert torch.batch_norm_stats(torch.stack([x, x]), 1.0)[1].eq(1).all()


def test_custom_operators_of_other_libraries_run():
    with torch.library._scoped_library("some_library", "DEF") as library, simulate(1):
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        twice = torch.ops.some_library.twice(torch.ones(3, device="sim:0"))
        assert twice.device == torch.device("sim:0")
        assert twice.eq(2).all()
