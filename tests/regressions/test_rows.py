"""Batches of user code: rows in other dimensions, and rows that are not tensors.

Each loop equals the plain program, or the error says what to write.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers.loops import CPUS, Calls
from helpers.optimizers import sgd
from helpers.problems import CLASSES, build_net
from torch import nn
from torch.testing import assert_close
from torch.utils.data import default_collate

from balanced_parallel import (
    Along,
    DataParallelCriterion,
    DataParallelModel,
    Rows,
    TrainStep,
    Whole,
    gather,
    parallelize,
    verify,
)

pytestmark = pytest.mark.usefixtures("double")


class TestOtherDimensions:
    def test_time_major_outputs_need_the_dimension_of_the_targets(self):
        x = torch.randn(5, 7, 4)
        target = torch.randint(CLASSES, (5, 7))
        criterion = DataParallelCriterion(nn.CrossEntropyLoss())
        model = DataParallelModel(build_net(), CPUS, dim=1)
        with pytest.raises(
            ValueError,
            match="the rows of the outputs are in dimension 1, expected dim= for those of the targets, or Along",
        ):
            criterion(model(x), target)

    def test_marks_set_the_dimension_of_each_argument(self):
        def function(net, x, state, scale):
            return {"y": net(x + state.sum(0)) * scale.sum(), "state": state * 2}

        module = Calls(function)
        x = torch.randn(7, 4)
        state = torch.randn(2, 7, 4)
        scale = torch.rand(5)
        model = DataParallelModel(module, CPUS, out_dims=(0, 1))
        outputs = model(x, Along(state, 1), Whole(scale))
        assert [output["state"].shape for output in outputs] == [(2, 3, 4), (2, 2, 4), (2, 2, 4)]
        whole = outputs.gather()
        expected = module(x, state, scale)
        assert_close(whole, expected)
        assert_close(gather(outputs["state"]), expected["state"])
        again = model(x, outputs["state"], Whole(scale))  # from step to step, on its devices
        assert_close(again.gather(), module(x, expected["state"], scale))

    def test_invalid_dims_raise_an_error(self):
        pair = Calls(lambda net, x: (net(x), net(x)))
        with pytest.raises(ValueError, match="has 2 entries, expected 1, one for each of the dim"):
            DataParallelModel(pair, CPUS, out_dims=(0,))(torch.zeros(3, 4))
        with pytest.raises(TypeError, match="in the order of the entries"):
            DataParallelModel(pair, CPUS, out_dims={"state": 1})
        with pytest.raises(TypeError, match=r"mark each one, as in \(Along\(h, 1\)"):
            Along((torch.zeros(3, 4), torch.zeros(3, 4)), 1)

    @pytest.mark.parametrize(
        "wrap", [DataParallelModel, DataParallelCriterion, parallelize, verify]
    )
    def test_the_dimensions_of_all_arguments_are_an_error_that_names_marks(self, wrap):
        with pytest.raises(TypeError, match=r"'in_dims', expected dim=1 .* Along\(x, 1\)"):
            wrap(build_net(), in_dims=(0, 1))


class TestRowsThatAreNotTensors:
    def seen(self, *inputs, **kwargs):
        outputs = DataParallelModel(Calls(lambda net, *inputs, **kwargs: [(inputs, kwargs)]), CPUS)(
            *inputs, **kwargs
        )
        return [entry for output in outputs for entry in output]

    def test_strings_are_split_if_there_is_one_for_each_row(self):
        names = [["row 0", "row 1", "row 2"], ["row 3", "row 4"], ["row 5", "row 6"]]
        images, strings = default_collate(
            [(torch.full((2,), float(row)), f"row {row}") for row in range(7)]
        )
        assert type(strings) is tuple
        assert [list(inputs[1]) for inputs, _ in self.seen(images, strings)] == names
        batch = default_collate(
            [{"image": torch.zeros(2), "name": f"row {row}"} for row in range(7)]
        )
        assert [kwargs["name"] for _, kwargs in self.seen(**batch)] == names
        pair = self.seen(default_collate([(torch.zeros(2), "a"), (torch.zeros(2), "b")]))
        assert {len(inputs[0][1]) for inputs, _ in pair} == {1}
        assert [inputs[1] for inputs, _ in self.seen(torch.zeros(4, 2), ["a", None, "c", "d"])] == [
            ["a", None],
            ["c"],
            ["d"],
        ]
        with pytest.raises(
            ValueError, match=r"inputs\[1\] is a tuple of 2 plain values \(2 rows\).*Whole"
        ):
            self.seen(torch.zeros(4, 2), ("cat", "dog"))
        assert [inputs[1] for inputs, _ in self.seen(torch.zeros(4, 2), Whole(("cat", "dog")))] == [
            ("cat", "dog")
        ] * 3

    def test_ambiguous_lists_raise_an_error(self):
        pair = [torch.zeros(3, 2), torch.ones(3, 2)]
        with pytest.raises(
            ValueError, match=r"inputs\[0\] is a list of 2 entries of one type.*Rows.*tuple.*Whole"
        ):
            self.seen(pair)
        assert [len(inputs[0][1]) for inputs, _ in self.seen(tuple(pair))] == [1, 1, 1]
        assert [len(inputs[1][1]) for inputs, _ in self.seen(torch.zeros(3, 4), pair)] == [
            1,
            1,
            1,
        ]  # three rows say it
        model = DataParallelModel(Calls(lambda net, pair: net(torch.cat(pair, 1))), CPUS)
        assert model((torch.zeros(3, 2), torch.ones(3, 2))).sizes == (1, 1, 1)

    def test_rows_splits_detection_targets_and_lists_of_lists(self):
        images = [torch.rand(3, height, 5) for height in (4, 5, 6, 7)]
        targets = [
            {"boxes": torch.rand(count, 4), "labels": torch.arange(count)} for count in (1, 0, 3, 2)
        ]
        ragged = [[1, 2, 3], [4], [5, 6]]
        for inputs in ((images, targets), (torch.zeros(3, 2), ragged)):
            with pytest.raises(ValueError, match="Rows"):
                self.seen(*inputs)
        seen = self.seen(Rows(images), Rows(targets))
        assert [[len(target["labels"]) for target in inputs[1]] for inputs, _ in seen] == [
            [1, 0],
            [3],
            [2],
        ]
        assert [[image.shape[1] for image in inputs[0]] for inputs, _ in seen] == [[4, 5], [6], [7]]
        assert [inputs[1] for inputs, _ in self.seen(torch.zeros(3, 2), Rows(ragged))] == [
            [[1, 2, 3]],
            [[4]],
            [[5, 6]],
        ]


class TestListsOfOutputs:
    """Images of several sizes, whose outputs are lists beside lists of targets."""

    def outputs(self):
        return Calls(lambda net, texts: [net(text) for text in texts])

    def batch(self):
        lengths = (1, 3, 2, 5, 4)
        return (
            [torch.randn(length, 4) for length in lengths],
            [torch.randint(CLASSES, (length,)) for length in lengths],
        )

    def test_rows_in_lists_that_cannot_be_joined_are_refused(self):
        def mean_of_texts(outputs, labels):
            pairs = zip(outputs["texts"], labels, strict=False)
            return torch.stack([F.cross_entropy(*pair) for pair in pairs]).mean()

        texts, labels = self.batch()
        module = Calls(lambda net, texts: {"texts": [net(text) for text in texts]})
        optimizer = sgd(module)
        model = DataParallelModel(module, CPUS)
        step = TrainStep(model, DataParallelCriterion(mean_of_texts), optimizer, micro_batch_size=1)
        with pytest.raises(ValueError, match="rows together raise|give weight='rows'"):
            step(Rows(texts), Rows(labels))

    @pytest.mark.parametrize("micro_batch_size", [None, 1])
    def test_a_mean_of_the_means_of_rows_needs_a_weight(self, micro_batch_size):
        def mean_of_texts(outputs, labels):
            pairs = zip(outputs, labels, strict=True)
            return torch.stack([F.cross_entropy(*pair) for pair in pairs]).mean()

        module, (texts, labels) = self.outputs(), self.batch()
        model, rows = DataParallelModel(module, CPUS), (Rows(texts), Rows(labels))
        optimizer = sgd(module)
        settings = {"micro_batch_size": micro_batch_size}
        step = TrainStep(model, DataParallelCriterion(mean_of_texts), optimizer, **settings)
        with pytest.raises(ValueError, match="expected the same means .* give weight=") as caught:
            step(*rows)
        assert len(str(caught.value)) < 800
        expected = mean_of_texts(module(texts), labels).detach()
        criterion = DataParallelCriterion(mean_of_texts, weight="rows")
        assert_close(TrainStep(model, criterion, optimizer, **settings)(*rows), expected)
