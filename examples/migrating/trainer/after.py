"""Trains a language model with balanced_parallel on all GPUs: python after.py"""

import torch
from torch.utils.data import DataLoader
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep

ROWS, LENGTH, WORDS = 50, 24, 97
BATCH_SIZE, MICRO_BATCH_SIZE = 16, 2


def load_rows():
    """Returns lines of 2 to 24 words. Labels of the padding are -100."""
    words = torch.randint(WORDS, (ROWS, LENGTH))
    lengths = torch.randint(2, LENGTH + 1, (ROWS, 1))
    labels = words.where(torch.arange(LENGTH) < lengths, -100)
    return [{"input_ids": words[row], "labels": labels[row]} for row in range(ROWS)]


def make_net():
    """Returns a small GPT-NeoX with random weights."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=WORDS, use_cache=False, **sizes))


def causal_loss(output, labels):
    """Returns the loss that the model has computed."""
    return output.loss


def count_targets(output, labels):
    """Returns the divisor of that loss: the first label of a row is not predicted."""
    return (labels[:, 1:] != -100).sum()


def main():
    """Trains for one epoch. Returns the module and the losses that a log shows."""
    torch.manual_seed(0)
    model = DataParallelModel(make_net())
    criterion = DataParallelCriterion(causal_loss, weight=count_targets)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = TrainStep(model, criterion, optimizer, micro_batch_size=MICRO_BATCH_SIZE, max_grad_norm=5.0)
    losses = []
    for batch in DataLoader(load_rows(), BATCH_SIZE):
        losses.append(step(batch, batch["labels"]).item())
        print(f"loss {losses[-1]:.4f}")
    return model.module, losses


if __name__ == "__main__":
    main()
