"""The public names of the package, and its version."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.scripts import SCRIPT
from test_walls import imported_modules

import balanced_parallel

PUBLIC = """
AdditiveLoss Along BalancedBatchSampler BalancedOptimizer ByCost Checkpoints DataParallelCriterion
DataParallelModel DiceLoss JaccardLoss PerReplica Precision RankBatchSampler Rows SumOverRows
TrainStep TverskyLoss Whole convert_sync_batchnorm gather loss_weight memory parallelize savings
scatter simulate verify weighted_mean
"""


def test_public_names_are_exported():
    assert sorted(balanced_parallel.__all__) == PUBLIC.split()
    assert all(getattr(balanced_parallel, name).__doc__ for name in PUBLIC.split())


def test_completion_shows_public_names_alone():
    assert dir(balanced_parallel) == PUBLIC.split()


# Marks are made in every update, and the library makes the others. loss_weight names the arguments of the loss.
NOT_NAMING = {"Along", "PerReplica", "Rows", "SumOverRows", "Whole", "loss_weight"}
NOT_NAMING |= {"KindComparison", "MemoryPlan", "MemoryReport", "memory", "savings"}


def test_public_calls_name_their_arguments():
    for module in (balanced_parallel, balanced_parallel.memory, balanced_parallel.savings):
        for name in sorted({*module.__all__} - NOT_NAMING):
            with pytest.raises(TypeError, match=rf", expected {name}\("):
                getattr(module, name)(other=1)


def test_the_version_is_read_without_torch():
    root = Path(balanced_parallel.__file__).parents[1]
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['setup.py', '--version']; exec(open('setup.py').read())"
    done = subprocess.run(
        [sys.executable, "-c", "__file__ = 'setup.py'; " + code],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=root,
    )
    assert done.stdout.splitlines()[-1] == balanced_parallel.__version__


def test_scripts_and_examples_import_public_names_only():
    root = SCRIPT.parents[1]
    sources = [*root.glob("scripts/**/*.py"), *root.glob("examples/*/*.py")]
    assert len(sources) > 5
    for path in sources:
        assert len(path.read_text().splitlines()) <= 300
        assert not [name for name in imported_modules(path.read_text(), ()) if "." in name], (
            path.name
        )
