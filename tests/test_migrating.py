"""Snippets of docs/recipes/dataparallel.md and migrating_loops.md: each leaves the loss and the gradients of the plain program.

Blocks before a snippet, and its own lines before ``DataParallelModel``, are the problem.
"""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers.pages import PAGES, ROOT, blocks
from helpers.problems import assert_equal, assert_same_gradients, gradients
from torch import Tensor, nn
from torch.testing import assert_close

PAGE = "docs/recipes/dataparallel.md"
LOOPS = "tests/migrating_loops.md"


def snippets(text):
    """Returns the problem and the program of each section. The problem begins with those of the sections before."""
    found = {}
    problem = ""
    for section in re.split(r"^#+ (?=[A-Z])", text, flags=re.MULTILINE):
        for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
            program = re.search(r"^[^\n]* DataParallelModel\(.*", block, re.DOTALL | re.MULTILINE)
            problem += block[: program.start()] if program else block
            if program:
                found[section.partition("\n")[0]] = problem, program[0]
    return found


SNIPPETS = {
    PAGE: snippets(PAGES[PAGE]),
    LOOPS: snippets((ROOT / LOOPS).read_text(encoding="utf-8")),
}

# transformers computes the loss of a language model in float32 (ForCausalLMLoss), in an order that depends on the processor
TOLERANCES = {"A language model that computes its own loss": 1e-6}


def several_outputs(page):
    main, other = page.net(page.inputs)
    return F.cross_entropy(main, page.targets) + 0.4 * F.cross_entropy(other, page.targets)


def masked(page):
    error = (page.net(page.inputs) - page.inputs).abs().sum(1)
    return (error * page.mask).sum() / page.mask.sum()


def hidden_states(page):
    state = page.state
    losses = []
    for chunk in page.chunks:
        output, state = page.net(chunk, state)
        losses.append(output.pow(2).mean())
        state = tuple(part.detach() for part in state)
    return sum(losses)


def several_heads(page):
    scores, logits = page.net(page.inputs)
    weighted = F.cross_entropy(scores, page.targets, weight=page.class_weights)
    return weighted + 0.3 * F.binary_cross_entropy_with_logits(logits, page.tags)


def autoencoder(page):
    reconstruction, mean, logvar = page.net(page.pixels)
    error = F.binary_cross_entropy(reconstruction, page.pixels, reduction="sum")
    return error - 0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())


def teacher(page):
    with torch.no_grad():
        for value, averaged in zip(
            page.net.parameters(), page.teacher_net.parameters(), strict=True
        ):
            averaged.mul_(0.9).add_(value, alpha=0.1)
        expected = page.teacher_net(page.inputs * 2)
    return F.mse_loss(page.net(page.inputs), expected)


def contrastive(page):
    features = F.normalize(page.net(page.inputs), dim=1)
    return F.cross_entropy(features @ features.t() / 0.1, page.labels)


def classes(page):
    return F.cross_entropy(page.net(page.inputs), page.targets)


# Each section has the loss of the plain program, a function of the names of the page.
PROGRAMS = {
    PAGE: {
        "The finished program": classes,
        "Several outputs, several losses": several_outputs,
        "A mask": masked,
        "A model that computes its own loss": lambda page: page.net(page.inputs, page.labels),
        "Hidden states": hidden_states,
        "Batch norm": classes,
    },
    LOOPS: {
        "A loss on gathered outputs": classes,
        "Several heads with losses of their own": several_heads,
        "A list of outputs": lambda page: sum(
            F.mse_loss(output, page.heatmaps) for output in page.net(page.inputs)
        ),
        "A loss that is a sum": autoencoder,
        "A language model that computes its own loss": lambda page: page.net(**page.batch).loss,
        "Lists of images, a mapping of losses": lambda page: sum(
            page.net(page.images, page.boxes).values()
        ),
        "Adversarial training": lambda page: F.binary_cross_entropy_with_logits(
            page.critic_net(page.net(page.noise)), page.ones
        ),
        "A teacher, a moving average": teacher,
        "Rows in another dimension": lambda page: F.cross_entropy(
            page.net(page.sequences).flatten(0, 1), page.tags.flatten()
        ),
        "A loss over all rows": contrastive,
        "A method besides forward": lambda page: F.mse_loss(
            page.net.encode_image(page.inputs), page.values
        ),
        "Several optimizers, and outputs for metrics": classes,
    },
}


def test_every_snippet_has_a_plain_program():
    assert {page: list(found) for page, found in SNIPPETS.items()} == {
        page: list(found) for page, found in PROGRAMS.items()
    }


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("page", "title"), [(page, title) for page in PROGRAMS for title in PROGRAMS[page]]
)
def test_snippets_equal_the_plain_program(page, title):
    torch.manual_seed(0)
    problem, program = SNIPPETS[page][title]
    names = {}
    exec(compile(problem, f"{page}: {title}", "exec"), names)
    data = {
        name: value
        for name, value in names.items()
        if isinstance(value, (Tensor, nn.Module, list, tuple, dict))
    }
    data.pop("__builtins__", None)
    plain = SimpleNamespace(**copy.deepcopy(data))
    loss = PROGRAMS[page][title](plain)
    loss.backward()
    exec(compile(program, f"{page}: {title}", "exec"), names)
    tolerance = TOLERANCES.get(title, 1e-10)
    assert_close(names["loss"], loss, rtol=tolerance, atol=tolerance)
    used = re.findall(r"\w+", program)
    modules = [
        name for name, value in data.items() if isinstance(value, nn.Module) and name in used
    ]
    assert modules
    for name in modules:
        assert_same_gradients(gradients(names[name]), gradients(getattr(plain, name)), tolerance)


@pytest.mark.usefixtures("double")
def test_the_difference_of_the_page_keeps_loss_accuracy_and_gradients():
    (difference,) = blocks(PAGE, "diff")
    problem, _ = SNIPPETS[PAGE]["The finished program"]
    found = {}
    for sign in "-+":
        torch.manual_seed(0)
        names = {}
        exec(problem, names)
        lines = [line[1:] for line in difference.splitlines() if line[0] in f" {sign}"]
        exec(
            "\n".join(lines).replace("DataParallelModel(net)", "DataParallelModel(net, DEVICES)"),
            names,
        )
        found[sign] = names
    assert_equal(found["+"]["loss"], found["-"]["loss"])
    assert found["+"]["accuracy"] == found["-"]["accuracy"]
    assert_same_gradients(gradients(found["+"]["net"]), gradients(found["-"]["net"]))


@pytest.mark.usefixtures("double")
def test_the_loop_of_a_step_trains_as_the_loop_with_accumulation():
    """The old loop is exact for micro-batches with the same number of targets."""
    page = "docs/recipes/own_loop.md"
    weights = []
    losses = []
    (difference,), (program, *_) = blocks(page, "diff"), blocks(page, "python")
    for sign in "-+":
        torch.manual_seed(0)
        names = {"DEVICE": "cpu"}
        exec(program[: program.index("step = ")], names)
        loop = "\n".join(line[1:] for line in difference.splitlines() if line[0] == sign)
        loop = loop.replace("torch.bfloat16)", "enabled=False)").replace('"bf16"', '"fp32"')
        if sign == "-":  # the mean over the micro-batches of the last update
            loop = "found = []\n" + loop.replace(
                "    (loss / 4)", "    found.append(loss.item())\n    (loss / 4)"
            )
        exec(loop, names)
        losses.append(sum(names["found"][-4:]) / 4 if sign == "-" else names["loss"].item())
        weights.append(names["net"].state_dict())
        assert names["scheduler"].last_epoch == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    assert_equal(*weights)
