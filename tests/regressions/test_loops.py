"""Training loops of user code: one line each, and micro-batches.

Each loop equals the plain program, or the error says what to write.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers.loops import CPUS, Calls
from helpers.optimizers import sgd
from helpers.problems import (
    CLASSES,
    assert_equal,
    assert_same_gradients,
    build_net,
    gradients,
)
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    Along,
    DataParallelCriterion,
    DataParallelModel,
    PerReplica,
    TrainStep,
    Whole,
)

pytestmark = pytest.mark.usefixtures("double")


class TestGatherOutputs:
    """``gather_outputs=True`` returns what ``nn.DataParallel`` returns."""

    def test_losses_emit_one_warning_and_outputs_that_are_the_same_on_all_replicas_none(self):
        model = DataParallelModel(
            Calls(lambda net, x: {"loss": net(x).mean()}), CPUS, gather_outputs=True
        )
        with pytest.warns(
            UserWarning, match=r"the output\['loss'\] has one value per replica.*weighted_mean"
        ) as caught:
            model(torch.randn(7, 4))
            model(torch.randn(7, 4))
        assert [warning.filename for warning in caught] == [__file__]
        for shape in ((), (1,)):
            scaled = Calls(
                lambda net, x, shape=shape: {
                    "y": net(x),
                    "nested": {"scale": net[0].bias.sum().exp().view(shape)},
                }
            )
            dims = (0, (None,))
            outputs = DataParallelModel(scaled, CPUS, gather_outputs=True, out_dims=dims)(
                torch.randn(7, 4)
            )
            assert outputs["nested"]["scale"].shape == shape
            assert outputs["y"].shape == (7, CLASSES)


class TestMicroBatches:
    """``TrainStep`` cuts over time what the model cuts over devices."""

    def test_time_major_rows_and_whole_arguments(self):
        def loss(output, target):
            return F.cross_entropy(output.flatten(0, 1), target.flatten())

        module = Calls(lambda net, x, scale: net(x) * scale)
        x = torch.randn(5, 13, 4)
        target = torch.randint(CLASSES, (5, 13))
        scale = torch.rand(CLASSES)
        target[1:, :9] = -100
        model = DataParallelModel(module, CPUS, dim=1)
        split = DataParallelCriterion(loss, weight=lambda output, target: (target != -100).sum())
        expected = loss(module(x, scale), target)
        expected_gradients = torch.autograd.grad(expected, [*module.parameters()])
        step = TrainStep(model, split, sgd(module, lr=0.0), micro_batch_size=2)
        found, outputs = step((x, Whole(scale)), Along(target, 1), return_outputs=True)
        assert_equal(found, expected.detach())
        assert_same_gradients(gradients(module), expected_gradients)
        assert_close(outputs.gather(), module(x, scale))
        with pytest.raises(ValueError, match="the rows of the outputs are in dimension 1"):
            TrainStep(model, DataParallelCriterion(nn.MSELoss()), sgd(module))(
                (x, Whole(scale)), target
            )

    def test_divisors_that_are_not_known_before_the_first_micro_batch_raise_an_error(self):
        split = DataParallelCriterion(
            lambda output, target: (output.mean(), output.sum()),
            weight=lambda output, target: (len(output), output.numel()),
        )
        model = DataParallelModel(build_net(), CPUS)
        step = TrainStep(model, split, sgd(model))
        steps = r".* before the first micro-batch: .*functions of the targets alone.*weight=\{.*in place of TrainStep"
        with pytest.raises(ValueError, match="divisors of their own" + steps):
            step(torch.randn(7, 4), torch.rand(7, CLASSES))
        counted = DataParallelCriterion(split.module, weight=(len, lambda target: 2 * len(target)))
        step = TrainStep(model, counted, sgd(model))
        with pytest.raises(ValueError, match=r"divisors of their own.*step\(inputs, targets\)"):
            step.add(torch.randn(7, 4), torch.rand(7, CLASSES))

    def test_criterion_without_outputs_and_gathered_outputs_in_a_step_raise_an_error(self):
        with pytest.raises(
            TypeError,
            match="the criterion was given an object of type PerReplica, expected the list",
        ):
            DataParallelCriterion(nn.MSELoss())(PerReplica([], []), torch.zeros(0, CLASSES))
        model = DataParallelModel(build_net(), CPUS, gather_outputs=True)
        with pytest.raises(TypeError, match="gather_outputs=True, expected outputs that stay"):
            TrainStep(model, DataParallelCriterion(nn.MSELoss()), sgd(model))
