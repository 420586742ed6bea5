"""Traces of modules with many equal blocks, compared with traces of all of their blocks."""

import functools

import pytest
import torch
from helpers.memory_problems import rows_of, trace_both
from helpers.slow import slow, slow_but
from torch import nn
from torch.nn import functional as F

from balanced_parallel import memory
from balanced_parallel.memory.estimation import make_request
from balanced_parallel.memory.problem import Problem
from balanced_parallel.memory.trace import stacks, tracer
from balanced_parallel.replicas import buckets

DEPTH = 8
MEAN = nn.MSELoss()


class Block(nn.Module):
    def __init__(self, width=16, rate=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.drop = nn.Dropout(rate)

    def forward(self, hidden):
        return hidden + self.drop(self.layers(self.norm(hidden)))


class Stacked(nn.Module):
    """Layers before and behind the blocks; the weight of one is tied to the other."""

    def __init__(self, depth=DEPTH, width=16):
        super().__init__()
        self.first = nn.Linear(24, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, 24)
        self.last.weight = nn.Parameter(self.first.weight.detach().T.contiguous())

    def forward(self, inputs):
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


def request_for(module, rows=6, criterion=MEAN, **settings):
    batch = torch.zeros(rows, 24, device="meta")
    return make_request(
        Problem(module, criterion, batch, batch), **{"device_kind": "h200", **settings}
    )


def repeated_trace(request):
    (trace,) = tracer.trace_few(request, [rows_of(request)])
    return trace


SETTINGS = {
    "single": {},
    "bf16, with checkpoints": {"precision": "bf16", "savings": ["checkpoint_activations"]},
    "offloaded": {"savings": ["offload_activations", "checkpoint_activations"]},
    "micro-batches": {"micro_batch_size": 2},
    "cpu": {"device_kind": "cpu"},
    "SGD": {"optimizer": functools.partial(torch.optim.SGD, momentum=0.9)},
    "Adafactor": {"optimizer": torch.optim.Adafactor},
    "ddp": {"layout": "ddp", "devices": 4},
    "ddp, accumulated": {"layout": "ddp", "devices": 2, "micro_batch_size": 2},
    "replicas": {"layout": "replicas", "devices": 2},
    "replicas, accumulated": {"layout": "replicas", "devices": 2, "micro_batch_size": 1},
    "fsdp": {"layout": "fsdp", "devices": 4},
    "fsdp, accumulated": {
        "layout": "fsdp",
        "devices": 2,
        "micro_batch_size": 3,
        "precision": "bf16",
    }
    | {"savings": ["checkpoint_activations"]},
    "balanced, with checkpoints": {"layout": "replicas", "devices": 2, "balanced_optimizer": True}
    | {"savings": ["checkpoint_activations"]},
}


@pytest.mark.parametrize("name", slow_but(list(SETTINGS), "bf16, with checkpoints"))
def test_few_blocks_make_the_trace_of_all(monkeypatch, name):
    if name.startswith("balanced"):
        monkeypatch.setattr(buckets, "BUCKET_BYTES", 1500)  # each block fills buckets of its own
    repeated, whole = trace_both(
        request_for(Stacked(16 if name == "offloaded" else 10), **SETTINGS[name])
    )
    assert repeated == whole


def adapted():
    """Returns blocks of which two layers learn, as with adapters, and frozen layers around them."""
    module = Stacked().requires_grad_(False)
    for block in module.blocks:
        block.layers.requires_grad_(True)
    return module


@pytest.mark.parametrize("settings", [{"micro_batch_size": 1}, slow({})])
def test_gradients_of_blocks_alone_repeat(settings):
    """The sum of a bucket comes directly behind the gradients of all blocks, and grows with them."""
    settings |= {"layout": "replicas", "devices": 2, "rows": 4}
    repeated, whole = trace_both(request_for(adapted(), **settings), times=[1])
    assert repeated == whole


@pytest.mark.parametrize("layout", ["replicas", slow("ddp")])
def test_shares_that_do_not_repeat_with_the_blocks_are_traced_whole(layout):
    """One bucket of all parameters is cut in its middle, and the largest shares of ZeRO alternate."""
    assert (
        repeated_trace(request_for(Stacked(), layout=layout, devices=2, balanced_optimizer=True))
        is None
    )


def causal_model(name):
    """Returns a tiny causal model of transformers, or one with masked words, on the meta device."""
    import transformers

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    sizes |= {"vocab_size": 100, "max_position_embeddings": 64}
    heads = {} if name in ("GPT2", "Bert") else {"num_key_value_heads": 2}
    kind = getattr(
        transformers,
        f"{name}LMHeadModel"
        if name == "GPT2"
        else f"{name}For{'Masked' if name == 'Bert' else 'Causal'}LM",
    )
    config = getattr(transformers, f"{name}Config")(**(sizes | heads))
    with torch.device("meta"):
        return kind(config)


@pytest.mark.parametrize("name", slow_but(["GPT2", "Llama", "Qwen3", "Bert"], "GPT2"))
def test_models_of_transformers_are_traced_by_few_blocks(name):
    words = torch.zeros(4, 16, dtype=torch.int64, device="meta")
    inputs = {"input_ids": words, "labels": words}
    savings = [] if name == "Bert" else ["replace_lm_head"]
    settings = {"device_kind": "h200", "precision": "bf16", "savings": savings}
    problem = Problem(causal_model(name), lambda output, labels: output.loss, inputs, words)
    repeated, whole = trace_both(make_request(problem, **settings), times=[1])
    assert repeated == whole


class Dense(Stacked):
    def forward(self, inputs):
        hidden = [self.first(inputs)]
        for block in self.blocks:
            hidden.append(block(torch.stack(hidden).sum(0)))
        return self.last(hidden[-1])


class Named(Stacked):
    def forward(self, inputs):
        return self.last(self.blocks[DEPTH - 1](self.first(inputs)))


@pytest.mark.parametrize("kind", [Dense, Named])
def test_blocks_that_others_read_or_name_are_traced_whole(kind):
    assert repeated_trace(request_for(kind())) is None


CHANGES = {
    "width": lambda block, first: setattr(block.layers, "1", nn.Linear(32, 32)),
    "rate": lambda block, first: setattr(block.drop, "p", 0.0),
    "frozen": lambda block, first: block.layers.requires_grad_(False),
    "eval": lambda block, first: block.eval(),
    "class": lambda block, first: setattr(block, "norm", nn.RMSNorm(16)),
    "tied": lambda block, first: setattr(block.layers[0], "bias", first.layers[0].bias),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_block_that_differs_is_not_one_of_equal_blocks(name):
    module = Stacked(DEPTH + 1)
    stack = stacks.find_stack(module)
    assert (stack.prefix, stack.start, stack.length) == ("blocks.", 0, DEPTH + 1)
    CHANGES[name](module.blocks[3], module.blocks[0])
    assert stacks.find_stack(module) is None


def test_blocks_may_know_their_number():
    module = Stacked()
    for number, block in enumerate(module.blocks):
        block.number = number
        block.name = f"blocks.{number}.layers"
        block.drop.p = 0.1 + number / 100
    assert stacks.find_stack(module).length == DEPTH
    module.blocks[5].number = 0
    assert stacks.find_stack(module) is None


def test_the_module_of_the_caller_has_all_blocks_afterwards():
    module = Stacked(DEPTH + 2)
    before = dict(module.named_modules())
    settings = {"device_kind": "h200", "savings": ["checkpoint_activations"]}
    report = memory.estimate(module, F.mse_loss, torch.zeros(6, 24), torch.zeros(6, 24), **settings)
    assert dict(module.named_modules()) == before
    assert {block.module for block in report.batches.exact.first.blocks} >= {
        f"blocks.{number}.layers.0" for number in range(10)
    }
