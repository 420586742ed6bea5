"""Operations on lists of tensors equal a loop over the tensors, for empty lists too."""

import torch

from balanced_parallel.runtime import multi_tensor


def tensors():
    return [torch.arange(6.0).view(2, 3), torch.tensor(4.0), torch.empty(0)]


def test_add_returns_sums_and_changes_no_argument():
    left, right = tensors(), tensors()
    sums = multi_tensor.add(left, right)
    assert all(torch.equal(total, 2 * tensor) for total, tensor in zip(sums, tensors(), strict=True))
    assert all(map(torch.equal, left, tensors()))


def test_operations_in_place_change_each_tensor():
    found = tensors()
    multi_tensor.add_(found, tensors())
    multi_tensor.multiply_(found, 3)
    multi_tensor.multiply_(found, torch.tensor(0.5))
    assert all(torch.equal(tensor, 3 * start) for tensor, start in zip(found, tensors(), strict=True))
    multi_tensor.copy_(found, tensors())
    assert all(map(torch.equal, found, tensors()))
    multi_tensor.zero_(found)
    assert not any(tensor.any() for tensor in found)


def test_operations_accept_empty_lists():
    assert multi_tensor.add([], []) == []
    multi_tensor.add_([], [])
    multi_tensor.multiply_([], 2)
    multi_tensor.copy_([], [])
    multi_tensor.zero_([])
