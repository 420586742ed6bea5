"""Updates in the user's own words: several models, optimizers and backwards."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from balanced_parallel import memory, simulate

NOISE = 32


def dcgan():
    """A generator and a discriminator of images of 16 x 16."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(NOISE, 64, 4),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 3, 4, 2, 1),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(64, 1, 4),
        nn.Flatten(0),
    )
    return nn.ModuleDict({"generator": generator, "discriminator": discriminator})


def optimizers_of(nets):
    adam = functools.partial(torch.optim.Adam, foreach=False)
    return {name: adam(net.parameters()) for name, net in nets.items()}


def update_of_gan(nets, optimizers, images):
    real = torch.ones(len(images), device=images.device)
    optimizers["discriminator"].zero_grad()
    noise = torch.randn(len(images), NOISE, 1, 1, device=images.device)
    fakes = nets["generator"](noise)
    loss = F.binary_cross_entropy_with_logits(nets["discriminator"](images), real)
    loss.backward()
    outputs = nets["discriminator"](fakes.detach())
    F.binary_cross_entropy_with_logits(outputs, torch.zeros_like(real)).backward()
    optimizers["discriminator"].step()
    optimizers["generator"].zero_grad()
    F.binary_cross_entropy_with_logits(nets["discriminator"](fakes), real).backward()
    optimizers["generator"].step()


def teacher_and_student():
    teacher = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 100))
    student = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 100))
    return nn.ModuleDict({"teacher": teacher.requires_grad_(False), "student": student})


def optimizer_of_student(nets):
    return torch.optim.Adam(nets["student"].parameters(), foreach=False)


def update_of_student(nets, optimizer, inputs, targets):
    with torch.no_grad():
        goal = nets["teacher"](inputs).softmax(-1)
    outputs = nets["student"](inputs)
    loss = F.cross_entropy(outputs, targets) + F.cross_entropy(outputs, goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


CASES = {
    "DCGAN": (dcgan, optimizers_of, update_of_gan, (torch.zeros(64, 3, 16, 16),)),
    "distillation": (
        teacher_and_student,
        optimizer_of_student,
        update_of_student,
        (torch.zeros(64, 256), torch.zeros(64, dtype=torch.int64)),
    ),
}


def problem_of(name):
    build, optimizer, update, (inputs, *targets) = CASES[name]
    settings = {"optimizer": optimizer, "layout": "step", "device_kind": "sim"}
    return (build(), update, inputs, tuple(targets)), settings


@pytest.mark.parametrize("name", CASES)
def test_a_step_of_the_user_needs_what_is_predicted(name):
    build, make_optimizer, update, batch = CASES[name]
    problem, settings = problem_of(name)
    report = memory.estimate(*problem, **settings)
    with simulate(devices=1) as cluster:
        nets = build().to("sim:0")
        optimizer = make_optimizer(nets)
        for _ in range(3):
            update(nets, optimizer, *(each.to("sim:0") for each in batch))
        assert report.allocated[0] == pytest.approx(cluster.peak[0], rel=0.02)
    assert report.parts[0]["optimizer state"] > 0
    assert set(report.phases) == {"backward", "update"}
    assert report.affine
    assert report.at(128)[0] > report.allocated[0]


def test_a_whole_step_has_no_other_settings():
    problem, settings = problem_of("distillation")
    for other in ({"micro_batch_size": 4}, {"mode": "evaluate"}, {"devices": 2}):
        with pytest.raises(ValueError, match="layout='step'"):
            memory.estimate(*problem, **settings, **other)


def test_a_plan_of_a_whole_step_fits_or_tries_what_needs_no_knowledge_of_it():
    problem, settings = problem_of("distillation")
    report = memory.estimate(*problem, **settings)
    plan = memory.plan(*problem, **settings, batch_size=64, capacity=2 * report.allocated[0])
    assert plan.fits
    assert (plan.micro_batch_size, plan.chosen.micro_batches) == (64, 1)
    assert plan.lines[-1] == "update(module, optimizer, *inputs, *targets)"
    with pytest.raises(ValueError, match="expected its lines to be run"):
        plan.apply(*problem[:2])
    smaller = memory.plan(*problem, **settings, batch_size=64, capacity=report.allocated[0] - 4096)
    assert smaller.fits
    assert smaller.chosen.name != "step"
    for other in ({"devices": 2}, {"layout": "ddp"}):
        with pytest.raises(ValueError, match="expected"):
            memory.plan(*problem, **settings | other, batch_size=64)
