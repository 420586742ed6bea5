"""Lines of an old loop that were kept beside a :class:`TrainStep`: they change no number, or are an error."""

import copy
import warnings

import pytest
import torch
from helpers.fsdp import whole
from helpers.optimizers import balanced_or_plain
from helpers.problems import CLASSES
from helpers.ranks import run_ranks
from helpers.steps import parallel_step
from helpers.updates import SIMULATED, values_of
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.testing import assert_close

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, simulate

pytestmark = pytest.mark.usefixtures("double")


def build(devices, kind=torch.optim.SGD):
    torch.manual_seed(1)
    net = nn.Linear(4, CLASSES).to(devices[0])
    model = DataParallelModel(net, devices)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    is_balanced = torch.device(devices[0]).type == "sim"
    optimizer = balanced_or_plain(model, kind, is_balanced)
    return net, optimizer, TrainStep(model, criterion, optimizer)


def batch(rows=7):
    return torch.randn(rows, 4), torch.randint(CLASSES, (rows,))


def clip_and_step(net, optimizer):
    nn.utils.clip_grad_norm_(
        [parameter for group in optimizer.param_groups for parameter in group["params"]], 0.01
    )
    optimizer.step()


def log_and_step(net, optimizer):
    """Makes a graph, as an accuracy or a norm of the weights does."""
    assert net.weight.square().sum() > 0
    optimizer.step()


def log_clip_and_step(net, optimizer):
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    log_and_step(net, optimizer)


KEPT = {
    "a graph and optimizer.step()": log_and_step,
    "clipping, a graph and optimizer.step()": log_clip_and_step,
    "optimizer.step()": lambda net, optimizer: optimizer.step(),
    "clipping and optimizer.step()": clip_and_step,
    "zero_grad() and optimizer.step()": lambda net, optimizer: (
        optimizer.zero_grad(),
        optimizer.step(),
    ),
}


def train(devices, kind, after):
    torch.manual_seed(0)
    batches = [batch() for _ in range(3)]
    net, optimizer, step = build(devices, kind)
    for x, y in batches:
        step(x, y)
        after(net, optimizer)
    return values_of(net)


LAYOUTS = {"one device": ["cpu"], "three replicas": ["cpu"] * 3, "balanced": SIMULATED}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_kept_step_of_the_optimizer_updates_nothing(layout, kind, kept):
    """It updated again with the same gradients."""
    with simulate(3):
        expected = train(LAYOUTS[layout], kind, lambda net, optimizer: None)
        with pytest.warns(
            UserWarning,
            match=r"TrainStep steps the optimizer itself, so .*: leave optimizer.step\(\) out",
        ):
            result = train(LAYOUTS[layout], kind, KEPT[kept])
        assert all(map(torch.equal, result, expected))


CHANGES = {
    "a graph and optimizer.step()": lambda net, optimizer, step: log_and_step(net, optimizer),
    "zero_grad()": lambda net, optimizer, step: optimizer.zero_grad(),
    "zero_grad(set_to_none=False)": lambda net, optimizer, step: optimizer.zero_grad(
        set_to_none=False
    ),
    "zero_grad() of the net": lambda net, optimizer, step: net.zero_grad(),
    "clipping": lambda net, optimizer, step: nn.utils.clip_grad_norm_(net.parameters(), 0.01),
    "backward": lambda net, optimizer, step: net.weight.square().sum().backward(),
    "another step": lambda net, optimizer, step: TrainStep(step.model, step.criterion, optimizer)(
        *batch()
    ),
    "optimizer.step()": lambda net, optimizer, step: optimizer.step(),
}


@pytest.mark.filterwarnings("ignore:optimizer.step")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("adds", [False, True])
def test_gradients_that_are_changed_in_a_window_are_an_error(adds, devices, change):
    """Rows were lost or counted twice."""
    net, optimizer, step = build(["cpu"] * devices)
    step.add(*batch())
    CHANGES[change](net, optimizer, step)
    before = copy.deepcopy(net)
    with pytest.raises(
        RuntimeError, match=r"the gradient of model\.weight was cleared or changed before apply\(\)"
    ) as caught:
        step.add(*batch()) if adds else step.apply()
    assert "add them again" in caught.value.__notes__[0]
    assert all(map(torch.equal, net.parameters(), before.parameters()))
    x, y = batch()
    loss = nn.functional.cross_entropy(net(x), y)
    assert_close(step(x, y), loss)  # the window is closed


