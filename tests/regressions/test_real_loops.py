"""Training loops as people have them, moved to this library: each equals the plain program, or says what to write."""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import CLASSES, assert_same_gradients, build_net, class_targets, gradients, plain_program
from torch import nn
from torch.utils.data import default_collate

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    PerReplica,
    Rows,
    TrainStep,
    Whole,
    gather,
    simulate,
    weighted_mean,
)
from balanced_parallel.batch import provenance

pytestmark = pytest.mark.usefixtures("double")

CPUS = ["cpu"] * 3


class Calls(nn.Module):
    """A module whose forward is a function of its net and the arguments."""

    def __init__(self, function, outputs=CLASSES):
        super().__init__()
        self.net = build_net(outputs)
        self.function = function

    def forward(self, *inputs, **kwargs):
        return self.function(self.net, *inputs, **kwargs)


def assert_equal_program(module, criterion, plain, inputs, targets=(), model=None, kwargs=None):
    """``criterion`` on the outputs of the replicas gives the loss and the gradients of ``plain(module, inputs)``."""
    loss = plain(module)
    loss.backward()
    expected = gradients(module)
    module.zero_grad()
    model = model or DataParallelModel(module, CPUS)
    found = criterion(model(*inputs, **(kwargs or {})), *targets)
    found.backward()
    torch.testing.assert_close(found.detach(), loss.detach(), rtol=1e-10, atol=1e-10)
    assert_same_gradients(gradients(module), expected)


class TestReductions:
    """The divisor of a class that computes its loss itself is not believed."""

    @pytest.mark.parametrize("setting", ["sum", "none"])
    def test_the_attribute_of_a_class_with_a_forward_of_its_own_is_not_believed(self, setting):
        class BNLLLoss(nn.BCEWithLogitsLoss):
            def forward(self, output, target):
                return F.binary_cross_entropy_with_logits(output, target, reduction="sum") / len(output)

        x, target = torch.randn(7, 4), torch.rand(7, CLASSES)
        module, criterion = build_net(), BNLLLoss(reduction=setting)
        assert_equal_program(
            module, DataParallelCriterion(criterion, weight="rows"), lambda net: criterion(net(x), target), [x], [target]
        )
        with pytest.warns(UserWarning, match=f"weighted by rows.*reduction='{setting}' has no effect"):
            DataParallelCriterion(criterion)(DataParallelModel(module, CPUS)(x), target)

    def test_a_focal_loss_with_none_inside_is_a_scalar(self):
        class FocalLoss(nn.CrossEntropyLoss):
            def forward(self, output, target):
                loss = super().forward(output, target)
                return ((1 - torch.exp(-loss)) ** 2 * loss).mean()

        x, target = torch.randn(7, 4), class_targets(7)
        criterion = FocalLoss(reduction="none")
        split = DataParallelCriterion(criterion, weight="rows")
        assert_equal_program(build_net(), split, lambda net: criterion(net(x), target), [x], [target])

    def test_a_sum_is_not_divided(self):
        def elbo(output, mean, target):
            return F.binary_cross_entropy(output.sigmoid(), target, reduction="sum") + mean.pow(2).sum()

        module = Calls(lambda net, x: (net(x), net(x * 2)))
        x, target = torch.randn(7, 4), torch.rand(7, CLASSES)
        split = DataParallelCriterion(elbo, reduction="sum")
        assert_equal_program(module, split, lambda module: elbo(*module(x), target), [x], [target])

    @pytest.mark.parametrize(
        "settings", [{"size_average": False}, {"reduce": False}, {"size_average": True}, {"reduction": "mean"}]
    )
    def test_a_reduction_at_the_call_is_obeyed(self, settings):
        net, x, target = build_net(), torch.randn(7, 4), torch.rand(7, CLASSES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = F.mse_loss(net(x), target, **settings)
        found = DataParallelCriterion(F.mse_loss)(DataParallelModel(net, CPUS)(x), target, **settings)
        torch.testing.assert_close(gather(found) if isinstance(found, list) else found, expected)

    def test_the_warning_knows_sums_and_rows(self):
        criterion = DataParallelCriterion(lambda output, target: (output - target).pow(2).sum())
        with pytest.warns(UserWarning, match=r"weight=.*reduction='sum' for a sum; weight='rows'"):
            criterion([torch.zeros(2, 3)], torch.ones(2, 3))

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"reduction": "total"}, "reduction='total', expected 'sum', 'mean' or 'none'"),
            ({"weight": "row"}, "weight='row', expected a function .* or 'rows'"),
            ({"minimum": -1}, "minimum=-1, expected the smallest divisor"),
            ({"in_dims": "rows"}, "in_dims contains 'rows', expected the dimension"),
        ],
    )
    def test_settings_out_of_their_range(self, settings, message):
        with pytest.raises((ValueError, TypeError), match=message):
            DataParallelCriterion(lambda output, target: output.mean(), **settings)

    def test_a_reduction_that_torchs_loss_does_not_have(self):
        with pytest.raises(ValueError, match="reduction='sum' was given for a loss of torch with reduction='mean'"):
            DataParallelCriterion(nn.MSELoss(), reduction="sum")


