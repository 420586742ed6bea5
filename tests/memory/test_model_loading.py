"""Models, criteria and targets that the command line names."""

import textwrap

import pytest
import torch
from torch import nn

from balanced_parallel import DataParallelCriterion
from balanced_parallel.memory import model_loading

# building


def test_models_are_built_on_the_meta_device_if_possible(nets):
    for name, device in {"small": "meta", "Net": "meta", "reads_values": "cpu", "made": "cpu"}.items():
        module, criterion = model_loading.build_model(nets(name))
        assert next(module.parameters()).device.type == device
        assert criterion is None
    assert isinstance(model_loading.build_model("torch.nn:Identity")[0], nn.Identity)


def problem(model, inputs, targets=(), criterion=None):
    return model_loading.build_problem(model, inputs, targets, criterion, 8)


def test_several_inputs_and_custom_criteria(nets):
    found = problem(nets("Two"), ["3", "3"], ["1"], nets("distance"))
    assert [tuple(one.shape) for one in found.inputs] == [(8, 3), (8, 3)]
    assert (found.targets.shape, found.targets.dtype, found.assumed) == ((8, 1), torch.float32, ())
    found = problem(nets("Two"), ["3", "3"], criterion="mseloss")
    assert isinstance(found.criterion, nn.MSELoss)
    assert found.targets.shape == (8, 1)


def test_unknown_targets_raise_an_error_with_a_fix(nets):
    with pytest.raises(ValueError, match="targets of distance are not known: give the shape of one row as --target"):
        problem(nets("small"), ["4"], criterion=nets("distance"))
    with pytest.raises(ValueError, match="output is tuple: give --target, and a --criterion"):
        problem(nets("Pair"), ["3"])
    with pytest.raises(ValueError, match=r"output \(8,\) has no classes: give a --criterion, such as BCEWithLogitsLoss"):
        problem("torch.nn:Identity", [":float32"])
    with pytest.raises(ValueError, match=r"output \(4,\) does not have 8 rows along dimension 0: give --target"):
        problem(nets("Sum"), ["4"])


def test_classes_are_in_dimension_1_or_last_by_the_shape_of_the_targets(nets):
    image = problem("torch.nn:Identity", ["5x6x7"])
    assert image.targets.shape == (8, 6, 7)
    assert isinstance(image.criterion, nn.CrossEntropyLoss)
    positions = problem("torch.nn:Identity", ["5x6"])
    assert positions.targets.shape == (8, 6)
    last = problem("torch.nn:Identity", ["5x6"], ["5"])
    assert isinstance(last.criterion, model_loading.SequenceLoss)
    assert last.assumed == ("criterion: CrossEntropyLoss over the flattened logits (8, 5, 6)",)


def test_sequence_loss_is_exact_over_replicas():
    output, targets = torch.randn(6, 5, 4), torch.randint(0, 4, (6, 5))
    targets[0, 1:] = -100
    loss = model_loading.SequenceLoss(nn.CrossEntropyLoss())
    whole = nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss(output, targets), whole)
    parts = DataParallelCriterion(loss, ["cpu", "cpu"])([output[:3], output[3:]], targets)
    torch.testing.assert_close(parts, whole)


def test_model_files_import_their_neighbours_and_run_once(tmp_path):
    (tmp_path / "neighbour_of_model.py").write_text("width = 4\n")
    (tmp_path / "types.py").write_text(  # named as a module of Python's
        textwrap.dedent("""
        from pathlib import Path
        from dataclasses import dataclass
        from torch import nn
        from neighbour_of_model import width

        @dataclass
        class Settings:
            width: int = width

        with Path(__file__).with_name("runs").open("a") as runs:
            runs.write("x")

        def build():
            return nn.Linear(Settings().width, 3)

        loss = nn.MSELoss()
        """)
    )
    found = problem(f"{tmp_path}/types.py:build", ["4"], criterion=f"{tmp_path}/types.py:loss")
    assert isinstance(found.criterion, nn.MSELoss)
    assert (tmp_path / "runs").read_text() == "x"
