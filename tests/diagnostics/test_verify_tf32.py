"""Switches of TF32, on the CPU: they are set in the block, and put back behind it, whichever way the program has set them."""

import pytest
import torch

from balanced_parallel.diagnostics.verify import without_tf32

BACKENDS = torch.backends


def states():
    """Returns what torch computes with, in the new way, and what a program reads in the old one."""
    new = [
        switch.fp32_precision
        for switch in (BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn)
    ]
    new += [BACKENDS.mkldnn.matmul.fp32_precision, BACKENDS.fp32_precision]
    try:
        return (
            new,
            torch.get_float32_matmul_precision(),
            BACKENDS.cuda.matmul.allow_tf32,
            BACKENDS.cudnn.allow_tf32,
        )
    except RuntimeError as error:
        return new, type(error)


def nothing():
    pass


def old_way():
    BACKENDS.cuda.matmul.allow_tf32 = True
    BACKENDS.cudnn.allow_tf32 = False


def medium():
    torch.set_float32_matmul_precision("medium")


def new_way():
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    BACKENDS.cudnn.rnn.fp32_precision = "ieee"


def new_way_for_all():
    BACKENDS.fp32_precision = "tf32"


@pytest.fixture(autouse=True)
def restored():
    yield
    BACKENDS.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cudnn.allow_tf32 = True
    for switch in (BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul):
        switch.fp32_precision = "none"


@pytest.mark.parametrize("set_up", [nothing, old_way, medium, new_way, new_way_for_all])
@pytest.mark.parametrize("fails", [False, True])
def test_products_are_exact_in_the_block_and_as_before_behind_it(set_up, fails):
    set_up()
    before = states()
    try:
        with without_tf32():
            inside, *old = states()
            assert inside[:4] == ["ieee"] * 4
            if len(before) == 4:  # the program may read the switches in the old way
                assert old == ["highest", False, False]
            if fails:
                raise LookupError
    except LookupError:
        assert fails
    assert states() == before
