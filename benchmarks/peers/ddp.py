"""``DistributedDataParallel`` with ``no_sync``: https://docs.pytorch.org/docs/stable/notes/ddp.html

The sampler is that of https://docs.pytorch.org/tutorials/beginner/ddp_series_multigpu.html
"""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


def train(model, rows, batch_size, micro_batch_size, lr):
    """Trains on all rows."""
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    device = torch.accelerator.current_accelerator()
    dist.init_process_group(dist.get_default_backend_for_device(device))
    model = nn.parallel.DistributedDataParallel(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    micro_batches = batch_size // (micro_batch_size * dist.get_world_size())
    loader = DataLoader(rows, micro_batch_size, sampler=DistributedSampler(rows, shuffle=False))
    for index, batch in enumerate(loader, 1):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        last = index % micro_batches == 0 or index == len(loader)
        with contextlib.nullcontext() if last else model.no_sync():
            loss = model(**batch).loss / micro_batches
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
