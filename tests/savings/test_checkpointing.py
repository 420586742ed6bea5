"""``checkpoint_activations``: the same result, fewer bytes, the same random numbers."""

import copy
import io
import pickle

import pytest
import torch
from helpers.memory_problems import LanguageModel, tokens
from helpers.savings import WIDTH, Block, assert_unchanged
from torch import nn

from balanced_parallel import DataParallelModel, savings, simulate
from balanced_parallel.savings.activation_checkpointing import Checkpointed


def checkpoint_blocks(net):
    savings.checkpoint_activations(net)


def checkpoint_part(net):
    inputs = torch.randn(7, WIDTH)
    kept = savings.checkpoint_activations(net, budget="1GiB", inputs=inputs).kept
    handle = savings.checkpoint_activations(net, budget=int(0.8 * kept), inputs=inputs)
    assert handle.parts
    assert 0.5 * kept < handle.kept < 0.8 * kept


@pytest.mark.parametrize("saving", [checkpoint_blocks, checkpoint_part])
@pytest.mark.parametrize("name", ["residual", "convolutions", "encoder"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_gradients_and_statistics_are_those_without_it(ranks, name, saving):
    assert_unchanged(ranks, name, saving)


def bytes_of_forward(cluster, net, inputs):
    """Bytes that the graph keeps, without the output."""
    before = cluster.live[0]
    output = net(inputs)
    return cluster.live[0] - before - output.untyped_storage().nbytes()


def test_the_budget_is_kept_to_the_byte():
    with simulate(1) as cluster:
        net, inputs = LanguageModel(dropout=0.1).to("sim:0"), tokens(8).to("sim:0")
        plain = bytes_of_forward(cluster, net, inputs)
        found = {}
        for budget in ("1MiB", "700KiB", "600KiB", "400KiB", "300KiB"):
            handle = savings.checkpoint_activations(net, budget=budget, inputs=inputs)
            assert handle.kept == bytes_of_forward(cluster, net, inputs)
            found[budget] = handle.parts
        assert found == {
            "1MiB": (),
            "700KiB": ("layers.0",),
            "600KiB": ("layers.0", "layers.1 (selective)"),
            "400KiB": ("layers.0", "layers.1"),
            "300KiB": ("layers.0", "layers.1", "layers.2 (selective)"),
        }
        with pytest.raises(ValueError, match=r"do not fit into budget=1\.00 KiB: at least 64\.00 KiB \(65536 bytes\) stay"):
            savings.checkpoint_activations(net, budget="1KiB", inputs=inputs)
        assert bytes_of_forward(cluster, net, inputs) == plain  # as before the refused call


def test_replicas_on_accelerators_peak_lower():
    peaks = []
    for saving in (lambda net: None, savings.checkpoint_activations):
        net = nn.Sequential(*[layer for _ in range(16) for layer in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))])
        saving(net)
        with simulate(2) as cluster:
            model = DataParallelModel(net.to("sim:0"))
            for _ in range(2):
                cluster.reset_peak()
                model(torch.ones(2000, 32)).map(torch.sum).gather().sum().backward()
            peaks.append(cluster.peak)
            del model
    assert all(with_it < 0.5 * without for with_it, without in zip(peaks[1], peaks[0], strict=True))


def test_replicas_follow_a_call_after_their_first_forward():
    net = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())])
    with simulate(3) as cluster:
        model = DataParallelModel(net.to("sim:0"))

        def bytes_of_graph():
            before = cluster.live
            outputs = model(torch.ones(1536, 64))
            kept = [after - at_first for after, at_first in zip(cluster.live, before, strict=True)]
            outputs.gather().sum().backward()
            net.zero_grad()
            return kept

        bytes_of_graph()
        plain = bytes_of_graph()
        handle = savings.checkpoint_activations(net)
        assert all(checkpointed < 0.8 * kept for checkpointed, kept in zip(bytes_of_graph(), plain, strict=True))
        savings.checkpoint_activations(net, segments=2)
        assert max(bytes_of_graph()) < max(plain)
        handle.remove()
        assert bytes_of_graph() == plain


def test_retained_graphs_double_backward_and_nested_blocks(double):
    found = []
    for blocks in ([], ["0"], ["0", "0.1", "2"], [""]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Tanh(), nn.Dropout(0.3))), nn.Tanh(), nn.Linear(8, 1))
        if blocks:
            savings.checkpoint_activations(net, blocks=blocks)
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        output = net(x).sum()
        (first,) = torch.autograd.grad(output, x, create_graph=True)
        first.square().sum().backward(retain_graph=True)
        output.backward()
        found.append([x.grad, *(parameter.grad for parameter in net.parameters())])
    for others in found[1:]:
        torch.testing.assert_close(others, found[0], rtol=1e-10, atol=1e-10)


def test_copies_pickles_and_hooks_of_checkpointed_modules():
    net = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())])
    handle = savings.checkpoint_activations(net, segments=3)
    assert handle.parts == ("[0:2]", "[2:4]")
    assert isinstance(net, nn.Sequential)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(file, weights_only=False)):
        assert isinstance(other, Checkpointed)
        assert other(torch.ones(2, 4)).equal(net(torch.ones(2, 4)))
    assert str(net) == str(nn.Sequential(*net))
    handle.remove()
    assert type(net) is nn.Sequential
    assert type(copy.deepcopy(net)) is nn.Sequential


def test_no_graph_is_made_without_gradients():
    net = Block()
    savings.checkpoint_activations(net, blocks="")
    with torch.no_grad():
        assert not net(torch.ones(3, WIDTH), scale=1.0).requires_grad
    with torch.inference_mode():
        assert net(torch.ones(3, WIDTH), scale=1.0).is_inference()


@pytest.mark.parametrize("blocks", ["", "auto"])
def test_compiled_blocks(double, blocks):
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.Tanh())])
    plain = copy.deepcopy(net)
    savings.checkpoint_activations(net, blocks=blocks)
    compiled = torch.compile(net, backend="aot_eager")
    for each in (plain, compiled):
        each(torch.ones(2, 4)).sum().backward()
    for one, other in zip(plain.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-10)


def write_in_place():
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2)))
    savings.checkpoint_activations(net, blocks=["1"])
    net(torch.ones(2, 2))


def count_values():
    class Reading(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    savings.checkpoint_activations(Reading(2, 2), blocks="", budget=1, inputs=torch.ones(2, 2))


REFUSED = [
    (write_in_place, "Sequential writes to its input in place.*call checkpoint_activations before inplace_activations"),
    (count_values, "cannot be counted without its values.*choose blocks by name"),
    (lambda: savings.checkpoint_activations(nn.Linear(2, 2)), "Linear has neither repeated blocks nor an nn.Sequential"),
    (lambda: savings.checkpoint_activations(nn.Linear(2, 2), blocks="layer"), "there is no module 'layer'"),
    (lambda: savings.checkpoint_activations(nn.Linear(2, 2), blocks=()), r"blocks=\(\) is empty"),
    (lambda: savings.checkpoint_activations(nn.Linear(2, 2), blocks="", segments=2), "segments=2, but Linear is not"),
    (lambda: savings.checkpoint_activations(nn.Sequential(nn.ReLU(), nn.ReLU()), segments=3), "from 2 to the 2 modules"),
    (lambda: savings.checkpoint_activations(nn.Linear(2, 2), blocks="", budget=1), "budget needs inputs"),
    (lambda: savings.checkpoint_activations(nn.Linear(2, 2), blocks="", budget="1 mile", inputs=1), "not a memory size"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refused_calls(call, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        call()
