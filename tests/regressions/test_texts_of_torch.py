"""Texts of torch that docs/troubleshooting.md quotes: what provokes each of them, and that the way out in its row works."""

import datetime
import faulthandler
import io
import mmap
import os
import re
import signal
import socket
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.loops import CPUS, Calls
from helpers.optimizers import sgd
from helpers.pages import PAGES
from helpers.ranks import on_ranks, run_ranks
from torch import nn
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn import functional as F
from torch.utils.data import DataLoader, get_worker_info

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    Whole,
    gather,
    parallelize,
    savings,
    simulate,
)

PAGE = PAGES["docs/troubleshooting.md"]
TABLE = PAGE.partition("## Errors of torch and Python")[2].partition("## Errors and warnings")[0]
TEXTS = [
    text
    for cell in re.findall(r"^- ((?:`[^`]+`|[^`:])+): ", TABLE, re.MULTILINE)
    for text in re.findall(r"`([^`]+)`", cell)
]
TEXTS += ["CUDA out of memory. Tried to allocate …"]
IN_FILES = {  # need CUDA, or a machine or a rank that ends: the files of torch that have the texts
    "is killed by signal: Killed": "lib/libtorch_python.so",
    "It is possible that dataloader's workers are out of shared memory": "lib/libtorch_python.so",
    "Cannot re-initialize CUDA in forked subprocess": "cuda/__init__.py",
    "Connection closed by peer": "lib/libtorch_cpu.so",
}
OF_GPUS = {
    "CUDA error: device-side assert triggered",
    "Watchdog caught collective operation timeout",
    "ncclRemoteError",
    "NCCL error",
    "unhandled system error",
    "Duplicate GPU detected",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_INITIALIZED",
}
OF_ACCELERATORS = "Expected all tensors", "Attempting to unscale", "binary_cross_entropy"
PLACES = {"in replica 1"}  # a note of this package beside a text of torch
OF_RANKS = {
    "Expected to have finished reduction in the prior iteration",
    "Default process group has not been initialized",
    "trying to initialize the default process group twice!",
    "EADDRINUSE",
    "Timed out waiting",
    "got mixed torch.Tensor and DTensor",
}

INPUTS = torch.ones(4, 4)
TARGETS = torch.tensor([0, 1, 2, 0])
MEMORY = "256KiB"
CE = nn.CrossEntropyLoss()


