"""Random numbers by row: their bits, parts of a batch against the whole, and torch's kernels outside of forwards.

Statistics of the random numbers by row: moments, masks, and correlations of rows, elements, draws and updates.

Each is a number of standard deviations from what chance expects. Over many updates, their mean must be near 0 and their spread
near 1. Seeds are fixed, so the test has one outcome.
"""

import collections
import contextlib
import functools
import types

import pytest
import torch
import torch.nn.functional as F
from helpers.by_row import CPU, drawing_by_row

from balanced_parallel.reproducible import row_random
from balanced_parallel.reproducible.row_random import Forward, UpdateRandom, philox


def test_philox_has_the_published_bits():
    """The first known answer of the Random123 library, and that of a key of two words for two counters."""
    words = philox(torch.tensor([[0], [0x123456789ABCDEF0]]), 8).tolist()
    assert [f"{word:08x}" for word in words[0][:4] + words[1]] == [
        *("6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8", "092c9b44", "78384bc0"),
        *("c9fb80be", "2b3be4dd", "389d999a", "609cf517", "0570bb00", "99b16edc"),
    ]


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "dropout2d": lambda x: F.dropout2d(x[..., None], 0.4)[..., 0],
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "rand": lambda x: x + torch.rand(len(x), 1, 1),
    "randn": lambda x: x + torch.randn(len(x), 3, 4),
    "randint": lambda x: x + torch.randint(5, (len(x), 1, 1)),
    "random_ with a bound": lambda x: x + torch.empty(len(x), 1, 1).random_(7),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: x * torch.empty(len(x), 1, 1).bernoulli_(0.5),
    "gumbel_softmax": F.gumbel_softmax,
    "multinomial": lambda x: x + torch.multinomial(x[:, 0].softmax(-1), 2)[:, :1, None],
    "multinomial with replacement": lambda x: (
        x + torch.multinomial(x[:, 0].softmax(-1), 2, True)[:, :1, None]
    ),
    "attention": lambda x: F.scaled_dot_product_attention(
        x[:, None], x[:, None], x[:, None], dropout_p=0.4
    ),
    "time-major": lambda x: F.dropout(x.transpose(0, 1), 0.4).transpose(0, 1),
    "flat": lambda x: F.dropout(x.flatten(0, 1), 0.4).view_as(x),
    "shared": lambda x: x * F.dropout(torch.ones(3, 4), 0.4) + torch.rand(()),
    "on another device": lambda x: x * torch.rand(len(x), 1, 1, dtype=torch.float64),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_of_a_batch_draw_the_numbers_of_the_whole(name, dtype):
    x = torch.randn(7, 3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    draw = DRAWS[name]

    def run(rows):
        with drawing_by_row(11, rows, lambda count: draw(x[:1].expand(count, -1, -1))):
            return draw(x[rows])

    whole = run(range(7))
    assert not torch.equal(whole, draw(x))  # torch's own numbers
    for rows in ([0, 1, 2], [3], [6, 4], [5]):
        torch.testing.assert_close(run(rows), whole[rows], rtol=1e-6, atol=1e-6)
    assert torch.equal(run(range(7)), whole)


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        (lambda x: torch.poisson(x.abs()), NotImplementedError, "poisson draws in this forward"),
        (
            lambda x: torch._standard_gamma(x.abs()),
            NotImplementedError,
            "_standard_gamma draws in this forward",
        ),
        (
            lambda x: torch.randperm(4),
            NotImplementedError,
            "randperm.generator_out draws in this forward",
        ),
        (
            lambda x: torch.empty_like(x).random_(),
            NotImplementedError,
            "random_ draws in this forward",
        ),
        (
            lambda x: F.rrelu(-x, training=True),
            RuntimeError,
            "an operator that reproducible=True does not know has drawn",
        ),
        (
            lambda x: [torch.rand(2) for _ in x],
            ValueError,
            r"draw 2 is nothing of shape \(\) for 2 rows and uniform_ of shape \(2,\) for 3",
        ),
        (
            lambda x: torch.rand(len(x) ** 2),
            ValueError,
            r"draw 0 is uniform_ of shape \(4,\) for 2 rows and uniform_ of shape \(9,\) for 3",
        ),
    ],
)
def test_draws_that_cannot_follow_the_rows_are_refused(draw, error, message):
    with (
        pytest.raises(error, match=message),
        drawing_by_row(1, range(3), lambda count: draw(torch.ones(count))),
    ):
        pass


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (
            lambda: None,
            r"draw 0 is uniform_ of shape \(2, 2\) for 2 rows and nothing of shape \(\) for 3 rows",
        ),
        (
            lambda: torch.rand(3),
            r"draw 0 is .* and uniform_ of shape \(3,\) for 3 rows: with reproducible=True",
        ),
        (lambda: torch.rand(4, 2), r"draw 0 is .* and uniform_ of shape \(4, 2\) for 3 rows"),
        (
            lambda: [torch.rand(3, 2), torch.rand(3, 2)],
            r"draw 1 is nothing of shape \(\) for 2 rows and uniform_ of shape \(3, 2\) for 3 rows",
        ),
    ],
)
def test_a_forward_with_other_draws_than_the_small_ones_raises_an_error(forward, message):
    with (
        pytest.raises(ValueError, match=f"{message}.*must not depend on data or chance"),
        drawing_by_row(1, range(3), lambda count: torch.rand(count, 2)),
    ):
        forward()