def auxiliary_loss(net, optimizer):
    net(batch()[0].to(net.weight.device)).square().mean().backward()


def log_a_norm(net, optimizer):
    assert net.weight.square().sum() > 0


def update_by_hand(net, optimizer):
    """Updates, and leaves the gradients for the next zero_grad()."""
    optimizer.zero_grad()
    auxiliary_loss(net, optimizer)
    optimizer.step()
    log_a_norm(net, optimizer)


def clear_to_zeros(net, optimizer):
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    optimizer.zero_grad(set_to_none=False)
    log_a_norm(net, optimizer)


@pytest.mark.parametrize("devices", [["cpu"], ["cpu"] * 3, SIMULATED])
@pytest.mark.parametrize("first", [True, False])
def test_a_backward_before_a_step_is_dropped_with_a_warning(devices, first):
    """The gradient was dropped without a word."""
    with simulate(3):
        net, optimizer, step = build(devices)
        if not first:
            step(*batch())
        if devices is SIMULATED:
            step.criterion(step.model(batch()[0]), batch()[1]).backward()
        else:
            auxiliary_loss(net, optimizer)
        with pytest.warns(UserWarning, match="written to gradients since the last step"):
            step(*batch())
        step(*batch())


@pytest.mark.parametrize("devices", [["cpu"], ["cpu"] * 3])
@pytest.mark.parametrize("between", [log_a_norm, update_by_hand, clear_to_zeros])
def test_lines_before_a_step_that_drop_nothing_do_not_warn(devices, between):
    net, optimizer, step = build(devices)
    for _ in range(3):
        between(net, optimizer)
        step(*batch())
        log_a_norm(net, optimizer)


def test_a_kept_step_of_the_scheduler_is_an_error():
    """The learning rate fell twice as fast."""
    _net, optimizer, step = build(["cpu"])
    scheduler = StepLR(optimizer, 1, 0.5)
    steps = [
        TrainStep(step.model, step.criterion, optimizer, scheduler=scheduler) for _ in range(2)
    ]
    for each in steps * 2:  # several may share one
        each(*batch())
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 9})
    steps[0](*batch())
    scheduler.step()
    with pytest.raises(
        RuntimeError,
        match=r"StepLR was stepped by hand, .* leave scheduler.step\(\) out, or scheduler= here",
    ):
        steps[1](*batch())


def test_a_scheduler_is_stepped_by_hand_after_an_update_by_hand():
    net, optimizer, step = build(["cpu"])
    scheduler = StepLR(optimizer, 1, 0.5)
    scheduled = TrainStep(step.model, step.criterion, optimizer, scheduler=scheduler)
    for _ in range(2):
        scheduled(*batch())
        optimizer.zero_grad()
        auxiliary_loss(net, optimizer)
        optimizer.step()
        scheduler.step()
    assert scheduler.last_epoch == 4


def train_on_rank(rank, strategy):
    """Returns the errors of the lines that were kept. Without one, the parameters are those of a loop without the line."""
    warnings.simplefilter("ignore", UserWarning)
    expected = None
    errors = []
    for kept in ("nothing", "step", "zero_grad"):
        torch.manual_seed(1)
        net = nn.Linear(4, CLASSES).double()
        step = parallel_step(net, devices=["cpu"], strategy=strategy)
        try:
            for number in range(4):
                x = torch.randn(3 + rank, 4).double()
                y = torch.randint(CLASSES, (3 + rank,))
                if number == 0:  # the first updates of FSDP find out if whole gradients fit
                    step(x, y), step(x, y), step.add(x, y), step.add(x, y), step.apply()
                step.add(x, y)
                if kept == "zero_grad":
                    step.optimizer.zero_grad()
                step.add(x + 1, y)
                step.apply()
                if kept == "step":
                    step.optimizer.step()
            values = [whole(each).detach() for each in step.model.parameters()]
            expected = expected or values
            assert all(map(torch.equal, values, expected))
        except RuntimeError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_kept_lines_on_ranks(strategy):
    for errors in run_ranks(2, train_on_rank, strategy):
        assert ["was cleared or changed before apply" in error for error in errors] == [True]
