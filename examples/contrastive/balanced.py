"""Trains two towers with a contrastive loss, with balanced_parallel. The plain program is plain.py."""

import torch
from torch import nn
from torch.nn import functional as F

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep

STEPS, BATCH_SIZE, WORDS, WIDTH = 10, 50, 100, 32
DEVICES = None if torch.accelerator.is_available() else ["cpu"] * 3  # all GPUs, or three replicas


def load_batches():
    """Yields noisy pictures of 3 x 8 x 8, and the words that describe them."""
    look = torch.randn(WORDS, 3, 8, 8)
    for _ in range(STEPS):
        texts = torch.randint(WORDS, (BATCH_SIZE, 4))
        yield look[texts].sum(1) + 0.5 * torch.randn(BATCH_SIZE, 3, 8, 8), texts


class Towers(nn.Module):
    """A tower for pictures and a tower for texts. Their outputs are unit vectors of one space."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, WIDTH))
        self.text = nn.Sequential(nn.EmbeddingBag(WORDS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, images, texts):
        """Returns two embeddings, each of ``[rows, width]``."""
        return F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1)


def clip_loss(images, texts):
    """Returns the loss of CLIP: each picture against the texts of all rows, and each text against all pictures."""
    logits, own = images @ texts.T / 0.1, torch.arange(len(images), device=images.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def main():
    """Trains for some steps, and returns their losses."""
    torch.manual_seed(0)
    model = DataParallelModel(Towers(), DEVICES)
    criterion = DataParallelCriterion(clip_loss, whole=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = TrainStep(model, criterion, optimizer, micro_batch_size=4)
    losses = []
    for number, (images, texts) in enumerate(load_batches(), 1):
        loss = step((images, texts))
        losses.append(loss.item())
        print(f"step {number}: loss {loss.item():.4f}")
    return losses


if __name__ == "__main__":
    main()
