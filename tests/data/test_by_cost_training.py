"""Batches cut by the cost of their rows have the loss, the gradients and the outputs of the whole padded batch.

Collators of Hugging Face and of torch fit as they are. Under torchrun each rank cuts its own samples.
"""

import pytest
import torch
from helpers.fsdp import whole
from helpers.optimizers import sgd
from helpers.problems import assert_equal, assert_same_gradients, gradients
from helpers.ranks import on_ranks
from helpers.slow import slow
from helpers.steps import parallel_step
from helpers.unequal import (
    LENGTHS,
    Recurrent,
    Transformer,
    assert_same_rows,
    build,
    length_of,
    make_samples,
    make_step,
    pad,
    plain,
    with_cut,
)
from helpers.updates import values_of
from torch import nn

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    simulate,
)

SAMPLES = {"cost": length_of, "collate": pad}
LIMITS = [{}, {"micro_batch_size": 2}, {"limit": 30}, {"limit": 31, "combine": sum}]


def assert_as_plain(loss, net, samples, kind=Transformer):
    """Compares with the plain program on the whole padded batch, and returns its outputs."""
    expected_loss, expected, outputs = plain(build(kind), samples)
    assert_equal(loss.cpu(), expected_loss)
    assert_same_gradients(gradients(net), expected)
    return outputs


@pytest.mark.parametrize("kind", [Transformer, Recurrent])
@pytest.mark.parametrize("devices", [slow(1), 2, slow(4)])
def test_equal_to_the_whole_padded_batch(double, kind, devices):
    samples = make_samples()
    for limit in LIMITS:
        net = build(kind)
        step = make_step(net, ["cpu"] * devices, **SAMPLES, **limit)
        loss, outputs = step(samples, return_outputs=True)
        assert_same_rows(outputs.gather(), assert_as_plain(loss, net, samples, kind), samples)
        assert max(output.size(2) for output in outputs) == max(LENGTHS)
        assert (
            len({output.size(2) for output in outputs}) == len(outputs) or len(outputs) > 4
        )  # each has a length of its own


def test_a_cut_is_a_setting_and_keeps_no_sample():
    step = make_step(build(), **SAMPLES)
    before = dict(vars(step.cut))
    step(make_samples())
    assert vars(step.cut) == before


def test_a_criterion_takes_gathered_outputs_alone(double):
    samples = make_samples()
    loss, outputs = make_step(build(), **SAMPLES)(samples, return_outputs=True)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    tags = pad(samples)[1]
    assert_equal(criterion([outputs.gather()], tags), loss)
    for given in (outputs, (outputs, outputs)):
        with pytest.raises(
            ValueError,
            match=r"outputs in another order than the batch.*criterion\(\[outputs.gather\(\)\]",
        ):
            criterion(given, tags)


def test_nothing_waits_for_a_device():
    samples = make_samples()
    with simulate(3) as cluster:
        step = make_step(build(), range(3), **SAMPLES, micro_batch_size=2)
        step(samples)
        with cluster.forbidding_waits():
            for _ in range(3):
                step(samples)
                _, outputs = step(samples, return_outputs=True)
                outputs.gather()


def test_auto_halves_the_cost(double, caplog):
    samples = make_samples([12] * 8 + [3] * 40)
    with simulate(2) as cluster:
        make_step(build(), range(2), **SAMPLES)(samples)
        peak = max(cluster.peak)
    with simulate(2, memory=int(0.8 * peak)):
        net = build()
        step = make_step(net, range(2), **SAMPLES, micro_batch_size="auto")
        assert_as_plain(step(samples), net, samples)
        assert step.micro_batch_cost == 58.5
        assert step.micro_batch_size is None
        assert (
            "out of memory with 117 of cost per device in one forward: from now on at most 58.5"
            in caplog.text
        )
        step.micro_batch_cost = 20
        _, outputs = step(make_samples([21, 5, 5, 5]), return_outputs=True)
        assert outputs.sizes == (1, 3)  # a row over the limit runs alone


def test_bad_costs_and_collates_are_one_clear_error():
    samples = make_samples()
    net = build()

    def refuses(message, batch=None, **settings):
        with pytest.raises((ValueError, TypeError), match=message):
            make_step(net, **{**SAMPLES, **settings})(samples if batch is None else batch)

    refuses(
        "the cost of row 1 is -14, expected a finite number that is not negative",
        cost=lambda sample: 3 - length_of(sample),
    )
    refuses("the cost of row 0 is None, expected a finite number", cost=lambda sample: None)
    refuses(
        "collate was given 1 samples and returned inputs with 2 rows, expected one for each",
        collate=lambda some: pad([*some, samples[0]]),
    )
    refuses(
        "collate returned a tensor of shape .*, expected .inputs, targets., or a mapping",
        collate=lambda some: pad(some)[1],
    )
    refuses(
        "step was given a tensor of shape .*, expected a list of samples", batch=pad(samples)[1]
    )
    refuses("row 7 alone costs 30, expected at most the budget of 20", limit=20)
    with pytest.raises(TypeError, match="targets beside a list of samples"):
        make_step(net, **SAMPLES)(samples, torch.zeros(11))


def test_unequal_devices_are_refused():
    model = DataParallelModel(build(), ["cpu"] * 2, split=[2, 1])
    step = TrainStep(
        model,
        DataParallelCriterion(nn.CrossEntropyLoss()),
        sgd(model),
        **with_cut(**SAMPLES),
    )
    with pytest.raises(
        ValueError,
        match=r"split=.2.0, 1.0. of the model and cost= were given, expected one of them",
    ):
        step(make_samples())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cut": len}, "cut=.*, expected ByCost"),
        ({"cost": 3}, "cost=3, expected a function"),
        (
            {"cost": length_of, "collate": None},
            "collate=None, expected a function that makes a batch",
        ),
        ({**SAMPLES, "limit": 0}, "limit=0, expected a positive number"),
        (
            {**SAMPLES, "limit": 9, "micro_batch_size": 2},
            r"micro_batch_size=2 and ByCost\(limit=...\) were given",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make_step(build(), **settings)


@pytest.mark.parametrize("strategy", ["ddp", slow("fsdp")])
@pytest.mark.parametrize(
    ("settings", "parts"), [slow({"limit": 30}, False), ({"micro_batch_size": 2}, True)]
)
@on_ranks(2)
def test_ranks_cut_their_own_samples(rank, strategy, settings, parts):
    samples = make_samples()
    few = samples[:2]
    net = build().double()
    optimizer = sgd(net, lr=1.0)
    sharded = build().double()
    settings = with_cut(cost=length_of, collate=pad, **settings)
    step = parallel_step(sharded, devices=["cpu"], strategy=strategy, lr=1.0, **settings)
    for batch in (few, samples) if parts else (samples, few):
        optimizer.zero_grad()
        inputs, tags = pad(batch)
        expected = net(**inputs)
        loss = nn.functional.cross_entropy(expected, tags)
        loss.backward()
        mine = batch[7:] if rank else batch[:7]  # Rank 1 has none of a few.
        if parts and batch is samples:
            step.add(mine)
            step.add([])
            found = step.apply()
        else:
            found, outputs = step(mine, return_outputs=True)
            assert_same_rows(outputs.gather(), expected, batch)
        assert_equal(found, loss)
        optimizer.step()
    found = [whole(parameter).detach() for parameter in sharded.parameters()]
    assert_equal(found, values_of(net))
