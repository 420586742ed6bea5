"""Snippets, commands and links of the README and of docs/.

Each snippet of docs/migrating.md leaves the loss and the gradients of the plain program. The snippets of every other page run in
their order. Command lines are parsed, links lead to files and headings.
"""

import copy
import functools
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import CLASSES, assert_same_gradients, build_net, class_targets, gradients
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import balanced_parallel
import balanced_parallel.__main__

ROOT = Path(__file__).parent.parent
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
LINKING = PAGES | {name: (ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "CHANGELOG.md")}
PAGE = PAGES["docs/migrating.md"]
SNIPPETS = {
    title: "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    if "```python" in text
}
PROGRAMS = {}
ROWS = 7


def program(title):
    """Registers a function that returns the names of a snippet, and the plain program's loss as a function of them."""

    def register(make):
        PROGRAMS[title] = make
        return make

    return register


class Forward(nn.Module):
    def __init__(self, function, outputs=CLASSES):
        super().__init__()
        self.net, self.function = build_net(outputs), function

    def forward(self, *inputs):
        return self.function(self.net, *inputs)

    def encode_image(self, x):
        return self.net(x).tanh()


def classes(net, loss=F.cross_entropy):
    names = {"net": net, "inputs": torch.randn(ROWS, 4), "targets": class_targets(ROWS)}
    return names, lambda given: loss(given.net(given.inputs), given.targets)


@program("Nothing special")
def nothing_special():
    return classes(build_net())


@program("A loss and metrics of its own: one line")
def one_line():
    return classes(build_net())


@program("Metrics")
def metrics():
    return classes(build_net())


@program("Several outputs")
def several_outputs():
    def loss(outputs, targets):
        return F.cross_entropy(outputs[0], targets) + 0.4 * F.cross_entropy(outputs[1], targets)

    return classes(Forward(lambda net, x: (net(x), net(x * 2))), loss)


@program("A list of outputs: pose estimation, deep supervision")
def stacks():
    names, plain = classes(
        Forward(lambda net, x: [net(x), net(x * 2), net(x * 3)]),
        lambda outputs, targets: sum(F.mse_loss(output, targets) for output in outputs),
    )
    return names | {"targets": torch.rand(ROWS, CLASSES)}, plain


@program("A loss that is a sum: variational autoencoders, `size_average=False`")
def autoencoder():
    def plain(given):
        reconstruction, mean, logvar = given.net(given.inputs)
        error = F.binary_cross_entropy(reconstruction, given.inputs, reduction="sum")
        return error - 0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())

    net = Forward(lambda net, x: (net(x).sigmoid(), net(x * 2), net(x * 3)), outputs=4)
    return {"net": net, "inputs": torch.rand(ROWS, 4)}, plain


@program("A mean that divides by something else")
def masked():
    def plain(given):
        error = (given.net(given.inputs) - given.targets).pow(2).sum(1)
        return (error * given.mask).sum() / given.mask.sum()

    mask = torch.tensor([1.0, 1, 1, 0, 0, 1, 0])
    return {"net": build_net(), "inputs": torch.randn(ROWS, 4), "targets": torch.rand(ROWS, CLASSES), "mask": mask}, plain


@program("A model that computes its own loss: Hugging Face")
def hugging_face():
    net = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2)).eval()
    batch = {"input_ids": torch.randint(40, (ROWS, 9)), "labels": torch.randint(40, (ROWS, 9))}
    batch["labels"][2:5, 3:] = -100
    return {"net": net, "batch": batch}, lambda given: given.net(**given.batch).loss


@program("Detection: lists of images, a mapping of losses")
def detection():
    def losses(net, images, targets):
        scores = torch.stack([net(image.mean((1, 2))) for image in images])
        boxes = sum(target["boxes"].sum() * score.sum() for target, score in zip(targets, scores, strict=True))
        return {
            "loss_class": scores.pow(2).mean(),
            "loss_box": boxes / max(sum(len(target["boxes"]) for target in targets), 1),
        }

    images = [torch.rand(4, height, 5) for height in (4, 5, 6, 7)]
    targets = [{"boxes": torch.rand(count, 4)} for count in (1, 0, 3, 2)]
    names = {"net": Forward(losses), "images": images, "targets": targets}
    return names, lambda given: sum(given.net(given.images, given.targets).values())


@program("Adversarial training")
def adversarial():
    names = {"netG": build_net(4), "netD": build_net(1), "noise": torch.randn(ROWS, 4), "real": torch.randn(ROWS, 4)}
    labels = {"ones": torch.ones(ROWS, 1), "zeros": torch.zeros(ROWS, 1)}
    return names | labels, lambda given: F.binary_cross_entropy_with_logits(given.netD(given.netG(given.noise)), given.ones)


@program("A teacher, a moving average")
def teacher():
    def plain(given):
        with torch.no_grad():
            for mine, averaged in zip(given.net.parameters(), given.net_of_teacher.parameters(), strict=True):
                averaged.mul_(0.9).add_(mine, alpha=0.1)
            wanted = given.net_of_teacher(given.inputs * 2)
        return F.mse_loss(given.net(given.inputs), wanted)

    averaged = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    return {"net": build_net(), "net_of_teacher": averaged.requires_grad_(False), "inputs": torch.randn(ROWS, 4)}, plain


@program("Rows in another dimension")
def time_major():
    names = {"net": build_net(), "inputs": torch.randn(5, ROWS, 4), "targets": torch.randint(CLASSES, (5, ROWS))}
    return names, lambda given: F.cross_entropy(given.net(given.inputs).flatten(0, 1), given.targets.flatten())


@program("Hidden states from step to step")
def hidden_states():
    def plain(given):
        state, losses = (given.hidden, given.cell), []
        for chunk in given.chunks:
            output, state = given.lstm(chunk, state)
            losses.append(output.pow(2).mean())
            state = tuple(part.detach() for part in state)
        return sum(losses)

    states = {"hidden": torch.zeros(1, ROWS, 6), "cell": torch.zeros(1, ROWS, 6)}
    return {"lstm": nn.LSTM(4, 6), "chunks": torch.randn(3, 5, ROWS, 4).unbind()} | states, plain


@program("A loss over all rows: contrastive, mined triplets")
def contrastive():
    def plain(given):
        features = F.normalize(given.net(given.inputs), dim=1)
        return F.cross_entropy(features @ features.t() / 0.1, given.targets)

    return {"net": build_net(), "inputs": torch.randn(ROWS, 4), "targets": torch.arange(ROWS)}, plain


@program("A method besides `forward`")
def method():
    names = {"net": Forward(None), "inputs": torch.randn(ROWS, 4), "targets": torch.rand(ROWS, CLASSES)}
    return names, lambda given: F.mse_loss(given.net.encode_image(given.inputs), given.targets)


@program("Several optimizers, and outputs for metrics")
def several_optimizers():
    return classes(build_net())


def test_every_snippet_has_its_plain_program():
    assert list(SNIPPETS) == list(PROGRAMS)


def public_names():
    """Public names, with three replicas on the CPU unless a snippet names its devices or imports the class."""
    public = {name: getattr(balanced_parallel, name) for name in balanced_parallel.__all__}
    three = functools.partial(balanced_parallel.DataParallelModel, device_ids=["cpu"] * 3)
    return public | {"DataParallelModel": three, "balanced_parallel": balanced_parallel, "torch": torch, "nn": nn, "F": F}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("title", PROGRAMS)
def test_snippet_gives_the_loss_and_the_gradients_of_the_plain_program(title):
    torch.manual_seed(0)
    names, plain = PROGRAMS[title]()
    plain_names = copy.deepcopy(names)
    loss = plain(SimpleNamespace(**plain_names))
    loss.backward()
    found = names | public_names()
    exec(compile(SNIPPETS[title], f"docs/migrating.md: {title}", "exec"), found)
    torch.testing.assert_close(found["loss"].detach(), loss.detach(), rtol=1e-10, atol=1e-10)
    modules = [name for name, value in names.items() if isinstance(value, nn.Module)]
    assert modules
    for name in modules:
        assert_same_gradients(gradients(found[name]), gradients(plain_names[name]))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.RNN(4, 3)

    def forward(self, sequence, scale):
        return self.layer(sequence * scale)[0]


def page_names(rows):
    """Names that pages use and do not define."""
    net = build_net()
    model = balanced_parallel.DataParallelModel(net, ["cpu"] * 3)
    inputs, targets = torch.randn(rows, 4), class_targets(rows, ignored=2)
    return public_names() | {
        "net": net,
        "model": model,
        "criterion": balanced_parallel.DataParallelCriterion(nn.CrossEntropyLoss()),
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "inputs": inputs,
        "targets": targets,
        "values": torch.rand(ROWS, CLASSES),
        "mask": torch.tensor([1.0, 1, 1, 0, 0, 1, 0]),
        "loader": [(inputs, targets), (inputs[:4], targets[:4])],
        "micro_batches": [(inputs, targets), (inputs[:4], targets[:4])],
        "recurrent": Recurrent(),
        "sequence": torch.randn(5, ROWS, 4),
        "scale": torch.ones(4),
        "net_of_teacher": build_net(),
    }


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


WITH_SNIPPETS = [page for page in PAGES if page != "docs/migrating.md" and blocks(page, "python")]


@pytest.mark.parametrize("page", WITH_SNIPPETS)
def test_snippets_of_a_page_run_in_their_order(page):
    torch.manual_seed(0)
    names = page_names(rows=2048 if page == "docs/memory.md" else ROWS)  # fewer do not show in the peak
    for snippet in blocks(page, "python"):
        exec(compile(snippet, page, "exec"), names)
    loss = names.get("loss", torch.zeros(()))
    assert loss.device.type == "sim" or loss.isfinite()


def test_most_pages_have_snippets():
    assert {"README.md", "docs/quickstart.md", "docs/exactness.md", "docs/balance.md", "docs/memory.md"} <= set(WITH_SNIPPETS)


@pytest.mark.usefixtures("double")
def test_the_three_lines_of_the_readme_give_the_same_loss_accuracy_and_gradients():
    (difference,) = blocks("README.md", "diff")
    found = {}
    for sign in "-+":
        wrap_model, wrap_criterion, metric = (line[1:] for line in difference.splitlines() if line.startswith(sign))
        names = public_names() | {"net": build_net(), "inputs": torch.ones(ROWS, 4), "targets": class_targets(ROWS, ignored=2)}
        middle = ["outputs = model(inputs)", "loss = criterion(outputs, targets)", "loss.backward()"]
        exec("\n".join([wrap_model, wrap_criterion, *middle, metric]), names)
        found[sign] = names
    torch.testing.assert_close(found["+"]["loss"], found["-"]["loss"], rtol=1e-10, atol=1e-10)
    assert found["+"]["accuracy"] == found["-"]["accuracy"]
    assert_same_gradients(gradients(found["+"]["net"]), gradients(found["-"]["net"]))


def commands():
    """Yields the page and the words of each command line with a program of this repository."""
    for page in PAGES:
        for block in blocks(page, "bash"):
            for line in block.splitlines():
                for command in line.split("&&"):
                    if re.search(r"scripts/|examples/|benchmarks/|-m balanced_parallel", command):
                        yield page, shlex.split(command)


def test_flags_of_commands_exist(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    train = importlib.import_module("arguments").make_parser()
    seen = []
    for page, words in commands():
        place = next(i for i, word in enumerate(words) if word.endswith(".py") or word == "balanced_parallel")
        program, flags = words[place], words[place + 1 :]
        seen.append((page, program))
        if program == "balanced_parallel":
            balanced_parallel.__main__.make_parser().parse_args(flags)
            continue
        assert (ROOT / program).exists(), f"{page} runs {program}"
        if program == "scripts/train.py":
            train.parse_args(flags)
        else:
            assert not flags, f"{page} has flags of {program} that no test parses"
    assert ("README.md", "scripts/train.py") in seen
    assert ("docs/memory.md", "balanced_parallel") in seen


def test_the_command_line_of_the_page_about_memory_runs(tmp_path):
    (block,) = (block for block in blocks("docs/memory.md", "bash") if "my_file.py" in block)
    script = "set -e\n" + block.replace(".venv/bin/python", shlex.quote(sys.executable))
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "chosen: " in done.stdout
    assert done.stdout.splitlines()[-1] == "nothing found: Sequential runs as replicas"


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", LINKING)
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", LINKING[page]):
        if link.startswith("http"):
            continue
        path, _, fragment = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page} links to {link}"
        if fragment:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert fragment in map(anchor, headings), f"{page} links to {link}"


def test_the_readme_sells_in_25_lines_and_ends_after_100():
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 100
    first = "\n".join(lines[:25])
    for part in (
        "docs/images/memory.png",
        "```diff",
        "2.6 → 1.0",
        "0.35 → 6e-16",
        "pip install",
        "scripts/train.py --simulate 4 --plot",
    ):
        assert part in first


def test_the_numbers_of_the_readme_are_those_of_the_benchmarks():
    balance = (ROOT / "benchmarks" / "balance" / "README.md").read_text()
    expected = {"nn.DataParallel": 2.6, "balanced_parallel": 1.2, "+ BalancedOptimizer": 1.0}
    ratios = {name: float(re.search(rf"\| 4 +\| {re.escape(name)} +\|[^|]*\| ([\d.]+)", balance)[1]) for name in expected}
    assert {name: round(ratio, 1) for name, ratio in ratios.items()} == expected
    exactness = (ROOT / "benchmarks" / "exactness" / "README.md").read_text()
    errors = [float(error) for error in re.findall(r"\| (?:hand-written DDP|balanced_parallel) \|[^|]*\| ([\de.-]+)", exactness)]
    assert [round(errors[0], 2), float(f"{errors[1]:.0e}")] == [0.35, 6e-16]


def test_every_public_name_is_in_the_api_and_every_page_in_the_index():
    for name in balanced_parallel.__all__:
        assert f"`{name}" in PAGES["docs/api.md"], name
    for page in set(PAGES) - {"README.md", "docs/README.md"}:
        assert f"({Path(page).name})" in PAGES["docs/README.md"], page