def error_of(call):
    """Returns the error of a call, with its notes."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the texts are those of Python and torch
        call()
    return "".join(traceback.format_exception_only(caught.value))


def make_model(function=lambda net, x: net(x), devices=("cpu", "cpu"), **settings):
    return DataParallelModel(Calls(function, outputs=3), devices, **settings)


def make_step(model, loss=CE, **settings):
    return TrainStep(model, DataParallelCriterion(loss), sgd(model), **settings)


def plain_loss(function=lambda net, x: net(x)):
    return F.cross_entropy(Calls(function, outputs=3)(INPUTS), TARGETS)


class Kept(nn.Module):
    """Multiplies by a tensor that replicas do not have, or by a buffer."""

    def __init__(self, *, is_buffer):
        super().__init__()
        self.scores = nn.Linear(4, 3)
        if is_buffer:
            self.register_buffer("scale", torch.ones(3))
        else:
            self.scale = torch.ones(3)

    def forward(self, inputs):
        return self.scores(inputs) * self.scale


class Recurrent(nn.Module):
    """Keeps a state from step to step, with its graph or without it."""

    def __init__(self, *, is_detached):
        super().__init__()
        self.scores = nn.Linear(4, 3)
        self.state = 0
        self.is_detached = is_detached

    def forward(self, inputs):
        scores = self.scores(inputs) + self.state
        state = scores.exp().sum()
        self.state = state.detach() if self.is_detached else state
        return scores


def twice(model):
    step = make_step(model)
    return [step(INPUTS, TARGETS) for _ in range(2)]


def total(detach):
    model = make_model()
    criterion = DataParallelCriterion(CE)
    whole = torch.zeros(())
    for _ in range(2):
        loss = criterion(model(INPUTS), TARGETS)
        whole = whole + (loss.detach() if detach else loss)
        (loss if detach else whole).backward()
    return whole


def two_losses(way):
    model = make_model()
    criterion = DataParallelCriterion(CE)
    hidden = model(INPUTS)
    first = criterion(hidden, TARGETS)
    second = criterion(hidden, 2 - TARGETS)
    if way == "sum":
        (first + second).backward()
    else:
        first.backward()
        second.backward()


def own_loss(net, inputs, targets):
    return F.cross_entropy(net(inputs), targets)


def returned(outputs, targets):
    return outputs


def weighted_loss():
    criterion = DataParallelCriterion(
        returned, weight=lambda _, targets: torch.tensor(len(targets))
    )
    loss = criterion(make_model(own_loss)(INPUTS, TARGETS), TARGETS)
    loss.backward()
    torch.testing.assert_close(loss, plain_loss())


def unpacked(outputs):
    first, second = outputs
    return first, second


def pair(net, inputs):
    return net(inputs), inputs


def masked(mask):
    losses = lambda output, target: F.cross_entropy(output, target, reduction="none")  # noqa: E731
    if mask is None:
        criterion = DataParallelCriterion(
            lambda output, target, mask: (mask * losses(output, target)).mean()
        )
        return criterion(make_model()(INPUTS), TARGETS, torch.ones(4))
    return DataParallelCriterion(lambda output, target: (mask * losses(output, target)).mean())(
        make_model()(INPUTS), TARGETS
    )


def filled(cast):
    def forward(net, inputs):
        values = net(inputs)
        buffer = torch.zeros(len(inputs), 3, device=inputs.device)
        buffer[torch.arange(len(inputs), device=inputs.device)] = (
            values.to(buffer.dtype) if cast else values
        )
        return buffer

    return forward


class Rows(torch.utils.data.Dataset):
    """Four rows of lengths 1 to 4, in a worker that may fail or end."""

    def __init__(self, fault=None):
        self.fault = fault

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if get_worker_info() is not None and self.fault == "end":
            os.kill(os.getpid(), signal.SIGKILL)
        return {"targets": torch.ones(index + 1)}["inputs" if self.fault == "key" else "targets"]


def on_simulated(call):
    """Returns a call on two simulated devices."""

    def simulated():
        with simulate(2, memory=MEMORY):
            return call()

    return simulated


def load(state):
    model = make_model()
    (model.module if state == "plain" else model).load_state_dict(
        Calls(None, outputs=3).state_dict()
    )


def give(state):
    model = make_model()
    Calls(None, outputs=3).load_state_dict(
        (model.module if state == "plain" else model).state_dict()
    )


def stepped(step):
    step(INPUTS, TARGETS)
    return step


PAD = torch.nn.utils.rnn.pad_sequence
WAYS = {  # the text, calls that provoke it, and ways out
    "Expected all tensors to be on the same device": [
        (
            lambda: DataParallelModel(Kept(is_buffer=False))(INPUTS),
            lambda: DataParallelModel(Kept(is_buffer=True))(INPUTS),
        ),
        (
            lambda: make_model(lambda net, x: net(x) * torch.ones(3), None)(INPUTS),
            lambda: make_model(lambda net, x: net(x) * torch.ones(3, device=x.device), None)(
                INPUTS
            ),
        ),
        (
            lambda: F.cross_entropy(make_model(devices=None)(INPUTS)[0], TARGETS[:2]),
            lambda: DataParallelCriterion(CE)(make_model(devices=None)(INPUTS), TARGETS),
        ),
        (
            lambda: make_model(devices=None)(INPUTS).gather().argmax(1) == TARGETS,
            lambda: make_model(devices=None)(INPUTS).gather(TARGETS.device).argmax(1) == TARGETS,
        ),
    ],
    "The size of tensor a (4) must match the size of tensor b (2)": [
        (lambda: masked(torch.ones(4)), lambda: masked(None)),
        (
            lambda: make_model(lambda net, x: torch.ones(4, 1) * net(x))(INPUTS),
            lambda: make_model(lambda net, x, mask: mask * net(x))(INPUTS, torch.ones(4, 1)),
        ),
        (
            lambda: make_model(lambda net, x: torch.ones(4, 1) * net(x))(INPUTS),
            lambda: make_model(lambda net, x, whole: whole.mean() * net(x))(
                INPUTS, Whole(torch.ones(4, 1))
            ),
        ),
    ],
    "Expected input batch_size (2) to match target batch_size (4)": [
        (
            lambda: F.cross_entropy(make_model()(INPUTS)[0], TARGETS),
            lambda: DataParallelCriterion(CE)(make_model()(INPUTS), TARGETS),
        )
    ],
    "element 0 of tensors does not require grad and does not have a grad_fn": [
        (
            lambda: make_step(make_model())(INPUTS, TARGETS).backward(),
            lambda: make_step(make_model())(INPUTS, TARGETS),
        ),
        (
            lambda: DataParallelCriterion(CE)(
                make_model().requires_grad_(False)(INPUTS), TARGETS
            ).backward(),
            None,
        ),
    ],
    "grad can be implicitly created only for scalar outputs": [
        (
            lambda: make_model()(INPUTS).gather().backward(),
            lambda: DataParallelCriterion(CE)(make_model()(INPUTS), TARGETS).backward(),
        ),
        (
            lambda: make_model(own_loss, gather_outputs=True)(INPUTS, TARGETS).backward(),
            weighted_loss,
        ),
    ],
    "Trying to backward through the graph a second time": [
        (
            lambda: twice(DataParallelModel(Recurrent(is_detached=False), CPUS[:2])),
            lambda: twice(DataParallelModel(Recurrent(is_detached=True), CPUS[:2])),
        ),
        (lambda: total(False), lambda: total(True)),
        (lambda: two_losses("one after the other"), lambda: two_losses("sum")),
    ],
    "mat1 and mat2 must have the same dtype": [
        (
            lambda: make_step(make_model().bfloat16())(INPUTS, TARGETS),
            lambda: make_step(make_model(), precision="bf16")(INPUTS, TARGETS),
        )
    ],
    "Attempting to unscale FP16 gradients": [
        (
            lambda: make_step(make_model(devices=None).half(), precision="fp16")(INPUTS, TARGETS),
            lambda: make_step(make_model(devices=None), precision="fp16")(INPUTS, TARGETS),
        )
    ],
    "Index put requires the source and destination dtypes match": [
        (
            lambda: make_step(make_model(filled(cast=False)), precision="bf16")(INPUTS, TARGETS),
            lambda: make_step(make_model(filled(cast=True)), precision="bf16")(INPUTS, TARGETS),
        )
    ],
    "binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast": [
        (
            lambda: make_step(
                make_model(lambda net, x: net(x).sigmoid(), None), nn.BCELoss(), precision="bf16"
            )(INPUTS, torch.ones(4, 3)),
            lambda: make_step(make_model(devices=None), nn.BCEWithLogitsLoss(), precision="bf16")(
                INPUTS, torch.ones(4, 3)
            ),
        )
    ],
    "Target 9 is out of bounds": [(lambda: make_step(make_model())(INPUTS, TARGETS + 9), None)],
    "too many values to unpack (expected 2)": [
        (
            lambda: unpacked(make_model(devices=CPUS)(INPUTS)),
            lambda: unpacked(make_model(pair, CPUS)(INPUTS).unzip()),
        )
    ],
    "not enough values to unpack (expected 2, got 1)": [
        (
            lambda: unpacked(make_model(devices=["cpu"])(INPUTS)),
            lambda: unpacked(make_model(pair, ["cpu"])(INPUTS).unzip()),
        )
    ],
    'Missing key(s) in state_dict: "module.': [(lambda: load("wrapped"), lambda: load("plain"))],
    'Unexpected key(s) in state_dict: "module.': [
        (lambda: give("wrapped"), lambda: give("plain")),
    ],
    "'NoneType' object has no attribute 'item'": [
        (
            lambda: stepped(make_step(make_model())).grad_norm.item(),
            lambda: stepped(make_step(make_model(), max_grad_norm=1.0)).grad_norm.item(),
        )
    ],
    "return only tensors, got unsupported type": [
        (
            lambda: torch.func.vjp(make_model(), INPUTS),
            lambda: torch.func.vjp(make_model(gather_outputs=True), INPUTS),
        )
    ],
    "got an unexpected keyword argument 'gradient_accumulation_steps'": [
        (
            lambda: make_step(make_model(), gradient_accumulation_steps=2),
            lambda: make_step(make_model(), micro_batch_size=1),
        )
    ],
    "DataLoader worker (pid(s) …) exited unexpectedly": [
        (
            lambda: list(DataLoader(Rows("end"), num_workers=1)),
            lambda: list(DataLoader(Rows(), num_workers=1)),
        )
    ],
    "Caught KeyError in DataLoader worker process 0": [
        (lambda: list(DataLoader(Rows("key"), num_workers=1)), None)
    ],
    "stack expects each tensor to be equal size": [
        (
            lambda: list(DataLoader(Rows(), batch_size=2)),
            lambda: list(DataLoader(Rows(), batch_size=2, collate_fn=PAD)),
        )
    ],
}


def pattern(text):
    """Returns a pattern of a text, whose ellipses stand for anything."""
    return re.escape(text).replace("…", ".*")


def test_each_text_on_the_page_is_provoked_or_needs_gpus():
    tested = {
        *WAYS,
        *OF_RANKS,
        *IN_FILES,
        *OF_GPUS,
        *PLACES,
        "CUDA out of memory. Tried to allocate …",
    }
    assert {text for text in tested if not any(text in quoted for quoted in TEXTS)} == set()
    assert {quoted for quoted in TEXTS if not any(text in quoted for text in tested)} == set()


@pytest.mark.parametrize("text", IN_FILES)
def test_a_text_that_torch_has_in_its_files(text):
    path = Path(torch.__file__).parent / IN_FILES[text]
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert content.find(text.removesuffix("Killed").encode()) >= 0


@pytest.mark.filterwarnings("ignore:the output has one value per replica")
@pytest.mark.parametrize("text", WAYS)
def test_a_text_of_torch_and_its_way_out(text):
    for provoke, way_out in WAYS[text]:
        run = on_simulated if text.startswith(OF_ACCELERATORS) else lambda call: call
        assert re.search(pattern(text), error_of(run(provoke)))
        if way_out is not None:
            run(way_out)()


def test_a_tensor_in_forward_names_the_replica():
    text = error_of(on_simulated(lambda: DataParallelModel(Kept(is_buffer=False))(INPUTS)))
    assert re.search(r"in replica [01] on device sim:[01]", text)


def test_an_error_of_a_dataset_is_seen_without_workers():
    with pytest.raises(KeyError, match="^'inputs'$"):
        list(DataLoader(Rows("key"), num_workers=0))


class TestOutOfMemoryOutsideOfAnUpdate:
    """The rows of the table: bytes of the first of two simulated devices."""

    def peak(self, evaluate):
        with simulate(2, memory=MEMORY) as cluster:
            net = nn.Sequential(nn.Linear(4, 128), nn.Tanh(), nn.Linear(128, 128))
            # Sums of the bits of these weights take more memory than the outputs.
            evaluate(DataParallelModel(net, refresh="always"))
            return cluster.peak[0]

    def test_a_graph_and_gathered_outputs_run_out_of_memory(self):
        def kept(model, *device):
            return [model(INPUTS).gather(*device) for _ in range(130)]

        def without_graph(model, *device):
            with savings.inference(model):
                return kept(model, *device)

        def reduced(model):
            with savings.inference(model):
                return [
                    model(INPUTS).map(lambda output: output.argmax(1)).gather() for _ in range(130)
                ]

        text = error_of(lambda: self.peak(kept))
        assert re.search(pattern("out of memory. Tried to allocate …"), text)
        text = error_of(lambda: self.peak(without_graph))
        assert "out of memory" in text
        assert self.peak(lambda model: without_graph(model, "cpu")) < self.peak(reduced) < 2**18

    def test_losses_of_many_steps(self):
        def losses(model, detach):
            criterion = DataParallelCriterion(nn.MSELoss())
            for _ in range(20):
                loss = criterion(model(INPUTS), torch.ones(4, 128))
                kept.append(loss.detach() if detach else loss)

        peaks = []
        for detach in (False, True):
            kept = []
            peaks.append(self.peak(lambda model, detach=detach: losses(model, detach)))
        assert peaks[1] < peaks[0]

    def test_a_state_is_loaded_where_it_was_saved(self):
        with simulate(2, memory=MEMORY) as cluster:
            state = io.BytesIO()
            torch.save(nn.Linear(4, 3).to("sim:1").state_dict(), state)
            before = cluster.live[1]
            for map_location, device in ((None, "sim:1"), ("cpu", "cpu")):
                state.seek(0)
                loaded = torch.load(state, map_location=map_location)
                assert {str(tensor.device) for tensor in loaded.values()} == {device}
                assert (cluster.live[1] > before) == (device == "sim:1")
                del loaded


class Unused(nn.Module):
    """A model with a layer that no row uses."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(4, 3)
        self.unused = nn.Linear(4, 3)

    def forward(self, inputs):
        return self.scores(inputs)