def test_operators_that_do_not_draw_with_their_arguments_are_those_of_torch():
    x = torch.randn(3, 4)

    def forward(x):
        generator = torch.Generator().manual_seed(0)
        numbers = torch.rand(x.shape, generator=generator) + torch.poisson(x.abs(), generator)
        return (
            F.rrelu(x)
            + F.dropout(x, training=False)
            + torch.native_dropout(x, 0.5, False)[0]
            + numbers
        )

    expected = forward(x)
    with drawing_by_row(1, range(3), lambda count: forward(x[:count])):
        assert torch.equal(forward(x), expected)


def test_layers_of_cudnn_are_refused_if_they_draw_between_them():
    kernel = row_random._KERNELS["_cudnn_rnn"]
    draws = functools.partial(print, "_cudnn_rnn")
    operator = torch.ops.aten._cudnn_rnn.default._schema
    assert [operator.arguments[place].name for place in (11, 12)] == ["dropout", "train"]
    arguments = [None] * 11
    assert kernel(draws, *arguments, 0.0, True, False, [], None) is NotImplemented
    assert kernel(draws, *arguments, 0.5, False, False, [], None) is NotImplemented
    with pytest.raises(NotImplementedError, match="_cudnn_rnn draws in this forward"):
        kernel(draws, *arguments, 0.5, True, False, [], None)


@pytest.mark.parametrize("follows", [False, True])
def test_an_operator_that_is_not_replaced_raises_an_error(monkeypatch, follows):
    """Also where a known operator draws after it."""
    monkeypatch.setattr(
        row_random,
        "_KERNELS",
        {name: f for name, f in row_random._KERNELS.items() if name != "uniform_"},
    )
    update = UpdateRandom(1)

    def forward():
        with Forward(update, [0], CPU, None, {}).drawing():
            F.dropout(torch.ones(3))
            torch.rand(3)
            if follows:
                F.dropout(torch.ones(3))

    with pytest.raises(
        RuntimeError, match=r"does not know has drawn.*before it were \['bernoulli_.float'\]"
    ):
        forward()
    update.end()


def test_devices_whose_generators_torch_does_not_give_are_refused(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace())
    update = UpdateRandom(1)
    with (
        pytest.raises(
            NotImplementedError, match=r"reproducible=True on mps:0, expected CUDA or the CPU"
        ),
        Forward(update, [], torch.device("mps:0"), None, {}).drawing(),
    ):
        pass
    update.end()


UPDATES = 24
LINES = 64
LENGTH = 512
ELEMENTS = LINES * LENGTH


@contextlib.contextmanager
def forward_of_update(seed, rows, *draws):
    """One forward of an update, whose draws have their rows in the first dimension."""
    update = UpdateRandom(seed)
    try:
        with Forward(update, range(rows), CPU, [(*draw, 0) for draw in draws], {}).drawing():
            yield
    finally:
        update.end()


def draw_uniform(seed, *shapes):
    with forward_of_update(seed, shapes[0][0], *(("uniform_", shape) for shape in shapes)):
        return [torch.rand(shape).double() for shape in shapes]


def correlation(first, second):
    first = first - first.mean()
    second = second - second.mean()
    return (first * second).sum() / (first.norm() * second.norm()) * first.numel() ** 0.5


def chi_square(numbers):
    counts = torch.bincount((numbers * 256).long().flatten(), minlength=256).double()
    return (((counts - counts.mean()) ** 2 / counts.mean()).sum() - 255) / 510**0.5


def deviations(seed):
    base, following, volume = draw_uniform(seed, (LINES, LENGTH), (LINES, LENGTH), (LINES, 8, 64))
    (other,) = draw_uniform(seed + 1, (LINES, LENGTH))
    (path,) = draw_uniform(seed, (4096, 1, 1))
    return {
        "mean": (base.mean() - 0.5) * (12 * ELEMENTS) ** 0.5,
        "variance": (base.var() - 1 / 12) * (180 * ELEMENTS) ** 0.5,
        "256 bins": chi_square(base),
        "low 8 bits": chi_square(base * 2**16 % 1),
        "mask with p = 0.1": ((base < 0.9).double().mean() - 0.9) / (0.09 / ELEMENTS) ** 0.5,
        "one draw for each row": ((path < 0.9).double().mean() - 0.9) / (0.09 / 4096) ** 0.5,
        "rows r, r + 1": correlation(base[1:], base[:-1]),
        "elements j, j + 1": correlation(base[:, 1:], base[:, :-1]),
        "coordinates t, t + 1": correlation(volume[:, 1:], volume[:, :-1]),
        "draws d, d + 1": correlation(base, following),
        "row r of draw d, r + 1 of d + 1": correlation(base[1:], following[:-1]),
        "updates s, s + 1": correlation(base, other),
    }


@pytest.fixture(scope="module")
def statistics():
    values = collections.defaultdict(list)
    for seed in range(UPDATES):
        for name, value in deviations(seed).items():
            values[name].append(float(value))
    return {name: torch.tensor(column) for name, column in values.items()}


def test_moments_masks_and_correlations_are_within_chance(statistics):
    assert len(statistics) == 12
    for name, column in statistics.items():
        assert abs(column.mean()) < 3.5 * UPDATES**-0.5, name
        assert abs(column.std() - 1) < 3.5 * (2 * UPDATES) ** -0.5, name
        assert column.abs().max() < 4.5, name


def test_moments_of_normal_and_exponential_numbers():
    with forward_of_update(7, 256, ("normal_", (2, 2)), ("exponential_", (2, 2))):
        normal = torch.randn(256, 512, dtype=torch.float64)
        exponential = torch.empty(256, 512).exponential_()
    sigma = normal.numel() ** -0.5
    for power, (moment, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], 1):
        assert abs(normal.pow(power).mean() - moment) < 4 * variance**0.5 * sigma, power
    assert abs(exponential.double().mean() - 1) < 4 * sigma
