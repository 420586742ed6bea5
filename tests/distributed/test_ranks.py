"""Several ranks, as torchrun starts them: the same loss and gradients as the plain program, on every rank."""

import copy
import warnings

import pytest
import torch
from helpers.problems import (
    LOSSES,
    Calls,
    OnTop,
    assert_same_gradients,
    build_net,
    class_targets,
    gradients,
    make_targets,
    plain_program,
)
from helpers.ranks import run_ranks

from balanced_parallel import DataParallelCriterion, DataParallelModel, PerReplica, TrainStep, gather, parallelize, weighted_mean


def cut_over_ranks(tensor, sizes, rank):
    return tensor.split(sizes)[rank]


def check_losses(rank, sizes):
    """Plain loops and windows, for every loss; sizes are the ranks' rows."""
    torch.set_default_dtype(torch.float64)
    rows = sum(sizes)
    checked = 0
    for name, (make_criterion, kind) in LOSSES.items():
        torch.manual_seed(0)
        criterion, inputs = make_criterion(), torch.randn(rows, 4)
        targets = make_targets(kind, rows, ignored=sizes[0])  # with class targets, the first rank counts nothing
        plain = OnTop(name)
        loss, expected = plain_program(plain, criterion, inputs, targets)
        my_inputs = cut_over_ranks(inputs, sizes, rank)
        my_targets = tuple(cut_over_ranks(target, sizes, rank) for target in targets)

        model, parallel = parallelize(OnTop(name), criterion)
        found = parallel(model(my_inputs), *my_targets)
        found.backward()
        torch.testing.assert_close(found.detach(), loss, rtol=1e-10, atol=1e-10)
        assert_same_gradients(gradients(model.module, criterion), expected)

        for micro_batch_size in (None, 2):
            criterion = make_criterion()
            model, parallel = parallelize(OnTop(name), criterion)
            optimizer = torch.optim.SGD([*model.parameters(), *parallel.parameters()], lr=0.1)
            step = TrainStep(model, parallel, optimizer, micro_batch_size=micro_batch_size)
            torch.testing.assert_close(step(my_inputs, my_targets), loss, rtol=1e-10, atol=1e-10)
            assert_same_gradients(gradients(model.module, criterion), expected)
        checked += 1
    return checked


@pytest.mark.parametrize("sizes", [[4, 5], [1, 6], [5, 0, 2]])
def test_ranks_equal_the_plain_program(sizes):
    assert run_ranks(len(sizes), check_losses, sizes) == [len(LOSSES)] * len(sizes)


class Partly(torch.nn.Module):
    """One layer is never used, one only where a rank has enough rows, and a buffer counts the forwards."""

    def __init__(self):
        super().__init__()
        self.net, self.never, self.sometimes = build_net(), torch.nn.Linear(2, 2), torch.nn.Linear(5, 5)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, inputs):
        self.forwards += 1
        outputs = self.net(inputs)
        return outputs + self.sometimes(outputs) if len(inputs) > 2 else outputs


