"""Trains a tagger with balanced_parallel on all GPUs: python after.py"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from balanced_parallel import DataParallelCriterion, DataParallelModel

ROWS, LENGTH, WORDS, TAGS = 48, 24, 97, 5
BATCH_SIZE = 14
DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


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
    model = DataParallelModel(Tagger().to(DEVICE))
    loader = DataLoader(load_rows(), BATCH_SIZE)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for words, tags in loader:
        scores, tags = model(words.to(DEVICE)), tags.to(DEVICE)
        loss = criterion(scores, tags)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        accuracy = (scores.gather().argmax(1) == tags)[tags != -100].float().mean()
        print(f"loss {losses[-1]:.4f}, accuracy {accuracy:.2f}")
    return model.module, losses


if __name__ == "__main__":
    main()
