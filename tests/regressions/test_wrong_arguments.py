"""Arguments that cannot work: the errors name them, and say what to pass instead."""

import functools
import re
import traceback

import pytest
import torch
from helpers.loops import CPUS, Calls
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

import balanced_parallel
from balanced_parallel import (
    BalancedBatchSampler,
    BalancedOptimizer,
    ByCost,
    Checkpoints,
    DataParallelCriterion,
    DataParallelModel,
    DiceLoss,
    PerReplica,
    Precision,
    RankBatchSampler,
    Rows,
    TrainStep,
    TverskyLoss,
    convert_sync_batchnorm,
    gather,
    memory,
    parallelize,
    savings,
    scatter,
    simulate,
    verify,
    weighted_mean,
)
from balanced_parallel.savings.linear_cross_entropy import linear_cross_entropy

SGD = torch.optim.SGD


def make_model():
    return DataParallelModel(nn.Linear(4, 3), CPUS)


def make_step(model=None, criterion=None, optimizer=SGD, **settings):
    model = model or make_model()
    return TrainStep(
        model,
        criterion or DataParallelCriterion(F.cross_entropy),
        optimizer(model.parameters()),
        **settings,
    )


INPUTS = torch.ones(7, 4)
TARGETS = torch.zeros(7, dtype=torch.int64)
LOADER = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(INPUTS, TARGETS), 7)


def criterion_on(loss, *targets, outputs=None, **settings):
    return DataParallelCriterion(loss, **settings)(
        make_model()(INPUTS) if outputs is None else outputs, *targets
    )


def chunked(targets=TARGETS, **settings):
    return linear_cross_entropy(INPUTS, torch.ones(3, 4), targets, **settings)


def mappings():
    return make_model()(INPUTS).map(lambda output: {"logits": output})


def lists():
    model = DataParallelModel(Calls(lambda net, rows: [net(row) for row in rows]), CPUS)
    return model(Rows([torch.ones(length, 4) for length in (3, 1, 5, 2)]))


CE = nn.CrossEntropyLoss()
ADAMW = torch.optim.AdamW
PAIRS = [{"similarity": torch.zeros(size, size)} for size in (2, 1)]
STEP_LR = torch.optim.lr_scheduler.StepLR


def of_another(parameters):
    return SGD(nn.Linear(4, 3).parameters())


