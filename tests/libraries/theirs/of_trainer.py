"""Runs the tests of ``Trainer`` of transformers with ``BalancedTrainer`` in its place.

The tests are those at 5a67f0a7ac (5.1.0.dev0), the newest commit that was at hand for ``transformers`` 5.23.0. Tests that 5.23.0
itself fails, such as those that need a hub, count on neither side::

    git clone https://github.com/huggingface/transformers && mkdir theirs
    git -C transformers archive 5a67f0a7ac tests/trainer tests/__init__.py conftest.py pyproject.toml | tar x -C theirs
    python tests/libraries/theirs/of_trainer.py theirs

With ``OURS=2`` the devices are ``["cpu"] * 2``, and each has half of the rows that a test asks for, if the number is even.
"""

import os

from exact import exact
from suite import Suite, main

REASONS = {
    "np.float32": "The loss of an evaluation is computed from sums over the shards, and differs in its last bit",
    "from trainer_state.json|AssertionError: 8 != 4": "The test reads the number of rows for a device, which the script halves",
    "mat1 and mat2": "The model takes the rows of a batch for the features of one row, and the test has one row",
    "mse_loss of the first rows": "The model adds a random number of Python and NumPy to all rows of a forward: refused by name",
}
UNSELECTED = "Hub Ray Wandb Optuna Sigopt push_to_hub deepspeed fsdp"


def pytest_configure(config):
    """Changes what tests import from transformers."""
    import transformers

    for name in ("GlueDataset", "GlueDataTrainingArguments", "LineByLineTextDataset"):
        if not hasattr(transformers, name):  # Some tests import what has gone since.
            setattr(transformers, name, None)
    kind = os.environ.get("OURS")
    if not kind:
        return
    for name in ("Trainer", "Seq2SeqTrainer"):
        setattr(transformers, name, exact(getattr(transformers, name), int(kind)))


if __name__ == "__main__":
    selected = " and ".join(f"not {name}" for name in UNSELECTED.split())
    os.environ.update(HF_HUB_OFFLINE="1", PYTEST_ADDOPTS=f"-k '{selected}'")
    names = ("trainer", "trainer_callback", "trainer_seq2seq")
    files = [f"tests/trainer/test_{name}.py" for name in names]
    main(Suite("of_trainer", ".", files, {"2": "two devices"}, REASONS))
