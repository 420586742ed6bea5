"""balanced_parallel under torchrun: torch's ``DistributedDataParallel`` (docs/torchrun.md)."""

import torch
from torch.utils.data import DataLoader

from balanced_parallel import RankBatchSampler, TrainStep, parallelize


def train(model, rows, batch_size, micro_batch_size, lr):
    """Trains on all rows."""
    model, criterion = parallelize(
        model, lambda out, labels: out.loss, weight=lambda out, labels: (labels[:, 1:] != -100).sum(), strategy="ddp"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    step = TrainStep(model, criterion, optimizer, micro_batch_size=micro_batch_size)
    for batch in DataLoader(rows, batch_sampler=RankBatchSampler(rows, batch_size)):
        step(batch, batch["labels"])