class TestWeights:
    def test_a_weight_is_called_as_the_criterion_is(self):
        def criterion(one, two, target, *, mask):
            return ((one - two - target).pow(2).mean(1) * mask).sum() / mask.sum()

        module = Calls(lambda net, x: (net(x), net(x * 2)))
        x, target, mask = torch.randn(7, 4), torch.rand(7, CLASSES), torch.tensor([1.0, 1, 0, 0, 1, 0, 1])
        split = DataParallelCriterion(criterion, weight=lambda one, two, target, *, mask: mask.sum())
        call = functools.partial(split, mask=mask)
        assert_equal_program(module, call, lambda module: criterion(*module(x), target, mask=mask), [x], [target])

    @pytest.mark.parametrize(
        ("weight", "error", "message"),
        [
            (-1.0, ValueError, "a weight is -1.0, expected"),
            (float("nan"), ValueError, "a weight is nan, expected"),
            (torch.tensor(float("inf")), ValueError, "a weight is inf, expected"),
            (torch.ones(2), ValueError, r"a weight has shape \(2,\), expected a scalar"),
            ("many", TypeError, "a weight is an object of type str"),
        ],
    )
    def test_weights_that_are_not_weights(self, weight, error, message):
        criterion = DataParallelCriterion(lambda output, target: output.mean(), weight=lambda *_: weight)
        with pytest.raises(error, match=message):
            criterion([torch.zeros(2)], torch.zeros(2))
        with pytest.raises(error, match=message):
            weighted_mean([torch.tensor(1.0)], [weight])

    @pytest.mark.parametrize("positives", [0, 1, 5])
    def test_a_divisor_with_a_floor(self, positives):
        """Detection divides by max(positives, 1), while every row has a loss."""

        def count(output, target):
            return (target > 0).sum()

        def criterion(output, target):
            return F.cross_entropy(output, target, reduction="sum") / count(output, target).clamp(min=1)

        x, target = torch.randn(7, 4), torch.zeros(7, dtype=torch.long)
        target[:positives] = 3
        split = DataParallelCriterion(criterion, weight=count, minimum=1)
        assert_equal_program(build_net(), split, lambda net: criterion(net(x), target), [x], [target])
        net = build_net()
        pieces = list(zip(net(x).split([3, 2, 2]), target.split([3, 2, 2]), strict=True))
        mean = weighted_mean([criterion(*piece) for piece in pieces], [count(*piece) for piece in pieces], minimum=1)
        torch.testing.assert_close(mean, criterion(net(x), target))

    def test_several_means_each_with_a_divisor_of_its_own(self):
        def criterion(output, target):
            kept = target > 0
            return {"class": F.cross_entropy(output, target), "box": output[kept].pow(2).sum() / kept.sum()}

        x, target = torch.randn(7, 4), torch.tensor([0, 0, 0, 1, 2, 0, 3])
        split = DataParallelCriterion(criterion, weight=lambda output, target: {"class": len(target), "box": (target > 0).sum()})
        assert_equal_program(
            build_net(),
            lambda *given: sum(split(*given).values()),
            lambda net: sum(criterion(net(x), target).values()),
            [x],
            [target],
        )

    def test_weights_that_are_not_one_for_each_mean(self):
        outputs, target = DataParallelModel(build_net(), CPUS)(torch.randn(7, 4)), torch.rand(7, CLASSES)
        for weights in ([1, 2, 3], {"two": 1, "one": 2}):
            criterion = DataParallelCriterion(lambda o, t: {"one": o.mean(), "two": t.mean()}, weight=lambda o, t, w=weights: w)
            with pytest.raises(ValueError, match="expected one weight for each mean, in the same order"):
                criterion(outputs, target)
        listed = DataParallelCriterion(lambda o, t: [F.mse_loss(o, t), F.l1_loss(o, t)], weight=lambda o, t: [len(o), o.numel()])
        torch.testing.assert_close(listed(outputs, target)[1], F.l1_loss(outputs.gather(), target))

    def test_several_means_by_rows_and_as_sums(self):
        x, target = torch.randn(7, 4), torch.rand(7, CLASSES)
        net = build_net()
        outputs = DataParallelModel(net, CPUS)(x)
        means = DataParallelCriterion(lambda o, t: (F.mse_loss(o, t), F.l1_loss(o, t), None), weight="rows")(outputs, target)
        torch.testing.assert_close(means[0], F.mse_loss(net(x), target))
        torch.testing.assert_close(means[1], F.l1_loss(net(x), target))
        assert means[2] is None
        sums = DataParallelCriterion(lambda o, t: [F.mse_loss(o, t, reduction="sum"), o.sum()], reduction="sum")(outputs, target)
        torch.testing.assert_close(sums[1], net(x).sum())

    def test_several_means_where_a_replica_counts_nothing(self):
        net, x, target = build_net(), torch.randn(6, 4), torch.tensor([1, 2, -100, -100, 0, 3])
        criterion = DataParallelCriterion(lambda o, t: {"nll": F.cross_entropy(o, t)}, weight=lambda o, t: (t != -100).sum())
        found = criterion(DataParallelModel(net, CPUS)(x), target)
        torch.testing.assert_close(found["nll"], F.cross_entropy(net(x), target))


