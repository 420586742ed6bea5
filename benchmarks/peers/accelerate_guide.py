"""Accelerate with gradient accumulation: https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"""

import os

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader


def train(model, rows, batch_size, micro_batch_size, lr):
    """Trains on all rows."""
    micro_batches = batch_size // (micro_batch_size * int(os.environ["WORLD_SIZE"]))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    loader = DataLoader(rows, micro_batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
