"""Models, losses and comparisons of the tests of FSDP2."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WORDS = 23


class Language(nn.Module):
    """A small language model with tied weights and checkpointed blocks, and a head that nobody uses."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(8, WORDS, bias=False)
        self.never = nn.Linear(8, 3)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return self.head(hidden).transpose(1, 2)


def language_batch(rows=9):
    torch.manual_seed(1)
    words = torch.randint(WORDS, (rows, 5))
    targets = torch.randint(WORDS, (rows, 5))
    targets[: rows // 2, 2:] = -100
    return words, targets


def whole(tensor):
    """Returns a tensor with the elements of all ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole_gradients(module):
    """Returns the gradients with the elements of all ranks."""
    return [whole(parameter.grad) for parameter in module.parameters()]
