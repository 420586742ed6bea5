"""Programs with ``BalancedTrainer`` beside ``Trainer``: a resume on other devices, and a search for settings."""

import pytest
import torch
from helpers.trainers import make_arguments, make_model, make_rows, pad, train
from torch.testing import assert_close
from transformers import Trainer
from transformers.trainer_utils import HPSearchBackend

from balanced_parallel import simulate
from balanced_parallel.integrations.transformers import BalancedTrainer

ROWS = 19


def make_trainer(kind, arguments, devices=None, head="gpt2", **settings):
    if kind is BalancedTrainer:
        settings["device_ids"] = devices
    rows = make_rows(head, ROWS)
    data = {"train_dataset": rows, "eval_dataset": rows, "data_collator": pad}
    return kind(args=arguments, **data, **settings)


def make_whole(folder, **settings):
    """Returns arguments of a window of 8 rows in one forward, and of checkpoints."""
    saved = {"save_strategy": "steps", "save_steps": 4, "train_sampling_strategy": "random"}
    saved |= {"num_train_epochs": 2, "optim": "adamw_torch", "learning_rate": 1e-2}
    return make_arguments(folder, **saved, **settings)


@pytest.mark.parametrize(
    ("devices", "rows", "batches"), [(None, 2, 4), (None, 8, 1), (2, 2, 2), (4, 2, 1), (4, 1, 2)]
)
def test_a_resume_in_mid_epoch_on_other_devices(devices, rows, batches, tmp_path):
    """The checkpoint is of four devices with two rows each, after the first update of the second epoch."""
    layout = {"per_device_train_batch_size": 2}
    before = make_whole(tmp_path / "before", **layout)
    with simulate(4):
        saving = make_trainer(BalancedTrainer, before, range(4), model=make_model("gpt2"))
        expected = train(saving)
    assert len(expected) == 6
    arguments = make_whole(
        tmp_path / "after", per_device_train_batch_size=rows, gradient_accumulation_steps=batches
    )
    with simulate(4):
        ids = None if devices is None else range(devices)
        trainer = make_trainer(BalancedTrainer, arguments, ids or ["cpu"], model=make_model("gpt2"))
        result = train(trainer, resume_from_checkpoint=str(tmp_path / "before" / "checkpoint-4"))
    assert_close(torch.tensor(result), torch.tensor(expected), rtol=1e-4, atol=1e-5)


class Trial(dict):
    """Values of a trial, as a mapping and as an attribute."""

    def __init__(self, number, values):
        super().__init__(values)
        self.number = number
        self.params = values


class Search:
    """Trains with two learning rates and numbers of rows, as backends of a search do."""

    TRIALS = ((0.5, 2), (0.1, 1))

    def ensure_available(self):
        pass

    def run(self, trainer, n_trials, direction):
        scale = 1 if isinstance(trainer, BalancedTrainer) else 4
        losses = []
        for number, (rate, rows) in enumerate(self.TRIALS):
            values = {"learning_rate": rate, "per_device_train_batch_size": rows * scale}
            trainer.train(trial=Trial(number, values))
            losses.append(trainer.evaluate()["eval_loss"])
        return losses


def test_a_search_for_settings(monkeypatch):
    """Each trial begins with a new model, another learning rate and another batch."""
    from transformers import trainer as module
    from transformers.integrations import integration_utils

    # Trials that are mappings are those of a backend that may not be installed.
    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: True)
    monkeypatch.setitem(module.ALL_HYPERPARAMETER_SEARCH_BACKENDS, HPSearchBackend.OPTUNA, Search)

    def search(kind, **settings):
        arguments = make_arguments(**settings.pop("arguments"))
        settings |= {"head": "classes", "model_init": lambda: make_model("classes")}
        trainer = make_trainer(kind, arguments, **settings)
        return trainer.hyperparameter_search(lambda trial: trial.params, backend="optuna")

    expected = search(
        Trainer, arguments={"per_device_train_batch_size": 8, "per_device_eval_batch_size": ROWS}
    )
    with simulate(2):
        result = search(
            BalancedTrainer, devices=range(2), arguments={"gradient_accumulation_steps": 2}
        )
    assert expected[0] != expected[1]
    assert_close(torch.tensor(result), torch.tensor(expected), rtol=1e-4, atol=1e-5)
