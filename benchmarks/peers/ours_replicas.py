"""balanced_parallel in one process: replicas, and the optimizer's state spread over their devices (docs/balance.md)."""

import torch
from torch.utils.data import DataLoader

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, TrainStep


def train(model, rows, batch_size, micro_batch_size, lr):
    """Trains on all rows."""
    model = DataParallelModel(model)
    criterion = DataParallelCriterion(lambda out, labels: out.loss, weight=lambda out, labels: (labels[:, 1:] != -100).sum())
    optimizer = BalancedOptimizer(model, torch.optim.AdamW, lr=lr)
    step = TrainStep(model, criterion, optimizer, micro_batch_size=micro_batch_size)
    for batch in DataLoader(rows, batch_size):
        step(batch, batch["labels"])
