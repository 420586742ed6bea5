"""Control over a running backward: execution order of nodes, callbacks at its end, and the nodes that it will run.

torch's DistributedDataParallel and FSDP2 use the same private functions.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__: list[str] = []

Node = Any  # torch.autograd.graph.Node; its stub lacks attributes of custom functions
_HIGHEST_PRIORITY = 2**63


def run_first(node: Node) -> None:
    """Makes backward run ``node`` before all other nodes that are ready in the same thread of the engine.

    The engine has one thread per device. It runs the ready node with the highest sequence number first. Numbers follow the order
    of the forward, and there is no public way to change one (pytorch#114120 added this one).
    """
    node._set_sequence_nr(_HIGHEST_PRIORITY)


def run_after_backward(callback: Callable[[], None]) -> None:
    """Calls ``callback`` at the end of the running backward. Call this from a node or a hook of that backward.

    The callback may run on a thread of the engine, but with the current streams of the thread that called backward. The public
    ``torch.autograd.graph.queue_callback`` (pytorch#66199, #193958) is newer than torch 2.13.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def will_run(node: Node) -> bool | None:
    """Returns True if the running backward will run ``node``; for the node of a leaf, if it will fill the ``grad`` of the leaf.

    Returns None for a leaf whose gradient ``torch.autograd.grad`` returns: torch refuses to answer for it. There is no public
    function (pytorch#83617, #84773).
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None


def reached_leaves(roots: Iterable[torch.Tensor]) -> set[int]:
    """Returns the ids of the leaves that a backward from ``roots`` reaches, also after it has run."""
    nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen, found = set(nodes), set()
    while nodes:
        node: Node = nodes.pop()
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        fresh = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= fresh
        nodes += fresh
    return found


def current_node() -> Node | None:
    """Returns the node that the calling thread runs in a backward, or None outside of a backward. No public function exists."""
    return torch._C._current_autograd_node()


def number_of(node: Node) -> int:
    """Returns the number of a node in the order of the forward. It tells nodes apart without keeping them."""
    return int(node._sequence_nr())


def current_backward_id() -> int | None:
    """Returns the number of the backward that the calling thread runs, or None outside of one. No public function exists."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def keeps_graph() -> bool:
    """Returns True if the running backward may run again: ``retain_graph=True``, or it is compiled. No public function exists."""
    return torch.compiler.is_compiling() or bool(torch._C._autograd._get_current_graph_task_keep_graph())