class TestListOutputs:
    """A model that returns a list, as in pose estimation and deep supervision."""

    def stacks(self):
        return Calls(lambda net, x: [net(x), net(x * 2), net(x * 3)])  # as many as there are devices

    def test_the_old_loop_over_the_list_is_refused(self):
        x, target = torch.randn(6, 4), torch.rand(6, CLASSES)
        criterion = DataParallelCriterion(nn.MSELoss())
        outputs = DataParallelModel(self.stacks(), CPUS)(x)
        with pytest.raises(ValueError, match=r"3 outputs of one replica, number 0, expected one of each.*outputs\.map"):
            sum(criterion(output, target) for output in outputs)
        with pytest.raises(ValueError, match="3 outputs of one replica, number 0"):
            criterion([F.relu(output) for output in outputs[0]], target)
        with torch.no_grad(), pytest.raises(ValueError, match="3 outputs of one replica, number 0"):
            criterion(DataParallelModel(self.stacks(), CPUS)(x)[0], target)

    @pytest.mark.parametrize("micro_batch_size", [None, 1, 2])
    def test_a_list_of_targets_has_the_rows_of_the_outputs(self, micro_batch_size):
        def loss(outputs, targets):
            return sum(F.mse_loss(output, target) for output, target in zip(outputs, targets, strict=True))

        module, x, targets = self.stacks(), torch.randn(11, 4), [torch.rand(11, CLASSES) for _ in range(3)]
        split = DataParallelCriterion(loss, weight="rows")
        assert_equal_program(module, split, lambda module: loss(module(x), targets), [x], [targets])
        model, optimizer = DataParallelModel(module, CPUS), torch.optim.SGD(module.parameters(), lr=0.0)
        step = TrainStep(model, split, optimizer, micro_batch_size=micro_batch_size)
        torch.testing.assert_close(step(x, targets), loss(module(x), targets).detach())
        with pytest.raises(ValueError, match="a list of 3 entries of one type"):  # they may be the three rows
            split(DataParallelModel(module, CPUS)(x[:3]), [target[:3] for target in targets])

    def test_the_error_shows_the_way(self):
        x, target = torch.randn(7, 4), torch.rand(7, CLASSES)
        split = DataParallelCriterion(nn.MSELoss())

        def loss_of(outputs, target):
            return sum(split(outputs.map(lambda output, stack=stack: output[stack]), target) for stack in range(3))

        def zipped(outputs, target):
            return sum(split(output, target) for output in zip(*outputs, strict=True))

        for loss in (loss_of, zipped):
            assert_equal_program(
                self.stacks(), loss, lambda module: sum(F.mse_loss(output, target) for output in module(x)), [x], [target]
            )

    def test_outputs_in_another_order_are_refused(self):
        outputs = DataParallelModel(build_net(), CPUS)(torch.randn(7, 4))
        with pytest.raises(ValueError, match="outputs of replicas 2, 1, 0 of 3, expected one of each, in order"):
            DataParallelCriterion(nn.MSELoss())(list(outputs)[::-1], torch.rand(7, CLASSES))

    def test_one_of_several_outputs_is_refused(self):
        """[1, CLASSES] beside [7, CLASSES] would be broadcast."""
        outputs = DataParallelModel(Calls(lambda net, x: (net(x),)), CPUS)(torch.randn(3, 4))
        with pytest.raises(ValueError, match="outputs of replicas 0 of 3"):
            DataParallelCriterion(nn.MSELoss())(outputs[0], torch.rand(3, CLASSES))

    def test_what_all_replicas_contributed_to_is_nobodys(self):
        net, x, target = build_net(), torch.randn(7, 4), class_targets(7)
        whole = DataParallelModel(net, CPUS)(x).gather()
        criterion = DataParallelCriterion(nn.CrossEntropyLoss())
        torch.testing.assert_close(criterion([whole], target), F.cross_entropy(net(x), target))
        torch.testing.assert_close(criterion(list(whole.split(4)), target), F.cross_entropy(net(x), target))

    def test_nothing_is_kept_of_outputs_that_are_gone(self):
        model = DataParallelModel(build_net(), CPUS)
        before = len(provenance._known)
        for _ in range(3):
            outputs = model(torch.randn(7, 4))
            assert len(provenance._known) == before + 3
        del outputs
        assert len(provenance._known) == before


