"""Outputs of user code: lists, and values per replica.

Each loop equals the plain program, or the error says what to write.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers.loops import CPUS, Calls
from helpers.problems import CLASSES, build_net
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    PerReplica,
)

pytestmark = pytest.mark.usefixtures("double")


class TestListOutputs:
    """A model that returns a list, as in pose estimation and deep supervision."""

    def stacks(self):
        return Calls(
            lambda net, x: [net(x), net(x * 2), net(x * 3)]
        )  # There are as many as devices.

    @pytest.mark.parametrize("rows", [6, 7])
    def test_criterion_on_the_outputs_of_one_replica_raises_an_error(self, rows):
        """6 rows on 3 devices: three outputs of one replica have the shapes of one output of each replica."""
        x = torch.randn(rows, 4)
        target = torch.rand(rows, CLASSES)
        criterion = DataParallelCriterion(nn.MSELoss())
        outputs = DataParallelModel(self.stacks(), CPUS)(x)
        message = r"3 outputs with [23] rows each, all on cpu: .* or 3 outputs of one replica, .*outputs\.map.*unzip"
        with pytest.raises(ValueError, match=message):
            sum(criterion(output, target) for output in outputs)
        with pytest.raises(ValueError, match=message):
            criterion([F.relu(output) for output in outputs[0]], target)
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            criterion(DataParallelModel(self.stacks(), CPUS)(x)[0], target)
        outputs = DataParallelModel(Calls(lambda net, x: (net(x),)), CPUS)(x[:3])
        with pytest.raises(ValueError, match="1 outputs with 1 rows, and targets with 3"):
            criterion(outputs[0], target[:3])  # [1, CLASSES] beside [3, CLASSES] would be broadcast

    def test_rows_of_losses_in_a_list_are_unknown(self):
        outputs = DataParallelModel(Calls(lambda net, x: net(x).mean()), CPUS, split=[5, 1, 1])(
            torch.randn(7, 4)
        )
        criterion = DataParallelCriterion(
            lambda loss, target: loss, weight=lambda loss, target: len(target)
        )
        with pytest.raises(
            ValueError, match=r"3 outputs with no rows, and targets with 7.*outputs\.map"
        ):
            criterion(list(outputs), torch.rand(7))
        assert_close(
            criterion(outputs, torch.rand(7)), (5 * outputs[0] + outputs[1] + outputs[2]) / 7
        )


class TestPerReplica:
    def outputs(self):
        return DataParallelModel(Calls(lambda net, x: {"logits": net(x), "deep": {"x": x}}), CPUS)(
            torch.randn(7, 4)
        )

    def test_keys_and_attributes_apply_to_every_entry(self):
        outputs = self.outputs()
        logits = outputs["logits"]
        assert isinstance(logits, PerReplica)
        assert logits.sizes == (3, 2, 2)
        assert outputs["deep"]["x"].gather().shape == (7, 4)
        record = outputs.map(
            lambda output: torch.return_types.max((output["logits"], output["logits"]))
        )
        assert record.values.gather().shape == (7, CLASSES)
        with pytest.raises(KeyError):
            outputs["loss"]

    def test_gradients_of_outputs_raise_an_error_with_a_fix(self):
        x = torch.randn(7, 4, requires_grad=True)
        scores = DataParallelModel(build_net(1), CPUS)(x)
        with pytest.raises(TypeError, match=r"grad\(\) is not defined .*call \.gather\(\)"):
            torch.autograd.grad(scores, x, scores.map(torch.ones_like))

    def test_tensor_operations_raise_an_error_with_a_fix(self):
        for use in (
            lambda outputs: outputs.mean(),
            lambda outputs: outputs.shape,
            lambda outputs: outputs[:, 0],
            lambda outputs: F.nll_loss(outputs, torch.zeros(7, dtype=torch.long)),
            lambda outputs: F.softmax(outputs, 1),
            lambda outputs: torch.mean(outputs),
            lambda outputs: torch.ones(7, CLASSES) - outputs,
            lambda outputs: outputs * 2,
            lambda outputs: outputs == torch.zeros(7, CLASSES),
            lambda outputs: 2 * outputs,
            lambda outputs: outputs + outputs,
            nn.Linear(CLASSES, 2),
        ):
            message = r"PerReplica, .*not a tensor: call \.gather\(\).*DataParallelCriterion"
            with pytest.raises((TypeError, AttributeError), match=message):
                use(self.outputs()["logits"])
