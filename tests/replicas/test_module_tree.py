"""Trees with tied parameters, parameter lists, buffers that learn, and modules that are false.

Weights of RNNs on every device in one buffer, in cuDNN's order. A stand-in for cuDNN lays them out and checks them.

Modules that cannot be replicated.
"""

import collections
import copy
import functools
import itertools
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from helpers import caches
from helpers.optimizers import assert_same, balanced_or_plain, sgd
from helpers.problems import assert_same_gradients, build_net, gradients
from helpers.ranks import on_ranks
from helpers.slow import slow_but
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.testing import assert_close

from balanced_parallel import DataParallelModel, gather, parallelize, simulate


class WithALearnedBuffer(nn.Module):
    """Two names for one buffer that learns, and one that does not."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(4, 4)
        self.register_buffer("prompt", torch.linspace(1, 2, 4).requires_grad_())
        self.register_buffer("again", self.prompt)
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x):
        return (self.scale(x) * self.prompt + self.offset) * self.again


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize("devices", [["cpu"] * 3, None])
def test_gradients_of_buffers_are_summed_over_replicas(double, devices):
    x = torch.randn(7, 4)
    net = WithALearnedBuffer()
    net(x).square().sum().backward()
    expected = [*gradients(net), net.prompt.grad]
    with simulate(3):
        parallel = copy.deepcopy(net)
        parallel.zero_grad()
        parallel.prompt = parallel.again = (
            parallel.prompt.detach().to("cpu" if devices else "sim:0").requires_grad_()
        )
        model = DataParallelModel(parallel, devices)
        with torch.no_grad():
            assert not any(output.requires_grad for output in model(x))
        gather(model(x)).square().sum().backward()
        found = [*gradients(parallel), parallel.prompt.grad.cpu()]
        assert_same_gradients(found, expected)


CPUS = ["cpu"] * 3


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x):
        return self.output(self.embedding(x))


class UsesItsParameters(nn.Module):
    """A module that torch's replicas cannot run: it asks for its parameters, and keeps some in a ParameterList."""

    def __init__(self):
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(3), torch.randn(3)])
        self.named = nn.ParameterDict({"a": torch.randn(3)})
        self.plain = [*self.listed]

    def forward(self, x):
        first = next(self.parameters())
        assert isinstance(first, nn.Parameter)
        assert (first.device, first.dtype) == (x.device, x.dtype)
        assert (len(self.listed), len(list(self.parameters()))) == (2, 3)
        return x * self.listed[0] + sum(self.plain) * self.named["a"]


class Falsy(nn.Linear):
    """A module that is false, as an empty container is; its parameters are copied all the same."""

    def __len__(self):
        return 0


CASES = {
    "tied": (Tied, lambda: torch.randint(7, (6,))),
    "parameters": (UsesItsParameters, lambda: torch.randn(6, 3)),
    "weight_norm": (lambda: weight_norm(nn.Linear(3, 2)), lambda: torch.randn(6, 3)),
    "spectral_norm": (lambda: spectral_norm(nn.Linear(3, 2)).eval(), lambda: torch.randn(6, 3)),
    "lstm": (lambda: Last(3, 2, 2, batch_first=True), lambda: torch.randn(6, 5, 3)),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
        lambda: torch.randn(6, 5, 4),
    ),
    "a false module": (lambda: nn.Sequential(Falsy(3, 2)), lambda: torch.randn(6, 3)),
    "shared module": (lambda: nn.Sequential(*[nn.Linear(3, 3)] * 2), lambda: torch.randn(6, 3)),
}


