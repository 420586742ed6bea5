"""Programs with ``BalancedTrainer`` beside ``Trainer``: a resume on other devices, a search for settings, callbacks that change
the model, and data without a length."""

import pytest
import torch
from helpers.trainers import make_arguments, make_model, make_rows, pad, train, train_plainly
from torch import nn
from torch.testing import assert_close
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of four devices, and the numbers of its run."""
    folder = tmp_path_factory.mktemp("saved")
    arguments = make_whole(folder, per_device_train_batch_size=2)
    with simulate(4):
        trainer = make_trainer(BalancedTrainer, arguments, range(4), model=make_model("gpt2"))
        return str(folder / "checkpoint-4"), train(trainer)


@pytest.mark.parametrize(
    ("devices", "rows", "batches"), [(None, 2, 4), (None, 8, 1), (2, 2, 2), (4, 2, 1), (4, 1, 2)]
)
def test_a_resume_in_mid_epoch_on_other_devices(devices, rows, batches, tmp_path, saved):
    """The checkpoint is of four devices with two rows each, after the first update of the second epoch."""
    checkpoint, expected = saved
    assert len(expected) == 6
    arguments = make_whole(
        tmp_path, per_device_train_batch_size=rows, gradient_accumulation_steps=batches
    )
    with simulate(4):
        ids = None if devices is None else range(devices)
        trainer = make_trainer(BalancedTrainer, arguments, ids or ["cpu"], model=make_model("gpt2"))
        result = train(trainer, resume_from_checkpoint=checkpoint)
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


class Replacing(TrainerCallback):
    """Gives the model another head after the second update."""

    def on_step_end(self, args, state, control, model=None, optimizer=None, **_):
        if state.global_step == 2:
            torch.manual_seed(3)
            model.classifier = nn.Linear(16, 3).to(model.device)
            optimizer.param_groups[0]["params"] = [*model.parameters()]


def test_a_callback_replaces_a_part_of_the_model():
    whole = make_arguments(per_device_train_batch_size=8)
    settings = {"head": "classes", "callbacks": [Replacing()]}
    expected = train(make_trainer(Trainer, whole, model=make_model("classes"), **settings))
    arguments = make_arguments(gradient_accumulation_steps=2)
    with simulate(2):
        trainer = make_trainer(
            BalancedTrainer, arguments, [0, 1], model=make_model("classes"), **settings
        )
        result = train(trainer)
    assert len(result) == 3
    assert_close(torch.tensor(result), torch.tensor(expected), rtol=1e-4, atol=1e-5)


class Stream(IterableDataset):
    """Rows without a length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize(("devices", "batches"), [(1, 4), (2, 2)])
def test_the_last_rows_of_data_without_a_length_are_of_the_next_update(devices, batches):
    """``Trainer`` does not know that they are the last ones, and makes no update of them alone."""
    rows = make_rows("llama", 20)
    model = make_model("llama")
    windows = rows[:8], rows[8:16], rows[16:] + rows[:8], rows[8:16]
    expected = [number for each in windows for number in train_plainly(model, each, len(each))]
    arguments = make_arguments(gradient_accumulation_steps=batches, max_steps=4)
    trainer = BalancedTrainer(
        make_model("llama"),
        arguments,
        train_dataset=Stream(rows),
        data_collator=pad,
        device_ids=["cpu"] * devices,
    )
    assert_close(torch.tensor(train(trainer)), torch.tensor(expected), rtol=1e-4, atol=1e-5)