ERRORS = {
    "the input of CrossEntropyLoss is a dict, expected a tensor": lambda: criterion_on(
        CE, TARGETS, outputs=mappings()
    ),
    r"missing a required argument: 'target'; pass targets after outputs: criterion\(outp": lambda: (
        criterion_on(CE)
    ),
    r"targets\[0\] is an array of shape \(7,\)": lambda: make_step()(INPUTS, TARGETS.numpy()),
    # Torch raises this one.
    r"no data! Please use torch\.nn\.Module\.to_empty\(\)": lambda: DataParallelModel(
        nn.Linear(4, 3, device="meta"), CPUS
    ),
    "a DataParallelCriterion already, expected a plain one: pass its ": lambda: (
        DataParallelCriterion(DataParallelCriterion(CE))
    ),
    "a DataParallelModel already, expected a plain one: pass its .module": lambda: (
        DataParallelCriterion(make_model())
    ),
    "the criterion returned None, expected a loss": lambda: criterion_on(
        lambda *_: None, TARGETS, weight="rows"
    ),
    r"join the lists instead, as in \[row for output in outputs for row in": lambda: (
        lists().gather()
    ),
    r"select the outputs that have rows before, as in outputs.map\(": lambda: gather(PAIRS),
    "optimizer 0 .SGD. has 2 parameter.s., and none is a parameter of the model or the criterion": lambda: (
        make_step(optimizer=of_another)
    ),
    "optimizer 0 .BalancedOptimizer. has 2 parameter.s., and none is a parameter of the model or": lambda: (
        make_step(
            optimizer=lambda _: BalancedOptimizer(
                make_model(), SGD, nn.Linear(4, 3).parameters(), lr=0.1
            )
        )
    ),
    "the model is a Linear, expected a DataParallelModel or the model that par": lambda: TrainStep(
        nn.Linear(4, 3), DataParallelCriterion(CE), SGD([INPUTS])
    ),
    "the criterion is a MSELoss, expected a DataParallelCriterion": lambda: make_step(
        criterion=nn.MSELoss()
    ),
    "the targets have 6 rows, but the inputs have 7": lambda: make_step()(INPUTS, TARGETS[1:]),
    "reduction='none', expected a scalar loss": lambda: make_step(
        criterion=DataParallelCriterion(nn.MSELoss(reduction="none"))
    )(INPUTS, torch.ones(7, 3)),
    "precision 'bf16' was given a gradient scaler, expected none": lambda: Precision(
        "bf16", torch.amp.GradScaler("cpu")
    ),
    "micro_batch_size=0, expected a positive number of rows per device, None or 'auto'": lambda: (
        make_step(micro_batch_size=0)
    ),
    "max_grad_norm=-1.0, expected": lambda: make_step(max_grad_norm=-1.0),
    "precision='int8', expected one of 'fp32', 'bf16', 'fp16'": lambda: make_step(precision="int8"),
    r"step=DataParallelM.*, expected a TrainStep: fit\(step, inputs, targets\)": lambda: memory.fit(
        make_model(), INPUTS, TARGETS, capacity="1GiB"
    ),
    "1 is not initialised yet: run the module once": lambda: convert_sync_batchnorm(
        nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d())
    ),
    # Torch raises this one.
    "more than 1 value per channel": lambda: DataParallelModel(
        convert_sync_batchnorm(nn.BatchNorm1d(3)), CPUS
    )(torch.randn(1, 3)),
    r"inputs\[0\] is a tensor of shape \(7, 4\).*kwargs\['mask'\] is a tensor of shape \(3,\)": lambda: (
        make_model()(INPUTS, mask=torch.zeros(3))
    ),
    "expected a PerReplica, which knows the rows of each": lambda: criterion_on(
        CE, TARGETS[:3], outputs=PerReplica([torch.zeros(4, 3), torch.zeros(2, 3)])
    ),
    "strategy='ddp' in one process, expected 'auto' or 'replicas'.*torchrun": lambda: parallelize(
        nn.Linear(4, 3), strategy="ddp"
    ),
    "strategy='zero', expected one of 'auto', 'replicas', 'ddp', 'fsdp'": lambda: parallelize(
        nn.Linear(4, 3), strategy="zero"
    ),
    "weight= was given beside a DataParallelCriterion": lambda: parallelize(
        nn.Linear(4, 3), DataParallelCriterion(CE), weight="rows"
    ),
    "mesh= was given in one process, expected None": lambda: parallelize(
        nn.Linear(4, 3), mesh=object()
    ),
    "reduction='batchmean', expected 'mean' or 'sum': for the losses of rows": lambda: chunked(
        reduction="batchmean"
    ),
    r"shape \(6,\).*inputs of shape \(7, 4\).*class indices of shape \(7,\)": lambda: chunked(
        TARGETS[1:]
    ),
    "dtype torch.float64": lambda: chunked(TARGETS.double()),
    r"shape \(4,\), expected one weight for each of 3 classes": lambda: savings.LinearCrossEntropy(
        4, 3, weight=torch.ones(4)
    ),
    "label_smoothing=2, expected a number from 0 to 1": lambda: savings.LinearCrossEntropy(
        4, 3, label_smoothing=2
    ),
    "reduction='max', expected 'mean' or 'sum'": lambda: savings.LinearCrossEntropy(
        4, 3, reduction="max"
    ),
    "the model is a Linear, expected a DataParallelModel or the model": lambda: BalancedOptimizer(
        nn.Linear(4, 3), SGD, lr=0.1
    ),
    "LBFGS evaluates the loss several times per step, and BalancedOptimizer once": lambda: (
        BalancedOptimizer(make_model(), torch.optim.LBFGS, lr=0.1)
    ),
    "shard='rows', expected 'elements', 'parameters' or None": lambda: BalancedOptimizer(
        make_model(), SGD, shard="rows", lr=0.1
    ),
    "model=<generator": lambda: BalancedOptimizer(nn.Linear(4, 3).parameters(), ADAMW),
    "an object of type AdamW, expected a class of optimizers": lambda: BalancedOptimizer(
        make_model(), ADAMW(make_model().parameters())
    ),
    "the scheduler is the class StepLR, expected an instance of LRS": lambda: make_step(
        scheduler=STEP_LR
    ),
    "the optimizer is the class SGD, expected an instance of Optimizer, or a list": lambda: (
        make_step(optimizer=lambda _: SGD)
    ),
    "1 entries and 2 sizes, expected the rows of each entry": lambda: PerReplica([INPUTS], [3, 4]),
    r"CrossEntropyLoss is a dict, expected a tensor: .* loss\(output\['logits'\], target\)": lambda: (
        criterion_on(CE, TARGETS, outputs=PerReplica([{"logits": torch.ones(7, 3)}], [7]))
    ),
    "the target of cross_entropy is a list, expected a tensor: pass a tensor that is in it": lambda: (
        make_step()(INPUTS, [TARGETS])
    ),
    "the inputs are a DataLoader, expected one of its batches": lambda: make_step()(LOADER),
    r"inputs are a DataLoader, .* for inputs, targets in loader": lambda: verify(
        nn.Linear(4, 3), CE, LOADER
    ),
    "device_ids=SGD .*, expected a list, such as": lambda: parallelize(
        nn.Linear(4, 3), CE, SGD([INPUTS])
    ),
    "module='all', expected a module, as in": lambda: savings.checkpoint_activations("all"),
    r"missing 2 required .*, expected verify\(model, criterion, inputs, targets": lambda: verify(
        make_step()
    ),
    r"takes 2 positional arguments .*, expected Checkpoints\(folder, \*, keep, \*\*parts\)": lambda: (
        Checkpoints("runs", make_step())
    ),
    r"TrainStep.apply\(\) takes 1 positional argument .*, expected TrainStep.apply\(\)": lambda: (
        make_step().apply(INPUTS, TARGETS)
    ),
    r"unexpected keyword argument 'return_output', expected TrainStep\(inputs, targets, \*, return_outputs\)": lambda: (
        make_step()(INPUTS, TARGETS, return_output=True)
    ),
    r"unexpected keyword argument 'labels', expected TrainStep\(inputs, targets": lambda: (
        make_step()(labels=TARGETS)
    ),
    r"expected estimate\(module, criterion, inputs, targets, \*": lambda: memory.estimate(
        nn.Linear(4, 3), CE, LOADER
    ),
    r"returned a pair, expected model, criterion = parallelize\(": lambda: parallelize(
        nn.Linear(4, 3), CE, CPUS
    )(INPUTS),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_say_what_is_expected(message):
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        ERRORS[message]()


