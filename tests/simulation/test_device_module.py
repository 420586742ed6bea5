"""Random states of ``torch.sim``."""

import torch
from torch import nn

from balanced_parallel import simulate


def test_each_device_has_its_own_random_state():
    with simulate(2):
        torch.manual_seed(5)
        zero, one = (torch.rand(8, device=device) for device in ("sim:0", "sim:1"))
        assert zero.cpu().equal(one.cpu())  # the same seed for all devices, as in CUDA
        host = torch.get_rng_state()
        state = torch.sim.get_rng_state(1)
        first = nn.functional.dropout(one, 0.5)
        assert torch.get_rng_state().equal(host)
        assert torch.sim.get_rng_state(0).equal(state)  # the same number of draws
        torch.sim.set_rng_state(state, 1)
        assert nn.functional.dropout(one, 0.5).equal(first)
        generator = torch.Generator("sim:1").manual_seed(3)
        drawn = torch.rand(4, device="sim:1", generator=generator)
        assert torch.rand(4, device="sim:1", generator=generator.manual_seed(3)).equal(drawn)
        with torch.random.fork_rng([0, 1], device_type="sim"):
            inside = torch.rand(3, device="sim:0")
        assert torch.rand(3, device="sim:0").equal(inside)


def test_manual_seed_before_the_block_seeds_the_devices():
    drawn = []
    for _ in range(2):
        torch.manual_seed(11)
        with simulate(1):
            drawn.append(torch.rand(5, device="sim:0").cpu())
    assert drawn[0].equal(drawn[1])
