"""A comparison of facts over all ranks. The error names the facts that differ, and the ranks with each value."""

from collections.abc import Callable, Hashable, Mapping, Sequence

from .collectives import gather_objects

__all__: list[str] = []

_SHOWN = 8  # ranks in a message


def compare_ranks(
    facts: Mapping[str, Hashable], expected: str, explain: Callable[[str, list[str | None]], Sequence[str | None]] | None = None
) -> None:
    """Compares the facts of all ranks in one small all-gather. A fact that a rank does not have is not compared.

    Args:
        facts: of this rank, with values that can be pickled.
        expected: a phrase for the message.
        explain: replaces the values of the ranks in the message. It may communicate: all ranks call it for the same facts.

    Raises:
        ValueError: on every rank, if a fact differs.
    """
    ranks = gather_objects(dict(facts))
    messages = []
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        if len({rank[name] for rank in ranks if name in rank}) > 1:
            values = [str(rank[name]) if name in rank else None for rank in ranks]
            messages.append(f"{name}: {by_value(values if explain is None else explain(name, values))}")
    if messages:
        raise ValueError(f"the ranks differ, expected {expected}: {'; '.join(messages)}")


def by_value(values: Sequence[str | None]) -> str:
    """Describes the value of each rank: ``"2.13.0 on ranks 0, 1 and 2.11.0 on rank 2"``."""
    groups: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return " and ".join(f"{value} on {_names(ranks)}" for value, ranks in groups.items() if value is not None)


def _names(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_SHOWN]))}{more}"
