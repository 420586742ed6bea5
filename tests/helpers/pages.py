"""The README and the pages of docs/."""

import functools
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import balanced_parallel
import balanced_parallel.__main__

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/recipes/*.md")]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
ROWS = 7


def public_names():
    """Public names, with three replicas on the CPU unless a snippet names its devices or imports the class."""
    public = {name: getattr(balanced_parallel, name) for name in balanced_parallel.__all__}
    three = functools.partial(balanced_parallel.DataParallelModel, device_ids=["cpu"] * 3)
    return public | {
        "DataParallelModel": three,
        "balanced_parallel": balanced_parallel,
        "torch": torch,
        "nn": nn,
        "F": F,
    }


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)
