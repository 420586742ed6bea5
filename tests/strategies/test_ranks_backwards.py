"""Backwards of ranks that are not one for each forward: several, none, and those that are asked for some gradients alone."""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers.fsdp import whole_gradients
from helpers.plain import Plain
from helpers.problems import assert_equal, assert_same_gradients, gradients
from helpers.ranks import on_ranks
from helpers.slow import pairs
from helpers.steps import parallel_step
from torch import nn

from balanced_parallel import DataParallelCriterion, gather, parallelize, weighted_mean

pytestmark = pytest.mark.usefixtures("double")

STRATEGIES = ["ddp", "fsdp"]
SIZES = [[2, 4], [6, 0]]


def build():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(nn.Linear(4, 6), *blocks, nn.Linear(6, 5))


def forwards_then_backwards(model, loss, x, other, y):
    losses = loss(model(x), y), loss(model(other), y)
    for each in losses:
        each.backward()


def three(model, loss, x, other, y):
    output = model(x)
    losses = loss(output, y), loss(model(other), y), loss(output, 2 * y)
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    losses[2].backward()


def one_for_two_forwards(model, loss, x, other, y):
    (loss(model(x), y) + 2 * loss(model(other), y)).backward()


def accumulate(model, loss, x, other, y):
    no_sync = getattr(model, "no_sync", contextlib.nullcontext)
    with no_sync():
        output = model(x)
        loss(output, y).backward(retain_graph=True)
        loss(output, 2 * y).backward()
    output = model(other)
    loss(output, y).backward(retain_graph=True)
    loss(output, 2 * y).backward()


def of_inputs(model, loss, x, other, y):
    """Gradients of inputs are those of this rank, and leave the next backward alone."""
    x = x.clone().requires_grad_()
    loss(model(x), y)
    of_loss = torch.autograd.grad(loss(model(x), y), x)
    of_output = torch.autograd.grad([output.sum() for output in model(x)], x)
    assert of_loss[0].shape == of_output[0].shape == x.shape
    loss(model(other), y).backward()


def adaptive_weight(model, loss, x, other, y):
    """The weight of a second loss is a ratio of gradients of the last layer, as in VQGAN."""
    last = parameters_of(model)[-2:]
    output = model(x)
    first = loss(output, y)
    second = loss(output, 2 * y)
    slopes = [torch.autograd.grad(each, last, retain_graph=True) for each in (first, second)]
    weight = slopes[0][0].norm() / slopes[1][0].norm()
    (first + weight * second).backward()
    return [*slopes[0], *slopes[1]]


def hessian_products(model, loss, x, other, y):
    """The products of the Hessian and two vectors are asked for, then the gradient as it is."""
    parameters = parameters_of(model)
    value = loss(model(x), y)
    slopes = torch.autograd.grad(value, parameters, create_graph=True)
    first = torch.autograd.grad(
        slopes, parameters, [slope.detach().sign() for slope in slopes], retain_graph=True
    )
    second = torch.autograd.grad(
        sum(slope.pow(3).sum() for slope in slopes[1:]), parameters, retain_graph=True
    )
    value.backward()
    return [*first, *second]


def some_accumulate(model, loss, x, other, y):
    """The next forward is not disturbed."""
    last = parameters_of(model)[-2:]
    value = loss(model(x), y)
    value.backward(retain_graph=True)
    value.backward(inputs=last)
    loss(model(other), y).backward()


def penalty_of_inputs(model, loss, x, other, y):
    """A penalty of gradients of inputs is a loss of its own, as in StyleGAN. Its backward does not pass the outputs."""
    x = x.clone().requires_grad_()
    outputs = model(x)
    total = outputs.sum() if isinstance(outputs, torch.Tensor) else outputs[0].sum()
    (slopes,) = torch.autograd.grad(total, x, create_graph=True)
    slopes = slopes if isinstance(outputs, torch.Tensor) else [slopes]
    loss(slopes, y[:, :4]).backward()


def after_a_failure(model, loss, x, other, y):
    """A backward that has failed leaves nothing to the next ones."""
    parameter = parameters_of(model)[0]
    value = loss(model(x), y)

    def fail(gradient):
        raise KeyError("a mistake")

    handle = parameter.register_hook(fail)
    with pytest.raises(KeyError, match="a mistake"):
        torch.autograd.grad(value, [parameter], retain_graph=True)
    handle.remove()
    loss(model(other), y).backward()
    slopes = torch.autograd.grad(value, [parameter], retain_graph=True)
    value.backward()
    return slopes


def parameters_of(model):
    return [*getattr(model, "module", model).parameters()]


WAYS = [forwards_then_backwards, three, one_for_two_forwards, accumulate, of_inputs]
ASKED = [adaptive_weight, hessian_products]
ASKED += [some_accumulate, penalty_of_inputs, after_a_failure]
CASES = [*pairs(WAYS, STRATEGIES, SIZES), *itertools.product(ASKED, ["ddp"], SIZES)]


@pytest.mark.parametrize(("way", "strategy", "sizes"), CASES)
@on_ranks(2)
def test_each_backward_equals_the_plain_program(rank, way, strategy, sizes):
    plain = build()
    tensors = torch.randn(6, 4), torch.randn(6, 4), torch.randn(6, 5)
    expected = way(plain, F.mse_loss, *tensors)
    model, criterion = parallelize(build(), nn.MSELoss(), ["cpu"], strategy=strategy)
    results = way(model, criterion, *(tensor.split(sizes)[rank] for tensor in tensors))
    assert_equal(results or (), expected or ())
    assert_same_gradients(whole_gradients(model.module), gradients(plain))


