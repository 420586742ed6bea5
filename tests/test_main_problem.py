"""Problems that the command line names: functions of a file that return module, criterion, inputs and targets."""

import textwrap

import torch
from torch import nn

from balanced_parallel import Rows, Whole
from balanced_parallel.__main__ import build_problem
from balanced_parallel.memory.problem import Problem


def test_problems_are_built_on_the_meta_device_if_possible(nets):
    for name, device in {
        "small": "meta",
        "pair": "meta",
        "reads_values": "cpu",
        "made": "cpu",
    }.items():
        module = build_problem(nets(name)).module
        assert next(module.parameters()).device.type == device


def test_files_import_their_neighbours(tmp_path):
    (tmp_path / "neighbour_of_model.py").write_text("width = 4\n")
    (tmp_path / "types.py").write_text(  # named as a module of Python's
        textwrap.dedent("""
        from dataclasses import dataclass
        from torch import nn
        from neighbour_of_model import width

        @dataclass
        class Settings:
            width: int = width

        def build():
            return nn.Linear(Settings().width, 3), nn.MSELoss(), None, None
        """)
    )
    assert isinstance(build_problem(f"{tmp_path}/types.py:build").criterion, nn.MSELoss)


def test_marked_inputs_and_lists_get_the_rows():
    images = Rows([torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)])
    sizes = torch.tensor([[8, 8], [9, 9]])
    problem = Problem(
        nn.Flatten(),
        nn.MSELoss(),
        (images, Whole(torch.zeros(3, 4)), sizes, ["a", "b"]),
        torch.zeros(4, 1),
    )
    problem = problem.with_rows(3)
    images, anchors, sizes, names = problem.inputs
    assert [image.shape[-1] for image in images.entries] == [8, 9, 8]
    assert anchors.value.shape == (3, 4)
    assert sizes.tolist() == [[8, 8], [9, 9], [8, 8]]
    assert names == ["a", "b", "a"]
    assert [target.shape for target in problem.targets] == [(6, 1)]
