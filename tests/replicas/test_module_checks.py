"""Modules that cannot be replicated."""

import pytest
import torch
from helpers.problems import build_net
from torch import nn

from balanced_parallel import DataParallelModel

pytestmark = pytest.mark.usefixtures("double")

CPUS = ["cpu"] * 3


def test_modules_that_cannot_be_replicated_raise_an_error():
    with pytest.raises(ValueError, match=r"weight is not initialised yet: run the module once"):
        DataParallelModel(nn.LazyLinear(3), CPUS)(torch.randn(3, 4))
    compiled = torch.compile(build_net(), backend="eager")
    with pytest.raises(TypeError, match=r"is compiled, which binds it to one replica: pass the module without torch.compile"):
        DataParallelModel(compiled, CPUS)(torch.randn(3, 4))
    model = DataParallelModel(build_net(), CPUS)
    model.module.to("meta")
    with pytest.raises(ValueError, match=r"0.weight is on meta, expected .* on the first device, cpu.*\.to\('cpu'\)"):
        model(torch.randn(3, 4))
