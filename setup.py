"""Package metadata. The version is read from the package's text, so that installing needs no torch."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'^__version__ = "(.+)"$', (here / "balanced_parallel" / "__init__.py").read_text(), re.MULTILINE)
assert version is not None

URL = "https://github.com/balanced-parallel/balanced_parallel"  # a placeholder until the first release


def long_description() -> str:
    """Returns the README with absolute links, since PyPI shows it away from the files of the repository."""
    readme = (here / "README.md").read_text(encoding="utf-8")
    with_images = re.sub(r"!\[([^]]*)\]\((?!https?:)([^)]+)\)", rf"![\1]({URL}/raw/main/\2)", readme)
    return re.sub(r"(?<!!)\[([^]]*)\]\((?!https?:|#)([^)]+)\)", rf"[\1]({URL}/blob/main/\2)", with_images)


extras = {
    "hf": ["accelerate>=1.10", "transformers>=5.23"],
    "lightning": ["lightning>=2.5"],
    "train": ["safetensors", "scikit-learn", "tqdm"],
    "checkpoints": ["safetensors"],
    "plot": ["matplotlib", "plotly"],
    "test": [
        "accelerate>=1.10",
        "build",
        "hypothesis",
        "lightning-fabric>=2.5",
        "matplotlib",
        "peft",
        "plotly",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "pytorch_optimizer>=4.1",
        "pyyaml",
        "safetensors",
        "schedulefree",
        "scikit-learn",
        "torch_geometric",
        "torchmetrics",
        "tqdm",
        "transformers",
    ],
    # These slow down the import of others: tests of their own.
    "libraries": [
        "bitsandbytes",
        "datasets",
        "jsonargparse[signatures]",
        "lightning>=2.5",
        "sentence-transformers>=6",
        "tensorboard",
        "trl>=1.16",
        "wandb",
    ],
    "docs": ["furo", "myst-parser", "sphinx", "sphinx-copybutton"],
    "dev": ["mypy", "ruff", "types-tabulate"],
}

setup(
    name="balanced-parallel",
    version=version.group(1),
    description="Train with the batch you want on the GPUs you have: exact data parallelism for PyTorch, balanced over devices.",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="The balanced_parallel maintainers",
    url=URL,
    project_urls={
        "Documentation": f"{URL}/blob/main/docs/README.md",
        "Changelog": f"{URL}/blob/main/CHANGELOG.md",
        "Issues": f"{URL}/issues",
    },
    keywords=["pytorch", "data parallel", "gpu memory", "gradient accumulation", "out of memory", "DDP", "FSDP"],
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["balanced_parallel", "balanced_parallel.*"]),
    package_data={"balanced_parallel": ["py.typed", "simulation/native/*"]},
    python_requires=">=3.11",
    install_requires=["torch>=2.11", "numpy", "tabulate"],
    extras_require=extras,
    entry_points={"console_scripts": ["balanced-parallel = balanced_parallel.__main__:run_console_script"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