def check_windows(rank):
    """Windows of different lengths on each rank, three in a row: one rank has no rows at all in the second."""
    torch.set_default_dtype(torch.float64)
    windows = [[[3, 1], [4]], [[], [2, 2, 3]], [[1], [1, 1]]]  # window -> rank -> rows of its micro-batches
    plain = Partly()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.5)
    model, criterion = parallelize(Partly(), torch.nn.CrossEntropyLoss())
    model.load_state_dict({"module." + name: tensor for name, tensor in plain.state_dict().items()})
    step = TrainStep(model, criterion, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), max_grad_norm=0.3)
    for number, window in enumerate(windows):
        sizes = [size for mine in window for size in mine]
        torch.manual_seed(number)
        inputs, targets = torch.randn(sum(sizes), 4), class_targets(sum(sizes), ignored=1)
        optimizer.zero_grad()
        total = sum(
            torch.nn.functional.cross_entropy(plain(some), labels, reduction="sum")
            for some, labels in zip(inputs.split(sizes), targets.split(sizes), strict=True)
        )
        loss = total / (targets != -100).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        assert norm > 0.3
        optimizer.step()

        start = sum(len(mine) for mine in window[:rank])
        for piece in range(start, start + len(window[rank])):
            step.add(inputs.split(sizes)[piece], targets.split(sizes)[piece])
        torch.testing.assert_close(step.apply(), loss.detach(), rtol=1e-10, atol=1e-10)
        assert_same_gradients(gradients(model.module), gradients(plain))
        assert model.module.never.weight.grad is None
        for one, other in zip(model.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    return True


def check_two_optimizers(rank):
    """The gradients of all parameters are the true ones, whichever optimizer has them."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    inputs, targets = torch.randn(7, 4), class_targets(7)
    plain = build_net()
    _, expected = plain_program(plain, torch.nn.CrossEntropyLoss(), inputs, targets)
    model, criterion = parallelize(build_net(), torch.nn.CrossEntropyLoss())
    step = TrainStep(model, criterion, torch.optim.SGD(list(model.parameters())[1:], lr=0.1), micro_batch_size=2)
    for _ in range(3):  # the reducer makes its buckets anew after the first
        model.module.load_state_dict(build_net().state_dict())
        step(inputs.split([4, 3])[rank], targets.split([4, 3])[rank])
        assert_same_gradients(gradients(model.module), expected)
    return True


def test_gradients_are_divided_once_whoever_has_the_parameters():
    assert run_ranks(2, check_two_optimizers) == [True, True]


def check_copy(rank):
    torch.manual_seed(0)
    inputs, targets = torch.randn(7, 4), class_targets(7, 1)
    mine = slice(0, 2) if rank == 0 else slice(2, None)
    model, criterion = parallelize(build_net(), torch.nn.CrossEntropyLoss())
    TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.1))(inputs[mine], targets[mine])
    copied = copy.deepcopy(model)
    assert copied.module[0].weight is not model.module[0].weight
    for one in (model, copied):
        plain = copy.deepcopy(one.module)
        loss, expected = plain_program(plain, torch.nn.CrossEntropyLoss(), inputs, targets)
        step = TrainStep(one, criterion, torch.optim.SGD(one.parameters(), lr=0.1))
        torch.testing.assert_close(step(inputs[mine], targets[mine]), loss)
        assert_same_gradients(gradients(one.module), expected, 1e-6)
    return True


def test_a_model_that_has_trained_can_be_copied_and_the_copy_trains():
    assert run_ranks(2, check_copy) == [True, True]


def test_ragged_windows_equal_the_plain_program_also_for_a_rank_without_rows():
    assert run_ranks(2, check_windows) == [True, True]


def check_overlapped(rank):
    """step(...) reduces in its last backward: parameters that this rank did not use are another's to decide."""
    torch.set_default_dtype(torch.float64)
    plain = Partly()
    inputs, targets = torch.randn(5, 4), class_targets(5)
    for sizes in ([2, 3], [5, 0], [3, 2]):
        plain.zero_grad()
        total = sum(
            torch.nn.functional.cross_entropy(plain(some), labels, reduction="sum")
            for some, labels in zip(inputs.split(sizes), targets.split(sizes), strict=True)
            if len(some)
        )
        (total / 5).backward()
        model, criterion = parallelize(Partly(), torch.nn.CrossEntropyLoss())
        step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.0))
        for _ in range(3):  # the reducer rebuilds its buckets after the first
            loss = step(cut_over_ranks(inputs, sizes, rank), cut_over_ranks(targets, sizes, rank))
            torch.testing.assert_close(loss, (total / 5).detach(), rtol=1e-10, atol=1e-10)
            assert_same_gradients(gradients(model.module), gradients(plain))
    return True


def test_one_backward_reduces_and_leaves_unused_parameters_alone():
    assert run_ranks(2, check_overlapped) == [True, True]


