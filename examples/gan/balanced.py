"""Trains a generator and a discriminator, each with its optimizer, with balanced_parallel. The plain program is plain.py."""

import math

import torch
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel

STEPS, BATCH_SIZE, NOISE = 20, 50, 8
DEVICES = None if torch.accelerator.is_available() else ["cpu"] * 3  # all GPUs, or three replicas


def load_batches():
    """Yields points of eight Gaussians on a circle."""
    for _ in range(STEPS):
        angles = torch.randint(8, (BATCH_SIZE,)) * (math.pi / 4)
        yield torch.stack((angles.cos(), angles.sin()), 1) + 0.05 * torch.randn(BATCH_SIZE, 2)


def make_net(features, outputs):
    """Returns a perceptron with a hidden layer."""
    return nn.Sequential(nn.Linear(features, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs))


def main():
    """Trains for some steps, and returns the losses of both networks."""
    torch.manual_seed(0)
    generator = DataParallelModel(make_net(NOISE, 2), DEVICES)
    discriminator = DataParallelModel(make_net(2, 1), DEVICES)
    criterion = DataParallelCriterion(nn.BCEWithLogitsLoss())
    of_generator = torch.optim.AdamW(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    of_discriminator = torch.optim.AdamW(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    ones, zeros = torch.ones(BATCH_SIZE, 1), torch.zeros(BATCH_SIZE, 1)
    losses = []
    for step, points in enumerate(load_batches(), 1):
        samples = generator(torch.randn(BATCH_SIZE, NOISE))
        of_discriminator.zero_grad()
        loss = criterion(discriminator(points), ones) + criterion(discriminator(samples.map(torch.detach)), zeros)
        loss.backward()
        of_discriminator.step()
        of_generator.zero_grad()
        generator_loss = criterion(discriminator(samples), ones)
        generator_loss.backward()
        of_generator.step()
        losses += [loss.item(), generator_loss.item()]
        if step % 4 == 0:
            print(f"step {step}: discriminator {losses[-2]:.4f}, generator {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
