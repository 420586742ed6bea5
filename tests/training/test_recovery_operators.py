"""An error in place of any operator of an update: afterwards, the run is that of smaller micro-batches, or of a repeated step."""

import pytest
import torch
from helpers.problems import CLASSES, class_batch
from helpers.slow import slow
from helpers.steps import make_step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode  # documented without a public module

from balanced_parallel import DataParallelCriterion

UPDATES = 3


class Failing(TorchDispatchMode):
    """Raises in place of one operator of this thread, and counts them."""

    def __init__(self, number=0, error=torch.OutOfMemoryError):
        super().__init__()
        self.number = number
        self.error = error
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.number:
            raise self.error(f"injected into {function}")
        return function(*args, **(kwargs or {}))


class Run:
    def __init__(self, precision, devices, balanced=False, add=False, whole=False):
        torch.manual_seed(3)
        norm = nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2), nn.Flatten(), nn.Dropout(0.3)
        self.net = nn.Sequential(nn.Linear(4, 6), *norm, nn.Tanh(), nn.Linear(6, CLASSES))
        criterion = DataParallelCriterion(nn.CrossEntropyLoss(), **{"whole": True} if whole else {})
        settings = {"devices": devices, "kind": torch.optim.AdamW, "is_balanced": balanced}
        settings |= {"micro_batch_size": "auto", "precision": precision, "max_grad_norm": 0.5}
        self.step = make_step(self.net, criterion, **settings)
        self.optimizer = self.step.optimizer
        self.add = add
        self.losses = []

    def train(self, number, mode=None):
        torch.manual_seed(100 + number)
        inputs, targets = class_batch(8, ignored=1)
        parts = [(inputs[:5], targets[:5]), (inputs[5:], targets[5:])]
        torch.manual_seed(number)
        with mode or Failing():
            if self.add:
                for part in parts:
                    self.step.add(*part)
                self.losses.append(self.step.apply())
            else:
                self.losses.append(self.step(inputs, targets))

    def result(self):
        scaler = self.step.precision.scaler
        states = self.optimizer.state_dict()["state"].values()
        values = [value for state in states for value in state.values()]
        if scaler is not None:
            values += [scaler.get_scale(), scaler.state_dict()["_growth_tracker"]]
        tensors = [*self.losses, *self.net.state_dict().values(), *map(torch.as_tensor, values)]
        return [*tensors, torch.get_rng_state()]


def undisturbed(case, failed, size):
    run = Run(*case)
    for number in range(UPDATES):
        if number == failed:
            run.step.micro_batch_size = size
        run.train(number)
    return run.result()


def count_operators(case, failed):
    run = Run(*case)
    for number in range(failed):
        run.train(number)
    mode = Failing()
    run.train(failed, mode)
    return mode.count


CASES = [
    (("fp16", 1), 23),
    (("fp32", 2, True), 31),
    slow(("fp16", 2, True, True), 29),
    slow(("fp32", 1, False, False, True), 23),
    slow(("bf16", 2, False, True, True), 37),
]


def disturbed(case, failed, mode):
    """Returns a run with a failure in one update, or None if its optimizer had begun: some parameters may have changed then."""
    run = Run(*case)
    has_begun = []
    for number in range(UPDATES):
        if number != failed:
            run.train(number)
            continue
        run.optimizer.register_step_pre_hook(lambda *_: has_begun.append(True))
        buffers = [buffer.clone() for buffer in run.net.buffers()]
        try:
            run.train(number, mode)
            assert mode.error is torch.OutOfMemoryError  # Other errors are the caller's.
        except mode.error as error:
            if has_begun or "the optimizer's step" in "".join(getattr(error, "__notes__", [])):
                return None
            if mode.error is torch.OutOfMemoryError:
                raise
            for buffer, value in zip(run.net.buffers(), buffers, strict=True):
                buffer.copy_(value)
            run.train(number)
    return run


@pytest.mark.parametrize("failed", [0, 1])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ArithmeticError])
@pytest.mark.parametrize(("case", "every"), CASES)
def test_a_failure_in_any_operator_leaves_the_run_of_some_micro_batch_size_or_of_a_repeated_step(
    case, every, error, failed
):
    expected = {}
    for place in range(1, count_operators(case, failed) + 1, every):
        run = disturbed(case, failed, Failing(place, error))
        if run is None:
            break
        size = run.step.micro_batch_size
        result = run.result()
        if size not in expected:
            expected[size] = undisturbed(case, failed, size)
        assert len(result) == len(expected[size]), place
        assert all(map(torch.equal, result, expected[size])), place
    assert len(expected) > 1 if error is torch.OutOfMemoryError else expected.keys() == {None}
