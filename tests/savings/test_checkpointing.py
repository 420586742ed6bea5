"""``checkpoint_activations``: the same result, fewer bytes, the same random numbers.

Blocks of a model that are checkpointed.

Forwards that run again: random numbers, autocast and buffers are those of the first run.

Checkpointed blocks of Hugging Face models, which make a cache of keys and values in training too.
"""

import copy
import time
import types

import pytest
import torch
from helpers.memory_problems import LanguageModel, tokens
from helpers.problems import assert_equal, assert_same_gradients, gradients
from helpers.releases import released_at_once
from helpers.savings import assert_unchanged, checkpoint_all_blocks, checkpoint_selectively
from helpers.slow import pairs, slow
from torch import nn
from torch.testing import assert_close
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from balanced_parallel import DataParallelModel, savings, simulate
from balanced_parallel.savings.checkpointing import run_checkpointed


@pytest.mark.parametrize(
    ("name", "saving", "ranks"),
    pairs(
        ["residual", "convolutions", "encoder"],
        [checkpoint_all_blocks, checkpoint_selectively],
        [1, 2],
    ),
)
def test_loss_gradients_and_statistics_are_those_without_it(ranks, name, saving):
    assert_unchanged(ranks, name, saving)


def bytes_of_forward(cluster, net, inputs):
    """Bytes that the graph keeps, without the output."""
    before = cluster.live[0]
    output = net(inputs)
    return cluster.live[0] - before - output.untyped_storage().nbytes()


def test_a_selective_checkpoint_keeps_more_than_a_plain_one_and_less_than_none():
    with simulate(1) as cluster:
        net = LanguageModel(dropout=0.1).to("sim:0")
        inputs = tokens(8).to("sim:0")
        plain = bytes_of_forward(cluster, net, inputs)
        handle = savings.checkpoint_activations(net, selective=True)
        assert [*handle.parts] == ["layers.0", "layers.1", "layers.2"]
        selective = bytes_of_forward(cluster, net, inputs)
        savings.checkpoint_activations(net)
        assert 2 * bytes_of_forward(cluster, net, inputs) < selective < 0.8 * plain
        handle.remove()
        assert bytes_of_forward(cluster, net, inputs) == plain


@released_at_once
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
        assert all(
            checkpointed < 0.8 * kept
            for checkpointed, kept in zip(bytes_of_graph(), plain, strict=True)
        )
        savings.checkpoint_activations(net, blocks="")
        assert max(bytes_of_graph()) < max(plain)
        handle.remove()
        assert bytes_of_graph() == plain


def test_retained_graphs_double_backward_and_nested_blocks(double):
    found = []
    for blocks in ([], ["0"], ["0", "0.1", "2"], [""]):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Tanh(), nn.Dropout(0.3))),
            nn.Tanh(),
            nn.Linear(8, 1),
        )
        if blocks:
            savings.checkpoint_activations(net, blocks=blocks)
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        output = net(x).sum()
        (first,) = torch.autograd.grad(output, x, create_graph=True)
        first.square().sum().backward(retain_graph=True)
        output.backward()
        found.append([x.grad, *(parameter.grad for parameter in net.parameters())])
    for others in found[1:]:
        assert_equal(others, found[0])


@pytest.mark.parametrize("blocks", [slow(""), "auto"])
def test_compiled_blocks(double, blocks):
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.Tanh())])
    plain = copy.deepcopy(net)
    savings.checkpoint_activations(net, blocks=blocks)
    for each in (plain, torch.compile(net, backend="aot_eager")):
        each(torch.ones(2, 4)).sum().backward()
    assert_same_gradients(gradients(net), gradients(plain))


def write_in_place():
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2)))
    savings.checkpoint_activations(net, blocks=["1"])
    net(torch.ones(2, 2))


