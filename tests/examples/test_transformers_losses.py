"""Programs with losses of two parts, which models of transformers compute."""

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "transformers"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_the_loss_of_an_update_is_that_of_the_model_with_all_rows(name, capsys):
    losses = runpy.run_path(str(FOLDER / f"{name}.py"))["main"]()
    assert capsys.readouterr().out.count("loss ") == len(losses) > 0
    for loss, expected in losses:
        assert loss == pytest.approx(expected, rel=1e-5)