class Last(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("devices", [CPUS, None])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_tied_and_listed_parameters_equal_the_plain_program(name, devices):
    build, make = CASES[name]
    module = build()
    x = make()
    module(x).pow(2).sum().backward()
    expected = gradients(module)
    module.zero_grad()
    with simulate(3):
        gather(DataParallelModel(module, devices)(x)).pow(2).sum().backward()
        assert_same_gradients(gradients(module), expected)


class Capturing(nn.Module):
    """Registers a hook at its first call, as transformers does."""

    def __init__(self, kind):
        super().__init__()
        self.layer = nn.Linear(4, 5)
        self.kind = kind
        self.is_hooked = False

    def forward(self, x):
        captured = []
        if not self.is_hooked:
            register = getattr(self.layer, f"register_forward_{self.kind}")
            register(lambda *_, **__: captured.append(None), with_kwargs=True)
            self.is_hooked = True
        self.layer(x)
        return torch.tensor([len(captured)])


@pytest.mark.parametrize("kind", ["hook", "pre_hook"])
def test_hooks_that_a_replica_registers_are_its_own(kind):
    """An adapter of peft passes values of its rows in such a hook."""
    net = Capturing(kind)
    assert DataParallelModel(net, ["cpu"] * 3)(torch.randn(7, 4)).gather().tolist() == [1, 1, 1]
    assert len(getattr(net.layer, f"_forward_{kind}s")) == 1


KINDS = {
    "lstm": lambda: nn.LSTM(3, 2, 2, bidirectional=True),
    "gru without bias": lambda: nn.GRU(3, 2, 2, bias=False),
    "projected": lambda: nn.LSTM(3, 4, proj_size=2),
}


@pytest.fixture
def flattened(monkeypatch):
    """Replaces ``flatten_parameters``, which does nothing without CUDA, and counts its calls by device."""
    calls = collections.Counter()

    @torch.no_grad()
    def flatten_parameters(self):
        weights = self._flat_weights
        calls[str(weights[0].device)] += 1
        buffer = torch.cat([weight.flatten() for weight in in_order(weights)])
        pieces = buffer.split([weight.numel() for weight in in_order(weights)])
        for weight, piece in zip(in_order(weights), pieces, strict=True):
            weight.set_(piece.view(weight.shape))

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten_parameters)
    return calls


def in_order(weights):
    """Returns the matrices of all layers before their biases."""
    return sorted(weights, key=lambda weight: -weight.dim())


def is_flat(weights):
    """Returns True if the weights are as ``try_get_weight_buf`` of torch's ``cudnn/RNN.cpp`` expects them."""
    storage = weights[0].untyped_storage().data_ptr()
    offset = 0
    for weight in in_order(weights):
        if weight.data_ptr() != storage + offset or not weight.is_contiguous():
            return False
        offset += weight.nbytes
    return weights[0].untyped_storage().nbytes() == offset


class Reads(nn.Module):
    """An RNN that records in each forward whether cuDNN could take its weights as they are."""

    def __init__(self, kind):
        super().__init__()
        self.rnn = KINDS[kind]()
        self.found = []

    def forward(self, x):
        output, _ = self.rnn(x)
        own = [getattr(self.rnn, name) for name in self.rnn._flat_weights_names]
        same = all(one is other for one, other in zip(own, self.rnn._flat_weights, strict=True))
        self.found.append((str(x.device), is_flat(self.rnn._flat_weights) and same))
        return output


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    ("kind", "is_sharded"), [*itertools.product(KINDS, [False]), ("lstm", True)]
)
def test_weights_are_flat_on_every_device_and_flattened_once(flattened, kind, is_sharded):
    def train(net, forward, optimizer):
        x = torch.linspace(-1, 1, 72).view(4, 6, 3)
        for _ in range(3):
            optimizer.zero_grad()
            forward(x).pow(2).sum().backward()
            optimizer.step()

    plain = Reads(kind)
    with simulate(3):
        net = copy.deepcopy(plain)
        model = DataParallelModel(net, dim=1)
        flattened.clear()
        optimizer = balanced_or_plain(model, torch.optim.SGD, is_sharded)
        train(net, lambda x: gather(model(x), "cpu", dim=1), optimizer)
        assert sorted(net.found) == [(f"sim:{index}", True) for index in range(3) for _ in range(3)]
        # The parameters themselves were flattened as they were moved.
        assert flattened == {"sim:1": 1, "sim:2": 1}
        assert is_flat(net.rnn._flat_weights)
        own = zip(net.rnn._flat_weights, net.rnn.parameters(), strict=True)
        assert all(one is other for one, other in own)
        train(plain, plain, sgd(plain))
        assert_same(net, plain, 1e-5)


