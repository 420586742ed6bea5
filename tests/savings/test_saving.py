"""The list of savings: docs/savings.md has a row for each."""

from helpers.pages import PAGES

from balanced_parallel.memory.savings import PLANNED


def test_the_page_has_a_row_for_each_saving():
    rows = [line.strip("| ").split(" | ") for line in PAGES["docs/savings.md"].splitlines() if line.startswith("| `")]
    shown = [(name, cost, result, tried) for name, _, cost, result, _, tried in rows]
    expected = []
    for planned in PLANNED:
        saving = planned.saving
        tried = "as a remark" if planned.of_state else "by hand" if planned.stage == "by hand" else "yes"
        expected.append((f"`{saving.name}`", saving.cost, saving.result, tried))
    assert shown == expected
