"""Streams without a length: a rank whose stream has ended takes part without rows, as docs/torchrun.md shows."""

import pytest
import torch
from helpers.pages import blocks
from helpers.plain import Plain
from helpers.problems import assert_equal, build_net, class_targets
from helpers.ranks import run_ranks
from helpers.slow import slow
from helpers.steps import parallel_step
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from balanced_parallel import ByCost

BATCH = 4


def until_all_end(*arguments):
    """Runs the function of the page."""
    (block,) = [
        block for block in blocks("docs/torchrun.md", "python") if "def until_all_end" in block
    ]
    names = {}
    imports = block[: block.index("class Stream")]
    function = block[block.index("def until_all_end") : block.index("no_rows = ")]
    exec("import torch\nfrom balanced_parallel import gather\n" + imports + function, names)
    return names["until_all_end"](*arguments)


class Stream(IterableDataset):
    """Some rows of a rank."""

    def __init__(self, rank, rows):
        numbers = torch.Generator().manual_seed(rank)
        self.rows = list(
            zip(
                torch.randn(rows, 4, generator=numbers).double(),
                class_targets(rows, ignored=rank),
                strict=True,
            )
        )

    def __iter__(self):
        yield from self.rows


def train(rank, strategy, lengths, by_cost):
    net = build_net().double()
    cut = (
        ByCost(lambda row: 1.0, collate=torch.utils.data.default_collate, limit=3)
        if by_cost
        else None
    )
    step = parallel_step(
        net,
        devices=["cpu"],
        strategy=strategy,
        lr=0.5,
        cut=cut,
        micro_batch_size=None if by_cost else 3,
    )
    loader = DataLoader(
        Stream(rank, lengths[rank]), batch_size=BATCH, collate_fn=list if by_cost else None
    )
    if by_cost:
        return [step(rows) for rows in until_all_end(loader, [])]
    no_rows = torch.empty(0, 4, dtype=torch.float64), torch.empty(0, dtype=torch.long)
    return [step(*batch) for batch in until_all_end(loader, no_rows)]


def plain(lengths):
    """Trains on all rows of all ranks: each batch has those that the ranks still have."""
    program = Plain(build_net().double(), nn.CrossEntropyLoss(), lr=0.5)
    losses = []
    for start in range(0, max(lengths), BATCH):
        rows = [
            row
            for rank, rows in enumerate(lengths)
            for row in Stream(rank, rows).rows[start : start + BATCH]
        ]
        losses.append(program(*torch.utils.data.default_collate(rows)))
    return losses


@pytest.mark.parametrize(
    ("strategy", "lengths", "by_cost"),
    [
        ("ddp", (14, 5), False),
        slow("fsdp", (0, 9), False),
        slow("ddp", (3, 0), True),
        slow("fsdp", (14, 5), True),
    ],
)
def test_every_rank_steps_until_all_streams_end(strategy, lengths, by_cost):
    expected = plain(lengths)
    for losses in run_ranks(2, train, strategy, lengths, by_cost):
        assert_equal(losses, expected)


def test_one_process_needs_no_other_rank():
    assert list(until_all_end([1, 2], 0)) == [1, 2]
