"""Execution order, callbacks and planned nodes of a running backward.

Private properties of tensors, as torch defines them.

Dictionaries of one module, with entries that are None, and modules that were compiled.

Nested lists, tuples and dictionaries, flattened and mapped.

Operations on lists of tensors equal a loop over the tensors, for empty lists too.
"""

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


def test_current_node_is_that_of_the_running_backward():
    leaf = torch.ones(2, requires_grad=True)
    nodes = []
    product = leaf * 2
    product.register_hook(lambda _: nodes.append(torch_private.current_node()))
    product.sum().backward()
    assert [node.name() for node in nodes] == ["MulBackward0"]
    assert torch_private.current_node() is None


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


def test_versions_count_writes_in_place():
    tensor, other = torch.zeros(3), torch.zeros(3)
    tensor.add_(1).mul_(2)
    assert torch_private.versions([tensor, other]) == [2, 0]


def test_versions_of_inference_tensors_are_zero():
    with torch.inference_mode():
        inference = torch.zeros(3)
    counted = torch.zeros(3).add_(1)
    assert torch_private.versions([inference, counted]) == [0, 1]


def test_base_of_a_view_is_the_viewed_tensor():
    tensor = torch.zeros(4, 2)
    assert torch_private.base_of(tensor[1:].t()) is tensor
    assert torch_private.base_of(tensor) is tensor


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


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_of_the_backward_of_a_module_are_found(register):
    module = nn.Linear(2, 2)
    assert not any(torch_private.backward_hooks_of(module))
    getattr(module, register)(lambda *of: None)
    assert any(torch_private.backward_hooks_of(module))


def test_views_share_the_id_of_their_storage():
    tensor = torch.zeros(4)
    others = [torch.zeros(4), torch.empty(0), torch.empty(0)]
    assert torch_private.storage_id(tensor[1:].untyped_storage()) == torch_private.storage_id(tensor.untyped_storage())
    assert len({torch_private.storage_id(other.untyped_storage()) for other in [tensor, *others]}) == 4


def test_dictionaries_hold_own_entries_only_and_keep_none():
    module = nn.Sequential(nn.Linear(2, 2, bias=False))
    module.register_buffer("steps", None)
    assert torch_private.children_of(module) == {"0": module[0]}
    assert torch_private.parameters_of(module) == {}
    assert torch_private.buffers_of(module) == {"steps": None}
    assert torch_private.parameters_of(module[0]) == {"weight": module[0].weight, "bias": None}


def test_changes_to_a_dictionary_change_the_module():
    module = nn.Linear(2, 2)
    torch_private.parameters_of(module)["bias"] = None
    assert module.bias is None


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


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(3), nn.SyncBatchNorm(3), nn.LazyBatchNorm1d()])
def test_batch_norms_have_one_base_class(layer):
    assert isinstance(layer, torch_private.BatchNorm)
    assert not isinstance(nn.LayerNorm(3), torch_private.BatchNorm)


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout()])
def test_dropouts_have_one_base_class(layer):
    assert isinstance(layer, torch_private.Dropout)


def test_leaves_are_in_order_and_include_plain_values():
    tensor = torch.ones(2)
    assert torch_private.leaves_of_tree({"step": 3, "state": [tensor, (None, "text")]}) == [3, tensor, None, "text"]


def test_map_tensors_leaves_other_values_alone():
    tree = {"step": 3, "state": (torch.ones(2), "text")}
    assert torch_private.map_tensors(lambda tensor: tensor.tolist(), tree) == {"step": 3, "state": ([1.0, 1.0], "text")}


def tensors():
    return [torch.arange(6.0).view(2, 3), torch.tensor(4.0), torch.empty(0)]


def test_add_returns_sums_and_changes_no_argument():
    left, right = tensors(), tensors()
    sums = torch_private.foreach_add(left, right)
    assert all(torch.equal(total, 2 * tensor) for total, tensor in zip(sums, tensors(), strict=True))
    assert all(map(torch.equal, left, tensors()))


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
