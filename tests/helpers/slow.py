"""Cases that the default run leaves out, since others of their kind run in it. ``pytest -m slow`` runs them."""

import itertools

import pytest


def pairs(*columns, fast=None):
    """Returns cases in which any two values of two parameters meet. They are fewer than all combinations.

    With ``fast``, only so many of them run by default.
    """
    cases = [*itertools.product(*(range(len(column)) for column in columns))]
    met = {case: {*itertools.combinations(enumerate(case), 2)} for case in cases}
    missing = set().union(*met.values())
    chosen = []
    while missing:
        chosen.append(max(cases, key=lambda case: len(met[case] & missing)))
        missing -= met[chosen[-1]]
    found = [
        tuple(column[place] for column, place in zip(columns, case, strict=True)) for case in chosen
    ]
    return found if fast is None else [*found[:fast], *itertools.starmap(slow, found[fast:])]


def slow(*values):
    """Returns a case of ``pytest.mark.parametrize`` that only ``-m slow`` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(cases, *kept, most=12):
    """Returns the cases, of which only ``kept`` run by default, and at most so many of the others in slow runs."""
    missing = [case for case in kept if case not in cases]
    assert not missing, f"{missing} are not among the cases"
    others = [case for case in cases if case not in kept]
    step = max(1, -(-len(others) // most))
    marked = [slow(*case) if isinstance(case, tuple) else slow(case) for case in others[::step]]
    return [*kept, *marked]
