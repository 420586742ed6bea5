"""Private names of torch: the order of nodes in a backward, versions and storages of tensors, compiled methods."""

import pytest
import torch
from torch import nn

from balanced_parallel.runtime import torch_private


class Recorded(torch.autograd.Function):
    """The identity. Its backward appends a name to a list."""

    @staticmethod
    def forward(ctx, tensor, name, names):
        ctx.name = name
        ctx.names = names
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.names.append(ctx.name)
        return gradient, None, None


@pytest.mark.parametrize("raised", [False, True])
def test_run_first_overtakes_later_nodes_of_the_forward(raised):
    names = []
    leaf = torch.ones(2, requires_grad=True)
    early = Recorded.apply(leaf, "early", names)
    late = Recorded.apply(leaf, "late", names)
    if raised:
        torch_private.run_first(early.grad_fn)
    (early + late).sum().backward()
    assert names == (["early", "late"] if raised else ["late", "early"])


def test_versions_count_writes_in_place_but_for_inference_tensors():
    with torch.inference_mode():
        inference = torch.zeros(3)
    tensor = torch.zeros(3)
    tensor.add_(1).mul_(2)
    assert torch_private.versions([inference, tensor, torch.zeros(3)]) == [0, 2, 0]


def test_views_share_the_id_of_their_storage():
    tensor = torch.zeros(4)
    others = [torch.zeros(4), torch.empty(0), torch.empty(0)]
    assert torch_private.storage_id(tensor[1:].untyped_storage()) == torch_private.storage_id(
        tensor.untyped_storage()
    )
    assert (
        len({torch_private.storage_id(other.untyped_storage()) for other in [tensor, *others]}) == 4
    )


def test_compiled_methods_are_found_and_disabled_ones_are_not():
    class Decorated(nn.Linear):
        @torch.compile(backend="eager")
        def forward(self, inputs):
            return super().forward(inputs)

    assert torch_private.is_compiled(Decorated(2, 2))
    module = nn.Linear(2, 2)
    module.forward = torch.compiler.disable(module.forward)
    assert not torch_private.is_compiled(module)
    module.forward = torch.compile(nn.Linear(2, 2).forward, backend="eager")
    assert torch_private.is_compiled(module)