REFUSED = [
    (
        write_in_place,
        "Sequential writes to its input in place.*set inplace=False on the module that does",
    ),
    (
        lambda: savings.checkpoint_activations(nn.Linear(2, 2)),
        "Linear has neither repeated blocks nor an nn.Sequential",
    ),
    (
        lambda: savings.checkpoint_activations(nn.Linear(2, 2), blocks="layer"),
        "there is no module 'layer'",
    ),
    (lambda: savings.checkpoint_activations(nn.Linear(2, 2), blocks=()), r"blocks=\(\) is empty"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refused_calls(call, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        call()


class Later(nn.Module):
    """Lets the replicas on accelerators start after the others."""

    def forward(self, x):
        time.sleep(0 if x.is_cpu else 0.01)
        return x


class Drawing(nn.Module):
    """Draws from the generator of its device after a while, or from that of the CPU."""

    def __init__(self, host=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.host = host

    def forward(self, x):
        y = nn.functional.dropout(x * self.weight, 0.2)
        time.sleep(0.03)  # the threads of all devices are in the middle of it at once
        y = nn.functional.dropout(y, 0.2)
        return y * torch.rand(()).item() if self.host else y


LAYOUTS = [
    (["cpu"] * 3, False),
    (["sim:0", "cpu", "sim:1"], False),
    (["sim:0"], True),
    (["cpu"] * 2, True),
    slow(["sim:0"] * 2 + ["sim:1"], False),
    slow(["sim:0", "sim:1", "sim:2"], False),
    slow(["sim:0"], False),
]


@pytest.mark.parametrize(("devices", "host"), LAYOUTS, ids=str)
def test_replicas_draw_the_same_numbers_again(devices, host):
    """The CPU's generator goes on from before the backward."""
    for _ in range(2):
        with simulate(3):
            net = Drawing(host)
            savings.checkpoint_activations(net, blocks="")
            x = torch.ones(9, 64, requires_grad=True)
            output = DataParallelModel(nn.Sequential(Later(), net), devices)(x).gather("cpu")
            torch.rand(())
            state = torch.get_rng_state()
            output.sum().backward()
            assert_close(output, x.grad, rtol=1e-6 if host else 0, atol=0)
            assert state.equal(torch.get_rng_state())


def test_arguments_by_name_have_their_devices_numbers_and_autocast():
    class Named(nn.Module):
        def forward(self, *, x, nothing=None):
            return nn.functional.dropout(x @ x.t())

    net = Named()
    savings.checkpoint_activations(net, blocks="")
    with simulate(1):
        x = torch.ones(8, 8, device="sim:0", requires_grad=True)
        with torch.autocast("sim", torch.bfloat16):
            output = net(x=x)
        output.sum().backward()
        assert output.dtype == torch.bfloat16
        mask = (output != 0).float() * 2
        assert_close(x.grad, (mask + mask.t()) @ torch.ones(8, 8, device="sim:0"))


class Boxed(nn.Linear):
    def forward(self, box):
        return nn.functional.dropout(box.x * self.weight.sum())


class Moving(nn.Linear):
    def forward(self, x):
        return nn.functional.dropout(x.to(self.weight.device)) * self.weight.sum()


@pytest.mark.parametrize(
    ("net", "device", "wrap"),
    [
        (Boxed(1, 1), "sim:0", lambda x: types.SimpleNamespace(x=x)),
        (Moving(1, 1), "sim:1", lambda x: x),
    ],
)
def test_objects_as_arguments_and_layers_on_another_device_draw_the_same_numbers_again(
    net, device, wrap
):
    savings.checkpoint_activations(net, blocks="")
    with simulate(2):
        net.to(device)
        x = torch.ones(9, 64, device="sim:0", requires_grad=True)
        output = net(wrap(x))
        output.sum().backward()
        assert_close(x.grad.cpu(), output.cpu())


def test_spectral_norm_runs_again_with_the_weight_of_the_forward(double):
    nets = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(
            *[nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)) for _ in range(4)]
        )
        if checkpointed:
            savings.checkpoint_activations(net, blocks=["0", "1", "2"])
        for _ in range(2):
            net(torch.ones(3, 4)).sum().backward()
        nets.append(net)
    assert_same_gradients(*map(gradients, nets))
    assert all(map(torch.equal, nets[0].buffers(), nets[1].buffers()))


def test_hooks_of_saved_tensors_do_not_get_what_a_selective_checkpoint_keeps():
    """Torch 2.15 warned of it."""
    packed = []
    net = nn.Linear(4, 3)
    inputs = torch.ones(2, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor
    ):
        outputs = run_checkpointed(
            [net], lambda x: net(x).exp(), (inputs,), {}, name="Linear", selective=True
        )
    assert [tensor.shape for tensor in packed if tensor.numel()] == [
        inputs.shape
    ]  # torch 2.11 also saves an empty one
    outputs.sum().backward()
    assert torch.equal(inputs.grad, net(inputs).exp() @ net.weight)


BATCH = {"input_ids": torch.arange(36).view(3, 12), "labels": torch.arange(36).view(3, 12)}


def llama():
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, attention_dropout=0.1, **sizes))


def t5():
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=50, decoder_start_token_id=0, **sizes))


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("make", [llama, t5])
def test_gradients_are_those_without_checkpoints(double, make, selective):
    torch.manual_seed(0)
    plain = make().train()
    net = copy.deepcopy(plain)
    savings.checkpoint_activations(net, selective=selective)
    for each in (plain, net):
        torch.manual_seed(1)
        each(**BATCH).loss.backward()
    assert_same_gradients(gradients(net), gradients(plain))


def test_generation_has_its_cache():
    net = llama().eval()
    expected = net.generate(BATCH["input_ids"], max_new_tokens=4, do_sample=False)
    savings.checkpoint_activations(net)
    assert net.generate(BATCH["input_ids"], max_new_tokens=4, do_sample=False).equal(expected)
    assert net(**BATCH, use_cache=True).past_key_values.get_seq_length() == 12


def test_a_cache_with_earlier_tokens_is_refused():
    net = llama().train()
    cache = DynamicCache()
    with torch.no_grad():
        net(BATCH["input_ids"][:, :5], past_key_values=cache)
    savings.checkpoint_activations(net, blocks=["model.layers.1"])
    with pytest.raises(
        ValueError, match=r"gets a cache with the keys of \d+ tokens for 7 new ones"
    ):
        net(BATCH["input_ids"][:, 5:], past_key_values=cache)


def test_a_module_in_place_of_its_name_is_refused():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"no module Linear.* to checkpoint, expected names of"):
        savings.checkpoint_activations(net, blocks=[net[0]])
