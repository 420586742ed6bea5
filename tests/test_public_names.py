"""The public names of the package, and its version."""

import subprocess
import sys
from pathlib import Path

import balanced_parallel

PUBLIC = {
    "BalancedOptimizer",
    "DataParallelCriterion",
    "DataParallelModel",
    "PerReplica",
    "Precision",
    "Rows",
    "TrainStep",
    "Whole",
    "convert_sync_batchnorm",
    "gather",
    "loss_weight",
    "memory",
    "parallelize",
    "scatter",
    "simulate",
    "verify",
    "weighted_mean",
}


def test_public_names():
    assert set(balanced_parallel.__all__) == PUBLIC
    assert all(getattr(balanced_parallel, name).__doc__ for name in PUBLIC)


def test_the_version_is_read_without_torch():
    root = Path(balanced_parallel.__file__).parents[1]
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['setup.py', '--version']; exec(open('setup.py').read())"
    done = subprocess.run(
        [sys.executable, "-c", "__file__ = 'setup.py'; " + code], capture_output=True, text=True, timeout=100, cwd=root
    )
    assert done.stdout.splitlines()[-1] == balanced_parallel.__version__