def with_max_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 3, max_norm=1.0), nn.Flatten(), nn.Linear(6, 2)).double()


RESCALES = r"the embedding '0' has max_norm=1: .* expected max_norm=None: rescale all rows after each update"


@pytest.mark.usefixtures("double")
def test_embeddings_that_rescale_their_rows_are_refused_on_several_devices():
    """Each device rescales the rows that it sees, in a weight of its own."""
    tokens = torch.randint(7, (5, 2))
    expected = with_max_norm()(tokens)
    assert_close(
        DataParallelModel(with_max_norm(), CPUS)(tokens).gather(), expected
    )  # they share one weight
    with simulate(2):
        model = DataParallelModel(with_max_norm().to("sim:0"))
        with pytest.raises(ValueError, match=RESCALES):
            model(tokens.to("sim:0"))
        with torch.no_grad():
            assert_close(model(tokens.to("sim:0")).gather().cpu(), expected)
        model.module[0].requires_grad_(False)
        assert model(tokens.to("sim:0"))


@pytest.mark.slow
@on_ranks(2)
def test_embeddings_that_rescale_their_rows_are_refused_on_several_ranks(rank):
    for strategy in ("ddp", "fsdp"):
        with pytest.raises(ValueError, match=RESCALES):
            parallelize(with_max_norm(), nn.CrossEntropyLoss(), strategy=strategy)


CACHED = [*itertools.product(caches.KINDS, caches.ROWS)]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("kind", "rows"), slow_but(CACHED, *zip(caches.KINDS, caches.ROWS[1:], strict=True))
)
def test_tensors_in_plain_attributes_are_on_the_device_of_their_replica(kind, rows):
    caches.check_caches(kind, rows)


class Patched(nn.Module):
    """A module with a forward that a program has put on it, and a method of another module."""

    def __init__(self, make):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 2)
        self.project = self.second.forward
        self.forward = make(self)

    def forward(self, inputs):
        return self.project(self.first(inputs))


def around(net):
    """Returns a function around the forward, as TRL makes a fused head."""
    forward = net.forward

    def call(*inputs, factor=2.0):
        assert call
        return forward(*inputs) * factor

    return call


def within(function):
    return lambda _, inputs: function(inputs)


PATCHES = {
    "method": lambda net: MethodType(lambda net, x: net.project(net.first(x)), net),
    "closure": around,
    "method with a closure": lambda net: MethodType(within(around(net)), net),
    "partial": lambda net: functools.partial(lambda net, x: net.project(net.first(x)), net),
}


@pytest.mark.parametrize("make", PATCHES.values(), ids=PATCHES)
def test_methods_and_functions_on_a_module_are_bound_to_the_replica(make):
    net = Patched(make)
    inputs = torch.randn(4, 3)
    expected = net(inputs)
    with simulate(2):
        model = DataParallelModel(net, [0, 1])
        outputs = model(inputs)
        assert [str(output.device) for output in outputs] == ["sim:0", "sim:1"]
        assert_close(outputs.gather("cpu"), expected)
        model.module.project = model.module.first.forward  # the same number of attributes
        assert [output.shape[1] for output in model(inputs)] == [3, 3]


class Words(nn.Module):
    """An embedding, or a bag of them, by a function of torch."""

    def __init__(self, function, **settings):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 3))
        self.function = function
        self.settings = settings

    def forward(self, tokens):
        return self.function(tokens, self.weight, **self.settings).flatten(1)


