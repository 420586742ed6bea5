"""The list of savings: docs/savings.md has a row for each."""

import re

import pytest
from helpers.pages import PAGES

from balanced_parallel.memory.savings import PLANNED


@pytest.mark.parametrize(("heading", "exact"), [("Exact", True), ("Other numbers", False)])
def test_the_page_has_a_row_for_each_saving(heading, exact):
    section = re.split(
        r"^## ", PAGES["docs/savings.md"].partition(f"\n## {heading}\n")[2], flags=re.MULTILINE
    )[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in section.splitlines()
        if line.startswith("| `")
    ]
    shown = [(name, cost, tried) for name, _, cost, *_, tried in rows]
    expected = []
    for planned in PLANNED:
        saving = planned.saving
        tried = (
            "as a remark"
            if planned.stage == "optimizer" and planned.change is None
            else "by hand"
            if planned.stage == "by hand"
            else "yes"
        )
        if (saving.result == "exact") == exact:
            expected.append((f"`{saving.name}`", saving.cost, tried))
    assert shown == expected
