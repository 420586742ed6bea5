"""``memory.fit``: the micro-batches that it chooses fit simulated devices, and one more row does not."""

import functools

import pytest
import torch
from helpers.memory_problems import WordModel, peak_of_updates, words
from helpers.optimizers import sgd
from helpers.ranks import run_ranks
from helpers.releases import released_at_once
from helpers.slow import slow, slow_but
from torch import nn

from balanced_parallel import (
    Along,
    BalancedOptimizer,
    ByCost,
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    Whole,
    memory,
    parallelize,
    simulate,
)


def adamw(model, **settings):
    return torch.optim.AdamW(model.parameters(), **settings)


def groups(model):
    named = dict(model.named_parameters())
    some = [{"params": [p for n, p in named.items() if "layers" in n], "amsgrad": True}]
    return torch.optim.AdamW(
        [*some, {"params": [p for n, p in named.items() if "layers" not in n], "foreach": False}]
    )


def several(model):
    first, *others = model.parameters()
    return [torch.optim.SGD([first], momentum=0.9), torch.optim.Adam(others)]


OPTIMIZERS = {
    "momentum": lambda model: sgd(model, momentum=0.9),
    "groups": groups,
    "several": several,
    "BalancedOptimizer": lambda model: BalancedOptimizer(model, torch.optim.AdamW, amsgrad=True),
    "capturable": functools.partial(adamw, capturable=True),
}


def make_step(make_optimizer, devices=None, split=None, weight=None, criterion=None, **settings):
    model = DataParallelModel(WordModel(), devices, split=split)
    wrapped = DataParallelCriterion(criterion or nn.CrossEntropyLoss(), weight=weight)
    return TrainStep(model, wrapped, make_optimizer(model), **settings)


def fits(make, size, capacity, rows):
    """Returns True if two steps with micro-batches of ``size`` rows run within the capacity."""
    with simulate(len(capacity), list(capacity)) as cluster:
        step = make()
        step.micro_batch_size = size
        try:
            peak_of_updates(cluster, step, *words(rows))
        except torch.OutOfMemoryError:
            return False
        return True


def fit_and_run(make, capacity, rows):
    """Fits a step, and runs it twice. Returns its micro-batch size. The report has the peak of the second update."""
    with simulate(len(capacity), capacity) as cluster:
        step = make()
        report = memory.fit(step, *words(rows))
        assert 1 < step.micro_batch_size < rows // 2
        assert max(peak_of_updates(cluster, step, *words(rows))) == pytest.approx(
            max(report.allocated), rel=0.01
        )
        return step.micro_batch_size


@released_at_once
@pytest.mark.parametrize("name", slow_but(list(OPTIMIZERS), "BalancedOptimizer"))
def test_chosen_rows_fit_and_one_more_does_not(name):
    make = functools.partial(make_step, OPTIMIZERS[name])
    capacity = ("2MiB",) * 2
    size = fit_and_run(make, capacity, 50)
    assert not fits(make, size + 1, capacity, (size + 1) * 6)


def other_loss(output, targets):
    return nn.functional.cross_entropy(output, targets)


@pytest.mark.parametrize(
    ("capacity", "settings"),
    [
        slow(("2MiB", "1200KiB"), {"split": [2, 1]}),
        slow(("2MiB",), {"precision": "bf16"}),
        (("2MiB",), {"precision": "fp16", "max_grad_norm": 1.0}),
        slow(
            ("2MiB",) * 2,
            {"criterion": other_loss, "weight": lambda output, targets: targets.numel()},
        ),
    ],
)
def test_settings_of_the_step_decide(capacity, settings):
    make = functools.partial(make_step, adamw, **settings)
    assert not fits(make, fit_and_run(make, capacity, 100) + 2, capacity, 200)


