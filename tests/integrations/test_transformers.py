"""``BalancedTrainer`` against a plain loop on one device: the heads and the options of transformers."""

import numpy as np
import pytest
import torch
from helpers.ranks import Ranks
from helpers.slow import slow, slow_but
from helpers.trainers import (
    MODELS,
    make_arguments,
    make_model,
    make_rows,
    model_loss,
    pad,
    shifted_loss,
    train,
    train_plainly,
)
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import DataCollatorWithFlattening, Trainer
from transformers.trainer_pt_utils import LabelSmoother

from balanced_parallel.integrations.transformers import BalancedTrainer

TWO = ["cpu"] * 2
HEADS = [head for head in MODELS if head != "routers"]


def make_trainer(
    head, arguments, kind=BalancedTrainer, rows=19, devices=TWO, model=None, **settings
):
    if kind is not Trainer:
        settings["device_ids"] = devices
    rows = make_rows(head, rows) if isinstance(rows, int) else rows
    model = make_model(head) if model is None else model
    return kind(
        model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=pad, **settings
    )


def check(numbers, expected, tolerance=1e-4):
    assert_close(
        torch.tensor(numbers), torch.tensor(expected), rtol=tolerance, atol=1e-5, equal_nan=True
    )


def check_training(
    head, loss_of=model_loss, kind=BalancedTrainer, tolerance=1e-4, rows=19, **settings
):
    """Compares a training in windows of two micro-batches on two devices with the plain loop."""
    rows = make_rows(head, rows) if isinstance(rows, int) else rows
    expected = train_plainly(make_model(head), rows, 8, loss_of)
    arguments = make_arguments(gradient_accumulation_steps=2, **settings.pop("arguments", {}))
    check(train(make_trainer(head, arguments, kind, rows=rows, **settings)), expected, tolerance)


@pytest.mark.parametrize("head", slow_but(HEADS, "masked words", "gpt2", "t5"))
def test_heads(head):
    check_training(head)


@pytest.mark.parametrize("head", ["gpt2", slow("answers")])
def test_heads_on_one_device(head):
    expected = train_plainly(make_model(head), make_rows(head, 19), 6)
    arguments = make_arguments(
        gradient_accumulation_steps=3, logging_nan_inf_filter=False
    )  # one row has no answer in its text
    check(train(make_trainer(head, arguments, devices=None)), expected)


def test_counts_that_the_first_batch_does_not_tell():
    """The first and the last row of the first batch have no padding, and others have."""
    rows = sorted(make_rows("replaced words", 19), key=lambda row: -row["attention_mask"].sum())
    check_training("replaced words", rows=rows)


def test_trainer_of_transformers_is_wrong():
    expected = train_plainly(make_model("masked words"), make_rows("masked words", 16), 8)
    numbers = train(
        make_trainer(
            "masked words", make_arguments(gradient_accumulation_steps=4), Trainer, rows=16
        )
    )
    assert numbers[0][0] / expected[0][0] == pytest.approx(4, rel=1e-3)  # the sum of four means


@pytest.mark.parametrize("head", ["gpt2", slow("tags")])
def test_label_smoothing(head):
    smoother = LabelSmoother(0.1)

    def loss_of(model, batch):
        labels = batch.pop("labels")
        return smoother(model(**batch), labels, shift_labels=head == "gpt2")

    check_training(head, loss_of, arguments={"label_smoothing_factor": 0.1})


def weighted_loss(outputs, labels, num_items_in_batch=None):
    """Returns a mean over the weights of the classes, which only a forward can count."""
    return F.cross_entropy(outputs.logits.flatten(0, -2), labels.flatten(), torch.arange(1.0, 6.0))


