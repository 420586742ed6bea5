"""Trains a language model with a large vocabulary, with balanced_parallel. The plain program is plain.py."""

import torch
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, savings

STEPS, BATCH_SIZE, LENGTH, VOCABULARY, WIDTH = 6, 10, 16, 8192, 32
DEVICES = None if torch.accelerator.is_available() else ["cpu"] * 3  # all GPUs, or three replicas


def load_batches():
    """Yields lines of 2 to 16 tokens, each token and the next. The next is -100 after the end of the line."""
    words = torch.randperm(VOCABULARY)
    for _ in range(STEPS):
        starts, lengths = torch.randint(50, (BATCH_SIZE, 1)), torch.randint(2, LENGTH + 1, (BATCH_SIZE, 1))
        places = torch.arange(LENGTH + 1)
        tokens = words[starts + places]
        yield tokens[:, :-1], tokens[:, 1:].where(places[1:] < lengths, -100)


class Decoder(nn.Module):
    """A decoder of one layer, without the last linear layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, tokens):
        """Returns the hidden states ``[rows, length, width]`` of tokens ``[rows, length]``."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.layer(self.embedding(tokens), mask, is_causal=True)


def main():
    """Trains for some steps, and returns their losses."""
    torch.manual_seed(0)
    model = DataParallelModel(Decoder(), DEVICES)
    criterion = DataParallelCriterion(savings.LinearCrossEntropy(WIDTH, VOCABULARY))
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()], lr=1e-2)
    step = TrainStep(model, criterion, optimizer, micro_batch_size=2)
    losses = []
    for number, (inputs, targets) in enumerate(load_batches(), 1):
        loss = step(inputs, targets)
        losses.append(loss.item())
        print(f"step {number}: loss {loss.item():.4f}")
    return losses


if __name__ == "__main__":
    main()
