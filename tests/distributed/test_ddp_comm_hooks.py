"""Communication hooks of ``DistributedDataParallel``."""

import pytest
import torch
from helpers.ddp import Chosen, make_update
from helpers.problems import assert_same_gradients, class_targets, gradients
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import TrainStep, parallelize


def quantize(state, bucket):
    """Rounds a whole bucket to 7 bits, by its largest entry."""
    buffer = bucket.buffer()
    unit = buffer.abs().max() / 127
    buffer.copy_((buffer / unit).round() * unit if unit else buffer)
    return torch.distributed.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0] / 2)


def check_bucketwise(rank):
    torch.manual_seed(1)
    inputs, targets = torch.randn(600, 4, dtype=torch.float64), class_targets(600)
    mine = slice(0, 200) if rank == 0 else slice(200, None)
    for way in ["step", "criterion"]:
        plain, (model, update) = Chosen(), make_update(way, Chosen(), nn.CrossEntropyLoss())
        model.register_comm_hook(None, quantize)
        loss = nn.functional.cross_entropy(plain(inputs), targets)
        loss.backward()
        for _ in range(3):
            torch.testing.assert_close(update(inputs[mine], targets[mine]), loss.detach(), rtol=1e-10, atol=1e-10)
            largest = max(gradient.abs().max() for gradient in gradients(plain) if gradient is not None)
            assert_same_gradients(gradients(model.module), gradients(plain), 0.02 * largest.item())
    return True


def test_comm_hook_buckets_contain_only_gradients():
    assert run_ranks(2, check_bucketwise) == [True, True]


def check_batched(rank):
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook

    model, _ = parallelize(Chosen(), nn.CrossEntropyLoss())
    with pytest.warns(UserWarning, match="torch raises an AssertionError without a message.*use powerSGD_hook"):
        model.register_comm_hook(PowerSGDState(None), batched_powerSGD_hook)
    return True


def test_batched_powersgd_hook_emits_a_warning():
    assert run_ranks(2, check_batched) == [True, True]


def check_compressed(rank):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    torch.manual_seed(0)
    plain, rows = torch.nn.Linear(4, 2), 4099  # a number that float16 cannot hold
    inputs, targets = torch.randn(rows, 4), torch.randint(2, (rows,))
    expected = torch.nn.functional.cross_entropy(plain(inputs), targets)
    model, criterion = parallelize(plain, torch.nn.CrossEntropyLoss())
    model.register_comm_hook(None, fp16_compress_hook)
    step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.0))
    mine = slice(None, 4000) if rank == 0 else slice(4000, None)
    for _ in range(2):
        torch.testing.assert_close(step(inputs[mine], targets[mine]), expected.detach(), rtol=1e-6, atol=1e-6)
    return True


def test_fp16_compression_hook_does_not_round_the_weight():
    assert run_ranks(2, check_compressed) == [True, True]


def check_powersgd(rank):
    """Callbacks of the hook start collectives, on threads of gloo, while the reducer starts that of the unused parameters."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(30)])
    model, criterion = parallelize(net, nn.MSELoss())
    model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)
    step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.01))
    return [step(torch.randn(8, 64), torch.randn(8, 64)).item() for _ in range(40)][-1]


def test_powersgd_hook_does_not_hang():
    first, second = run_ranks(2, check_powersgd, timeout=60)
    assert first == second
