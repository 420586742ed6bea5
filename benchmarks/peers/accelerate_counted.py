"""Accelerate with a window fetched ahead and its tokens counted over all ranks, as its guide says for samples of variable size.

https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation#gradient-accumulation-on-training-samples-of-variable-size
"""

import contextlib
import itertools
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
    iterator = iter(loader)
    while window := list(itertools.islice(iterator, micro_batches)):
        tokens = sum((batch["labels"][:, 1:] != -100).sum() for batch in window)
        tokens = accelerator.gather(tokens).sum().item()
        for index, batch in enumerate(window, 1):
            with contextlib.nullcontext() if index == len(window) else model.no_sync():
                loss = model(**batch, num_items_in_batch=tokens).loss
                accelerator.backward(loss * micro_batches * accelerator.num_processes)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
