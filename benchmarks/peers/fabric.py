"""Lightning Fabric with gradient accumulation: https://lightning.ai/docs/fabric/stable/advanced/gradient_accumulation.html

The sample on that page leaves out the division of the loss.
"""

import os

import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader


def train(model, rows, batch_size, micro_batch_size, lr):
    """Trains on all rows."""
    micro_batches = batch_size // (micro_batch_size * int(os.environ["WORLD_SIZE"]))
    fabric = Fabric(strategy="ddp", devices=int(os.environ["WORLD_SIZE"]))
    fabric.launch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(rows, micro_batch_size))
    for index, batch in enumerate(loader, 1):
        accumulating = index % micro_batches != 0 and index < len(loader)
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = model(**batch).loss / micro_batches
            fabric.backward(loss)
        if not accumulating:
            optimizer.step()
            optimizer.zero_grad()
