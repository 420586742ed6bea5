"""Comparison of facts over ranks."""

from helpers.ranks import run_ranks

from balanced_parallel.runtime.comparison import by_value, compare_ranks


def test_a_message_names_at_most_eight_ranks():
    assert by_value(["a"] * 10 + ["b"]) == "a on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more and b on rank 10"


def error_of_rank(rank):
    from helpers.ddp import make_update
    from helpers.problems import build_net
    from torch import nn

    make_update("criterion", build_net(), nn.CrossEntropyLoss())  # starts the process group
    compare_ranks({"lr": 1 if rank else 1.0, "only here": 2} if rank else {"lr": 1.0}, "equal ones")
    try:
        compare_ranks({"norm": [None, 1.0][rank], "lr": 0.1}, "equal ones")
    except ValueError as error:
        return str(error)


def test_equal_numbers_agree_and_others_are_named_on_each_rank():
    assert run_ranks(2, error_of_rank) == ["the ranks differ, expected equal ones: norm: None on rank 0 and 1.0 on rank 1"] * 2