class TestOtherDimensions:
    def time_major(self):
        return Calls(lambda net, x: net(x))  # [T, B, 4] to [T, B, CLASSES]

    def test_a_flattened_time_major_batch_is_refused(self):
        x, target = torch.randn(5, 7, 4), torch.randint(CLASSES, (5, 7))
        criterion = DataParallelCriterion(nn.CrossEntropyLoss())
        model = DataParallelModel(self.time_major(), CPUS, dim=1)
        with pytest.raises(ValueError, match=r"rows are not all in dimension 0.*outputs\.map"):
            criterion([output.view(-1, CLASSES) for output in model(x)], target.view(-1))
        with torch.no_grad(), pytest.raises(ValueError, match="rows are not all in dimension 0"):
            criterion([output.log_softmax(-1).reshape(-1, CLASSES) for output in model(x)], target.view(-1))
        with pytest.raises(ValueError, match="the rows of the outputs are in dimension 1; say where those of the targets are"):
            criterion(model(x), target)

    def test_the_dimension_of_the_targets_can_be_said(self):
        def loss(output, target):
            return F.cross_entropy(output.reshape(-1, CLASSES), target.reshape(-1))

        x, target = torch.randn(5, 7, 4), torch.randint(CLASSES, (5, 7))
        target[2:, :3] = -100
        weight = lambda output, target: (target != -100).sum()  # noqa: E731
        for criterion in (
            DataParallelCriterion(loss, dim=1, weight=weight),
            DataParallelCriterion(loss, in_dims=(1, 1), weight=weight),
            DataParallelCriterion(loss, in_dims={"target": 1}, weight=weight),
        ):
            module = self.time_major()
            model = DataParallelModel(module, CPUS, dim=1)
            assert_equal_program(module, criterion, lambda module: loss(module(x), target), [x], [target], model)

    @pytest.mark.parametrize("in_dims", [(0, 1, None), {"state": 1, "scale": None}, {1: 1, 2: None}])
    def test_each_argument_can_have_its_rows_elsewhere(self, in_dims):
        def function(net, x, state, scale):
            return {"y": net(x + state.sum(0)) * scale.sum(), "state": state * 2}

        class Recurrent(Calls):
            def forward(self, x, state, scale):
                return function(self.net, x, state, scale)

        module = Recurrent(None)
        x, state, scale = torch.randn(7, 4), torch.randn(2, 7, 4), torch.rand(5)
        model = DataParallelModel(module, CPUS, in_dims=in_dims, out_dims={"state": 1})
        outputs = model(x, state, scale)
        assert [output["state"].shape for output in outputs] == [(2, 3, 4), (2, 2, 4), (2, 2, 4)]
        whole, expected = outputs.gather(), module(x, state, scale)
        torch.testing.assert_close(whole, expected)
        torch.testing.assert_close(gather(outputs["state"]), expected["state"])
        again = model(x, outputs["state"], scale)  # from step to step, on its devices
        torch.testing.assert_close(again.gather(), module(x, expected["state"], scale))

    def test_a_position_is_that_of_an_argument_given_by_name_too(self):
        class Stateful(Calls):
            def forward(self, x, state=None):
                return self.net(x) if state is None else self.net(x + state.sum(0))

        module, x, state = Stateful(None), torch.randn(2, 4), torch.randn(2, 2, 4)  # a wrong dimension would fit
        model = DataParallelModel(module, CPUS, in_dims={1: 1})
        torch.testing.assert_close(model(x, state=state).gather(), module(x, state))
        torch.testing.assert_close(model(x).gather(), module(x))

    def test_dimensions_that_name_nothing(self):
        model = DataParallelModel(build_net(), CPUS, in_dims={"mask": 1})
        with pytest.raises(ValueError, match="dimensions are given for 'mask', expected one of the arguments input"):
            model(torch.zeros(3, 4))
        with pytest.raises(
            ValueError, match=r"dimensions are given for 3, expected one of the arguments input, or the position of one"
        ):
            DataParallelModel(build_net(), CPUS, in_dims={3: 1})(torch.zeros(3, 4))
        with pytest.raises(ValueError, match=r"given for 2 arguments, but 1 were passed by position"):
            DataParallelModel(build_net(), CPUS, in_dims=(0, 1))(torch.zeros(3, 4))
        with pytest.raises(ValueError, match="has 2 entries, but the dimensions"):
            DataParallelModel(Calls(lambda net, x: (net(x), net(x))), CPUS, out_dims=(0,))(torch.zeros(3, 4))


