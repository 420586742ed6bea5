"""Execution order, callbacks and planned nodes of a running backward."""

import pytest
import torch

from balanced_parallel.runtime import autograd


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
        autograd.run_first(early.grad_fn)
    (early + late).sum().backward()
    assert names == (["early", "late"] if raised else ["late", "early"])


def test_callbacks_run_after_all_gradients_are_accumulated():
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen = []
    product = first * second
    product.register_hook(lambda _: autograd.run_after_backward(lambda: seen.append((first.grad, second.grad))))
    product.sum().backward()
    assert len(seen) == 1
    assert all(gradient is not None for gradient in seen[0])


def test_will_run_is_true_for_the_leaves_whose_gradient_backward_accumulates():
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen = []
    product = first * second
    nodes = [node for node, _ in product.grad_fn.next_functions]
    product.register_hook(lambda _: seen.append([autograd.will_run(node) for node in nodes]))
    product.sum().backward(inputs=[second], retain_graph=True)
    product.sum().backward(retain_graph=True)
    torch.autograd.grad(product.sum(), [first])
    assert seen == [[False, True], [True, True], [None, False]]


def test_current_node_is_that_of_the_running_backward():
    leaf = torch.ones(2, requires_grad=True)
    nodes = []
    product = leaf * 2
    product.register_hook(lambda _: nodes.append(autograd.current_node()))
    product.sum().backward()
    assert [node.name() for node in nodes] == ["MulBackward0"]
    assert autograd.current_node() is None


def test_each_backward_has_a_number_of_its_own():
    leaf = torch.ones(2, requires_grad=True)
    numbers = []
    for _ in range(2):
        product = leaf * 2
        product.register_hook(lambda _: numbers.append(autograd.current_backward_id()))
        (product + product).sum().backward()
    assert None not in numbers
    assert len(set(numbers)) == 2
    assert autograd.current_backward_id() is None


def test_keeps_graph_is_true_if_the_backward_may_run_again():
    leaf, seen = torch.ones(2, requires_grad=True), []
    total = (leaf * 2).sum()
    total.register_hook(lambda _: seen.append(autograd.keeps_graph()))
    total.backward(retain_graph=True)
    total.backward()
    assert seen == [True, False]
