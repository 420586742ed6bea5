"""Snippets of docs/migrating.md: each leaves the loss and the gradients of the plain program.

The first block of the page is the problem, and the lines of a section before ``DataParallelModel`` change it.
"""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers.pages import PAGES
from helpers.problems import assert_same_gradients, gradients
from torch import Tensor, nn

INTRODUCTION, *SECTIONS = re.split(r"^## ", PAGES["docs/migrating.md"], flags=re.MULTILINE)
(PROBLEM,) = re.findall(r"```python\n(.*?)```", INTRODUCTION, re.DOTALL)
SNIPPETS = {
    section.partition("\n")[0]: re.search(
        r"```python\n(.*?)(^[^\n]*DataParallelModel\(.*?)```", section, re.DOTALL | re.MULTILINE
    )
    for section in SECTIONS
    if "```python" in section
}

# transformers computes the loss of a language model in float32 (ForCausalLMLoss), in an order that depends on the processor
TOLERANCES = {"A model that computes its own loss: Hugging Face": 1e-6}


def several_heads(page):
    scores, logits = page.net(page.inputs)
    weighted = F.cross_entropy(scores, page.targets, weight=page.class_weights)
    return weighted + 0.3 * F.binary_cross_entropy_with_logits(logits, page.tags)


def several_outputs(page):
    main, auxiliary = page.net(page.inputs)
    return F.cross_entropy(main, page.targets) + 0.4 * F.cross_entropy(auxiliary, page.targets)


def autoencoder(page):
    reconstruction, mean, logvar = page.net(page.pixels)
    error = F.binary_cross_entropy(reconstruction, page.pixels, reduction="sum")
    return error - 0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())


def masked(page):
    error = (page.net(page.inputs) - page.values).pow(2).sum(1)
    return (error * page.mask).sum() / page.mask.sum()


def teacher(page):
    with torch.no_grad():
        for value, averaged in zip(page.net.parameters(), page.teacher_net.parameters(), strict=True):
            averaged.mul_(0.9).add_(value, alpha=0.1)
        expected = page.teacher_net(page.inputs * 2)
    return F.mse_loss(page.net(page.inputs), expected)


def hidden_states(page):
    state, losses = (page.hidden, page.cell), []
    for chunk in page.chunks:
        output, state = page.net(chunk, state)
        losses.append(output.pow(2).mean())
        state = tuple(part.detach() for part in state)
    return sum(losses)


def contrastive(page):
    features = F.normalize(page.net(page.inputs), dim=1)
    return F.cross_entropy(features @ features.t() / 0.1, page.labels)


def classes(page):
    return F.cross_entropy(page.net(page.inputs), page.targets)


PROGRAMS = {  # of each section: the loss of the plain program, a function of the names of the page
    "Nothing special": classes,
    "A loss and metrics of its own: one line": classes,
    "Metrics": classes,
    "Several outputs": several_outputs,
    "Several heads with losses of their own": several_heads,
    "A list of outputs: pose estimation, deep supervision": lambda page: sum(
        F.mse_loss(output, page.heatmaps) for output in page.net(page.inputs)
    ),
    "A loss that is a sum: variational autoencoders, `size_average=False`": autoencoder,
    "A mean that divides by something else": masked,
    "A model that computes its own loss: Hugging Face": lambda page: page.net(**page.batch).loss,
    "Detection: lists of images, a mapping of losses": lambda page: sum(page.net(page.images, page.boxes).values()),
    "Adversarial training": lambda page: F.binary_cross_entropy_with_logits(page.critic_net(page.net(page.noise)), page.ones),
    "A teacher, a moving average": teacher,
    "Rows in another dimension": lambda page: F.cross_entropy(page.net(page.sequences).flatten(0, 1), page.tags.flatten()),
    "Hidden states from step to step": hidden_states,
    "A loss over all rows: contrastive, mined triplets": contrastive,
    "A method besides `forward`": lambda page: F.mse_loss(page.net.encode_image(page.inputs), page.values),
    "Several optimizers, and outputs for metrics": classes,
}


def test_every_snippet_has_a_plain_program():
    assert set(SNIPPETS) == set(PROGRAMS)
    assert set(TOLERANCES) <= set(PROGRAMS)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("title", PROGRAMS)
def test_snippets_equal_the_plain_program(title):
    torch.manual_seed(0)
    setup, program = SNIPPETS[title].groups()
    names = {}
    exec(compile(PROBLEM + setup, f"docs/migrating.md: {title}", "exec"), names)
    data = {name: value for name, value in names.items() if isinstance(value, (Tensor, nn.Module, list, tuple, dict))}
    data.pop("__builtins__", None)
    plain = SimpleNamespace(**copy.deepcopy(data))
    loss = PROGRAMS[title](plain)
    loss.backward()
    exec(compile(program, f"docs/migrating.md: {title}", "exec"), names)
    tolerance = TOLERANCES.get(title, 1e-10)
    torch.testing.assert_close(names["loss"].detach(), loss.detach(), rtol=tolerance, atol=tolerance)
    modules = [name for name, value in data.items() if isinstance(value, nn.Module)]
    assert modules
    for name in modules:
        assert_same_gradients(gradients(names[name]), gradients(getattr(plain, name)), tolerance)
