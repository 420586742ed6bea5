"""Trains a masked language model of transformers from random weights, with balanced_parallel. The plain program is plain.py."""

import torch
from transformers import BertConfig, BertForMaskedLM

from balanced_parallel import DataParallelCriterion, DataParallelModel

STEPS, BATCH_SIZE, LENGTH, VOCABULARY, PAD, MASK = 8, 10, 24, 200, 0, 1
DEVICES = None if torch.accelerator.is_available() else ["cpu"] * 3  # all GPUs, or three replicas


def load_batches():
    """Yields lines of 4 to 24 tokens with 15 % of them masked. The labels of all others are -100."""
    for _ in range(STEPS):
        places = torch.arange(LENGTH)
        attention_mask = places < torch.randint(4, LENGTH + 1, (BATCH_SIZE, 1))
        tokens = (2 + torch.randint(20, (BATCH_SIZE, 1)) + places).where(attention_mask, PAD)
        masked = (torch.rand(tokens.shape) < 0.15) & attention_mask
        labels = tokens.where(masked, -100)
        yield {"input_ids": tokens.masked_fill(masked, MASK), "attention_mask": attention_mask.long(), "labels": labels}


def make_net():
    """Returns a small BERT. Dropout is off, since three replicas draw other random numbers than one device."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes, **dropout))


def main():
    """Trains for some steps, and returns their losses."""
    torch.manual_seed(0)
    model = DataParallelModel(make_net(), DEVICES)
    criterion = DataParallelCriterion(lambda out, labels: out.loss, weight=lambda out, labels: (labels != -100).sum())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for number, batch in enumerate(load_batches(), 1):
        loss = criterion(model(**batch), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {number}: loss {loss.item():.4f}")
    return losses


if __name__ == "__main__":
    main()