ATTRIBUTES = {
    r"a TrainStep has no zero_grad\(\): leave it out": lambda: make_step().zero_grad(),
    r"a TrainStep has no eval\(\): call model.eval\(\)": lambda: make_step().eval(),
    "'TrainStep' object has no attribute 'other'": lambda: make_step().other,
    r"call \['logits'\] for the entry, .gather\(\) for one tensor": lambda: (
        PerReplica([{"logits": torch.ones(7, 3)}], [7]).logits
    ),
    r"a TrainStep has no parameters\(\): call model.parameters\(\)": lambda: (
        make_step().parameters()
    ),
    r"a RankBatchSampler has no set_epoch\(\): leave it out": lambda: RankBatchSampler(
        range(9), 3
    ).set_epoch(1),
    "'RankBatchSampler' object has no attribute 'other'": lambda: (
        RankBatchSampler(range(9), 3).other
    ),
    r"a Checkpoints has no load\(\): call load_latest\(\)": lambda: Checkpoints(
        "runs", step=make_step()
    ).load("last"),
    r"returned a pair, expected model, criterion = parallelize\(.*, before .train": lambda: (
        parallelize(nn.Linear(4, 3), CE, CPUS).train()
    ),
    "no devices outside of its block, expected .* as cluster: cluster.devices": lambda: (
        simulate(4).devices
    ),
    "'other'$": lambda: balanced_parallel.other,
}


