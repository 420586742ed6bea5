"""Trains a tagger with Lightning Fabric: python before.py"""

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, LENGTH, WORDS, TAGS = 48, 24, 97, 5
BATCH_SIZE, ACCUMULATION = 2, 4


def load_rows():
    """Returns sentences of 2 to 24 words, and the tags of their words. Tags of the padding are -100."""
    words = torch.randint(WORDS, (ROWS, LENGTH))
    lengths = torch.randint(2, LENGTH + 1, (ROWS, 1))
    return TensorDataset(words, (words % TAGS).where(torch.arange(LENGTH) < lengths, -100))


class Tagger(nn.Module):
    """Scores ``[rows, tags, words]`` of words ``[rows, words]``."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(WORDS, 16), nn.Tanh(), nn.Linear(16, TAGS))

    def forward(self, words):
        """Returns the scores."""
        return self.layers(words).transpose(1, 2)


def main():
    """Trains for one epoch. Returns the module and the losses that a log shows."""
    torch.manual_seed(0)
    fabric = Fabric(devices=2, strategy="ddp")
    fabric.launch()
    model, criterion = Tagger(), nn.CrossEntropyLoss()
    rows = load_rows()
    loader = DataLoader(rows, BATCH_SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    losses = []
    for number, (words, tags) in enumerate(loader, 1):
        accumulating = number % ACCUMULATION != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = criterion(model(words), tags)
            fabric.backward(loss / ACCUMULATION)
        if not accumulating:
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            fabric.print(f"loss {losses[-1]:.4f}")
    return model.module, losses


if __name__ == "__main__":
    main()