def check_nothing_counted(rank):
    model, criterion = parallelize(build_net(), torch.nn.CrossEntropyLoss())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = TrainStep(model, criterion, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = step(torch.randn(3, 4), torch.full((3,), -100))
        empty = step(torch.randn(0, 4), torch.zeros(0, dtype=torch.long))
    assert loss.isnan()
    assert empty.isnan()
    assert sum("nothing is updated" in str(warning.message) for warning in caught) == 2
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    with pytest.raises(TypeError, match=r"2 ranks are running.*use parallelize"):
        TrainStep(DataParallelModel(build_net(), ["cpu"]), criterion, optimizer)
    return True


def test_a_window_that_counts_nothing_on_any_rank_changes_nothing():
    assert run_ranks(2, check_nothing_counted) == [True, True]


def check_half(rank):
    """One decision for all ranks to skip a step, and one scale, though only one rank overflows, or has rows at all."""
    model, criterion = parallelize(build_net(), torch.nn.MSELoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, criterion, optimizer, precision="fp16")
    step(torch.randn(3 * rank, 4), torch.rand(3 * rank, 5))
    assert all(parameter.grad.abs().max() < 10 for parameter in model.parameters())  # unscaled on both
    scaler = step.precision.scaler
    scale = scaler.get_scale()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step(torch.randn(2, 4), torch.full((2, 5), torch.inf if rank == 0 else 1.0))
    assert scaler.get_scale() == scale / 2
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    step(torch.randn(2 * rank, 4), torch.rand(2 * rank, 5))
    assert not torch.equal(before[0], next(model.parameters()))
    return [scaler.get_scale(), next(model.parameters()).sum().item()]


def test_ranks_agree_on_the_gradient_scaler():
    first, second = run_ranks(2, check_half)
    assert first == second


def check_gather(rank):
    torch.set_default_dtype(torch.float64)
    parallelize(build_net(), torch.nn.MSELoss())
    sizes = [1, 0, 4]
    whole = torch.arange(10.0).view(5, 2)
    mine = cut_over_ranks(whole, sizes, rank).clone().requires_grad_()
    names = [["a"], [], ["b", "c", "d", "e"]][rank]
    result = gather([{"x": mine, "names": names, "none": None, "rank": rank, "loss": torch.tensor(float(rank))}])
    assert torch.equal(result["x"], whole), result["x"]
    assert result["names"] == ["a", "b", "c", "d", "e"]
    assert result["none"] is None
    assert result["rank"] == [0, 1, 2]
    assert result["loss"].tolist() == [0.0, 1.0, 2.0]
    across = gather([mine.detach().t()], dim=1)
    assert torch.equal(across, whole.t())
    result["x"].pow(3).sum().backward()  # every rank computes the same loss: gradients are its own, times the ranks
    torch.testing.assert_close(mine.grad, 3 * 3 * mine.detach() ** 2)
    with pytest.raises(ValueError, match="on rank 0"):
        gather([torch.zeros(2, 3 + rank)])
    without = gather([] if rank == 1 else [{"x": mine.detach(), "names": names, "none": None}])
    assert torch.equal(without["x"], whole), without
    assert without["names"] == result["names"]
    time_major = PerReplica([] if rank == 1 else [mine.detach().t()], [] if rank == 1 else [sizes[rank]], 1)
    assert torch.equal(time_major.gather(), whole.t())
    with pytest.raises(ValueError, match="no outputs on any rank"):
        gather([])
    mean = weighted_mean([torch.tensor(float("nan") if rank == 1 else rank + 1.0)], [[2, 0, 1][rank]])
    torch.testing.assert_close(mean, torch.tensor(5.0 / 3))
    return True


def test_gather_and_weighted_mean_over_uneven_ranks():
    assert run_ranks(3, check_gather) == [True] * 3


def check_disagreement(rank):
    import os

    import torch.distributed as dist

    dist.init_process_group("gloo")
    model, _ = parallelize(build_net(), torch.nn.MSELoss())  # the running group fits: it is used
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"] = "5", "5"
    with pytest.raises(ValueError, match="rank . of 2, but torchrun's environment says rank . of 5"):
        parallelize(build_net(), torch.nn.MSELoss())
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    with pytest.raises(ValueError, match="2 ranks is running, but torchrun's environment is not there"):
        parallelize(build_net(), torch.nn.MSELoss())
    dist.destroy_process_group()
    return True


def test_a_process_group_that_disagrees_with_the_environment_is_an_error():
    assert run_ranks(2, check_disagreement, fresh=True) == [True, True]


def test_without_torchrun_it_is_one_process():
    model, criterion = parallelize(build_net(), torch.nn.MSELoss(), ["cpu"] * 2)
    assert isinstance(model, DataParallelModel)
    assert isinstance(criterion, DataParallelCriterion)
    assert len(model(torch.randn(5, 4))) == 2


def check_parameter_of_nobody(rank):
    """The criterion is a function that learns a parameter of its own, which no reducer knows. One rank: nothing to reduce."""
    torch.set_default_dtype(torch.float64)
    inputs, targets = torch.randn(7, 4), torch.rand(7, 5)

    def trained(make):
        scale = torch.nn.Parameter(torch.tensor(2.0))
        net = build_net()
        make(net, scale, lambda output, target: (output * scale - target).pow(2).mean())
        return [parameter.detach() for parameter in (*net.parameters(), scale)]

    def plain(net, scale, criterion):
        optimizer = torch.optim.SGD([*net.parameters(), scale], lr=0.1)
        criterion(net(inputs), targets).backward()
        optimizer.step()

    def ours(net, scale, criterion):
        model, parallel = parallelize(net, criterion, weight=lambda output, target: len(target))
        step = TrainStep(model, parallel, torch.optim.SGD([*net.parameters(), scale], lr=0.1), micro_batch_size=3)
        step(inputs, targets)

    for one, other in zip(trained(ours), trained(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_parameter_that_no_reducer_knows_is_scaled_too():
    run_ranks(1, check_parameter_of_nobody)


def all_reduces_of(work):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        work()
    return sum(event.count for event in profiler.key_averages() if event.key == "gloo:all_reduce")


def check_lean(rank):
    inputs, targets = torch.randn(4, 4), torch.zeros(4, dtype=torch.long)
    model, criterion = parallelize(build_net().float(), torch.nn.CrossEntropyLoss())
    with warnings.catch_warnings(action="ignore"):  # of no unused parameter
        by_hand = torch.nn.parallel.DistributedDataParallel(build_net().float(), find_unused_parameters=True)
    step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=2)

    def one_update_by_hand():
        with by_hand.no_sync():
            torch.nn.functional.cross_entropy(by_hand(inputs[:2]), targets[:2]).backward()
        torch.nn.functional.cross_entropy(by_hand(inputs[2:]), targets[2:]).backward()

    counts = []
    for work in (one_update_by_hand, lambda: step(inputs, targets)):
        work()  # the reducer builds its buckets again after the first
        counts.append(all_reduces_of(work))
    assert counts[0] > 0
    return counts


def test_an_update_adds_two_small_collectives_to_those_by_hand():
    """Loss and weight before the last backward, and after it whether the backward of a rank has failed."""
    counts = run_ranks(2, check_lean)
    assert counts[0][1] == counts[0][0] + 2, counts


def check_history(rank):
    """Gradients are divided as they are made, by about what the window before weighed. That must not show in any bit."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(32, 4), class_targets(32, 7)
    model, criterion = parallelize(build_net().float(), torch.nn.CrossEntropyLoss())
    found = []
    for before, rows in ((None, 11), (3, 11), (11, 11), (20, 11), (None, 16), (16, 16)):
        step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.0), micro_batch_size=4)
        if before is not None:
            step(inputs[-before:], targets[-before:])
        with Calls(torch.ops.aten._foreach_mul_.Scalar) as multiplications:
            step(inputs[-rows:], targets[-rows:])
        found.append((gradients(model.module), multiplications.seen))
    assert all(torch.equal(one, other) for some, _ in found[1:4] for one, other in zip(found[0][0], some, strict=True))
    assert all(map(torch.equal, found[4][0], found[5][0]))
    assert [seen for _, seen in found] == [1, 1, 1, 1, 1, 0]  # nothing is left to divide where both weigh the same power of two
    return True


def test_the_window_before_shows_in_no_bit_of_a_gradient():
    assert run_ranks(2, check_history) == [True, True]


def check_compressed(rank):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    torch.manual_seed(0)
    plain, rows = torch.nn.Linear(4, 2), 4099  # a number that float16 cannot hold
    inputs, targets = torch.randn(rows, 4), torch.randint(2, (rows,))
    expected = torch.nn.functional.cross_entropy(plain(inputs), targets)
    model, criterion = parallelize(plain, torch.nn.CrossEntropyLoss())
    model.register_comm_hook(None, fp16_compress_hook)
    step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.0))
    mine = slice(None, 4000) if rank == 0 else slice(4000, None)
    for _ in range(2):
        torch.testing.assert_close(step(inputs[mine], targets[mine]), expected.detach(), rtol=1e-6, atol=1e-6)
    return True


def test_a_hook_that_rounds_gradients_does_not_round_their_weight():
    assert run_ranks(2, check_compressed) == [True, True]


def check_alone(rank):
    model, criterion = parallelize(build_net(), torch.nn.CrossEntropyLoss())
    assert isinstance(model, DataParallelModel)
    assert torch.distributed.get_world_size() == 1
    assert criterion(model(torch.randn(3, 4)), torch.zeros(3, dtype=torch.long)).isfinite()
    return True


def test_a_rank_that_is_alone_is_one_process():
    assert run_ranks(1, check_alone) == [True]


def check_nothing_to_train(rank):
    with pytest.raises(ValueError, match="no parameter of the module requires a gradient, expected one at least"):
        parallelize(build_net().requires_grad_(False), torch.nn.CrossEntropyLoss())
    return True


def test_a_module_without_anything_to_train_is_refused():
    assert run_ranks(2, check_nothing_to_train) == [True, True]
