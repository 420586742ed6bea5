"""Models of user code: chains, other methods than forward, devices.

Each loop equals the plain program, or the error says what to write.
"""

import pytest
import torch
from helpers.loops import CPUS
from helpers.problems import build_net
from torch import nn
from torch.testing import assert_close

from balanced_parallel import DataParallelModel, simulate

pytestmark = pytest.mark.usefixtures("double")


class TestChains:
    def test_plain_list_of_outputs_as_input_raises_an_error(self):
        model = DataParallelModel(build_net(4), CPUS)
        with pytest.raises(
            ValueError, match=r"different numbers of rows.*inputs\[0\]\[0\] is a tensor"
        ):
            model(list(model(torch.randn(7, 4))))

    def test_hidden_states_can_be_unzipped_and_passed_back(self):
        lstm = nn.LSTM(4, 6)
        model = DataParallelModel(lstm, CPUS, dim=1, out_dims=(1, (1, 1)))
        x = torch.randn(5, 7, 4)
        state = (torch.zeros(1, 7, 6), torch.zeros(1, 7, 6))
        plain = (torch.zeros(1, 7, 6), torch.zeros(1, 7, 6))
        for _ in range(3):
            outputs = model(x, state)
            expected, plain = lstm(x, plain)
            _, state = outputs.unzip()
            assert_close(outputs.gather()[0], expected)
            assert_close(outputs.map(lambda output: output[1], dim=1).gather(), plain)
        with pytest.raises(ValueError, match=r"map\(function, dim=...\)"):
            outputs.map(lambda output: output[0])


def test_invalid_modules_raise_an_error():
    for module, message in (
        (nn.Linear, r"the module is the class Linear, expected an instance: write Linear\(...\)"),
        (len, "the module is an object of type len, expected a torch.nn.Module"),
        (
            DataParallelModel(nn.Linear(2, 2), ["cpu"]),
            "wrapped in DataParallelModel already, expected a plain one",
        ),
        (nn.DataParallel(nn.Linear(2, 2)), "wrapped in DataParallel already"),
    ):
        with pytest.raises(TypeError, match=message):
            DataParallelModel(module, CPUS)


class TestDevices:
    """The same on devices whose memory is their own."""

    def test_outputs_move_only_if_the_split_differs(self):
        torch.set_default_dtype(torch.float32)
        with simulate(devices=3) as cluster:
            generator = DataParallelModel(build_net(4))
            critic = DataParallelModel(build_net(1))
            uneven = DataParallelModel(build_net(1), split=[1, 1, 5])
            fake = generator(torch.randn(9, 4))
            with critic.no_sync(), uneven.no_sync():
                critic(fake), uneven(fake)  # parameters are on all devices then
                before = sum(cluster.moved.values())
                scores = critic(fake)
                assert sum(cluster.moved.values()) == before
                uneven(fake)
                assert (
                    sum(cluster.moved.values()) - before == 5 * 4 * 4
                )  # one row goes to the second device, four to the last
            assert [score.device.index for score in scores] == [0, 1, 2]
            gathered = DataParallelModel(build_net(1), output_device=1, gather_outputs=True)(fake)
            assert gathered.device.index == 1


class TestForwards:
    def test_statistics_of_instance_norm_are_an_error_in_training(self):
        inputs = torch.randn(7, 4, 3)
        net = nn.InstanceNorm1d(4, track_running_stats=True)
        model = DataParallelModel(net, CPUS)
        with pytest.raises(RuntimeError, match="other values to the tensor running_mean"):
            model(inputs)
        model.eval()
        assert_close(model(inputs).gather(), net(inputs))
        other = nn.InstanceNorm1d(4)
        assert_close(DataParallelModel(other, CPUS)(inputs).gather(), other(inputs))
