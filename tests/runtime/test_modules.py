"""Dictionaries of one module, with entries that are None, and modules that were compiled."""

import pytest
import torch
from torch import nn

from balanced_parallel.runtime import modules


def test_dictionaries_hold_own_entries_only_and_keep_none():
    module = nn.Sequential(nn.Linear(2, 2, bias=False))
    module.register_buffer("steps", None)
    assert modules.children_of(module) == {"0": module[0]}
    assert modules.parameters_of(module) == {}
    assert modules.buffers_of(module) == {"steps": None}
    assert modules.parameters_of(module[0]) == {"weight": module[0].weight, "bias": None}


def test_changes_to_a_dictionary_change_the_module():
    module = nn.Linear(2, 2)
    modules.parameters_of(module)["bias"] = None
    assert module.bias is None


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # the compiler's own imports
def test_compiled_modules_are_found_in_both_forms():
    module = nn.Linear(2, 2)
    assert not modules.is_compiled(module)
    assert modules.is_compiled(torch.compile(module))
    module.compile()
    assert modules.is_compiled(module)


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(3), nn.SyncBatchNorm(3), nn.LazyBatchNorm1d()])
def test_batch_norms_have_one_base_class(layer):
    assert isinstance(layer, modules.BatchNorm)
    assert not isinstance(nn.LayerNorm(3), modules.BatchNorm)


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout()])
def test_dropouts_have_one_base_class(layer):
    assert isinstance(layer, modules.Dropout)