@pytest.mark.parametrize("message", ATTRIBUTES)
def test_attributes_of_other_libraries_are_named(message):
    with pytest.raises(AttributeError, match=message):
        ATTRIBUTES[message]()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DataParallel", "use DataParallelModel and DataParallelCriterion"),
        ("Trainer", "use TrainStep, or BalancedTrainer of"),
        ("BalancedTrainer", "import it from balanced_parallel.integrations.transformers"),
    ],
)
def test_imports_of_names_that_are_elsewhere_say_where(name, text):
    with pytest.raises(ImportError, match=text):
        getattr(balanced_parallel, name)
    with pytest.raises(ImportError, match=text):
        exec(f"from balanced_parallel import {name}")


def test_a_strategy_of_lightning_says_where_it_is():
    """Lightning's command line looks for it by ``hasattr``, so it is no ``ImportError``."""
    with pytest.raises(AttributeError, match="import it from balanced_parallel.integrations.light"):
        balanced_parallel.BalancedStrategy  # noqa: B018


def test_a_pair_of_parallelize_is_a_tuple():
    pair = parallelize(nn.Linear(4, 3), CE, CPUS)
    assert isinstance(pair, tuple)
    assert not hasattr(pair, "other")
    model, criterion = pair
    assert criterion(model(INPUTS), TARGETS).isfinite()


def test_outputs_that_are_a_dict_in_a_step_are_told_the_entry():
    class Named(nn.Linear):
        def forward(self, inputs):
            return {"logits": super().forward(inputs)}

    text = error_of(lambda: make_step(DataParallelModel(Named(4, 3), CPUS))(INPUTS, TARGETS))
    assert "output of the model is a dict: give a function of an entry" in text
    assert "loss(output['logits'], target)" in text


def test_rows_in_another_dimension_are_named():
    text = error_of(lambda: DataParallelModel(nn.Linear(4, 3), CPUS, dim=1)(INPUTS))
    assert "dim=1 has split the inputs along dimension 1" in text
    assert "has split" not in error_of(lambda: make_model()(INPUTS[:, 1:]))


def test_a_batch_without_targets_is_told_where_they_go():
    with pytest.raises(TypeError, match="takes 2 positional arguments") as caught:
        verify(nn.Linear(4, 3), CE, (INPUTS, TARGETS))
    text = (
        "expected step(inputs, targets), or verify(model, criterion, inputs, targets): write step("
    )
    assert any(text in note for note in caught.value.__notes__)


def test_a_list_of_batches_is_told_to_be_passed_one_by_one():
    """A loader may be a list. The text spoke of rows alone."""
    text = "or be a batch.*pass batches one by one: for inputs, targets in loader"
    for call in (make_step(), lambda loader: verify(nn.Linear(4, 3), CE, loader)):
        with pytest.raises(ValueError, match=text):
            call([(INPUTS, TARGETS)] * 2)


def test_objects_show_their_settings(tmp_path):
    text = "RankBatchSampler(batches=0, rows=9, batch_size=3, seed=0, micro_batch_size=None)"
    assert repr(RankBatchSampler(range(9), 3, seed=0)) == text
    text = "ByCost(cost=<built-in function len>, collate=<class 'tuple'>, limit=8)"
    assert repr(ByCost(len, collate=tuple, limit=8)) == text
    checkpoints = Checkpoints(tmp_path, keep=2, step=make_step())
    assert repr(checkpoints) == f"Checkpoints('{tmp_path}', keep=2, parts=['step'])"


@pytest.mark.parametrize("targets", [None, TARGETS.tolist(), 3])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy])
def test_targets_that_are_not_tensors(loss, targets):
    name = type(targets).__name__
    with pytest.raises(
        TypeError, match=rf"the target of \w+ is a {name}, expected a tensor: use torch.as_tensor"
    ):
        criterion_on(loss, targets)


