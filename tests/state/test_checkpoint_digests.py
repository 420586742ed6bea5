"""The digest of the parameters: the same in every layout, in the manifest of a checkpoint and of the running step."""

import json

import pytest
import torch
from helpers.checkpoints import Part, save
from helpers.optimizers import sgd
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import Checkpoints, TrainStep, parallelize


class Scaled(nn.Module):
    """A criterion with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, output, targets):
        return nn.functional.cross_entropy(output * self.scale, targets, reduction="sum")


def make_net():
    """A model with five rows to shard, two names for a parameter, a scalar, bfloat16 and complex numbers, and a frozen layer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 5))
    net[2].weight = net[0].weight
    net[3].requires_grad_(False)
    net.register_parameter("scalar", nn.Parameter(torch.tensor(2.0)))
    net.brief = nn.Parameter(torch.randn(3, 2).bfloat16(), requires_grad=False)
    return net


def make_step(net, devices=("cpu",), *, criterion=Scaled, **settings):
    model, criterion = parallelize(net, criterion(), list(devices), **settings)
    return TrainStep(model, criterion, sgd(model))


def digest_in(folder):
    (line,) = (
        text for text in (folder / "checkpoint.json").read_text().splitlines() if '"digest"' in text
    )
    found = json.loads((folder / "checkpoint.json").read_text())["digest"]
    assert json.dumps(found) in line  # It has a line of its own, for grep.
    return found


def digests(folder, net, *devices, **settings):
    """Returns the digest of a step and that of its checkpoint."""
    step = make_step(net, *devices, **settings)
    save(folder, 1, step=step)
    return step.digest(), digest_in(folder / "step-00000001")


def digests_on_rank(rank, folder, settings):
    return digests(folder, make_net(), **settings)


def test_a_digest_is_the_same_for_replicas_ranks_and_compiled_modules(tmp_path):
    expected, found = digests(tmp_path / "one", make_net())
    assert found == expected
    assert digests(tmp_path / "replicas", make_net(), ["cpu"] * 3) == (expected, expected)
    assert digests(tmp_path / "compiled", torch.compile(make_net(), backend="eager")) == (
        expected,
        expected,
    )
    for ranks in (2, 3):
        found = run_ranks(ranks, digests_on_rank, tmp_path / f"{ranks} ranks", {"strategy": "ddp"})
        assert found == [(expected, expected)] * ranks


def test_a_digest_of_shards_is_that_of_the_whole(tmp_path):
    """A checkpoint of shards has none."""
    expected, _ = digests(tmp_path / "one", make_net(), criterion=nn.CrossEntropyLoss)
    settings = {"strategy": "fsdp", "criterion": nn.CrossEntropyLoss}
    found = run_ranks(2, digests_on_rank, tmp_path / "shards", settings)
    assert found == [(expected, None)] * 2


def change_bit(net, step):
    net[3].bias.data.view(torch.int32)[1] += 1


def change_dtype(net, step):
    net[3].bias = nn.Parameter(net[3].bias.double())


def change_shape(net, step):
    net[3].weight = nn.Parameter(net[3].weight.reshape(4, 5))


def swap_names(net, step):
    net[0].bias, net[2].bias = net[2].bias, net[0].bias


def change_criterion(net, step):
    step.criterion.module.scale.data *= 2


@pytest.mark.parametrize(
    "change", [change_bit, change_dtype, change_shape, swap_names, change_criterion]
)
def test_each_change_of_a_parameter_changes_the_digest(change):
    net = make_net()
    step = make_step(net)
    before = step.digest()
    assert step.digest() == before
    change(net, step)
    assert step.digest() != before


def test_buffers_and_the_state_of_the_optimizer_are_not_in_the_digest():
    net = make_net()
    step = make_step(net)
    before = step.digest()
    net[1].running_mean += 1
    step.optimizer.param_groups[0]["lr"] = 3.0
    assert step.digest() == before


def test_the_digest_is_that_of_the_moment_of_the_save(tmp_path):
    net = make_net()
    step = make_step(net)
    checkpoints = Checkpoints(tmp_path, step=step)
    digest = step.digest()
    checkpoints.save(1)
    net[0].bias.data += 1  # while it is written
    checkpoints.wait()
    assert digest_in(tmp_path / "step-00000001") == digest != step.digest()


def test_a_digest_is_that_of_the_step_whatever_parts_are_beside_it(tmp_path):
    step = make_step(make_net())
    save(tmp_path / "alone", 1, net=make_net(), part=Part({"tensor": torch.ones(2)}))
    save(tmp_path / "step", 1, step=step, net=make_net())
    assert digest_in(tmp_path / "alone" / "step-00000001") is None
    assert digest_in(tmp_path / "step" / "step-00000001") == step.digest()


def test_a_checkpoint_without_a_digest_is_loaded(tmp_path):
    """Checkpoints of older versions have none."""
    net = make_net()
    save(tmp_path, 1, net=net)
    path = tmp_path / "step-00000001" / "checkpoint.json"
    manifest = json.loads(path.read_text())
    del manifest["digest"]
    path.write_text(json.dumps(manifest))
    assert Checkpoints(tmp_path, net=make_net()).load_latest() == 1
