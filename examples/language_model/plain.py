"""Trains a language model with a large vocabulary. The same program with balanced_parallel is balanced.py."""

import torch
from torch import nn

STEPS, BATCH_SIZE, LENGTH, VOCABULARY, WIDTH = 6, 10, 16, 8192, 32
DEVICE = torch.accelerator.current_accelerator(check_available=True) or "cpu"


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
    model = nn.DataParallel(nn.Sequential(Decoder(), nn.Linear(WIDTH, VOCABULARY, bias=False)).to(DEVICE))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number, (inputs, targets) in enumerate(load_batches(), 1):
        logits = model(inputs)  # all logits of the batch are on one GPU
        loss = criterion(logits.flatten(0, 1), targets.flatten().to(DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {number}: loss {loss.item():.4f}")
    return losses


if __name__ == "__main__":
    main()
