"""Trains a tagger with DistributedDataParallel and no_sync: torchrun --nproc-per-node=2 before.py"""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group()
    model, criterion = nn.parallel.DistributedDataParallel(Tagger().to(device)), nn.CrossEntropyLoss()
    rows = load_rows()
    loader = DataLoader(rows, BATCH_SIZE, sampler=DistributedSampler(rows, shuffle=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for number, (words, tags) in enumerate(loader, 1):
        accumulating = number % ACCUMULATION != 0
        with model.no_sync() if accumulating else contextlib.nullcontext():
            loss = criterion(model(words.to(device)), tags.to(device))
            (loss / ACCUMULATION).backward()
        if not accumulating:
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            print(f"loss {losses[-1]:.4f}")
    return model.module, losses


if __name__ == "__main__":
    main()
