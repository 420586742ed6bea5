"""Outputs of replicas inside of accelerate, Fabric, transformers and torchmetrics, and their wrapped models in ``TrainStep``."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import send_to_device
from helpers.optimizers import sgd
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.testing import assert_close
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.trainer_pt_utils import nested_detach

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    PerReplica,
    TrainStep,
)

INPUTS = torch.arange(20.0).view(5, 4)
TARGETS = torch.tensor([0, 1, 2, 0, -100])
COPIES = {
    "accelerate": lambda outputs: send_to_device(outputs, "cpu"),
    "Fabric": lambda outputs: apply_to_collection(outputs, torch.Tensor, torch.Tensor.float),
    "transformers": nested_detach,
}


def make(devices=3):
    torch.manual_seed(0)
    return DataParallelModel(nn.Linear(4, 3), ["cpu"] * devices)


@pytest.fixture
def accelerator():
    yield lambda precision: Accelerator(cpu=True, mixed_precision=precision)
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("library", COPIES)
def test_outputs_pass_through(library):
    outputs = make()(INPUTS)
    copied = COPIES[library](outputs)
    assert isinstance(copied, PerReplica)
    assert copied.sizes == outputs.sizes == (2, 2, 1)
    assert_close(copied.gather(), outputs.gather())
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    assert_close(criterion(copied, TARGETS), criterion(outputs, TARGETS))
    records = PerReplica(
        [TokenClassifierOutput(logits=INPUTS[:3]), TokenClassifierOutput(logits=INPUTS[3:])], [3, 2]
    )
    assert_close(COPIES[library](records).logits.gather(), INPUTS)


@pytest.mark.parametrize("library", COPIES)
def test_copies_that_would_lose_the_order_or_the_dimension_of_rows_are_refused(library):
    for outputs in (make()(INPUTS).in_order([4, 3, 2, 1, 0]), PerReplica([INPUTS.T], [5], dim=1)):
        with pytest.raises(TypeError, match="expected sizes, dimension and order"):
            COPIES[library](outputs)
        outputs.map(torch.Tensor.float).gather()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(accelerator, precision):
    model = make()
    optimizer = sgd(model)
    model, optimizer = accelerator(precision).prepare(model, optimizer)
    plain = nn.Linear(4, 3)
    plain.load_state_dict(model.module.state_dict())
    step = TrainStep(
        model, DataParallelCriterion(nn.CrossEntropyLoss()), optimizer, micro_batch_size=1
    )
    loss = step(INPUTS, TARGETS)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        expected = nn.functional.cross_entropy(plain(INPUTS), TARGETS)
    expected.backward()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if precision == "no" else {"rtol": 0.02, "atol": 0.02}
    assert_close(loss, expected, **tolerance)
    assert_close(model.module.weight.grad, plain.weight.grad, **tolerance)
    assert not torch.equal(model.module.weight, plain.weight)


def test_fabric():
    model = make()
    optimizer = sgd(model)
    from lightning_fabric import Fabric  # It imports torchmetrics and scipy.

    wrapped, fabric_optimizer = Fabric(accelerator="cpu", devices=1).setup(model, optimizer)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    assert_close(criterion(wrapped(INPUTS), TARGETS), criterion(model(INPUTS), TARGETS))
    with pytest.raises(
        TypeError, match="_FabricModule.*pass the DataParallelModel that is in its .module"
    ):
        TrainStep(wrapped, criterion, fabric_optimizer)
    before = model.module.weight.clone()
    TrainStep(wrapped.module, criterion, fabric_optimizer)(INPUTS, TARGETS)
    assert not torch.equal(model.module.weight, before)
