"""``cost=`` under torchrun: each rank cuts its own samples, and the loss and the gradients are those of all ranks."""

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.unequal import assert_same_rows, build, length_of, make_samples, pad, plain
from torch import nn

from balanced_parallel import TrainStep, parallelize


def own(samples, rank):
    return samples[:7] if rank == 0 else samples[7:]


def train(rank, strategy, settings, parts):
    net = build().double()
    model, criterion = parallelize(net, nn.CrossEntropyLoss(), device_ids=["cpu"], strategy=strategy)
    step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=1.0), cost=length_of, collate=pad, **settings)
    samples = make_samples()
    if parts:
        step([] if rank else samples[:2])  # a rank that has had no sample yet
        step.add(own(samples, rank))
        step.add([])
        loss, outputs = step.apply(), None
    else:
        loss, outputs = step(own(samples, rank), return_outputs=True)
        outputs = outputs.gather()
        step([] if rank else samples[:2])
    state = step.state_dict()["model"]
    return loss, outputs, {name: tensor.full_tensor() if strategy == "fsdp" else tensor for name, tensor in state.items()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("settings", "parts"), [({"micro_batch_cost": 30}, False), ({"micro_batch_size": 2}, True)])
def test_ranks_cut_their_own_samples(strategy, settings, parts):
    samples, net = make_samples(), build().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    for batch in (samples[:2], samples) if parts else (samples, samples[:2]):
        if batch is samples:
            expected_loss, _, expected_outputs = plain(net, samples)
        optimizer.zero_grad()
        inputs, tags = pad(batch)
        nn.functional.cross_entropy(net(**inputs), tags).backward()
        optimizer.step()
    for loss, outputs, state in run_ranks(2, train, strategy, settings, parts):
        torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=1e-10)
        if outputs is not None:
            assert_same_rows(outputs, expected_outputs, samples)
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-10, atol=1e-10)
