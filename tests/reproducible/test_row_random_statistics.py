"""Statistics of the random numbers by row: moments, masks, and correlations of rows, elements, draws and updates.

Each is a number of standard deviations from what chance expects. Over many updates, their mean must be near 0 and their spread
near 1. Seeds are fixed, so the test has one outcome.
"""

import collections
import contextlib

import pytest
import torch

from balanced_parallel.reproducible.row_random import Forward, UpdateRandom

CPU = torch.device("cpu")
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