class TestSteps:
    def test_optimizer_of_the_criterion_alone(self):
        criterion = DataParallelCriterion(nn.PReLU())
        make_step(criterion=criterion, optimizer=lambda _: SGD(criterion.parameters()))

    @pytest.mark.parametrize("cause", ["no_grad", "frozen", "detached"])
    def test_losses_without_gradients(self, cause):
        criterion = DataParallelCriterion(
            lambda output, target: output.detach().mean(), weight="rows"
        )
        step = make_step(criterion=criterion if cause == "detached" else None)
        step.model.requires_grad_(cause != "frozen")
        with (
            torch.set_grad_enabled(cause != "no_grad"),
            pytest.raises(RuntimeError, match="no parameter with requires_grad=True"),
        ):
            step(INPUTS, TARGETS)
        step.model.requires_grad_(True)
        if cause != "detached":
            assert step(INPUTS, TARGETS).isfinite()

    def test_update_without_rows(self):
        step = make_step()
        for _ in range(2):
            with pytest.warns(
                UserWarning,
                match=r"no rows were added before apply\(\): nothing is updated, and its loss is nan",
            ):
                step.apply()
            step.add(INPUTS, TARGETS)
            assert step.apply().isfinite()

    def test_states_that_are_not_mappings(self):
        for state in ([], None, "step.pt"):
            with pytest.raises(
                TypeError,
                match=r"state_dict=.*, expected what a TrainStep's state_dict\(\) returns",
            ):
                make_step().load_state_dict(state)


class Masked(nn.Linear):
    """A model with an optional second argument, and a method besides forward."""

    def forward(self, inputs, mask=None):
        return super().forward(inputs)

    def encode(self, inputs):
        return super().forward(inputs)


def add_and_apply(step, batch):
    step.add(batch)
    step.apply()


def error_of(call):
    """Returns the error of a call, with its notes."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the texts are those of Python and torch
        call()
    return "".join(traceback.format_exception_only(caught.value))


class TestBatches:
    """Targets among the inputs are an error of Python or torch, whose note says how a step is called."""

    @pytest.mark.parametrize("way", ["step", "add", "coupled"])
    @pytest.mark.parametrize(
        ("batch", "description"),
        [
            ([INPUTS, TARGETS], r"list with entries \[0\], \[1\]"),
            ((INPUTS, TARGETS), r"tuple with entries \[0\], \[1\]"),
            (
                {"inputs": INPUTS, "labels": TARGETS},
                r"dict with entries \['inputs'\], \['labels'\]",
            ),
            (INPUTS, r"a tensor of shape \(\d, 4\)"),
            (torch.ones(()), r"a tensor of shape \(\)"),  # a loss
        ],
    )
    def test_targets_among_the_inputs(self, way, batch, description):
        for net in (nn.Linear(4, 3), Masked(4, 3)):
            model = DataParallelModel(net, CPUS)
            criterion = (
                None
                if way == "step"
                else DataParallelCriterion(lambda output, target: F.cross_entropy(output, target))
            )
            step = make_step(model, criterion)
            expected = rf"{description}\. If targets are among them, expected step\(.*, or verify\(.*: write step\(\*batch\) for"
            added = functools.partial(add_and_apply, step, batch)
            text = error_of(added if way == "add" else functools.partial(step, batch))
            assert re.search(expected, text), text

    def test_foreign_keys_beside_targets(self):
        text = error_of(lambda: make_step()({"input": INPUTS, "labels": TARGETS}, TARGETS))
        assert "unexpected keyword argument 'labels'" in text
        assert (
            "write step(*batch) for a pair, step({'x': batch['x']}, batch['y']) for a mapping"
            in text
        )

    def test_other_errors_have_no_note(self):
        model = make_model()
        assert "If targets are among them" not in error_of(
            lambda: make_step(model)(torch.ones(7, 5), TARGETS)
        )
        model.module.forward = lambda **inputs: inputs["input"][9]
        assert "If targets are among them" not in error_of(
            lambda: make_step(model)({"input": INPUTS})
        )


class TestTensorsOutsideOfTheArguments:
    """A criterion reads a tensor of the whole batch, or of another device: the note of torch's error names it."""

    def test_rows_in_a_closure(self):
        rows = torch.rand(7)
        losses = functools.partial(F.cross_entropy, reduction="none")
        criteria = {
            "divided": DataParallelCriterion(
                lambda output, target: (rows * losses(output, target)).sum(), weight="rows"
            ),
            "found": DataParallelCriterion(
                lambda output, target: (rows * losses(output, target)).mean()
            ),
            "masked": DataParallelCriterion(
                lambda output, target: losses(output, target)[rows > 0].sum(), reduction="sum"
            ),
        }
        for criterion in criteria.values():
            text = error_of(lambda: make_step(criterion=criterion)(INPUTS, TARGETS))  # noqa: B023
            assert (
                "the criterion reads rows beside its arguments, which is neither split by rows nor moved to cpu"
                in text
            )
            assert (
                "pass a tensor of all rows as a target, another as a buffer of a module or by functools.partial"
                in text
            )

    def test_rows_in_globals_and_attributes(self):
        class Weighted(nn.Module):
            def __init__(self):
                super().__init__()
                self.rows = torch.rand(7, 1)

            def forward(self, output, target):
                return (self.rows * (output - target)).sum()

        for criterion, name in (
            (Weighted(), "rows"),
            (lambda output, target: (output - INPUTS[:, :3]).sum(), "INPUTS"),
        ):
            wrapped = DataParallelCriterion(criterion, reduction="sum")
            text = error_of(lambda: wrapped(make_model()(INPUTS), torch.zeros(7, 3)))  # noqa: B023
            assert f"the criterion reads {name} beside its arguments" in text

    def test_tensor_of_another_device(self):
        with simulate(2):
            classes = torch.ones(3)
            model = DataParallelModel(nn.Linear(4, 3))
            criterion = DataParallelCriterion(
                lambda output, target: F.cross_entropy(output, target, classes), weight="rows"
            )
            text = error_of(lambda: criterion(model(INPUTS), TARGETS))
            assert re.search(r"reads classes beside its arguments, .* nor moved to sim:\d", text), (
                text
            )
            functional = functools.partial(F.cross_entropy, weight=classes)
            assert DataParallelCriterion(functional)(model(INPUTS), TARGETS).isfinite()

    def test_other_errors_have_no_note(self):
        assert "reads" not in error_of(
            lambda: DataParallelCriterion(nn.MSELoss())(make_model()(INPUTS), torch.zeros(7, 5, 2))
        )


