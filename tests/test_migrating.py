"""Snippets of docs/migrating.md: each leaves the loss and the gradients of the plain program."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers.pages import PAGES, ROWS, public_names
from helpers.problems import CLASSES, assert_same_gradients, build_net, class_targets, gradients
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

PAGE = PAGES["docs/migrating.md"]
SNIPPETS = {
    title: "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    if "```python" in text
}

# transformers computes the loss of a language model in float32 (ForCausalLMLoss), in an order that depends on the processor
TOLERANCES = {"A model that computes its own loss: Hugging Face": 1e-6}
PROGRAMS = {}


def plain_program(title):
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


@plain_program("Nothing special")
def nothing_special():
    return classes(build_net())


@plain_program("A loss and metrics of its own: one line")
def one_line():
    return classes(build_net())


@plain_program("Metrics")
def metrics():
    return classes(build_net())


@plain_program("Several outputs")
def several_outputs():
    def loss(outputs, targets):
        return F.cross_entropy(outputs[0], targets) + 0.4 * F.cross_entropy(outputs[1], targets)

    return classes(Forward(lambda net, x: (net(x), net(x * 2))), loss)


@plain_program("Several heads with losses of their own")
def several_heads():
    def loss(given):
        scores, logits = given.net(given.inputs)
        weighted = F.cross_entropy(scores, given.targets, weight=given.class_weights)
        return weighted + 0.3 * F.binary_cross_entropy_with_logits(logits, given.tags)

    names, _ = classes(Forward(lambda net, x: (net(x), net(x * 2))))
    return names | {"class_weights": torch.rand(CLASSES) + 0.5, "tags": torch.rand(ROWS, CLASSES).round()}, loss


@plain_program("A list of outputs: pose estimation, deep supervision")
def stacks():
    names, plain = classes(
        Forward(lambda net, x: [net(x), net(x * 2), net(x * 3)]),
        lambda outputs, targets: sum(F.mse_loss(output, targets) for output in outputs),
    )
    return names | {"targets": torch.rand(ROWS, CLASSES)}, plain


@plain_program("A loss that is a sum: variational autoencoders, `size_average=False`")
def autoencoder():
    def plain(given):
        reconstruction, mean, logvar = given.net(given.inputs)
        error = F.binary_cross_entropy(reconstruction, given.inputs, reduction="sum")
        return error - 0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())

    net = Forward(lambda net, x: (net(x).sigmoid(), net(x * 2), net(x * 3)), outputs=4)
    return {"net": net, "inputs": torch.rand(ROWS, 4)}, plain


@plain_program("A mean that divides by something else")
def masked():
    def plain(given):
        error = (given.net(given.inputs) - given.targets).pow(2).sum(1)
        return (error * given.mask).sum() / given.mask.sum()

    mask = torch.tensor([1.0, 1, 1, 0, 0, 1, 0])
    return {"net": build_net(), "inputs": torch.randn(ROWS, 4), "targets": torch.rand(ROWS, CLASSES), "mask": mask}, plain


@plain_program("A model that computes its own loss: Hugging Face")
def hugging_face():
    net = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2)).eval()
    batch = {"input_ids": torch.randint(40, (ROWS, 9)), "labels": torch.randint(40, (ROWS, 9))}
    batch["labels"][2:5, 3:] = -100
    return {"net": net, "batch": batch}, lambda given: given.net(**given.batch).loss


@plain_program("Detection: lists of images, a mapping of losses")
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


@plain_program("Adversarial training")
def adversarial():
    names = {"netG": build_net(4), "netD": build_net(1), "noise": torch.randn(ROWS, 4), "real": torch.randn(ROWS, 4)}
    labels = {"ones": torch.ones(ROWS, 1), "zeros": torch.zeros(ROWS, 1)}
    return names | labels, lambda given: F.binary_cross_entropy_with_logits(given.netD(given.netG(given.noise)), given.ones)


@plain_program("A teacher, a moving average")
def teacher():
    def plain(given):
        with torch.no_grad():
            for mine, averaged in zip(given.net.parameters(), given.net_of_teacher.parameters(), strict=True):
                averaged.mul_(0.9).add_(mine, alpha=0.1)
            wanted = given.net_of_teacher(given.inputs * 2)
        return F.mse_loss(given.net(given.inputs), wanted)

    averaged = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    return {"net": build_net(), "net_of_teacher": averaged.requires_grad_(False), "inputs": torch.randn(ROWS, 4)}, plain


@plain_program("Rows in another dimension")
def time_major():
    names = {"net": build_net(), "inputs": torch.randn(5, ROWS, 4), "targets": torch.randint(CLASSES, (5, ROWS))}
    return names, lambda given: F.cross_entropy(given.net(given.inputs).flatten(0, 1), given.targets.flatten())


@plain_program("Hidden states from step to step")
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


@plain_program("A loss over all rows: contrastive, mined triplets")
def contrastive():
    def plain(given):
        features = F.normalize(given.net(given.inputs), dim=1)
        return F.cross_entropy(features @ features.t() / 0.1, given.targets)

    return {"net": build_net(), "inputs": torch.randn(ROWS, 4), "targets": torch.arange(ROWS)}, plain


@plain_program("A method besides `forward`")
def method():
    names = {"net": Forward(None), "inputs": torch.randn(ROWS, 4), "targets": torch.rand(ROWS, CLASSES)}
    return names, lambda given: F.mse_loss(given.net.encode_image(given.inputs), given.targets)


@plain_program("Several optimizers, and outputs for metrics")
def several_optimizers():
    return classes(build_net())


def test_every_snippet_has_a_plain_program():
    assert list(SNIPPETS) == list(PROGRAMS)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("title", PROGRAMS)
def test_snippets_equal_the_plain_program(title):
    torch.manual_seed(0)
    names, plain = PROGRAMS[title]()
    plain_names = copy.deepcopy(names)
    loss = plain(SimpleNamespace(**plain_names))
    loss.backward()
    found = names | public_names()
    exec(compile(SNIPPETS[title], f"docs/migrating.md: {title}", "exec"), found)
    tolerance = TOLERANCES.get(title, 1e-10)
    torch.testing.assert_close(found["loss"].detach(), loss.detach(), rtol=tolerance, atol=tolerance)
    modules = [name for name, value in names.items() if isinstance(value, nn.Module)]
    assert modules
    for name in modules:
        assert_same_gradients(gradients(found[name]), gradients(plain_names[name]), tolerance)
