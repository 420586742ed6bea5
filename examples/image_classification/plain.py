"""Trains a classifier of handwritten digits with ``nn.DataParallel``. The same program with this library is balanced.py."""

import torch
from sklearn.datasets import load_digits
from torch import nn

STEPS, BATCH_SIZE = 35, 50


def load_batches():
    """Yields batches of digits. One label in five is unknown, which is -100, so that shards count different numbers of labels."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images).view(-1, 1, 8, 8).float() / 16
    targets = torch.tensor(labels)
    targets[torch.rand(len(targets)) < 0.2] = -100
    order = torch.randperm(len(inputs))[: STEPS * BATCH_SIZE]
    for rows in order.split(BATCH_SIZE):
        yield inputs[rows], targets[rows]


def make_net():
    """Returns a small convolutional network."""
    return nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, 10))


def main():
    """Trains for some steps, and returns their losses."""
    torch.manual_seed(0)
    net = make_net().to(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    model = nn.DataParallel(net)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step, (inputs, targets) in enumerate(load_batches(), 1):
        outputs = model(inputs)
        loss = criterion(outputs, targets.to(outputs.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 5 == 0:
            predictions = outputs.argmax(1).cpu()
            accuracy = (predictions == targets)[targets >= 0].float().mean()
            print(f"step {step}: loss {loss.item():.4f}, accuracy {accuracy:.2f}")
    return losses


if __name__ == "__main__":
    main()