class TestRowsThatAreNotTensors:
    def seen(self, *inputs, **kwargs):
        outputs = DataParallelModel(Calls(lambda net, *inputs, **kwargs: [(inputs, kwargs)]), CPUS)(*inputs, **kwargs)
        return [entry for output in outputs for entry in output]

    def test_what_default_collate_makes_of_names(self):
        images, names = default_collate([(torch.full((2,), float(row)), f"row {row}") for row in range(7)])
        assert type(names) is tuple
        seen = self.seen(images, names)
        assert [inputs[1] for inputs, _ in seen] == [("row 0", "row 1", "row 2"), ("row 3", "row 4"), ("row 5", "row 6")]
        batch = default_collate([{"image": torch.zeros(2), "name": f"row {row}"} for row in range(7)])
        assert [kwargs["name"] for _, kwargs in self.seen(**batch)] == [
            ["row 0", "row 1", "row 2"],
            ["row 3", "row 4"],
            ["row 5", "row 6"],
        ]
        (seen,) = {len(inputs[0][1]) for inputs, _ in self.seen(default_collate([(torch.zeros(2), "a"), (torch.zeros(2), "b")]))}
        assert seen == 1

    def test_a_list_of_names_with_none_in_it_is_cut(self):
        seen = self.seen(torch.zeros(4, 2), ["a", None, "c", "d"])
        assert [inputs[1] for inputs, _ in seen] == [["a", None], ["c"], ["d"]]

    def test_names_that_are_no_rows_are_refused(self):
        with pytest.raises(ValueError, match=r"inputs\[1\] is a tuple of 2 plain values \(2 rows\).*Whole"):
            self.seen(torch.zeros(4, 2), ("cat", "dog"))
        assert [inputs[1] for inputs, _ in self.seen(torch.zeros(4, 2), Whole(("cat", "dog")))] == [("cat", "dog")] * 3

    def test_clips_of_different_lengths(self):
        clips = [torch.full((length, 2), float(length)) for length in (2, 3, 4)]
        for inputs in ([clips], [torch.zeros(3, 2), clips]):
            with pytest.raises(ValueError, match=r"Rows\(...\)"):
                self.seen(*inputs)
        seen = self.seen(Rows(clips))
        assert [[len(clip) for clip in inputs[0]] for inputs, _ in seen] == [[2], [3], [4]]

    def test_lists_that_may_be_rows_or_parts(self):
        pair = [torch.zeros(3, 2), torch.ones(3, 2)]
        with pytest.raises(ValueError, match=r"inputs\[0\] is a list of 2 entries of one type.*Rows.*tuple.*Whole"):
            self.seen(pair)
        assert [len(inputs[0][1]) for inputs, _ in self.seen(tuple(pair))] == [1, 1, 1]
        assert [len(inputs[1][1]) for inputs, _ in self.seen(torch.zeros(3, 4), pair)] == [1, 1, 1]  # three rows say it
        model = DataParallelModel(Calls(lambda net, pair: net(torch.cat(pair, 1))), CPUS, in_dims=(0,))
        assert model([torch.zeros(3, 2), torch.ones(3, 2)]).sizes == (1, 1, 1)

    def test_the_targets_of_detection(self):
        images = [torch.rand(3, height, 5) for height in (4, 5, 6, 7)]
        targets = [{"boxes": torch.rand(count, 4), "labels": torch.arange(count)} for count in (1, 0, 3, 2)]
        with pytest.raises(ValueError, match="Rows"):
            self.seen(images, targets)
        seen = self.seen(Rows(images), Rows(targets))
        assert [[len(target["labels"]) for target in inputs[1]] for inputs, _ in seen] == [[1, 0], [3], [2]]
        assert [[image.shape[1] for image in inputs[0]] for inputs, _ in seen] == [[4, 5], [6], [7]]

    def test_lists_of_lists(self):
        ragged = [[1, 2, 3], [4], [5, 6]]
        with pytest.raises(ValueError, match="Rows"):
            self.seen(torch.zeros(3, 2), ragged)
        assert [inputs[1] for inputs, _ in self.seen(torch.zeros(3, 2), Rows(ragged))] == [[[1, 2, 3]], [[4]], [[5, 6]]]

    def test_an_object_that_holds_tensors_is_refused(self):
        class Data:
            def __init__(self):
                self.store = {"x": torch.zeros(4, 2)}

        with pytest.raises(TypeError, match=r"inputs\[0\] is an object of type Data that holds tensors.*Whole"):
            self.seen(Data())
        with pytest.raises(TypeError, match="object of type Data"):
            self.seen(torch.zeros(4, 2), extra={"data": Data()})
        assert len(self.seen(torch.zeros(4, 2), Whole(Data()))) == 3


class TestChains:
    @pytest.mark.parametrize("split", [None, [1, 4, 2]])
    def test_outputs_are_inputs_of_another_model(self, split):
        """netD(netG(z)), also where the two share rows in another way."""
        generator, critic, z = build_net(4), build_net(1), torch.randn(9, 4)
        critic(generator(z)).pow(2).mean().backward()
        expected = gradients(generator, critic)
        generator.zero_grad()
        critic.zero_grad()
        fake = DataParallelModel(generator, CPUS)(z)
        outputs = DataParallelModel(critic, CPUS, split=split)(fake)
        criterion = DataParallelCriterion(lambda score: score.pow(2).mean(), weight="rows")
        criterion(outputs).backward()
        assert_same_gradients(gradients(generator, critic), expected)

    def test_rows_that_are_in_their_place_stay_there(self):
        model = DataParallelModel(Calls(lambda net, x: x), CPUS)
        outputs = model(torch.randn(7, 4))
        assert all(one is other for one, other in zip(model(outputs), outputs, strict=True))

    def test_a_teachers_outputs_are_targets(self):
        student, teacher, x = build_net(), build_net(), torch.randn(7, 4)
        with torch.no_grad():
            wanted = DataParallelModel(teacher, CPUS, split=[3, 1, 1])(x)
        assert_equal_program(
            student,
            DataParallelCriterion(nn.MSELoss()),
            lambda student: F.mse_loss(student(x), teacher(x).detach()),
            [x],
            [wanted],
        )

    def test_a_list_that_is_no_per_replica_any_more_is_refused(self):
        model = DataParallelModel(build_net(4), CPUS)
        with pytest.raises(ValueError, match=r"inputs\[0\] is a list of the outputs of replicas 0, 1, 2.*outputs\.map"):
            model(list(model(torch.randn(7, 4))))

    def test_hidden_states_in_a_tuple_of_outputs(self):
        lstm = nn.LSTM(4, 6)
        model = DataParallelModel(lstm, CPUS, dim=1, in_dims=(1, (1, 1)), out_dims=(1, (1, 1)))
        x = torch.randn(5, 7, 4)
        state, plain = (torch.zeros(1, 7, 6), torch.zeros(1, 7, 6)), (torch.zeros(1, 7, 6), torch.zeros(1, 7, 6))
        for _ in range(3):
            outputs = model(x, state)
            expected, plain = lstm(x, plain)
            _, state = outputs.unzip()
            torch.testing.assert_close(outputs.gather()[0], expected)
            torch.testing.assert_close(outputs.map(lambda output: output[1], dim=1).gather(), plain)
        with pytest.raises(ValueError, match=r"map\(function, dim=...\)"):
            outputs.map(lambda output: output[0])


