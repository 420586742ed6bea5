"""Trains a segmentation network with an auxiliary head and Dice, with balanced_parallel. The plain program is plain.py."""

import torch
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, DiceLoss, convert_sync_batchnorm

STEPS, BATCH_SIZE, CLASSES, SIZE = 10, 11, 4, 16
DEVICES = None if torch.accelerator.is_available() else ["cpu"] * 3  # all GPUs, or three replicas


def load_batches():
    """Yields noisy pictures of a rectangle, and the class of each pixel. A tenth of the pixels is unknown, which is -100."""
    for _ in range(STEPS):
        targets = torch.zeros(BATCH_SIZE, SIZE, SIZE, dtype=torch.long)
        for target in targets:
            top, left, height, width = torch.randint(2, SIZE // 2, (4,)).tolist()
            target[top : top + height, left : left + width] = torch.randint(1, CLASSES, ())
        inputs = targets.unsqueeze(1) + 0.3 * torch.randn(BATCH_SIZE, 1, SIZE, SIZE)
        targets[torch.rand(targets.shape) < 0.1] = -100
        yield inputs, targets


class Net(nn.Module):
    """A small convolutional network with batch norm, a head for the result, and an auxiliary head in the middle."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.head, self.auxiliary_head = nn.Conv2d(32, CLASSES, 1), nn.Conv2d(16, CLASSES, 1)

    def forward(self, inputs):
        """Returns the logits of both heads, each of ``[rows, classes, height, width]``."""
        hidden = self.stem(inputs)
        return self.head(self.body(hidden)), self.auxiliary_head(hidden)


def main():
    """Trains for some steps, and returns their losses."""
    torch.manual_seed(0)
    model = DataParallelModel(convert_sync_batchnorm(Net()), DEVICES)
    cross_entropy, dice = DataParallelCriterion(nn.CrossEntropyLoss()), DataParallelCriterion(DiceLoss())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step, (inputs, targets) in enumerate(load_batches(), 1):
        output, auxiliary = model(inputs).unzip()
        loss = cross_entropy(output, targets) + 0.4 * cross_entropy(auxiliary, targets) + dice(output, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step}: loss {loss.item():.4f}")
    return losses


if __name__ == "__main__":
    main()
