"""Cases that the default run leaves out, since others of their kind run in it. ``pytest -m slow`` runs them."""

import pytest


def slow(*values):
    """Returns a case of ``pytest.mark.parametrize`` that only ``-m slow`` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(cases, *kept):
    """Returns the cases, of which only ``kept`` run by default."""
    missing = [case for case in kept if case not in cases]
    assert not missing, f"{missing} are not among the cases"
    return [
        case if case in kept else slow(*case) if isinstance(case, tuple) else slow(case)
        for case in cases
    ]