class TestPerReplica:
    def outputs(self):
        return DataParallelModel(Calls(lambda net, x: {"logits": net(x), "deep": {"x": x}}), CPUS)(torch.randn(7, 4))

    def test_keys_and_attributes_reach_into_every_entry(self):
        outputs = self.outputs()
        logits = outputs["logits"]
        assert isinstance(logits, PerReplica)
        assert logits.sizes == (3, 2, 2)
        assert outputs["deep"]["x"].gather().shape == (7, 4)
        record = outputs.map(lambda output: torch.return_types.max((output["logits"], output["logits"])))
        assert record.values.gather().shape == (7, CLASSES)
        with pytest.raises(KeyError):
            outputs["loss"]

    def test_it_is_a_list(self):
        outputs = self.outputs()["logits"]
        assert len(outputs) == 3
        assert outputs[-1].shape == (2, CLASSES)
        assert outputs[1:].sizes == (2, 2)
        assert len(list(zip(outputs, range(3), strict=True))) == 3
        assert [outputs[0], *outputs[1:]] == list(outputs)
        assert torch.cat(list(outputs)).shape == (7, CLASSES)

    @pytest.mark.parametrize(
        "use",
        [
            lambda outputs: outputs.mean(),
            lambda outputs: outputs.shape,
            lambda outputs: outputs[:, 0],
            lambda outputs: F.nll_loss(outputs, torch.zeros(7, dtype=torch.long)),
            lambda outputs: F.softmax(outputs, 1),
            lambda outputs: torch.mean(outputs),
            lambda outputs: torch.ones(7, CLASSES) - outputs,
            lambda outputs: outputs * 2,
            lambda outputs: outputs == torch.zeros(7, CLASSES),
            lambda outputs: 2 * outputs,
            lambda outputs: outputs + outputs,
            lambda outputs: nn.Linear(CLASSES, 2)(outputs),
        ],
    )
    def test_it_is_not_a_tensor_and_says_so(self, use):
        message = r"PerReplica, .*not a tensor: call \.gather\(\).*DataParallelCriterion"
        with pytest.raises((TypeError, AttributeError), match=message):
            use(self.outputs()["logits"])

    def test_a_gradient_penalty(self):
        """WGAN-GP takes the gradient of a gradient with respect to the inputs."""
        net, x = build_net(1), torch.randn(7, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).pow(2).mean()
        penalty.backward()
        expected = gradients(net)
        net.zero_grad()
        scores = DataParallelModel(net, CPUS)(x)
        (slope,) = torch.autograd.grad(scores, x, scores.map(torch.ones_like), create_graph=True)
        found = (slope.norm(dim=1) - 1).pow(2).mean()
        found.backward()
        torch.testing.assert_close(found, penalty)
        assert_same_gradients(gradients(net), expected)

    def test_map_keeps_the_rows_for_the_criterion(self):
        x, target = torch.randn(7, 4), class_targets(7)
        criterion = DataParallelCriterion(nn.CrossEntropyLoss())
        assert_equal_program(
            build_net(),
            lambda outputs, target: criterion(outputs.map(lambda output: output * 3), target),
            lambda net: F.cross_entropy(net(x) * 3, target),
            [x],
            [target],
        )

    def test_parts_fill_the_criterions_arguments(self):
        module = Calls(lambda net, x: {"one": net(x), "two": net(x * 2)})
        x, target = torch.randn(7, 4), torch.rand(7, CLASSES)

        def loss(one, two, target):
            return (one * two - target).pow(2).mean()

        split = DataParallelCriterion(loss, weight="rows")
        assert_equal_program(
            module,
            lambda outputs, target: split((outputs["one"], outputs["two"]), target),
            lambda module: loss(*module(x).values(), target),
            [x],
            [target],
        )


