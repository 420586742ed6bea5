"""Random problems, layouts of each, and digests of what training leaves, for ``reproducible="bits"``."""

import contextlib
import hashlib
import random
import time
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from balanced_parallel import BalancedOptimizer, TrainStep, parallelize, simulate
from balanced_parallel.savings import LinearCrossEntropy, checkpoint_activations

CLASSES = 4
TIME = 5
WORDS = 20
_pauses = random.Random(0)  # The layout that runs seeds it.


class Pause(torch.autograd.Function):
    """Waits for a random time in forward and backward, so that devices and ranks arrive in any order."""

    @staticmethod
    def forward(ctx, x, longest):
        ctx.longest = longest
        time.sleep(_pauses.random() * longest)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(_pauses.random() * ctx.longest)
        return gradient, None


class DropPath(nn.Module):
    """Stochastic depth: one draw for each row."""

    def forward(self, x):
        return (
            x * x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(0.7).div_(0.7)
            if self.training
            else x
        )


class Perceptron(nn.Module):
    kind = "vectors"

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(12, width)
        self.middle = nn.Linear(width, width)
        self.last = nn.Linear(width, CLASSES)
        self.drop = nn.Dropout(0.3)
        self.path = DropPath()

    def forward(self, x):
        x = self.drop(self.first(x).tanh())
        return self.last(x + self.path(F.gelu(self.middle(x))))


class Conv(nn.Module):
    kind = "images"

    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(2, width, 3, padding=1)
        self.norm = nn.GroupNorm(2, width)
        self.second = nn.Conv2d(width, width, 3, stride=2)
        self.head = nn.Linear(width, CLASSES)
        self.fixed = nn.BatchNorm2d(width).eval()

    def train(self, mode=True):
        """Leaves the batch norm in evaluation, as detectors do."""
        super().train(mode)
        self.fixed.eval()
        return self

    def forward(self, x):
        x = F.dropout2d(F.relu(self.fixed(self.norm(self.first(x)))), 0.2, self.training)
        return self.head(F.silu(self.second(x)).mean((2, 3)))


class Attention(nn.Module):
    """A model whose head has the weights of the embedding."""

    kind = "words"

    def __init__(self, width):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, batch_first=True)
        self.head.weight = self.words.weight

    def forward(self, words):
        return self.head(self.block(self.words(words)))[..., :CLASSES].transpose(1, 2)


class Bag(nn.Module):
    kind = "words"

    def __init__(self, width):
        super().__init__()
        self.words = nn.Embedding(WORDS, width, padding_idx=0)
        self.bag = nn.EmbeddingBag(WORDS, width, mode="mean")
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES * TIME)

    def forward(self, words):
        x = F.dropout(self.words(words).sum(1), 0.2, self.training) + self.bag(words)
        return self.head(self.norm(x)).unflatten(1, (CLASSES, TIME))


class Recurrent(nn.Module):
    kind = "words"

    def __init__(self, width, cell=nn.LSTM):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.cells = cell(
            width, width, 2, dropout=0.2, batch_first=True, bidirectional=cell is nn.GRU
        )
        self.head = nn.Linear(width * (1 + (cell is nn.GRU)), CLASSES)

    def forward(self, words):
        return self.head(self.cells(self.words(words))[0]).transpose(1, 2)


class Gated(Recurrent):
    def __init__(self, width):
        super().__init__(width, nn.GRU)


class Sometimes(nn.Module):
    """One layer is never used, one only for some rows, and one is frozen."""

    kind = "vectors"

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(12, width)
        self.last = nn.Linear(width, CLASSES)
        self.never = nn.Linear(3, 3)
        self.seldom = nn.Linear(12, CLASSES)
        self.frozen = nn.Linear(width, width).requires_grad_(False)

    def forward(self, x):
        y = self.last(self.frozen(F.dropout(self.first(x).tanh(), 0.2, self.training)))
        few = x[:, 0] > 1
        return y + few.unsqueeze(1) * self.seldom(x) if few.any() else y


NETS = {
    net.__name__: net for net in (Perceptron, Conv, Attention, Bag, Recurrent, Gated, Sometimes)
}


class Slow(nn.Module):
    def __init__(self, net, longest):
        super().__init__()
        self.net = net
        self.longest = longest

    def forward(self, x):
        return Pause.apply(self.net(x), self.longest)


def two_counts(output, labels, values):
    return F.cross_entropy(output, labels) + 0.3 * F.mse_loss(output, values)


def one_count(output, values):
    return F.mse_loss(output, values) + 0.5 * F.l1_loss(output, values)


def several(output, labels, values):
    return {"labels": F.cross_entropy(output, labels), "values": F.mse_loss(output, values)}


