"""Traces of a training step."""

import gc

from helpers.memory_problems import PROBLEMS
from torch.nn import functional as F

from balanced_parallel import memory


def test_traces_visit_no_older_objects_of_the_process():
    """A collection of all objects takes seconds in a notebook, and a plan has tens of traces."""
    build, batch = PROBLEMS["perceptron"]
    memory.estimate(build(), F.cross_entropy, *batch(6))  # imports and caches
    generations = []
    gc.disable()
    gc.callbacks.append(lambda phase, info: generations.append(info["generation"]))
    try:
        memory.estimate(build(), F.cross_entropy, *batch(6))
    finally:
        gc.callbacks.pop()
        gc.enable()
    assert set(generations) == {0, 1}
