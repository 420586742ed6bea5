"""Checks that need a GPU. ``python scripts/gpu_check.py --help`` describes the parts; the code is in the folder beside this."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_suffix("")), run_name="__main__")