class Uncertainty(nn.Module):
    """Two means with learned coefficients."""

    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.tensor([0.1, -0.2]))

    def forward(self, output, labels, values):
        first, second = self.scales.exp()
        return F.cross_entropy(output, labels) * first + F.mse_loss(output, values) * second


def mean_of_rows(output, values):
    return (output - values).square().flatten(1).mean(1).mean()


def focal(output, labels):
    losses = F.cross_entropy(output, labels, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).sum() / (labels != -100).sum()


def count_labels(output, labels):
    return (labels != -100).sum()


def class_weights():
    return torch.linspace(0.5, 2.0, CLASSES)


DIVISORS = {
    "labels": lambda labels, values: (labels != -100).sum(),
    "values": lambda labels, values: values.numel(),
}
# Each: a function that makes the criterion, the weight of its mean, and the targets.
LOSSES = {
    "cross entropy": (nn.CrossEntropyLoss, None, "labels"),
    "weights, smoothing": (
        lambda: nn.CrossEntropyLoss(class_weights(), label_smoothing=0.1),
        None,
        "labels",
    ),
    "sum": (lambda: nn.CrossEntropyLoss(reduction="sum"), None, "labels"),
    "focal": (lambda: focal, count_labels, "labels"),
    "squares": (nn.MSELoss, None, "values"),
    "sum of squares": (lambda: nn.MSELoss(reduction="sum"), None, "values"),
    "rows": (lambda: mean_of_rows, "rows", "values"),
    "one count": (lambda: one_count, None, "values"),
    "two counts": (lambda: two_counts, None, "both"),
    "several": (lambda: several, DIVISORS, "both"),
    "mapping": (lambda: several, None, "both"),
    "uncertainty": (Uncertainty, None, "both"),
    "head": (lambda: LinearCrossEntropy(CLASSES, CLASSES, bias=True), None, "labels"),
}

ELEMENTWISE = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    "AdamW": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    "AMSGrad": (torch.optim.AdamW, {"lr": 0.02, "amsgrad": True, "foreach": False}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
}
OPTIMIZERS = [*ELEMENTWISE, "fused AdamW", "Muon"]


class Problem(NamedTuple):
    """One training. All of it follows from the seed."""

    seed: int
    net: str
    loss: str
    optimizer: str
    dtype: torch.dtype
    precision: str
    rows: tuple[int, ...]  # One number for each update.
    micro_batch_size: int
    ignored: float  # the share of the labels that do not count
    without_labels: int  # an update in which no label counts, or -1
    max_grad_norm: float | None
    has_scheduler: bool
    is_checkpointed: bool  # Activations are computed twice.
    threads: int
    width: int
    pause: float = 0.002  # the longest one in a forward or a backward
    reproducible: bool | str = "bits"


class Layout(NamedTuple):
    """A way to run a problem. Its seed draws the times that devices wait, and the cuts."""

    seed: int = 0
    in_turn: tuple[tuple[str, ...], ...] = (("cpu",),)  # Devices of one process, in each update.
    ranks: int = 1
    adds: bool = False  # rows come in several calls
    shard: str = ""  # The setting of a BalancedOptimizer; empty without one.


def draw_problem(seed, **changes):
    """Returns a problem, the same for the same seed."""
    numbers = random.Random(seed)
    net = numbers.choice([*NETS])
    loss = numbers.choice([*LOSSES])
    if loss == "head" and NETS[net].kind == "words":
        loss = "cross entropy"
    dtype, precision = numbers.choices(
        [
            (torch.float32, "fp32"),
            (torch.float64, "fp32"),
            (torch.float32, "bf16"),
            (torch.bfloat16, "fp32"),
        ],
        [5, 3, 2, 1],
    )[0]
    optimizer = numbers.choice(OPTIMIZERS)
    if NETS[net] is Recurrent and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        precision = "fp32"  # oneDNN has no LSTM in bfloat16 for processors without AVX-512.
    if dtype == torch.bfloat16:
        net = numbers.choice(["Perceptron", "Bag"])
        optimizer = numbers.choice(["SGD", "momentum", "AdamW"])
        loss = numbers.choice(["cross entropy", "sum"])
    threads = numbers.choices([1, 2], [9, 1])[0]
    rows = tuple(numbers.choice([1, 2, 3, 5, 8, 11, 13, 17]) for _ in range(3))
    size = numbers.choice([1, 2, 3, 4, 5])
    if threads > 1:  # these kernels round in another way with other numbers of threads
        net = numbers.choice(["Conv", "Attention", "Bag"])
        loss = "cross entropy" if loss == "head" else loss
        rows = tuple(8 * count for count in rows)
        size = 8 * size
    problem = Problem(
        seed=seed,
        net=net,
        loss=loss,
        optimizer=optimizer,
        dtype=dtype,
        precision=precision,
        rows=rows,
        micro_batch_size=size,
        ignored=numbers.choice([0.0, 0.3, 0.8]),
        without_labels=numbers.choice([-1, -1, -1, 0, 1]) if LOSSES[loss][2] == "labels" else -1,
        max_grad_norm=numbers.choice([None, 0.5, 100.0]),
        has_scheduler=numbers.random() < 0.5,
        is_checkpointed=numbers.random() < 0.15,
        threads=threads,
        width=128 if threads > 1 else 8,
    )
    return problem._replace(**changes)


