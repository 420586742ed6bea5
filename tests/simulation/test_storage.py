"""Tensors of simulated devices: copies, files, pinned memory, tied parameters."""

import copy
import io
import pickle

import torch
from torch import nn

from balanced_parallel import simulate


def test_tensors_can_be_copied_saved_and_printed():
    with simulate(2):
        net = nn.Linear(3, 2).to("sim:1")
        assert repr(torch.ones(2, device="sim:1")) == "tensor([1., 1.], device='sim:1')"
        assert copy.deepcopy(net).weight.equal(net.weight)
        assert copy.deepcopy(net).weight.device == torch.device("sim:1")
        file = io.BytesIO()
        torch.save(net.state_dict(), file)
        file.seek(0)
        assert torch.load(file, map_location="cpu")["weight"].equal(net.weight.cpu())
        assert pickle.loads(pickle.dumps(net.weight.data)).device == torch.device("sim:1")
        assert torch.ones(2).pin_memory().to("sim:0", non_blocking=True).device == torch.device("sim:0")


def test_pinned_memory_is_known():
    with simulate(1):
        pinned = torch.ones(2).pin_memory()
        assert pinned.is_pinned()
        assert pinned[1:].is_pinned()
        assert torch.empty(3, pin_memory=True).is_pinned()
        assert not pinned.clone().is_pinned()
        assert not torch.ones(2).is_pinned()


def test_moving_a_module_keeps_tied_parameters():
    with simulate(1):
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        net[1].weight = net[0].weight
        before = net[0].weight
        net.to("sim:0")
        assert net[0].weight is before is net[1].weight
        assert before.device == torch.device("sim:0")


def test_memory_of_a_resized_storage_is_freed_and_allocated_again():
    with simulate(2) as cluster:
        tensor = torch.arange(256.0).to("sim:1")
        storage = tensor.untyped_storage()
        storage.resize_(2048)
        assert tensor.cpu().equal(torch.arange(256.0))
        assert cluster.live == [0, 2048]
        storage.resize_(0)
        assert (storage.size(), cluster.live) == (0, [0, 0])
        storage.resize_(1024)
        assert tensor.fill_(3).sum().item() == 768
        assert cluster.live == [0, 1024]
