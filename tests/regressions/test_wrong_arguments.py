"""Arguments that cannot work: the errors name them, and say what to pass instead."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from balanced_parallel import (
    BalancedOptimizer,
    DataParallelCriterion,
    DataParallelModel,
    Rows,
    TrainStep,
    gather,
    memory,
)

CPUS = ["cpu"] * 3
SGD = torch.optim.SGD


def make_model():
    return DataParallelModel(nn.Linear(4, 3), CPUS)


def make_step(model=None, criterion=None, optimizer=SGD, **settings):
    model = model or make_model()
    return TrainStep(model, criterion or DataParallelCriterion(F.cross_entropy), optimizer(model.parameters()), **settings)


INPUTS, TARGETS = torch.ones(7, 4), torch.zeros(7, dtype=torch.int64)


class TestTargets:
    @pytest.mark.parametrize("targets", [None, TARGETS.tolist(), 3])
    @pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy])
    def test_targets_that_are_not_tensors(self, loss, targets):
        name = type(targets).__name__
        with pytest.raises(TypeError, match=rf"the target of \w+ is a {name}, expected a tensor: use torch.as_tensor"):
            DataParallelCriterion(loss)(make_model()(INPUTS), targets)

    def test_outputs_that_are_mappings(self):
        outputs = make_model()(INPUTS).map(lambda output: {"logits": output})
        with pytest.raises(TypeError, match="the input of CrossEntropyLoss is a dict, expected a tensor"):
            DataParallelCriterion(nn.CrossEntropyLoss())(outputs, TARGETS)

    def test_no_targets(self):
        with pytest.raises(
            TypeError, match=r"missing a required argument: 'target'; pass targets after outputs: criterion\(outp"
        ):
            DataParallelCriterion(nn.CrossEntropyLoss())(make_model()(INPUTS))

    def test_arrays_are_called_targets(self):
        with pytest.raises(TypeError, match=r"targets\[0\] is an array of shape \(7,\)"):
            make_step()(INPUTS, TARGETS.numpy())


class TestModelsAndCriteria:
    def test_model_without_data(self):
        with pytest.raises(ValueError, match="weight is on the meta device and has no data: call module.to_empty"):
            DataParallelModel(nn.Linear(4, 3, device="meta"), CPUS)

    @pytest.mark.parametrize("criterion", [DataParallelCriterion(nn.MSELoss()), make_model()])
    def test_criterion_that_is_wrapped(self, criterion):
        with pytest.raises(TypeError, match=f"a {type(criterion).__name__} already, expected a plain one: pass its .module"):
            DataParallelCriterion(criterion)

    def test_criterion_that_returns_nothing(self):
        criterion = DataParallelCriterion(lambda output, target: None, weight="rows")
        with pytest.raises(TypeError, match="the criterion returned None, expected a loss"):
            criterion(make_model()(INPUTS), TARGETS)

    def test_lists_of_rows_that_cannot_be_gathered(self):
        class Lists(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 3)

            def forward(self, rows):
                return [self.layer(row) for row in rows]

        model = DataParallelModel(Lists(), CPUS)
        outputs = model(Rows([torch.ones(length, 4) for length in (3, 1, 5, 2)]))
        with pytest.raises(ValueError, match=re.escape("join the lists instead, as in [row for output in outputs for row in")):
            outputs.gather()

    def test_outputs_that_have_no_rows(self):
        with pytest.raises(ValueError, match=re.escape("select the outputs that have rows before, as in outputs.map(")):
            gather([{"similarity": torch.zeros(2, 2)}, {"similarity": torch.zeros(1, 1)}])


class TestSteps:
    def test_optimizer_of_another_model(self):
        with pytest.raises(ValueError, match="SGD has 2 parameter.s., and none is a parameter of the model or the criterion"):
            make_step(optimizer=lambda _: SGD(nn.Linear(4, 3).parameters()))

    def test_optimizer_of_the_criterion_alone(self):
        criterion = DataParallelCriterion(nn.PReLU())
        make_step(criterion=criterion, optimizer=lambda _: SGD(criterion.parameters()))

    def test_optimizer_that_evaluates_the_loss(self):
        with pytest.raises(TypeError, match="LBFGS evaluates the loss several times per step, and TrainStep once"):
            make_step(optimizer=torch.optim.LBFGS)

    @pytest.mark.parametrize(
        ("model", "message"), [(nn.Linear(4, 3).parameters(), "type generator"), (make_model(), "an instance of AdamW was given")]
    )
    def test_balanced_optimizer(self, model, message):
        kind = torch.optim.AdamW
        with pytest.raises(TypeError, match=message):
            BalancedOptimizer(model, kind(model.parameters()) if isinstance(model, nn.Module) else kind)

    @pytest.mark.parametrize("cause", ["no_grad", "frozen", "detached"])
    def test_losses_without_gradients(self, cause):
        criterion = DataParallelCriterion(lambda output, target: output.detach().mean(), weight="rows")
        step = make_step(criterion=criterion if cause == "detached" else None)
        step.model.requires_grad_(cause != "frozen")
        with (
            torch.set_grad_enabled(cause != "no_grad"),
            pytest.raises(RuntimeError, match="no parameter with requires_grad=True"),
        ):
            step(INPUTS, TARGETS)
        step.model.requires_grad_(True)
        if cause != "detached":
            assert step(INPUTS, TARGETS).isfinite()

    def test_norm_that_is_text(self):
        with pytest.raises(ValueError, match="max_grad_norm='1', expected a positive number"):
            make_step(max_grad_norm="1")

    @pytest.mark.parametrize("cost", [None, 5, torch.tensor(5)])
    def test_costs_that_are_not_one_per_row(self, cost):
        with pytest.raises(TypeError, match=r"cost= returned .*, expected one number for each row of the inputs"):
            make_step(cost=lambda inputs: cost)(INPUTS, TARGETS)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (("net", F.cross_entropy, INPUTS, TARGETS), {}, "the module is an object of type str"),
        ((make_model(), F.cross_entropy, INPUTS, TARGETS), {}, "wrapped in DataParallelModel already"),
        ((nn.Linear(4, 3), INPUTS, F.cross_entropy, TARGETS), {}, r"the criterion is a tensor of shape \(7, 4\), expected a mod"),
        ((nn.Linear(4, 3), F.cross_entropy, INPUTS, TARGETS), {"optimizer": SGD([torch.ones(1)])}, "the optimizer is .* SGD"),
        ((nn.Linear(4, 3), F.cross_entropy, INPUTS, TARGETS), {"optimizer": torch.optim.LBFGS}, "and an estimate once"),
    ],
)
@pytest.mark.usefixtures("trace_in_this_process")
def test_estimates(arguments, settings, message):
    with pytest.raises(TypeError, match=message):
        memory.estimate(*arguments, **settings)
