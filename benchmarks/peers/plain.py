"""Trains on one device, with each effective batch at once. The other programs are compared with this one, line by line."""

import torch
from torch.utils.data import DataLoader


def train(model, rows, batch_size, micro_batch_size, lr):
    """Trains on all rows."""
    device = torch.accelerator.current_accelerator()
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for batch in DataLoader(rows, batch_size):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