def draw_layouts(problem, kind, count):
    """Returns layouts of a problem, of kind "replicas", "ranks" or "simulated". The first is one device."""
    numbers = random.Random(f"{problem.seed} {kind}")
    draw = draw_ranks if kind == "ranks" else draw_devices
    layouts = [draw(problem, kind, numbers) for _ in range(count)]
    if kind != "ranks":
        layouts[0] = Layout(problem.seed, (names_of_devices(kind, 1),))
    return layouts


def names_of_devices(kind, count):
    return tuple(f"sim:{place}" if kind == "simulated" else "cpu" for place in range(count))


def draw_ranks(problem, kind, numbers):
    seed = numbers.randrange(10**6)
    shard = numbers.choice(["", "parameters"])
    ranks = numbers.choice([2, 3]) if problem.threads == 1 else 2
    return Layout(seed, ranks=ranks, shard=shard)


def draw_devices(problem, kind, numbers):
    """Returns devices of one process, which may change after each update."""
    whole = problem.optimizer in ("Muon", "fused AdamW") or problem.dtype == torch.bfloat16
    shards = ["", "parameters"] if whole else ["", "elements", "parameters"]
    most = 3 if kind == "simulated" else 4
    in_turn = tuple(
        names_of_devices(kind, numbers.randint(1, most)) for _ in range(numbers.choice([1, 1, 3]))
    )
    adds = numbers.random() < 0.3 and problem.loss != "several"
    return Layout(numbers.randrange(10**6), in_turn, adds=adds, shard=numbers.choice(shards))


def make_net(problem):
    torch.manual_seed(problem.seed)
    net = NETS[problem.net](problem.width)
    if problem.is_checkpointed:
        checkpoint_activations(
            net, blocks=[name for name, child in net.named_children() if [*child.parameters()]][1:2]
        )
    return Slow(net, problem.pause)


def make_batches(problem):
    """Returns inputs and targets of each update."""
    generator = torch.Generator().manual_seed(problem.seed)
    kind = NETS[problem.net].kind
    targets = LOSSES[problem.loss][2]
    batches = []
    for number, rows in enumerate(problem.rows):
        size = {"vectors": (rows, 12), "images": (rows, 2, 7, 7), "words": (rows, TIME)}[kind]
        inputs = torch.randn(size, generator=generator).to(problem.dtype)
        if kind == "words":
            inputs = torch.randint(WORDS, size, generator=generator)
        shape = (TIME,) if kind == "words" else ()
        labels = torch.randint(CLASSES, (rows, *shape), generator=generator)
        is_ignored = torch.rand(labels.shape, generator=generator) < problem.ignored
        labels[is_ignored if number != problem.without_labels else ...] = -100
        if targets == "both":  # nan otherwise, also in the plain program
            labels.view(-1)[0] = 0
        values = torch.randn(rows, CLASSES, *shape, generator=generator).to(problem.dtype)
        batches.append(
            (inputs, {"labels": (labels,), "values": (values,), "both": (labels, values)}[targets])
        )
    return batches


def make_optimizers(problem, model, criterion, shard):
    """Returns the optimizers of all parameters, plain or sharded over devices or ranks."""

    def make(optimizer_class, parameters, **settings):
        if not shard:
            return optimizer_class(parameters, **settings)
        return BalancedOptimizer(model, optimizer_class, parameters, shard, **settings)

    parameters = [*model.parameters(), *criterion.parameters()]
    if problem.optimizer == "fused AdamW":
        return [make(torch.optim.AdamW, parameters, lr=0.02, fused=True)]
    if problem.optimizer != "Muon":
        optimizer_class, settings = ELEMENTWISE[problem.optimizer]
        return [make(optimizer_class, parameters, **settings)]
    matrices = [each for each in parameters if each.dim() == 2]
    others = [each for each in parameters if each.dim() != 2]
    return [make(torch.optim.Muon, matrices, lr=0.02), make(torch.optim.AdamW, others, lr=0.02)]