class TestWrappers:
    def test_methods_of_the_module(self):
        model = DataParallelModel(Masked(4, 3), CPUS)
        with pytest.raises(
            AttributeError,
            match=r"'DataParallelModel' object has no attribute 'encode', which its module has",
        ):
            model.encode(INPUTS)
        with pytest.raises(
            AttributeError,
            match=r"write model.call\('encode', ...\) for .*, and model.module.encode for",
        ):
            model.encode(INPUTS)
        assert model.call("encode", INPUTS).gather().shape == (7, 3)
        with pytest.raises(
            AttributeError, match="'DataParallelModel' object has no attribute 'encoder'$"
        ):
            model.encoder(INPUTS)
        assert not hasattr(
            DataParallelModel.__new__(DataParallelModel), "module"
        )  # A copy begins like this.

    @pytest.mark.parametrize("way", ["model", "function"])
    def test_compiled_wrapper_on_several_devices(self, way):
        model = make_model()
        call = {"model": model, "function": lambda inputs: model(inputs)[0] * 2}[way]
        with pytest.raises(
            RuntimeError,
            match=r"torch.compile was given a model on several devices, .* call model.compile\(\)",
        ):
            torch.compile(call, backend="eager")(INPUTS)
        assert len(model(INPUTS)) == 3

    def test_folders_that_are_not_paths(self):
        for folder in (5, None, make_step()):
            with pytest.raises(
                TypeError,
                match=r"folder=.*, expected the path of a folder: Checkpoints\(folder, step=step\)",
            ):
                Checkpoints(folder, net=nn.Linear(4, 3))
        with pytest.raises(TypeError, match="folder="):
            Checkpoints(5)