def test_tensors_of_others_and_of_the_step_count():
    with simulate(1, "2MiB"):
        step = make_step(adamw)
        memory.fit(step, *words(50))
        alone = step.micro_batch_size
        step(*words(50))
        memory.fit(step, *words(50))
        assert (
            step.micro_batch_size == alone
        )  # the optimizer's state and the gradients are the step's own
        other = torch.zeros(2**18 // 4, device="sim:0")
        memory.fit(step, *words(50))
        assert step.micro_batch_size < alone
        assert step(*words(50)).isfinite()
        del other


def test_the_cpu_needs_a_capacity():
    step = make_step(adamw, ["cpu"] * 2)
    with pytest.raises(
        ValueError, match="the model is on the CPU, which other programs use too: give capacity="
    ):
        memory.fit(step, *words(6))
    assert step.micro_batch_size is None
    report = memory.fit(step, *words(60), capacity="4MiB")  # Both replicas share the CPU.
    assert 1 < step.micro_batch_size < 30
    assert sum(report.allocated) <= 4 * 2**20


def test_a_step_that_does_not_fit_names_the_best_saving():
    with simulate(2, "400KiB"):
        step = make_step(adamw, micro_batch_size=3)
        with pytest.raises(
            ValueError, match="not one row fits: one row per device needs .* of device 0, expected"
        ) as error:
            memory.fit(step, *words(50))
        assert "The largest holders are " in str(error.value)
        assert "185.09 KiB of parameters, 185.09 KiB of gradients" in str(error.value)
        assert "offload_optimizer would save most, 373.00 KiB" in str(error.value)
        assert step.micro_batch_size == 3


def test_outputs_in_another_dimension_than_the_inputs_are_refused_with_a_loss_of_all_rows():
    model = DataParallelModel(nn.Linear(4, 4), ["cpu"], out_dims=1)
    step = TrainStep(model, DataParallelCriterion(nn.MSELoss(), whole=True, dim=0), adamw(model))
    with pytest.raises(
        ValueError, match="expected one dim= for all with a loss whose rows depend on each other"
    ):
        memory.fit(step, Along(torch.zeros(4, 6), 1), torch.zeros(6, 4), capacity="1GiB")


class Transposing(nn.Linear):
    def forward(self, rows, anchors):
        return super().forward(rows.t()) + anchors.sum()


@pytest.mark.parametrize(
    "inputs",
    [
        (Along(torch.zeros(256, 6), 1), Whole(torch.zeros(3, 4))),
        {"rows": Along(torch.zeros(256, 6), 1), "anchors": Whole(torch.zeros(3, 4))},
    ],
)
def test_rows_in_other_dimensions_fit(inputs):
    with simulate(2, "4MiB") as cluster:
        model = DataParallelModel(Transposing(256, 256))
        step = TrainStep(model, DataParallelCriterion(nn.MSELoss()), adamw(model))
        report = memory.fit(step, inputs, torch.zeros(6, 256))
        assert step.micro_batch_size == 3
        peaks = peak_of_updates(cluster, step, inputs, torch.zeros(6, 256))
        assert max(report.allocated) == pytest.approx(max(peaks), rel=0.05)


def fit_on_ranks(rank, balanced):
    with simulate(2, ["2MiB", "3MiB"]) as cluster:
        model, criterion = parallelize(WordModel(), nn.CrossEntropyLoss(), strategy="ddp")
        optimizer = BalancedOptimizer(model, torch.optim.AdamW) if balanced else adamw(model)
        step = TrainStep(model, criterion, optimizer)
        report = memory.fit(step, *words(50 - rank))
        peak_of_updates(cluster, step, *words(50 - rank))
        with pytest.raises(ValueError, match="not one row fits"):
            memory.fit(step, *words(50), capacity="300KiB" if rank else "2MiB")
        return step.micro_batch_size, report.allocated[0], cluster.peak[rank]


@pytest.mark.slow
@pytest.mark.parametrize("balanced", [False, True])
def test_ranks_agree(balanced):
    found = run_ranks(2, fit_on_ranks, balanced)
    assert len({size for size, _, _ in found}) == 1
    assert 1 < found[0][0] < 25
    assert max(peak for _, _, peak in found) <= 2 * 2**20
    assert max(peak for _, _, peak in found) == pytest.approx(found[0][1], rel=0.03), found


def test_a_step_that_is_limited_by_cost_is_refused():
    model = DataParallelModel(WordModel(), ["cpu"])
    cut = ByCost(len, collate=tuple)
    step = TrainStep(model, DataParallelCriterion(nn.CrossEntropyLoss()), adamw(model), cut=cut)
    with pytest.raises(
        ValueError,
        match="limited by cost.*: micro_batch_size='auto' finds a cost that fits as it trains",
    ):
        memory.fit(step, *words(2), capacity="1GiB")