class TestOneLine:
    """``gather_outputs=True`` returns what ``nn.DataParallel`` returns."""

    def test_the_loss_may_be_whatever_it_was(self):
        net, x, target = build_net(), torch.randn(7, 4), class_targets(7, 2)
        loss, expected = plain_program(net, nn.CrossEntropyLoss(), x, target)
        output = DataParallelModel(net, CPUS, gather_outputs=True)(x)
        found = nn.CrossEntropyLoss()(output, target)
        found.backward()
        torch.testing.assert_close(found.detach(), loss)
        assert_same_gradients(gradients(net), expected)

    def test_inside_of_a_model(self):
        class Detector(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder = build_net(4)
                self.head = nn.Linear(4, 2)

            def forward(self, x):
                return self.head(self.encoder(x).relu())

        module, x = Detector(), torch.randn(7, 4)
        expected = module(x)
        module.encoder = DataParallelModel(module.encoder, CPUS, gather_outputs=True)
        torch.testing.assert_close(module(x), expected)

    @pytest.mark.parametrize("devices", [1, 3])
    def test_scalars_as_torch_returns_them(self, devices):
        model = DataParallelModel(Calls(lambda net, x: net(x).mean()), ["cpu"] * devices, gather_outputs=True)
        with torch.no_grad():
            assert model(torch.randn(7, 4)).shape == (() if devices == 1 else (3,))

    def test_the_mean_of_scalars_is_warned_about(self):
        model = DataParallelModel(Calls(lambda net, x: {"loss": net(x).mean()}), CPUS, gather_outputs=True)
        with pytest.warns(UserWarning, match=r"the output\['loss'\] is a scalar per replica.*weighted_mean") as caught:
            model(torch.randn(7, 4))
            model(torch.randn(7, 4))
        assert len(caught) == 1
        assert caught[0].filename == __file__

    def test_time_major_outputs_are_gathered_along_their_dimension(self):
        x = torch.randn(5, 7, 4)
        assert DataParallelModel(build_net(), CPUS, dim=1, gather_outputs=True)(x).shape == (5, 7, CLASSES)
        assert gather(DataParallelModel(build_net(), CPUS, dim=1)(x)).shape == (5, 7, CLASSES)
        with pytest.raises(ValueError, match="rows are not all in dimension 0"):
            gather([output * 2 for output in DataParallelModel(build_net(), CPUS, dim=1)(x)])
        with pytest.raises(ValueError, match="rows are not all in dimension 0"):
            gather([output.argmax(-1) for output in DataParallelModel(build_net(), CPUS, dim=1)(x)])
        assert gather([torch.zeros(2), torch.zeros(1)]).shape == (3,)  # nothing to do with that model


class TestMethods:
    class TwoTowers(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text = build_net(), build_net()

        def encode_image(self, x, *, scale=1):
            return self.image(x) * scale

        def forward(self, x):
            return self.text(x)

    def test_another_method_than_forward_is_cut_and_run_like_it(self):
        module, x = self.TwoTowers(), torch.randn(7, 4)
        loss = module.encode_image(x, scale=2).pow(2).mean()
        loss.backward()
        expected = gradients(module)
        module.zero_grad()
        outputs = DataParallelModel(module, CPUS).call("encode_image", x, scale=2)
        assert outputs.sizes == (3, 2, 2)
        DataParallelCriterion(lambda output: output.pow(2).mean(), weight="rows")(outputs).backward()
        assert_same_gradients(gradients(module), expected)

    def test_dimensions_of_forward_are_not_those_of_a_method(self):
        module, x = self.TwoTowers(), torch.randn(7, 4)
        module.scaled = lambda x, scale: module.image(x) * scale.sum()
        scale = torch.rand(3)
        named = DataParallelModel(module, CPUS)
        torch.testing.assert_close(named.call("scaled", x, Whole(scale)).gather(), module.scaled(x, scale))
        with pytest.raises(ValueError, match="has positions of arguments of forward, which do not apply to 'scaled'"):
            DataParallelModel(module, CPUS, in_dims=(0, None)).call("scaled", x, scale)

    def test_a_method_that_there_is_not(self):
        with pytest.raises(ValueError, match="TwoTowers has no method 'encode_audio' to call"):
            DataParallelModel(self.TwoTowers(), CPUS).call("encode_audio", torch.zeros(1))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear, r"the module is the class Linear, expected an instance: write Linear\(...\)"),
        (len, "the module is an object of type len, expected a torch.nn.Module"),
        (DataParallelModel(nn.Linear(2, 2), ["cpu"]), "wrapped in DataParallelModel already, expected a plain one"),
        (nn.DataParallel(nn.Linear(2, 2)), "wrapped in DataParallel already"),
    ],
)
def test_what_cannot_be_wrapped(module, message):
    with pytest.raises(TypeError, match=message):
        DataParallelModel(module, CPUS)


class TestDevices:
    """The same on devices whose memory is their own."""

    def test_chains_move_only_rows_that_must(self):
        torch.set_default_dtype(torch.float32)
        with simulate(devices=3) as cluster:
            generator, critic = DataParallelModel(build_net(4)), DataParallelModel(build_net(1))
            uneven = DataParallelModel(build_net(1), split=[1, 1, 5])
            fake = generator(torch.randn(9, 4))
            for _ in range(5):  # parameters are on all devices then, and were looked at
                critic(fake), uneven(fake)
            before = sum(cluster.moved.values())
            scores = critic(fake)
            assert sum(cluster.moved.values()) == before
            uneven(fake)
            assert sum(cluster.moved.values()) - before == 5 * 4 * 4  # one row goes to the second device, four to the last
            assert [score.device.index for score in scores] == [0, 1, 2]
            gathered = DataParallelModel(build_net(1), output_device=1, gather_outputs=True)(fake)
            assert gathered.device.index == 1

    def test_whole_and_rows_are_on_every_device(self):
        torch.set_default_dtype(torch.float32)
        with simulate(devices=3):
            model = DataParallelModel(Calls(lambda net, rows, scale: torch.stack([net(row * scale) for row in rows])))
            outputs = model(Rows([torch.ones(4) * row for row in range(7)]), Whole(torch.rand(4)))
            assert [output.device.index for output in outputs] == [0, 1, 2]
            outputs.gather().sum().backward()
            assert all(parameter.grad is not None for parameter in model.parameters())


