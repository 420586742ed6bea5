"""Trains a segmentation network with an auxiliary head and Dice. The same program with balanced_parallel is balanced.py."""

import torch
from torch import nn

STEPS, BATCH_SIZE, CLASSES, SIZE = 10, 11, 4, 16
DEVICE = torch.accelerator.current_accelerator(check_available=True) or "cpu"


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


def dice_loss(logits, targets):
    """Returns one minus the Dice coefficient over all rows, in the mean over classes."""
    counted = (targets >= 0).unsqueeze(1)
    wanted = nn.functional.one_hot(targets.clamp(min=0), CLASSES).movedim(-1, 1) * counted
    predicted = logits.softmax(1) * counted
    both, total = (predicted * wanted).sum((0, 2, 3)), (predicted + wanted).sum((0, 2, 3))
    return (1 - (2 * both + 1) / (total + 1)).mean()


def main():
    """Trains for some steps, and returns their losses."""
    torch.manual_seed(0)
    model = nn.DataParallel(Net().to(DEVICE))  # batch norm per GPU: several GPUs compute another loss
    cross_entropy, dice = nn.CrossEntropyLoss(), dice_loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step, (inputs, targets) in enumerate(load_batches(), 1):
        targets = targets.to(DEVICE)
        output, auxiliary = model(inputs)
        loss = cross_entropy(output, targets) + 0.4 * cross_entropy(auxiliary, targets) + dice(output, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step}: loss {loss.item():.4f}")
    return losses


if __name__ == "__main__":
    main()
