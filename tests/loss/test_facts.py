"""Facts about the tensors that a criterion computes."""

import itertools

import torch
from helpers.processes import start_process

from balanced_parallel.loss.facts import FIXED, FactsOfTensors


def free_at_all_depths():
    for depth, is_first in itertools.product(range(120), (True, False)):
        tensor = torch.ones(3)
        facts = FactsOfTensors(itertools.count())
        facts.tell(tensor, FIXED)
        node = [facts, tensor] if is_first else [tensor, facts]
        del tensor, facts
        for _ in range(depth):
            node = [node]
        del node


def test_facts_are_freed_inside_of_deep_structures():
    """Frames of a traceback are some. A reference without a callback ended the process there, with Python 3.11."""
    process = start_process(free_at_all_depths, ())
    process.join(60)
    assert process.exitcode == 0
