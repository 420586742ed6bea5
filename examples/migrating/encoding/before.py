"""Trains a tagger with PyTorch-Encoding's encoding.parallel on all GPUs: python before.py"""

import torch
from encoding.parallel import DataParallelCriterion, DataParallelModel
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, LENGTH, WORDS, TAGS = 48, 24, 97, 5
BATCH_SIZE = 16
DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def load_rows():
    """Returns sentences of 2 to 24 words, and the tags of their words. Tags of the padding are -100."""
    words = torch.randint(WORDS, (ROWS, LENGTH))
    lengths = torch.randint(2, LENGTH + 1, (ROWS, 1))
    return TensorDataset(words, (words % TAGS).where(torch.arange(LENGTH) < lengths, -100))


class Tagger(nn.Module):
    """Scores ``[rows, tags, words]`` of words ``[rows, words]``, the first of several outputs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(WORDS, 16), nn.Tanh(), nn.Linear(16, TAGS))

    def forward(self, words):
        """Returns a tuple of the scores."""
        return (self.layers(words).transpose(1, 2),)


def main():
    """Trains for one epoch. Returns the module and the losses that a log shows."""
    torch.manual_seed(0)
    model = DataParallelModel(Tagger()).to(DEVICE)
    loader = DataLoader(load_rows(), BATCH_SIZE)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss()).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for words, tags in loader:
        optimizer.zero_grad()
        outputs = model(words.to(DEVICE))
        loss = criterion(outputs, tags.to(DEVICE))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"loss {losses[-1]:.4f}")
    return model.module, losses


if __name__ == "__main__":
    main()
