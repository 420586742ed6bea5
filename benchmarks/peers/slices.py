"""The plain program with one micro-batch after the other. The time of programs in one process is divided by that of this one."""

import torch
from torch.utils.data import DataLoader


def train(model, rows, batch_size, micro_batch_size, lr):
    """Trains on all rows."""
    device = torch.accelerator.current_accelerator()
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    micro_batches = batch_size // micro_batch_size
    loader = DataLoader(rows, micro_batch_size)
    for index, batch in enumerate(loader, 1):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        loss = model(**batch).loss / micro_batches
        loss.backward()
        if index % micro_batches == 0 or index == len(loader):
            optimizer.step()
            optimizer.zero_grad()