@on_ranks(2)
def test_unused_parameters(rank):
    model, criterion = parallelize(Unused(), CE)
    ddp = nn.parallel.DistributedDataParallel(Unused())

    def backward(times):
        for _ in range(times):
            F.cross_entropy(ddp(INPUTS), TARGETS).backward()

    backward(1)
    text = error_of(lambda: backward(1))
    assert "Expected to have finished reduction in the prior iteration" in text
    for _ in range(2):
        criterion(model(INPUTS), TARGETS).backward()
    twice(model)
    assert model.module.unused.weight.grad is None
    assert "trying to initialize the default process group twice!" in error_of(
        lambda: dist.init_process_group("gloo")
    )


@on_ranks(2)
def test_a_penalty_with_a_constant_matrix_on_shards(rank):
    net = nn.Linear(4, 3)
    before = net.weight.detach().clone()
    model = parallelize(net, strategy="fsdp")

    def penalty():
        return (net.weight - before + 1).square().sum()

    assert "got mixed torch.Tensor and DTensor" in error_of(penalty)
    with implicit_replication():
        penalty().backward()
    assert (net.weight.grad.full_tensor() == 2).all()
    model(INPUTS)


def test_functions_before_the_group_is_started():
    assert "Default process group has not been initialized" in error_of(
        lambda: dist.all_reduce(torch.ones(()))
    )


def test_a_port_in_use():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert "EADDRINUSE" in error_of(
            lambda: dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        )
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def leave_a_rank_waiting(rank):
    """Rank 0 gathers alone, as under ``if rank == 0``. Returns its error and the lines that its stack has."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
    model = parallelize(nn.Linear(4, 3))
    outputs = model(INPUTS)
    if rank == 1:
        return None
    with open("stacks.txt", "w+") as stacks:
        faulthandler.dump_traceback_later(1, file=stacks)
        text = error_of(lambda: gather(outputs))
        stacks.seek(0)
        return text, stacks.read()


def test_a_hang_has_a_timeout_and_a_stack(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (text, stacks), _ = run_ranks(2, leave_a_rank_waiting, fresh=True)
    assert re.search("Timed out waiting 2000ms for (recv|send) operation to complete", text)
    assert "test_texts_of_torch.py" in stacks
    assert "in gather" in stacks
