"""Private names of torch: a running backward, properties of tensors, compiled modules, operations on lists of tensors."""

import pytest
import torch
from torch import nn

from balanced_parallel.runtime import torch_private


class Recorded(torch.autograd.Function):
    """The identity. Its backward appends a name to a list."""

    @staticmethod
    def forward(ctx, tensor, name, names):
        ctx.name, ctx.names = name, names
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


def test_callbacks_run_after_all_gradients_are_accumulated():
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen = []
    product = first * second
    product.register_hook(lambda _: torch_private.run_after_backward(lambda: seen.append((first.grad, second.grad))))
    product.sum().backward()
    assert len(seen) == 1
    assert all(gradient is not None for gradient in seen[0])


def test_will_run_is_true_for_the_leaves_whose_gradient_backward_accumulates():
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen = []
    product = first * second
    nodes = [node for node, _ in product.grad_fn.next_functions]
    product.register_hook(lambda _: seen.append([torch_private.will_run(node) for node in nodes]))
    product.sum().backward(inputs=[second], retain_graph=True)
    product.sum().backward(retain_graph=True)
    torch.autograd.grad(product.sum(), [first])
    assert seen == [[False, True], [True, True], [None, False]]


def test_each_backward_has_a_number_of_its_own():
    leaf = torch.ones(2, requires_grad=True)
    numbers = []
    for _ in range(2):
        product = leaf * 2
        product.register_hook(lambda _: numbers.append(torch_private.current_backward_id()))
        (product + product).sum().backward()
    assert None not in numbers
    assert len(set(numbers)) == 2
    assert torch_private.current_backward_id() is None


def test_keeps_graph_is_true_if_the_backward_may_run_again():
    leaf, seen = torch.ones(2, requires_grad=True), []
    total = (leaf * 2).sum()
    total.register_hook(lambda _: seen.append(torch_private.keeps_graph()))
    total.backward(retain_graph=True)
    total.backward()
    assert seen == [True, False]


def test_versions_count_writes_in_place_but_for_inference_tensors():
    with torch.inference_mode():
        inference = torch.zeros(3)
    tensor = torch.zeros(3)
    tensor.add_(1).mul_(2)
    assert torch_private.versions([inference, tensor, torch.zeros(3)]) == [0, 2, 0]


def test_marked_results_of_operators_are_parameters_to_isinstance():
    result = torch.ones(2, requires_grad=True) * 2
    assert not isinstance(result, nn.Parameter)
    torch_private.mark_as_parameters([result])
    assert isinstance(result, nn.Parameter)
    assert result.grad_fn is not None


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_are_found_taken_off_and_removed(register):
    parameter, calls = nn.Parameter(torch.ones(2)), []
    assert not any(torch_private.hooks_of(parameter))
    handle = getattr(parameter, register)(lambda _: calls.append(1))
    with torch_private.without_hooks([parameter]):
        assert not any(torch_private.hooks_of(parameter))
        parameter.sum().backward()
        assert calls == []
    assert any(torch_private.hooks_of(parameter))
    parameter.sum().backward()
    assert calls == [1]
    handle.remove()
    assert not any(torch_private.hooks_of(parameter))
    parameter.sum().backward()
    assert calls == [1]


def test_views_share_the_id_of_their_storage():
    tensor = torch.zeros(4)
    others = [torch.zeros(4), torch.empty(0), torch.empty(0)]
    assert torch_private.storage_id(tensor[1:].untyped_storage()) == torch_private.storage_id(tensor.untyped_storage())
    assert len({torch_private.storage_id(other.untyped_storage()) for other in [tensor, *others]}) == 4


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # the compiler's own imports
def test_compiled_modules_are_found_in_both_forms():
    module = nn.Linear(2, 2)
    assert not torch_private.is_compiled(module)
    assert torch_private.is_compiled(torch.compile(module))
    module.compile()
    assert torch_private.is_compiled(module)


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


def tensors():
    return [torch.arange(6.0).view(2, 3), torch.tensor(4.0), torch.empty(0)]


def test_operations_in_place_change_each_tensor():
    found = tensors()
    torch_private.foreach_add_(found, tensors())
    torch_private.foreach_multiply_(found, 3)
    torch_private.foreach_multiply_(found, torch.tensor(0.5))
    assert all(torch.equal(tensor, 3 * start) for tensor, start in zip(found, tensors(), strict=True))
    torch_private.foreach_copy_(found, tensors())
    assert all(map(torch.equal, found, tensors()))


def test_operations_accept_empty_lists():
    assert torch_private.foreach_add([], []) == []
    torch_private.foreach_add_([], [])
    torch_private.foreach_multiply_([], 2)
    torch_private.foreach_copy_([], [])
