"""``BalancedTrainer`` before another subclass of ``Trainer``: those of TRL, of sentence-transformers, and a user's own."""

import tempfile

import pytest
import torch
import transformers
from helpers.slow import slow
from helpers.trainers import (
    ARGUMENTS,
    make_arguments,
    make_model,
    make_rows,
    pad,
    train,
    train_plainly,
)
from torch.nn import functional as F
from transformers import Trainer

from balanced_parallel import simulate
from balanced_parallel.integrations.transformers import BalancedTrainer

THREE = ["cpu"] * 3
# Arguments and devices of a window in three parts, of two rows each.
IN_PARTS = [({"gradient_accumulation_steps": 3}, None), ({}, THREE)]


def check(numbers, expected, tolerance=1e-4):
    torch.testing.assert_close(
        torch.tensor(numbers), torch.tensor(expected), rtol=tolerance, atol=2e-5
    )


class TwoModels(Trainer):
    """A trainer with other arguments, in another order, and arguments of its own if none are given."""

    def __init__(self, model, reference=None, args=None, *, margin):
        args = args or make_arguments(learning_rate=0.25)
        rows = make_rows("tags", 13)
        super().__init__(model, args, data_collator=pad, train_dataset=rows, eval_dataset=rows)
        if args.n_gpu > 1:
            raise ValueError("several devices in one process are not supported")
        self.reference = reference.requires_grad_(False)
        self.margin = margin
        self.tokens = 0
        self.losses = []
        self.calls = []

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        assert model is self.model
        assert not self.reference.training
        with torch.no_grad():
            shift = self.reference(**inputs).logits
        counted = inputs["labels"] != -100
        difference = (
            (outputs.logits - shift).square().sum(-1) * counted
        ).sum() / counted.sum().clamp(min=1)
        loss = outputs.loss + self.margin * difference
        self.tokens += int(counted.sum())
        self.losses.append(loss.item())
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.calls.append(len(inputs["labels"]))
        return super().training_step(model, inputs, num_items_in_batch)


class ExactTwoModels(BalancedTrainer, TwoModels):
    pass


def two_models(kind=ExactTwoModels, args=None, **settings):
    reference = make_model("tags")
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.5)
    reference.config.hidden_dropout_prob = 0.5
    return kind(make_model("tags"), reference.eval(), args, margin=0.2, **settings)


@pytest.mark.parametrize(("parts", "devices"), IN_PARTS)
def test_a_trainer_with_arguments_of_its_own(parts, devices):
    expected = train(two_models(TwoModels, make_arguments(per_device_train_batch_size=6)))
    arguments = make_arguments(**parts)
    trainer = two_models(args=arguments, device_ids=devices)
    check(train(trainer), expected)
    assert arguments.n_gpu == 0
    assert trainer.args is not arguments
    # The forwards that find the means, and the first of two, leave no trace.
    assert trainer.tokens == sum((row["labels"] != -100).sum() for row in make_rows("tags", 13))
    assert len(trainer.losses) == 7  # of two rows, and of the last one
    assert sum(trainer.calls) == 13


def test_a_trainer_makes_its_own_arguments():
    trainer = two_models(device_ids=THREE)
    assert (trainer.args.learning_rate, trainer.args.train_batch_size, trainer.margin) == (
        0.25,
        6,
        0.2,
    )
    check(
        train(trainer),
        train(
            two_models(TwoModels, make_arguments(per_device_train_batch_size=6, learning_rate=0.25))
        ),
    )


def test_arguments_stay_after_a_failure():
    class Refusing(Trainer):
        def __init__(self, model, args):
            super().__init__(model, args)
            raise RuntimeError("after the beginning")

    arguments = make_arguments()
    with pytest.raises(RuntimeError, match="after the beginning"):
        type("Exact", (BalancedTrainer, Refusing), {})(
            make_model("tags"), arguments, device_ids=THREE
        )
    assert (arguments.n_gpu, arguments.average_tokens_across_devices) == (0, True)