COUNTED = {
    "embedding": lambda: nn.Sequential(nn.Embedding(7, 3, scale_grad_by_freq=True), nn.Flatten()),
    "bag": lambda: nn.EmbeddingBag(7, 3, scale_grad_by_freq=True),
    "function": lambda: Words(F.embedding, scale_grad_by_freq=True),
    "function of a bag": lambda: Words(F.embedding_bag, scale_grad_by_freq=True),
}
COUNTS = "an embedding has scale_grad_by_freq=True, so its gradient is divided by the counts of one forward, expected False"


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kind", COUNTED)
def test_gradients_that_are_divided_by_counts_of_a_forward_are_refused(kind, devices):
    """The counts were those of a replica or a micro-batch: gradients were up to twice too large."""
    tokens = torch.randint(7, (5, 2))
    model = DataParallelModel(COUNTED[kind](), ["cpu"] * devices)
    with torch.no_grad():
        model(tokens)
    with pytest.raises(ValueError, match=COUNTS):
        model(tokens)
    model = DataParallelModel(COUNTED[kind]().requires_grad_(False), ["cpu"] * devices)
    assert model(tokens)


def assert_later_settings_are_refused(model, tokens):
    for name, value, text in (("max_norm", 1.0, RESCALES), ("scale_grad_by_freq", True, COUNTS)):
        model(tokens)
        before = getattr(model.module[0], name)
        setattr(model.module[0], name, value)
        with pytest.raises(ValueError, match=text):
            model(tokens)
        setattr(model.module[0], name, before)


def test_settings_of_embeddings_that_are_assigned_later_are_refused():
    """The first forward alone was looked at: gradients were up to twice too large, silently."""
    net = nn.Sequential(nn.Embedding(7, 3), nn.Flatten())
    with simulate(2):
        assert_later_settings_are_refused(DataParallelModel(net), torch.randint(7, (5, 2)))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@on_ranks(2)
def test_settings_of_embeddings_that_are_assigned_later_are_refused_on_ranks(rank, strategy):
    model = parallelize(nn.Sequential(nn.Embedding(7, 3), nn.Flatten()), strategy=strategy)
    assert_later_settings_are_refused(model, torch.randint(7, (5, 2)))


EMBEDDED = "F.embedding was given max_norm=, and each device or rank would rescale the rows"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@on_ranks(2)
def test_embeddings_of_functions_are_refused_on_several_ranks(rank, strategy):
    """The second rank has no rows for those with a largest norm."""
    tasks = [(COUNTED["function"], 5, COUNTS)]
    for function in (F.embedding, F.embedding_bag):
        tasks.append((functools.partial(Words, function, max_norm=1.0), 0, EMBEDDED))
    for make, rows, text in tasks:
        model = parallelize(make(), strategy=strategy)
        with pytest.raises(ValueError, match=text):
            model(torch.randint(7, (rows if rank else 5, 2)))


@pytest.mark.parametrize("function", [F.embedding, F.embedding_bag])
@pytest.mark.parametrize("rows", [1, 6])
def test_embeddings_of_functions_that_rescale_are_refused_on_several_devices(function, rows):
    """Each device rescaled its own rows, and those of the others were lost, silently."""
    with simulate(2) as machine:
        model = DataParallelModel(Words(function, max_norm=1.0).to("sim:0"), machine.devices)
        model(torch.randint(7, (1, 2)))  # one device has all rows
        before = [each.tolist() for each in model.parameters()]
        with pytest.raises(ValueError, match=EMBEDDED):
            model(torch.randint(7, (2 * rows, 2)))
        assert [each.tolist() for each in model.parameters()] == before  # nothing was written


@pytest.mark.libraries
def test_lora_of_parameters_is_refused():
    """peft registers a parametrization in each forward, for which replicas have no class."""
    peft = pytest.importorskip("peft")
    net = peft.get_peft_model(
        build_net(), peft.LoraConfig(r=1, target_parameters=["0.weight"], target_modules=[])
    )
    net(torch.randn(3, 4))
    with pytest.raises(
        TypeError,
        match=r"LoraConfig\(target_parameters=...\) registers a parametrization in each forward",
    ):
        DataParallelModel(net, ["cpu"] * 2)(torch.randn(4, 4))