def loss_with_another_ignored_label(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(
        outputs.logits.flatten(0, -2), labels.clamp(min=0).flatten(), ignore_index=0
    )


def sum_and_mean(outputs, labels, num_items_in_batch=None):
    return (
        F.cross_entropy(outputs.logits.flatten(0, -2), labels.flatten())
        + 0.01 * (outputs.logits.square().sum(-1) * (labels != -100)).sum()
    )


def manual_loss(outputs, labels, num_items_in_batch):
    """Returns a sum that torch's losses have no part in."""
    logs = (
        outputs.logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
    )
    return -(logs * (labels[:, 1:] != -100)).sum() / num_items_in_batch


def mean_of_kept(outputs, labels, num_items_in_batch=None):
    """Returns the mean of losses of the labels that are kept, whose number only a forward can count."""
    is_kept = labels != -100
    return F.cross_entropy(outputs.logits[is_kept], labels[is_kept], reduction="none").mean()


def sum_or_mean(outputs, labels, num_items_in_batch=None):
    """Returns a sum where no number of items is told, which would add up over rows too."""
    return F.cross_entropy(outputs.logits.flatten(0, -2), labels.flatten(), reduction="sum") / (
        num_items_in_batch or 1
    )


@pytest.mark.parametrize(
    ("head", "function"),
    [
        ("gpt2", shifted_loss),
        ("tags", weighted_loss),
        ("tags", loss_with_another_ignored_label),
        ("tags", sum_or_mean),
        ("tags", mean_of_kept),
        slow("tags", sum_and_mean),
        slow("gpt2", manual_loss),
        slow("llama", manual_loss),
    ],
)
def test_compute_loss_func(head, function):
    def loss_of(model, batch):
        labels = batch.pop("labels")
        return function(
            model(**batch),
            labels,
            num_items_in_batch=(labels[:, int(head != "tags") :] != -100).sum(),
        )

    check_training(head, loss_of, compute_loss_func=function)


def test_packed_rows():
    """A batch is one row of several texts, and a tensor of their borders, which has another length."""
    rows = [
        {"input_ids": row["input_ids"][: row["attention_mask"].sum()].tolist()}
        for row in make_rows("llama", 16)
    ]

    def pack(features):
        batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(features)
        return {
            name: torch.as_tensor(value)
            for name, value in batch.items()
            if name not in ("max_length_q", "max_length_k")
        }

    expected = train_plainly(make_model("llama"), make_rows("llama", 16), 4)
    arguments = make_arguments(gradient_accumulation_steps=2, remove_unused_columns=False)
    check(
        train(
            BalancedTrainer(make_model("llama"), arguments, train_dataset=rows, data_collator=pack)
        ),
        expected,
    )


class OwnLoss(BalancedTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + 0.3 * F.mse_loss(outputs.logits, torch.ones_like(outputs.logits))
        return (loss, outputs) if return_outputs else loss


class LossOverItems(BalancedTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        loss = shifted_loss(outputs, inputs["labels"], num_items_in_batch * 1)
        return (loss, outputs) if return_outputs else loss


def loss_and_error(model, batch):
    outputs = model(**batch)
    return outputs.loss + 0.3 * outputs.logits.sub(1).square().mean()


@pytest.mark.parametrize(
    ("head", "kind", "loss_of"),
    [("gpt2", LossOverItems, model_loss), ("classes", OwnLoss, loss_and_error)],
)
def test_compute_loss_of_a_subclass(head, kind, loss_of):
    check_training(head, loss_of, kind)


class SometimesTwoMeans(BalancedTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        extra = (
            F.mse_loss(outputs.logits, torch.ones_like(outputs.logits))
            if self.state.global_step
            else 0.0
        )
        return (outputs.loss + extra, outputs) if return_outputs else outputs.loss + extra


def test_another_number_of_means_is_refused_in_a_window():
    arguments = make_arguments(gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="different counts, and had one in the batches before"):
        train(make_trainer("classes", arguments, SometimesTwoMeans))


@pytest.mark.parametrize("head", ["masked words", slow("classes")])
def test_bf16(head):
    def loss_of(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(**batch).loss

    check_training(head, loss_of, tolerance=5e-3, rows=8, arguments={"bf16": True})


def test_gradient_checkpointing():
    check_training("gpt2", arguments={"activation_checkpointing": True})


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft 0.21 reads it
def test_lora():
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(
        r=2, target_modules=["query", "value"], modules_to_save=["classifier"], lora_dropout=0.0
    )

    def make():
        model = make_model("classes")
        torch.manual_seed(1)
        return peft.get_peft_model(model, settings)

    expected = train_plainly(make(), make_rows("classes", 19), 8)
    check(
        train(make_trainer("classes", make_arguments(gradient_accumulation_steps=2), model=make())),
        expected,
    )


def test_resume(tmp_path):
    settings = {
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
    }
    settings |= {"save_strategy": "steps", "save_steps": 4, "train_sampling_strategy": "random"}
    expected = train(make_trainer("gpt2", make_arguments(tmp_path / "whole", **settings)))
    trainer = make_trainer("gpt2", make_arguments(tmp_path / "resumed", **settings))
    numbers = train(trainer, resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    check(numbers, expected, 1e-6)
    assert len(expected) == 6


def count_right(prediction):
    labels = prediction.label_ids
    return {
        "right": float((prediction.predictions.argmax(-1) == labels)[labels != -100].mean()),
        "rows": len(labels),
    }


@pytest.mark.parametrize(
    "head",
    ["masked words", slow("gpt2"), slow("numbers")],
)
def test_evaluation(head):
    rows = make_rows(head, 19)
    model = make_model(head).eval()
    outputs = model(**pad(rows))
    settings = {} if head == "numbers" else {"compute_metrics": count_right}
    metrics = make_trainer(head, make_arguments(), **settings).evaluate()
    assert metrics["eval_loss"] == pytest.approx(outputs.loss.item(), rel=1e-5)
    if settings:
        labels = pad(rows)["labels"]
        assert metrics["eval_right"] == pytest.approx(
            float((outputs.logits.argmax(-1) == labels)[labels != -100].float().mean())
        )
        assert metrics["eval_rows"] == 19


def test_evaluation_of_two_means():
    rows = make_rows("answers", 19)
    trainer = make_trainer("answers", make_arguments(eval_strategy="epoch"))
    trainer.train()
    with torch.no_grad():
        outputs = trainer.model.eval()(**pad(rows))
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses == [pytest.approx(outputs.loss.item(), rel=1e-5)]
    predictions = trainer.predict(
        [{name: row[name] for name in ("input_ids", "attention_mask")} for row in rows]
    ).predictions
    logits = np.where(
        predictions[0] == -100, predictions[0], outputs.start_logits
    )  # batches are padded to different lengths
    np.testing.assert_allclose(predictions[0], logits, rtol=1e-4, atol=1e-5)


class Contrastive(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 4)

    def forward(self, pixel_values, labels=None):
        features = self.linear(pixel_values.mean((2, 3)))
        return {
            "loss": F.cross_entropy(features @ features.T, torch.arange(len(features))),
            "logits": features,
        }


@pytest.mark.parametrize(
    ("head", "model", "text"),
    [
        ("routers", None, "is not a function of sums"),
        ("images", Contrastive, "depend on each other"),
    ],
)
def test_losses_that_are_no_sums_are_refused(head, model, text):
    trainer = make_trainer(head, make_arguments(), model=model and model())
    with pytest.raises(ValueError, match=text):
        trainer.train()


@pytest.mark.parametrize(("devices", "size"), [(TWO, 2), (None, 4)])
@pytest.mark.parametrize("head", ["masked words", "gpt2"])
def test_window_without_labels(head, devices, size):
    rows = make_rows(head, 8)
    for row in rows[:4]:
        row["labels"] = torch.full_like(row["labels"], -100)
    arguments = make_arguments(per_device_train_batch_size=size)
    numbers = train(make_trainer(head, arguments, rows=rows, devices=devices))
    assert numbers[0] == (0, 0)  # the log leaves out nan
    check(numbers[1:], train_plainly(make_model(head), rows[4:], 4))


def test_a_window_that_is_one_forward_has_any_loss():
    rows = make_rows("images", 4)
    expected = train_plainly(Contrastive(), rows, 2, lambda model, batch: model(**batch)["loss"])
    model = Contrastive()
    modes = []
    model.register_forward_pre_hook(lambda *_: modes.append(torch._C._len_torch_function_stack()))
    numbers = train(make_trainer("images", make_arguments(), model=model, rows=4, devices=None))
    check(numbers, expected)
    assert modes == [0, 0]  # It takes the time of Trainer's own: nothing is noted.


@pytest.mark.parametrize(("head", "is_noted"), [("gpt2", False), ("answers", True)])
def test_a_window_whose_loss_is_one_mean_is_noted_once(head, is_noted):
    rows = make_rows(head, 16)
    model, modes = make_model(head), []

    def note(*_):
        if torch.is_grad_enabled():
            modes.append(torch._C._len_torch_function_stack() > 0)

    model.register_forward_pre_hook(note)
    arguments = make_arguments(gradient_accumulation_steps=2)
    numbers = train(make_trainer(head, arguments, model=model, rows=rows, devices=None))
    check(numbers, train_plainly(make_model(head), rows, 4))
    assert modes[2:] == [is_noted] * 6


def test_settings_that_are_refused():
    with pytest.raises(ValueError, match="torch_compile=True with 2 devices"):
        make_trainer("gpt2", make_arguments(torch_compile=True))


class Sharded(BalancedTrainer):
    """A trainer whose arguments ask for FSDP, as under torchrun."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.is_fsdp_enabled = True


def test_shards_of_the_trainer_are_refused():
    with pytest.raises(ValueError, match="DeepSpeed, FSDP, a parallelism_config or LOMO is set"):
        make_trainer("gpt2", make_arguments(), Sharded)


def test_a_prediction_without_labels_before_training():
    """Forwards of an evaluation have no loss, and those of training have one."""
    rows = make_rows("tags", 16)
    trainer = make_trainer("tags", make_arguments(), rows=rows)
    unlabelled = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in rows]
    assert trainer.predict(unlabelled).predictions.shape[0] == 16
    check(train(trainer), train_plainly(make_model("tags"), rows, 4))


@pytest.mark.parametrize("devices", [None, TWO])
def test_another_model_is_evaluated_once_it_is_set(devices):
    trainer = make_trainer("tags", make_arguments(), devices=devices)
    before = trainer.evaluate()["eval_loss"]
    other = make_model("tags")
    with torch.no_grad():
        other.classifier.weight.mul_(5)
        expected = other.eval()(**pad(make_rows("tags", 19))).loss.item()
    trainer.model = other
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert before != pytest.approx(expected, rel=1e-3)


def test_arguments_are_copied():
    arguments = make_arguments()
    trainer = make_trainer("gpt2", arguments)
    assert (arguments.train_batch_size, trainer.args.train_batch_size) == (2, 4)


def run_rank(rank, head):
    arguments = make_arguments(gradient_accumulation_steps=2)
    trainer = make_trainer(head, arguments, devices=None, rows=21)
    return train(trainer), trainer.evaluate()["eval_loss"]


def run_rank_without_labels(rank, head):
    rows = make_rows(head, 16)
    for row in rows[2:4]:  # those of the second rank in the first window
        row["labels"] = torch.full_like(row["labels"], -100)
    return rows, train(make_trainer(head, make_arguments(), rows=rows, devices=None))


@pytest.fixture(scope="module")
def two_ranks():
    """Two processes that import transformers once. It makes a process group of its own in them."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize("head", ["gpt2", "t5", "answers"])
def test_two_ranks(two_ranks, head):
    rows = make_rows(head, 21)  # 8, 8 and 5, of which the second rank has two and none
    model = make_model(head)
    expected = train_plainly(model, rows, 8)
    with torch.no_grad():
        expected_loss = model.eval()(**pad(rows)).loss.item()
    for numbers, loss in two_ranks.run(run_rank, head):
        check(numbers, expected)
        assert loss == pytest.approx(expected_loss, rel=1e-4)


def test_rank_whose_first_rows_have_no_labels(two_ranks):
    """It takes what the loss is made of from the other rank."""
    for rows, numbers in two_ranks.run(run_rank_without_labels, "masked words"):
        check(numbers, train_plainly(make_model("masked words"), rows, 4))


class Boxes(nn.Module):
    """A detector: labels are a list with a dictionary for each image."""

    def __init__(self, reduce):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(6, 4)
        self.reduce = reduce

    def forward(self, x, labels):
        boxes = [
            F.l1_loss(row.expand_as(label["boxes"]), label["boxes"], reduction="none")
            for row, label in zip(self.head(x), labels, strict=True)
        ]
        return {"loss": self.reduce(boxes)}


def collate_boxes(samples):
    return {
        "x": torch.stack([sample["x"] for sample in samples]),
        "labels": [{"boxes": sample["boxes"]} for sample in samples],
    }


def train_boxes(reduce, folder, kind, rows, **settings):
    torch.manual_seed(1)
    samples = [{"x": torch.randn(6), "boxes": torch.randn(count % 3 + 1, 4)} for count in range(16)]
    arguments = make_arguments(
        folder,
        per_device_train_batch_size=rows,
        max_steps=2,
        remove_unused_columns=False,
        **settings.pop("arguments", {}),
    )
    model = Boxes(reduce)
    kind(model, arguments, train_dataset=samples, data_collator=collate_boxes, **settings).train()
    return model.head.weight.detach()


@pytest.mark.parametrize(
    "settings", [{"device_ids": ["cpu"] * 2}, {"arguments": {"gradient_accumulation_steps": 2}}]
)
def test_detectors_whose_labels_are_a_list_of_mappings(tmp_path, settings):
    """It was an ``IndexError``, or an error that told of nan."""
    expected = train_boxes(lambda boxes: torch.cat(boxes).mean(), tmp_path, Trainer, 8)
    result = train_boxes(
        lambda boxes: torch.cat(boxes).mean(), tmp_path, BalancedTrainer, 4, **settings
    )
    assert_close(result, expected)
    with pytest.raises(
        ValueError,
        match="computes mean.* for some rows, and mean.* for others",
    ):
        train_boxes(
            lambda boxes: torch.stack([each.mean() for each in boxes]).mean(),
            tmp_path,
            BalancedTrainer,
            4,
            **settings,
        )