def with_decay(model, inputs, items):
    """Returns a mean, and a sum over the parameters, which is not one over the rows."""
    return model(**inputs).loss + 1e-2 * sum(
        parameter.square().sum() for parameter in model.parameters()
    )


def mean_of_rows(model, inputs, items):
    counted = inputs["labels"] != -100
    losses = F.cross_entropy(
        model(**inputs).logits.transpose(1, 2), inputs["labels"], reduction="none"
    )
    return ((losses * counted).sum(1) / counted.sum(1)).mean()


def over_items(model, inputs, items):
    logits = model(**inputs).logits
    return (
        F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), reduction="sum") / items
    )


@pytest.mark.parametrize("function", [with_decay, mean_of_rows, over_items])
@pytest.mark.parametrize(("parts", "devices"), IN_PARTS)
def test_losses_that_users_write(function, parts, devices):
    class Own(BalancedTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = function(model, inputs, num_items_in_batch)
            return (loss, model(**inputs)) if return_outputs else loss

    rows = make_rows("tags", 13)
    expected = train_plainly(
        make_model("tags"),
        rows,
        6,
        lambda model, batch: function(model, batch, (batch["labels"] != -100).sum()),
    )
    check(
        train(
            Own(
                make_model("tags"),
                make_arguments(**parts),
                train_dataset=rows,
                data_collator=pad,
                device_ids=devices,
            )
        ),
        expected,
    )


def several_means_with_decay(model, inputs, items):
    output = model(**inputs)
    decay = sum(parameter.square().sum() for parameter in model.parameters())
    mask = (inputs["labels"] != -100).double()  # Each micro-batch is padded to its own longest row.
    squares = (output.logits.square().mean(-1) * mask).sum() / mask.sum()
    return output.loss + 0.1 * squares + 1e-2 * decay


def test_a_penalty_counts_on_distinct_devices_in_two_passes():
    class Own(BalancedTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return several_means_with_decay(model, inputs, num_items_in_batch)

    def train_on(model, devices):
        arguments = make_arguments(gradient_accumulation_steps=3)
        rows = make_rows("tags", 13)
        return train(
            Own(model, arguments, train_dataset=rows, data_collator=pad, device_ids=devices)
        )

    expected = train_on(make_model("tags"), ["cpu"] * 2)
    with simulate(2):
        check(train_on(make_model("tags").to("sim:0"), ["sim:0", "sim:1"]), expected)


def test_a_number_read_from_the_rows_is_refused():
    class Own(BalancedTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return over_items(model, inputs, num_items_in_batch.item())

    trainer = Own(
        make_model("tags"),
        make_arguments(),
        train_dataset=make_rows("tags", 6),
        data_collator=pad,
        device_ids=THREE,
    )
    with pytest.raises(
        ValueError,
        match=r"a number that was read from values of the batch.* sums over num_items_in_batch",
    ):
        trainer.train()


def generated(prediction):
    return {"sum": float(prediction.predictions.sum()), "rows": len(prediction.predictions)}


@pytest.mark.parametrize(("parts", "devices"), [IN_PARTS[0], slow(*IN_PARTS[1])])
def test_sequence_to_sequence(parts, devices):
    kind = type("Exact", (BalancedTrainer, transformers.Seq2SeqTrainer), {})
    rows = make_rows("t5", 13)

    def make(kind, settings, **more):
        arguments = transformers.Seq2SeqTrainingArguments(
            tempfile.mkdtemp(), predict_with_generate=True, generation_max_length=6, **settings
        )
        return kind(
            make_model("t5"),
            arguments,
            train_dataset=rows,
            eval_dataset=rows,
            data_collator=pad,
            compute_metrics=generated,
            **more,
        )

    whole = make(
        transformers.Seq2SeqTrainer, {**ARGUMENTS, "per_device_eval_batch_size": 13}
    ).evaluate()
    trainer = make(kind, {**ARGUMENTS, **parts}, device_ids=devices)
    metrics = trainer.evaluate()
    for name in ("eval_loss", "eval_sum", "eval_rows"):
        assert metrics[name] == pytest.approx(whole[name], rel=1e-5)
    check(train(trainer), train_plainly(make_model("t5"), rows, 6))
