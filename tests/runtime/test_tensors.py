"""Private properties of tensors, as torch defines them."""

import pytest
import torch
from torch import nn

from balanced_parallel.runtime import tensors


def test_versions_count_writes_in_place():
    tensor, other = torch.zeros(3), torch.zeros(3)
    tensor.add_(1).mul_(2)
    assert tensors.versions([tensor, other]) == [2, 0]


def test_versions_of_inference_tensors_are_zero():
    with torch.inference_mode():
        inference = torch.zeros(3)
    counted = torch.zeros(3).add_(1)
    assert tensors.versions([inference, counted]) == [0, 1]


def test_base_of_a_view_is_the_viewed_tensor():
    tensor = torch.zeros(4, 2)
    assert tensors.base_of(tensor[1:].t()) is tensor
    assert tensors.base_of(tensor) is tensor


def test_marked_results_of_operators_are_parameters_to_isinstance():
    result = torch.ones(2, requires_grad=True) * 2
    assert not isinstance(result, nn.Parameter)
    tensors.mark_as_parameter(result)
    assert isinstance(result, nn.Parameter)
    assert result.grad_fn is not None


def test_gradients_are_read_and_set_past_a_property(monkeypatch):
    parameter = nn.Parameter(torch.ones(2))
    parameter.sum().backward()
    monkeypatch.setattr(nn.Parameter, "grad", property(lambda _: pytest.fail("the property was called")), raising=False)
    assert tensors.get_gradient(parameter).tolist() == [1, 1]
    tensors.set_gradient(parameter, None)
    assert tensors.get_gradient(parameter) is None


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_are_found_until_they_are_removed(register):
    parameter = nn.Parameter(torch.ones(2))
    assert not tensors.has_gradient_hooks(parameter)
    handle = getattr(parameter, register)(lambda _: None)
    assert tensors.has_gradient_hooks(parameter)
    handle.remove()
    assert not tensors.has_gradient_hooks(parameter)


def test_views_share_the_id_of_their_storage():
    tensor = torch.zeros(4)
    others = [torch.zeros(4), torch.empty(0), torch.empty(0)]
    assert tensors.storage_id(tensor[1:].untyped_storage()) == tensors.storage_id(tensor.untyped_storage())
    assert len({tensors.storage_id(other.untyped_storage()) for other in [tensor, *others]}) == 4
