"""Predicted memory: to the byte what the CPU's allocator, the simulated devices and the caching allocator say."""

import contextlib
import dataclasses
import functools
import os

import pytest
import torch
from helpers.allocations import used
from torch import nn
from torch.nn import functional as F

from balanced_parallel import (
    BalancedOptimizer,
    DataParallelCriterion,
    DataParallelModel,
    convert_sync_batchnorm,
    memory,
    simulate,
)
from balanced_parallel.memory.caching_allocator import MIB, CachingAllocator, replay
from balanced_parallel.memory.device_specs import KINDS, find_kind
from balanced_parallel.memory.report import PARTS
from balanced_parallel.savings.activation_checkpointing import Checkpointed, checkpoint_blocks, find_blocks

VOCABULARY, LENGTH = 600, 16


class LanguageModel(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.Sequential(*[nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True) for _ in range(3)])
        self.output = nn.Linear(32, VOCABULARY)

    def forward(self, tokens):
        return self.output(self.layers(self.embedding(tokens))).transpose(1, 2)


def tokens(rows):
    return torch.zeros(rows, LENGTH, dtype=torch.int64)


def conv_net():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 32, 3, 2), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)], nn.Linear(64, 10))


PROBLEMS = {
    "perceptron": (perceptron, lambda rows: (torch.zeros(rows, 64), torch.zeros(rows, dtype=torch.int64))),
    "language model": (LanguageModel, lambda rows: (tokens(rows), tokens(rows))),
    "convolutions": (conv_net, lambda rows: (torch.zeros(rows, 3, 16, 16), torch.zeros(rows, dtype=torch.int64))),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_peak_is_what_the_allocator_says(problem, checkpoint, precision):
    build, batch = PROBLEMS[problem]
    if checkpoint and not find_blocks(build()):
        pytest.skip("nothing is repeated")
    found = used(build, lambda: batch(24), torch.optim.AdamW, precision, checkpoint)
    settings = {"precision": precision, "checkpoint": "blocks" if checkpoint else None}
    report = memory.estimate(build(), F.cross_entropy, *batch(24), device_kind="cpu", **settings)
    assert abs(report.peak[0] - found) <= (0.05 if problem == "convolutions" else 0.001) * found
    assert sum(report.parts[0].values()) == report.peak[0] == report.reserved[0]
    assert set(report.parts[0]) == set(PARTS)


def test_micro_batches_add_to_gradients_that_are_there():
    build, batch = PROBLEMS["language model"]
    momentum = functools.partial(torch.optim.SGD, momentum=0.9)
    found = used(build, lambda: batch(24), momentum, micro_batch_size=8)
    settings = {"optimizer": momentum, "device_kind": "cpu"}
    report = memory.estimate(build(), F.cross_entropy, *batch(24), micro_batch_size=8, **settings)
    assert abs(report.peak[0] - found) <= 0.001 * found
    assert (report.rows, report.micro_batches) == (8, 3)
    again = memory.estimate(build(), F.cross_entropy, *batch(8), accumulate=5, **settings)
    assert again.peak[0] < report.peak[0]  # the whole batch is not there at once
    assert again.micro_batches == 5


@pytest.mark.parametrize("kind", ["cpu", "h200"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_other_batches_follow_from_two_traces(problem, kind):
    build, batch = PROBLEMS[problem]
    report = memory.estimate(build(), F.cross_entropy, *batch(6), device_kind=kind, precision="bf16")
    assert report.affine
    for rows in (1, 7, 301):
        direct = memory.estimate(build(), F.cross_entropy, *batch(rows), device_kind=kind, precision="bf16")
        assert report.at(rows)[0] == pytest.approx(direct.peak[0], rel=1e-4)


@pytest.mark.parametrize("kind", ["cpu", "sim", "h200"])
def test_the_largest_batch_fits_and_one_more_does_not(kind):
    build, batch = PROBLEMS["language model"]
    report = memory.estimate(build(), F.cross_entropy, *batch(6), device_kind=kind)
    capacity = report.reserved[0] * 3
    rows = report.largest(capacity)
    assert rows > 18
    assert report.largest(str(capacity)) == rows
    direct = [memory.estimate(build(), F.cross_entropy, *batch(count), device_kind=kind) for count in (rows, rows + 1)]
    assert direct[0].peak[0] <= capacity
    if kind != "h200":  # there the allocator may give back segments, and do with less than it would take
        assert direct[1].peak[0] > capacity
    assert report.largest(1000) == 0


LAYOUTS = [("replicas", False), ("replicas", True), ("torch_data_parallel", False)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("layout", "balanced"), LAYOUTS)
def test_replicas_need_what_simulated_devices_count(layout, balanced, precision):
    build, batch = PROBLEMS["language model"]
    settings = {"layout": layout, "balanced_optimizer": balanced, "precision": precision, "devices": 3, "device_kind": "sim"}
    report = memory.estimate(build(), nn.CrossEntropyLoss(), *batch(24), **settings)
    with simulate(3) as cluster:
        inputs, targets = batch(24)
        if layout == "replicas":
            model, criterion = DataParallelModel(build(), precision=precision), DataParallelCriterion(nn.CrossEntropyLoss())
        else:
            model = nn.DataParallel(build().to("sim:0"))

            def criterion(outputs, targets):
                return F.cross_entropy(outputs, targets.to("sim:0"))

        if precision == "bf16" and layout != "replicas":
            pytest.skip("nn.DataParallel needs autocast inside of the module")
        optimizer = BalancedOptimizer(model, torch.optim.AdamW) if balanced else torch.optim.AdamW(model.parameters())
        for _ in range(2):
            cluster.reset_peak()
            optimizer.zero_grad()
            with torch.autocast("sim", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext():
                loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            del loss
        assert report.peak == pytest.approx(cluster.peak, rel=0.02)


class Repeated(nn.Module):
    """One layer, applied several times, as in ALBERT."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(128, 128)

    def forward(self, x):
        for _ in range(6):
            x = self.layer(x).relu()
        return x


def test_a_weight_of_a_replica_is_cast_at_each_use_and_that_is_counted():
    inputs, targets = torch.randn(1024, 128), torch.randint(128, (1024,))
    settings = {"optimizer": torch.optim.SGD, "precision": "bf16", "device_kind": "sim"}
    loss = nn.CrossEntropyLoss()
    report = memory.estimate(Repeated(), loss, inputs, targets, layout="replicas", devices=2, **settings)
    casts = 5 * 128 * 128 * 2  # more than in the plain program
    assert casts > 0.05 * report.peak[0]
    with simulate(2) as cluster:
        model, criterion = DataParallelModel(Repeated(), precision="bf16"), DataParallelCriterion(loss, precision="bf16")
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            cluster.reset_peak()
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()
        assert report.peak == pytest.approx(cluster.peak, rel=0.02)


def test_dropout_needs_what_simulated_devices_count():
    build, batch = functools.partial(LanguageModel, 0.1), PROBLEMS["language model"][1]
    settings = {"layout": "replicas", "devices": 2, "device_kind": "sim"}
    report = memory.estimate(build(), nn.CrossEntropyLoss(), *batch(24), **settings)
    with simulate(2) as cluster:
        model, criterion = DataParallelModel(build()), DataParallelCriterion(nn.CrossEntropyLoss())
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            cluster.reset_peak()
            optimizer.zero_grad()
            criterion(model(batch(24)[0]), batch(24)[1]).backward()
            optimizer.step()
        assert report.peak == pytest.approx(cluster.peak, rel=0.005)


def test_ddp_is_the_plain_program_and_its_buckets():
    build, batch = PROBLEMS["language model"]
    settings = {"device_kind": "cpu"}
    plain = memory.estimate(build(), F.cross_entropy, *batch(24), **settings)
    size = sum(parameter.nbytes for parameter in build().parameters())
    report = memory.estimate(build(), F.cross_entropy, *batch(24), layout="ddp", devices=2, **settings)
    assert report.parts[0]["communication buckets"] + report.parts[0]["gradients"] == size
    assert plain.peak[0] < report.peak[0] <= plain.peak[0] + size
    alone = memory.estimate(build(), F.cross_entropy, *batch(24), layout="ddp", **settings)
    assert alone.peak == plain.peak
    spread = memory.estimate(build(), F.cross_entropy, *batch(24), layout="ddp", devices=2, balanced_optimizer=True, **settings)
    assert report.peak[0] - spread.peak[0] == pytest.approx(size, rel=0.05)  # half of two states
    sharded = memory.estimate(build(), F.cross_entropy, *batch(24), layout="fsdp", devices=2, **settings)
    assert sharded.peak[0] < report.peak[0]
    assert len(sharded.peak) == 2
    assert not torch.distributed.is_initialized()


def test_checkpointing_and_synchronised_batch_norm_in_replicas():
    build, batch = PROBLEMS["language model"]
    settings = {"layout": "replicas", "devices": 2, "device_kind": "sim"}
    plain = memory.estimate(build(), F.cross_entropy, *batch(24), **settings)
    less = memory.estimate(build(), F.cross_entropy, *batch(24), checkpoint="blocks", **settings)
    assert less.peak < plain.peak
    assert less.flops > plain.flops
    build, batch = PROBLEMS["convolutions"]
    assert memory.estimate(convert_sync_batchnorm(build()), F.cross_entropy, *batch(6), **settings).peak


def test_nothing_of_the_callers_is_touched():
    build, batch = PROBLEMS["convolutions"]
    net, (inputs, targets) = build(), batch(6)
    before = {name: (value.data_ptr(), value._version) for name, value in net.state_dict().items()}
    random = torch.get_rng_state()
    memory.estimate(net, nn.CrossEntropyLoss(), inputs, targets, layout="replicas", devices=2, precision="bf16")
    assert {name: (value.data_ptr(), value._version) for name, value in net.state_dict().items()} == before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert "to" not in net.__dict__


def test_meta_and_fake_tensors_do_as_well_as_real_ones():
    build, batch = PROBLEMS["convolutions"]
    expected = memory.estimate(build(), F.cross_entropy, *batch(6)).peak
    with torch.device("meta"):
        net = build()
    meta = [tensor.to("meta") for tensor in batch(6)]
    assert memory.estimate(net, F.cross_entropy, *meta).peak == expected
    with torch._subclasses.FakeTensorMode():
        fake = batch(6)
    assert memory.estimate(build(), F.cross_entropy, *fake).peak == expected
    assert memory.estimate(net, F.cross_entropy, {"input": meta[0]}, meta[1]).peak == expected


def test_a_gpu_is_not_a_cpu():
    build, batch = functools.partial(LanguageModel, 0.1), PROBLEMS["language model"][1]
    reports = {kind: memory.estimate(build(), F.cross_entropy, *batch(24), device_kind=kind) for kind in ("cpu", "sim", "h200")}
    assert reports["h200"].parts[0]["saved activations"] < 0.8 * reports["cpu"].parts[0]["saved activations"]  # masks, attention
    assert reports["h200"].parts[0]["workspace"] == 4096 * 8 * 1024
    assert set(reports["h200"].assumed) == {"workspace", "context"}
    assert all("assumed" in source for source in reports["h200"].assumed.values())
    assert reports["h200"].reserved[0] >= reports["h200"].peak[0]
    assert not reports["cpu"].assumed


def test_the_report_says_where_it_goes():
    build, batch = PROBLEMS["language model"]
    report = memory.estimate(build(), F.cross_entropy, *batch(24), device_kind="cpu")
    assert max(report.timeline[0]) == report.peak[0]
    assert 0 < report.phases["backward"] < report.phases["update"] < len(report.timeline[0])
    sizes = [holder.bytes for holder in report.where[0]]
    assert sizes == sorted(sizes, reverse=True)
    assert any(holder.module.startswith("layers.") and holder.part == "saved activations" for holder in report.where[0])
    assert any("test_estimation.py:" in holder.line for holder in report.where[0])
    assert report.flops > 0
    for text in ("parameters", "saved activations", "layers.", "MiB"):
        assert text in str(report)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.rows = 3


BAD = {
    "layout='dp', expected one of": {"layout": "dp"},
    "device_kind='h900', expected one of": {"device_kind": "h900"},
    "precision='fp8'": {"precision": "fp8"},
    "devices=0": {"devices": 0},
    "devices=2 with layout='single'": {"devices": 2},
    "balanced_optimizer=True with layout='single'": {"balanced_optimizer": True},
    "micro_batch_size=-1": {"micro_batch_size": -1},
    "there is no module 'nothing' to checkpoint": {"checkpoint": ["nothing"]},
    "has no repeated blocks": {"checkpoint": "blocks"},
}


@pytest.mark.parametrize("said", BAD)
def test_bad_settings_are_named(said):
    build, batch = PROBLEMS["convolutions"]
    with pytest.raises(ValueError, match=said):
        memory.estimate(build(), F.cross_entropy, *batch(6), **BAD[said])


def test_what_the_module_raises_is_raised():
    build, batch = PROBLEMS["perceptron"]
    with pytest.raises(RuntimeError, match="reduction dim"):
        memory.estimate(build(), F.cross_entropy, torch.zeros(6, 63), batch(6)[1])
    with pytest.raises(ValueError, match="no rows"):
        memory.estimate(build(), F.cross_entropy, torch.zeros(()), batch(6)[1])
    with pytest.raises(ValueError, match="rows="):
        memory.estimate(build(), F.cross_entropy, *batch(6)).at(0)


def test_a_trace_after_a_backward_on_an_accelerator():
    """Autograd refuses to run in a process that is forked then: the trace is made in this one."""
    build, batch = PROBLEMS["perceptron"]
    before = memory.estimate(build(), F.cross_entropy, *batch(6), device_kind="sim").peak
    with simulate(2):
        net = nn.Linear(4, 4).to("sim:0")
        net(torch.zeros(2, 4, device="sim:0")).sum().backward()
        assert memory.estimate(build(), F.cross_entropy, *batch(6)).peak == before
        assert find_kind(None) is KINDS["sim"]
    resize = torch.UntypedStorage.resize_
    assert memory.estimate(build(), F.cross_entropy, *batch(6), device_kind="sim").peak == before
    assert torch.UntypedStorage.resize_ is resize
    logits = torch.zeros(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.softmax(logits.bfloat16(), 0).dtype == torch.bfloat16  # the CPU's own choice is back


def test_blocks_are_found_and_checkpointed_alike():
    assert find_blocks(LanguageModel()) == ("layers.0", "layers.1", "layers.2")
    assert find_blocks(perceptron()) == ("0", "1", "2", "3")
    assert find_blocks(conv_net()) == ()
    nets = [LanguageModel(), LanguageModel()]
    checkpoint_blocks(nets[1], find_blocks(nets[1]))
    checkpoint_blocks(nets[1], find_blocks(nets[1]))  # once is enough
    assert isinstance(nets[1].layers[0], Checkpointed)
    assert isinstance(nets[1].layers[0], nn.TransformerEncoderLayer)
    for net in nets:
        net(tokens(2)).sum().backward()
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert nets[0].state_dict().keys() == nets[1].state_dict().keys()


def test_the_caching_allocators_rules():
    allocator = CachingAllocator()
    assert allocator.allocate(1, 100)
    assert allocator.reserved == 2 * MIB  # a small segment
    assert allocator.allocate(2, MIB)
    assert allocator.reserved == 2 * MIB
    assert allocator.allocate(6, MIB)
    assert allocator.reserved == 4 * MIB  # the rest of the first is too small by 512 bytes
    assert allocator.allocate(3, 3 * MIB)
    assert allocator.reserved == 24 * MIB
    assert allocator.allocate(4, 17 * MIB - 1)
    assert allocator.reserved == 24 * MIB  # what is left of the 20 suffices
    assert allocator.allocate(7, 17 * MIB - 1)
    assert allocator.reserved == 42 * MIB  # a segment of its own, rounded to 2 MiB
    for key in (1, 2, 3, 4, 6, 7):
        allocator.release(key)
    assert allocator.allocate(5, 16 * MIB)
    assert allocator.reserved == allocator.peak == 42 * MIB
    limited = CachingAllocator(30 * MIB)
    assert limited.allocate(1, 20 * MIB)
    assert not limited.allocate(2, 20 * MIB)
    limited.release(1)
    assert limited.allocate(2, 24 * MIB)  # what is free is given back first
    assert replay([1, 2, -1, -2], [100, 20 * MIB]) == 22 * MIB
    assert replay([1, 2], [100, 20 * MIB], 21 * MIB) is None


def test_neighbours_are_merged():
    sizes = [4 * MIB] * 5 + [16 * MIB]
    assert replay([1, 2, 3, 4, 5, -2, -4, -3, -1, 6], sizes) == 20 * MIB


def test_a_child_that_dies_is_noticed():
    class Dying(nn.Linear):
        def forward(self, inputs):
            os._exit(3)

    net = Dying(8, 8)
    with pytest.raises(RuntimeError, match="without a result"):
        memory.estimate(net, lambda out, _: out.sum(), torch.zeros(6, 8), torch.zeros(6))


def test_unequal_devices_are_lines_too():
    build, batch = PROBLEMS["language model"]
    settings = {"layout": "replicas", "devices": 2, "split": (5.0, 2.0), "device_kind": "sim"}
    report = memory.estimate(build(), nn.CrossEntropyLoss(), *batch(20), **settings)
    for rows in (7, 33):
        direct = memory.estimate(build(), nn.CrossEntropyLoss(), *batch(rows), **settings)
        assert report.at(rows) == pytest.approx(direct.peak, rel=1e-4)
    capacity = report.at(29)
    assert report.largest(capacity) == 29
    assert report.largest([capacity[0], "1GiB"]) >= 29 > report.largest(capacity[1])
    with pytest.raises(ValueError, match="capacity has 3 sizes for 2 devices"):
        report.largest(["1GiB"] * 3)