@on_ranks(2)
def test_gradients_of_shards_that_are_asked_for_raise_an_error(rank):
    model, criterion = parallelize(build(), nn.MSELoss(), ["cpu"], strategy="fsdp")
    loss = criterion(model(torch.randn(3, 4)), torch.randn(3, 5))
    with pytest.raises(
        RuntimeError,
        match=r"gradients of shards were asked for.*retain_graph=True\) and read parameter\.grad",
    ):
        torch.autograd.grad(loss, [*model.module.parameters()][-1:], retain_graph=True)
    with pytest.raises(RuntimeError, match="gradients of shards were asked for"):
        loss.backward(inputs=[*model.module.parameters()], retain_graph=True)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_graphs_of_shared_gradients_raise_an_error(rank, strategy):
    model, criterion = parallelize(build(), nn.MSELoss(), ["cpu"], strategy=strategy)
    loss = criterion(model(torch.randn(3, 4)), torch.randn(3, 5))
    with pytest.raises(
        RuntimeError,
        match=r"create_graph=True, .*expected torch\.autograd\.grad\(loss, tensors",
    ):
        loss.backward(create_graph=True)


@pytest.mark.parametrize("inputs_alone", [True, False])
@on_ranks(2)
def test_forward_by_hand_does_not_disturb_steps_with_other_micro_batches(rank, inputs_alone):
    net = nn.Linear(4, 3)
    plain = Plain(net, nn.CrossEntropyLoss())
    step = parallel_step(net, devices=["cpu"], strategy="ddp", micro_batch_size=2)
    for rows in (7, 5, 1):
        inputs = torch.randn(rows, 4)
        targets = torch.randint(3, (rows,))
        part = slice(0, (rows + 1) // 2) if rank == 0 else slice((rows + 1) // 2, rows)
        attacked = inputs[part].clone().requires_grad_()
        output = step.model(attacked).gather(ranks=False)
        if inputs_alone:
            torch.autograd.grad(output.sum(), attacked)
        assert_equal(step(inputs[part], targets[part]), plain(inputs, targets))
    assert_equal(net.weight, plain.module.weight)


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 5).requires_grad_(False)
        self.adapter = nn.Linear(4, 5)

    def forward(self, inputs):
        return self.second(inputs)

    def second(self, inputs):
        return (self.base(inputs) + self.adapter(inputs)).tanh()


@on_ranks(2)
def test_outputs_past_the_model_raise_an_error(rank):
    inputs = torch.randn(3, 4)
    targets = torch.randint(5, (3,))
    net = Adapted()
    parallelize(net.adapter, nn.CrossEntropyLoss(), ["cpu"], strategy="ddp")
    outputs = net(inputs)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    for call in (
        lambda: criterion([outputs], targets),
        lambda: weighted_mean([outputs.sum()], [3]),
        lambda: gather([outputs]),
    ):
        with pytest.raises(
            ValueError,
            match=r"past the model that parallelize returned.*model\(inputs\).*model\.call",
        ):
            call()
    assert gather([outputs.detach()]).shape == (6, 5)
    model, criterion = parallelize(Adapted(), nn.CrossEntropyLoss(), ["cpu"], strategy="ddp")
    with pytest.raises(ValueError, match=r"past the model that parallelize returned"):
        criterion([model.module.second(inputs)], targets)
    with model.no_sync():
        criterion([model(inputs)[0]], targets).backward()
    criterion(model.call("second", inputs).map(lambda output: 2 * output), targets).backward()
    weighted_mean([F.cross_entropy(model(inputs)[0], targets)], [3]).backward()


class Scaled(nn.PReLU):
    def forward(self, output, target):
        return F.mse_loss(output * self.weight, target)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_parameters_of_a_criterion_that_the_ranks_do_not_share_raise_an_error(rank, strategy):
    inputs = torch.randn(3, 4)
    targets = torch.randn(3, 5)
    model = parallelize(build(), None, ["cpu"], strategy=strategy)
    with pytest.raises(
        ValueError,
        match=r"parameter of shape \(1,\) to train, whose gradient the ranks would not share",
    ):
        DataParallelCriterion(Scaled())(model(inputs), targets)
    DataParallelCriterion(Scaled().requires_grad_(False))(model(inputs), targets).backward()
    model, criterion = parallelize(build(), Scaled(), ["cpu"], strategy=strategy)
    if strategy == "fsdp":
        with pytest.raises(ValueError, match="make it part of the module"):
            criterion(model(inputs), targets)
    else:
        criterion(model(inputs), targets).backward()
        copy.deepcopy(model)


@on_ranks(2, fresh=True)
def test_wrong_hooks_and_join_have_clear_errors(rank):
    model, criterion = parallelize(build(), nn.MSELoss(), ["cpu"], strategy="ddp")
    with pytest.raises(TypeError, match=r"hook='allreduce', expected a function \(state, bucket\)"):
        model.register_comm_hook(None, "allreduce")
    with (
        pytest.raises(
            NotImplementedError, match=r"join\(\) was called, expected batches without rows"
        ),
        model.join(),
    ):
        pass
    model.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    with pytest.raises(
        TypeError,
        match=r"the hook returned a tensor of shape \(.*expected a torch\.futures\.Future",
    ):
        criterion(model(torch.randn(3, 4)), torch.randn(3, 5)).backward()


@on_ranks(2)
def test_error_before_the_first_forward_of_shards_is_raised_as_it_is(rank):
    step = parallel_step(build(), nn.MSELoss(), devices=["cpu"], strategy="fsdp")

    def fail(module, inputs):
        raise KeyError("a mistake")

    handle = step.model.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="a mistake"):
        step(torch.randn(3, 4), torch.randn(3, 5))
    handle.remove()
    assert step(torch.randn(3, 4), torch.randn(3, 5)).isfinite().item()