def make_step(problem, devices, shard=""):
    make_criterion, weight, _ = LOSSES[problem.loss]
    net = make_net(problem).to(problem.dtype)
    model, criterion = parallelize(net, make_criterion(), list(devices), weight=weight)
    criterion = criterion.to(model.devices[0], problem.dtype)
    optimizers = make_optimizers(problem, model, criterion, shard)
    schedulers = (
        [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
        if problem.has_scheduler
        else None
    )
    return TrainStep(
        model,
        criterion,
        optimizers,
        micro_batch_size=problem.micro_batch_size,
        precision=problem.precision,
        max_grad_norm=problem.max_grad_norm,
        scheduler=schedulers,
        reproducible=problem.reproducible,
    )


def cut_groups(rows, size, parts, numbers):
    """Returns slices of rows, each a number of whole groups of ``size``. Some may be empty, and the last rows may be fewer."""
    groups = -(-rows // size)
    ends = sorted(numbers.randint(0, groups) for _ in range(parts - 1))
    return [
        slice(a * size, min(b * size, rows))
        for a, b in zip([0, *ends], [*ends, groups], strict=True)
    ]


def run_update(step, inputs, targets, cuts):
    """Returns the loss of an update whose rows come in one call, or in several."""
    if len(cuts) == 1:
        return step(inputs[cuts[0]], tuple(target[cuts[0]] for target in targets))
    for cut in cuts:
        step.add(inputs[cut], tuple(target[cut] for target in targets))
    return step.apply()


def train(rank, problem, layout):
    """Trains in a layout. Returns digests by name."""
    return {name: digest(value) for name, value in train_values(rank, problem, layout).items()}


def train_values(rank, problem, layout):
    """Trains in a layout. Returns losses, norms and the state in the end, by name. Those of optimizers are of the first rank."""
    _pauses.seed(layout.seed + rank)
    numbers = random.Random(layout.seed)
    torch.set_num_threads(problem.threads)
    torch.set_default_dtype(problem.dtype if problem.dtype != torch.bfloat16 else torch.float32)
    is_simulated = layout.in_turn[0][0].startswith("sim")
    try:
        with simulate(3) if is_simulated else contextlib.nullcontext(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no target of this batch was counted")
            return _train(rank, problem, layout, numbers)
    finally:
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)


def _train(rank, problem, layout, numbers):
    step = None
    devices = None
    found = {}
    torch.manual_seed(problem.seed + 1)
    for number, (inputs, targets) in enumerate(make_batches(problem)):
        present = layout.in_turn[number % len(layout.in_turn)]
        if present != devices:
            before = None if step is None else step.state_dict()
            state = torch.get_rng_state()
            step = make_step(problem, present, layout.shard)
            devices = present
            torch.set_rng_state(state)
            if before is not None:
                step.load_state_dict(before)
        cuts = [slice(0, len(inputs))]
        if layout.ranks > 1:
            cuts = cut_groups(len(inputs), problem.micro_batch_size, layout.ranks, numbers)[
                rank : rank + 1
            ]
        elif layout.adds:
            cuts = cut_groups(len(inputs), problem.micro_batch_size, numbers.randint(2, 3), numbers)
        found[f"loss {number}"] = run_update(step, inputs, targets, cuts)
        # Nothing is updated where there is no label, and the norm is that of the update before.
        if step.grad_norm is not None and not found[f"loss {number}"].isnan():
            found[f"grad_norm {number}"] = step.grad_norm
    state = step.state_dict()
    kept = {"model", "criterion", "optimizers", "schedulers", "weight_before"}
    if rank:
        return found | dict(each_leaf({"model": state["model"], "criterion": state["criterion"]}))
    return (
        found | dict(each_leaf({name: state[name] for name in kept})) | {"random": torch.rand(())}
    )


def each_leaf(tree, name=""):
    """Yields the values of a state with their names."""
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield from each_leaf(child, f"{name}/{key}")
    elif isinstance(tree, (list, tuple)):
        for number, child in enumerate(tree):
            yield from each_leaf(child, f"{name}/{number}")
    else:
        yield name, tree


def digest(value):
    """Returns a text that is equal for equal bits."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    data = value.detach().cpu().contiguous()
    bits = hashlib.sha256(data.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
    return f"{data.dtype} {tuple(data.shape)} {bits}"


def train_all(rank, cases):
    """Returns the digests of several problems, each in a layout."""
    return [train(rank, problem, layout) for problem, layout in cases]


def differences(found, expected, rank=0):
    """Returns the names whose digests differ, or that only one of them has. Ranks but the first have no state of optimizers."""
    missing = [] if rank else [*(expected.keys() - found.keys())]
    return [name for name in found if found[name] != expected.get(name)] + missing
