"""``torch.nn.DataParallel`` with accumulation: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html

The model computes its own loss, so the losses of the replicas are averaged, as in the scripts of ``transformers``.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader


def train(model, rows, batch_size, micro_batch_size, lr):
    """Trains on all rows."""
    device = torch.accelerator.current_accelerator()
    model = nn.DataParallel(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    rows_at_once = micro_batch_size * torch.accelerator.device_count()
    micro_batches = batch_size // rows_at_once
    loader = DataLoader(rows, rows_at_once)
    for index, batch in enumerate(loader, 1):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        loss = model(**batch).loss.mean() / micro_batches
        loss.backward()
        if index % micro_batches == 0 or index == len(loader):
            optimizer.step()
            optimizer.zero_grad()