class TestMicroBatches:
    """``TrainStep`` cuts over time what the model cuts over devices."""

    def assert_step(self, module, criterion, plain, inputs, targets, model=None, micro_batch_size=2):
        loss = plain(module)
        loss.backward()
        expected = gradients(module)
        module.zero_grad()
        model = model or DataParallelModel(module, CPUS)
        step = TrainStep(model, criterion, torch.optim.SGD(module.parameters(), lr=0.0), micro_batch_size=micro_batch_size)
        found, outputs = step(inputs, targets, return_outputs=True)
        torch.testing.assert_close(found, loss.detach(), rtol=1e-10, atol=1e-10)
        assert_same_gradients(gradients(module), expected)
        return outputs

    def test_time_major_rows_and_whole_arguments(self):
        def loss(output, target):
            return F.cross_entropy(output.flatten(0, 1), target.flatten())

        module = Calls(lambda net, x, scale: net(x) * scale)
        x, target, scale = torch.randn(5, 13, 4), torch.randint(CLASSES, (5, 13)), torch.rand(CLASSES)
        target[1:, :9] = -100
        model = DataParallelModel(module, CPUS, dim=1, in_dims=(1, None))
        outputs = self.assert_step(
            module,
            DataParallelCriterion(loss, in_dims={"target": 1}, weight=lambda output, target: (target != -100).sum()),
            lambda module: loss(module(x, scale), target),
            (x, scale),
            target,
            model,
        )
        torch.testing.assert_close(outputs.gather(), module(x, scale))
        with pytest.raises(ValueError, match="the rows of the outputs are in dimension 1"):
            TrainStep(model, DataParallelCriterion(nn.MSELoss()), torch.optim.SGD(module.parameters()))((x, scale), target)

    def test_named_targets_behind_several_outputs(self):
        def loss(one, two, target):
            return F.mse_loss(one * two, target)

        module, x, target = Calls(lambda net, x: (net(x), net(x * 2))), torch.randn(11, 4), torch.rand(CLASSES, 11)
        criterion = DataParallelCriterion(
            lambda one, two, target: loss(one, two, target.t()), in_dims={"target": 1}, weight=lambda one, two, target: len(one)
        )
        self.assert_step(module, criterion, lambda module: loss(*module(x), target.t()), x, target)

    def test_rows_that_are_not_tensors(self):
        module = Calls(lambda net, clips, scale: torch.stack([net(clip).mean(0) * scale for clip in clips]))
        clips = [torch.randn(length, 4) for length in range(1, 12)]
        scale, target = torch.rand(CLASSES), torch.rand(11, CLASSES)
        self.assert_step(
            module,
            DataParallelCriterion(nn.MSELoss()),
            lambda module: F.mse_loss(module(clips, scale), target),
            (Rows(clips), Whole(scale)),
            target,
        )

    def test_outputs_of_another_model(self):
        generator, critic, z = build_net(4), build_net(1), torch.randn(11, 4)
        with torch.no_grad():
            fake = DataParallelModel(generator, CPUS, split=[5, 1, 2])(z)
        target = torch.rand(11, 1)
        plain = lambda critic: F.mse_loss(critic(generator(z).detach()), target)  # noqa: E731
        self.assert_step(critic, DataParallelCriterion(nn.MSELoss()), plain, fake, target)

    @pytest.mark.parametrize("positives", [0, 4])
    def test_a_divisor_with_a_floor(self, positives):
        def count(output, target):
            return (target > 0).sum()

        def loss(output, target):
            return F.cross_entropy(output, target, reduction="sum") / count(output, target).clamp(min=1)

        x, target = torch.randn(11, 4), torch.zeros(11, dtype=torch.long)
        target[:positives] = 3
        split = DataParallelCriterion(loss, weight=count, minimum=1)
        self.assert_step(build_net(), split, lambda net: loss(net(x), target), x, target)

    @pytest.mark.parametrize("kept", [(0, 3, 4, 9), ()])
    def test_several_means_each_with_a_divisor_of_its_own(self, kept):
        def loss(output, target):
            some = target > 0
            return {"class": F.cross_entropy(output, target), "box": output[some].pow(2).sum() / some.sum().clamp(min=1)}

        x, target = torch.randn(11, 4), torch.zeros(11, dtype=torch.long)
        target[list(kept)] = 2
        weight = lambda output, target: {"class": len(target), "box": (target > 0).sum()}  # noqa: E731
        split = DataParallelCriterion(loss, weight=weight, minimum=1)
        self.assert_step(build_net(), split, lambda net: sum(loss(net(x), target).values()), x, target)

    def test_divisors_that_depend_on_outputs_are_refused(self):
        split = DataParallelCriterion(
            lambda output, target: (output.mean(), output.sum()), weight=lambda output, target: (len(output), output.numel())
        )
        step = TrainStep(DataParallelModel(build_net(), CPUS), split, torch.optim.SGD(build_net().parameters()))
        with pytest.raises(ValueError, match="divisors of their own.*in place of TrainStep"):
            step(torch.randn(7, 4), torch.rand(7, CLASSES))
        counted = DataParallelCriterion(split.module, weight=lambda output, target: (len(target), 2 * len(target)))
        step = TrainStep(DataParallelModel(build_net(), CPUS), counted, torch.optim.SGD(build_net().parameters()))
        with pytest.raises(ValueError, match=r"divisors of their own.*step\(inputs, targets\)"):
            step.add(torch.randn(7, 4), torch.rand(7, CLASSES))

    def test_no_outputs_are_refused_by_the_criterion(self):
        with pytest.raises(TypeError, match="the criterion was given an object of type PerReplica, expected the list"):
            DataParallelCriterion(nn.MSELoss())(PerReplica([], []), torch.zeros(0, CLASSES))

    def test_gathered_outputs_are_refused(self):
        model = DataParallelModel(build_net(), CPUS, gather_outputs=True)
        with pytest.raises(TypeError, match="gather_outputs=True, expected outputs that stay"):
            TrainStep(model, DataParallelCriterion(nn.MSELoss()), torch.optim.SGD(model.parameters()))
