"""A step that failed before its update can be repeated, with the result that it would have had."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import CLASSES, assert_same_gradients, class_targets, gradients
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, parallelize


class Fails(nn.Module):
    """Raises in its forward or in its backward, as often as it is told."""

    def __init__(self):
        super().__init__()
        self.forwards, self.backwards = 0, 0

    def forward(self, inputs):
        if self.forwards:
            self.forwards -= 1
            raise ArithmeticError("a forward that fails")
        return _Fails.apply(inputs, self)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, module):
        ctx.module = module
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.module.backwards:
            ctx.module.backwards -= 1
            raise ArithmeticError("a backward that fails")
        return gradient, None


class Net(nn.Sequential):
    def __init__(self):
        torch.manual_seed(1)
        super().__init__(nn.Linear(4, 4), Fails(), nn.Linear(4, 6), Fails(), nn.Tanh(), nn.Linear(6, CLASSES), Fails())


def fail_in_optimizer(step):
    def raise_once(*_):
        handle.remove()
        raise ArithmeticError("an optimizer that fails")

    handle = step.optimizer.register_step_pre_hook(raise_once)


def fail_in_clipping(step):
    """Between unscaling and the step."""
    step.max_grad_norm = "many"


def batch(number):
    torch.manual_seed(number)
    return torch.randn(7, 4), class_targets(7, ignored=1)


@pytest.mark.parametrize("fail", [fail_in_optimizer, fail_in_clipping])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_failed_update_can_be_repeated(precision, micro_batch_size, fail):
    found = []
    for fails in (False, True):
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        model, criterion = DataParallelModel(net, ["cpu"] * 3), DataParallelCriterion(nn.CrossEntropyLoss())
        settings = {"micro_batch_size": micro_batch_size, "precision": precision, "scheduler": scheduler, "max_grad_norm": 0.5}
        step = TrainStep(model, criterion, optimizer, **settings)
        losses = []
        for number in range(3):
            if fails and number == 1:
                fail(step)
                with pytest.raises((ArithmeticError, ValueError)):
                    step(*batch(number))
                step.max_grad_norm = 0.5
            losses.append(step(*batch(number)))
        found.append([*losses, *(parameter.detach() for parameter in net.parameters()), torch.tensor(scheduler.get_last_lr())])
        if precision == "fp16":
            assert step.precision.scaler.state_dict()["_growth_tracker"] == 3
    assert all(map(torch.equal, *found))


def last_layer_of_both(rank, net, step):
    net[6].backwards = 1


def first_layer_of_both(rank, net, step):
    net[1].backwards = 1


def different_layers(rank, net, step):
    net[3 if rank else 6].backwards = 1


def one_rank(rank, net, step):
    net[3].backwards = rank


def forward_of_both(rank, net, step):
    net[3].forwards = 1


def optimizer_of_both(rank, net, step):
    fail_in_optimizer(step)


def hook_of_both(rank, net, step):
    def raise_once(parameter):
        handle.remove()
        raise ArithmeticError("a hook that fails")

    handle = net[0].weight.register_post_accumulate_grad_hook(raise_once)


FAILURES = [
    last_layer_of_both,
    first_layer_of_both,
    different_layers,
    one_rank,
    forward_of_both,
    optimizer_of_both,
    hook_of_both,
]


def check_failure(rank, fail, micro_batch_size, precision, hooked):
    torch.set_default_dtype(torch.float32 if precision == "fp16" else torch.float64)
    plain = Net()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    net = copy.deepcopy(plain)
    model, criterion = parallelize(net, nn.CrossEntropyLoss())
    if hooked:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        model.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    step = TrainStep(model, criterion, optimizer, micro_batch_size=micro_batch_size, precision=precision)
    error = 2e-2 if precision == "fp16" else 1e-10
    for number in range(4):  # the reducer makes its buckets anew after the first
        inputs, targets = batch(number)
        mine = slice(0, 3) if rank == 0 else slice(3, None)
        for _ in range(2):
            fail(rank, net, step)
            waits = fail is one_rank and rank == 0
            message = "1 of 2 ranks failed in the backward, expected none" if waits else "fails"
            with pytest.raises(RuntimeError if waits else ArithmeticError, match=message):
                step(inputs[mine], targets[mine])
        plain.zero_grad()
        loss = F.cross_entropy(plain(inputs), targets)
        loss.backward()
        reference.step()
        torch.testing.assert_close(step(inputs[mine], targets[mine]), loss.detach(), rtol=error, atol=error)
        assert_same_gradients(gradients(net), gradients(plain), error)
        net.load_state_dict(plain.state_dict())
    return True


@pytest.mark.parametrize("fail", FAILURES)
def test_failed_step_can_be_repeated_on_ranks(fail):
    for precision in ("fp32", "fp16"):
        for micro_batch_size in [None] if fail is one_rank else [None, 2]:  # before the last one nobody waits for it
            run_ranks(2, check_failure, fail, micro_batch_size, precision, False, timeout=60)
    run_ranks(2, check_failure, fail, None, "fp32", True, timeout=60)
