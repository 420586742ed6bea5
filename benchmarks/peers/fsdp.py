"""FSDP2, ``fully_shard`` on each block: https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html

The accumulation is that of https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler


def train(model, rows, batch_size, micro_batch_size, lr):
    """Trains on all rows."""
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    device = torch.accelerator.current_accelerator()
    dist.init_process_group(dist.get_default_backend_for_device(device))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_force_sum_reduction_for_comms(True)  # simulation: gloo has no averages
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    micro_batches = batch_size // (micro_batch_size * dist.get_world_size())
    loader = DataLoader(rows, micro_batch_size, sampler=DistributedSampler(rows, shuffle=False))
    for index, batch in enumerate(loader, 1):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        last = index % micro_batches == 0 or index == len(loader)
        model.set_requires_gradient_sync(last)
        loss = model(**batch).loss / micro_batches
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
