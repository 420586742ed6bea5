"""Trains a tagger with balanced_parallel: torchrun --nproc-per-node=2 after.py"""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from balanced_parallel import TrainStep, parallelize

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
    model, criterion = parallelize(Tagger(), nn.CrossEntropyLoss())
    rows = load_rows()
    loader = DataLoader(rows, BATCH_SIZE * ACCUMULATION, sampler=DistributedSampler(rows, shuffle=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = TrainStep(model, criterion, optimizer, micro_batch_size=BATCH_SIZE)
    losses = []
    for words, tags in loader:
        loss = step(words, tags)
        losses.append(loss.item())
        print(f"loss {losses[-1]:.4f}")
    return model.module, losses


if __name__ == "__main__":
    main()