def test_arguments_that_were_removed_name_what_to_write():
    for call, name, expected in (
        (functools.partial(ByCost, len, collate=tuple), "trim", "collate=, which pads a list"),
        (functools.partial(verify, nn.Identity(), CE, INPUTS), "weight", "DataParallelCriterion"),
        (functools.partial(verify, nn.Identity(), CE, INPUTS), "dim", "DataParallelModel"),
    ):
        with pytest.raises(TypeError, match=rf"keyword argument '{name}', expected {expected}"):
            call(**{name: 1})


def test_arguments_of_other_libraries():
    for call, name, expected in (
        (make_step, "gradient_accumulation_steps", "micro_batch_size"),
        (make_step, "clip_grad_norm", "max_grad_norm"),
        (functools.partial(DataParallelModel, nn.Linear(4, 3)), "devices", "device_ids"),
        (functools.partial(parallelize, nn.Linear(4, 3), nn.MSELoss()), "devices", "device_ids"),
        (functools.partial(RankBatchSampler, INPUTS, 2), "shuffle", "seed"),
        (functools.partial(BalancedBatchSampler, [1.0, 2.0], 2), "shuffle", "seed"),
        (functools.partial(ByCost, len, collate=tuple), "max_tokens", "limit"),
        (make_model()(INPUTS).gather, "rank", "ranks"),
    ):
        with pytest.raises(
            TypeError,
            match=rf"got an unexpected keyword argument '{name}', expected [\w.]+\(.*\b{expected}\b",
        ):
            call(**{name: 4})


@pytest.mark.usefixtures("trace_in_this_process")
def test_estimates():
    net = nn.Linear(4, 3)
    loss = F.cross_entropy
    for arguments, optimizer, message in (
        (("net", loss, INPUTS, TARGETS), ADAMW, "the module is an object of type str"),
        ((make_model(), loss, INPUTS, TARGETS), ADAMW, "wrapped in DataParallelModel already"),
        (
            (net, INPUTS, loss, TARGETS),
            ADAMW,
            r"the criterion is a tensor of shape \(7, 4\), expected a mod",
        ),
        ((net, loss, INPUTS, TARGETS), SGD([torch.ones(1)]), "the optimizer is .* SGD"),
        ((net, loss, INPUTS, TARGETS), torch.optim.LBFGS, "and an estimate once"),
    ):
        with pytest.raises(TypeError, match=message):
            memory.estimate(*arguments, optimizer=optimizer)


def sampler(**settings):
    return BalancedBatchSampler(**{"costs": [1.0, 2.0, 3.0], "batch_size": 2, **settings})


def cost_step(**settings):
    settings = {"cost": lambda sample: 1.0, "collate": default_collate, **settings}
    return make_step(cut=ByCost(**settings))([*zip(INPUTS, TARGETS, strict=True)])


CALLS = {
    "device_ids": [
        lambda value: DataParallelModel(nn.Linear(4, 3), value),
        lambda value: scatter(INPUTS, value),
    ],
    "dim": [
        lambda value: DataParallelModel(nn.Linear(4, 3), CPUS, dim=value),
        lambda value: DataParallelCriterion(F.cross_entropy, dim=value),
        lambda value: gather([INPUTS], dim=value),
        lambda value: scatter(INPUTS, CPUS, value),
        lambda value: parallelize(nn.Linear(4, 3), dim=value),
        lambda value: PerReplica([INPUTS], [7], value),
    ],
    "split": [
        lambda value: DataParallelModel(nn.Linear(4, 3), CPUS, split=value),
        lambda value: scatter(INPUTS, split=value),
    ],
    "gather_outputs": [
        lambda value: DataParallelModel(nn.Linear(4, 3), CPUS, gather_outputs=value)
    ],
    "precision": [lambda value: Precision(value), lambda value: make_step(precision=value)],
    "minimum": [
        lambda value: DataParallelCriterion(F.cross_entropy, minimum=value),
        lambda value: weighted_mean([torch.ones(())], [1], minimum=value),
    ],
    "losses": [lambda value: weighted_mean(value, [1])],
    "weights": [lambda value: weighted_mean([torch.ones(())], value)],
    "module": [convert_sync_batchnorm, lambda value: DataParallelModel(value, CPUS)],
    "model": [
        lambda value: verify(value, F.cross_entropy, INPUTS, TARGETS),
        lambda value: TrainStep(
            value, DataParallelCriterion(F.cross_entropy), SGD([torch.ones(1)])
        ),
        lambda value: BalancedOptimizer(value, SGD),
    ],
    "surround": [
        lambda value: make_step(surround=value),
        lambda value: make_step(surround=savings.offload_activations()),  # It would run once.
    ],
    "params": [lambda value: BalancedOptimizer(make_model(), SGD, value)],
    "tolerance": [
        lambda value: verify(
            nn.Linear(4, 3), F.cross_entropy, INPUTS, TARGETS, device_ids=CPUS, tolerance=value
        )
    ],
    "entries": [lambda value: PerReplica(value, [7])],
    "sizes": [lambda value: PerReplica([INPUTS], value)],
    "rows": [lambda value: RankBatchSampler(value, 2)],
    "costs": [lambda value: sampler(costs=value)],
    "batch_size": [lambda value: sampler(batch_size=value)],
    "seed": [lambda value: sampler(seed=value)],
    "rank": [lambda value: sampler(rank=value)],
    "ranks": [lambda value: sampler(ranks=value)],
    "combine": [lambda value: sampler(combine=value), lambda value: cost_step(combine=value)],
    "cost": [lambda value: cost_step(cost=value)],
    "collate": [lambda value: cost_step(collate=value)],
    "limit": [lambda value: cost_step(limit=value)],
    "keep": [lambda value: Checkpoints("unused", keep=value, net=nn.Linear(4, 3))],
    "part": [lambda value: Checkpoints("unused", part=value)],
    "number": [lambda value: Checkpoints("unused", net=nn.Linear(4, 3)).save(value)],
    "smooth": [lambda value: DiceLoss(smooth=value)],
    "alpha": [lambda value: TverskyLoss(alpha=value)],
    "ignore_index": [lambda value: DiceLoss(ignore_index=value)],
    "blocks": [
        lambda value: savings.checkpoint_activations(
            nn.Sequential(nn.Tanh(), nn.Tanh()), blocks=value
        )
    ],
}


@pytest.mark.parametrize(
    ("name", "call"), [(name, call) for name, calls in CALLS.items() for call in calls]
)
def test_types(name, call):
    """A value that no argument takes was an error of Python, such as ``'object' object is not iterable``."""
    with pytest.raises((TypeError, ValueError), match=rf"(?s){name}.*expected|expected.*{name}"):
        call(object())


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (
            ["precision", "dim", "split", "combine", "costs"],
            [{"text": 2.5}],
        ),  # "unhashable type: 'dict'", among others
        (["dim", "batch_size", "seed", "keep", "number"], [2.5, "text", True, torch.ones(2)]),
    ],
)
def test_values_of_other_types(names, values):
    for name in names:
        for call in CALLS[name]:
            for value in values:
                with pytest.raises((TypeError, ValueError), match=rf"{name}.*expected"):
                    call(value)


def test_means_of_a_bare_tensor_and_on_a_device_by_its_name():
    for name in ("losses", "weights"):
        with pytest.raises(
            TypeError, match=rf"{name}=.*expected a list with one entry per replica"
        ):
            CALLS[name][0](torch.ones(()))
    assert weighted_mean([torch.ones(())], [1], "cpu") == 1


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 5)
        self.scale = 1.0

    def forward(self, *tensors):
        return self.layer(tensors[0]) * self.scale


def test_a_setting_of_the_module_is_not_lost_on_its_wrapper():
    """``criterion.label_smoothing = 0.1`` and ``model.scale = 0.5`` had no effect."""
    model = DataParallelModel(Scaled(), ["cpu"] * 2)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    with pytest.raises(AttributeError, match=r"a DataParallelModel, expected \.module\.scale"):
        model.scale = 0.5
    with pytest.raises(AttributeError, match=r"expected \.module\.label_smoothing"):
        criterion.label_smoothing = 0.1
    with pytest.raises(AttributeError, match="expected a new one"):
        criterion.module = nn.MSELoss()
    model.module.scale = 0.5
    criterion.name = model.name = "theirs"
