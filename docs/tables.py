"""Copies tables from the pages of the benchmarks into the pages of docs/. To run it: ``python docs/tables.py``.

A table between ``<!-- table PAGE: "START" -->`` and ``<!-- end of table -->`` is the first one on the benchmark's page whose
header begins with START. With ``, rows "START"`` before the arrow, only the rows that begin so are copied. So the pages read the
same on GitHub as on the site. A test compares them.
"""

import re
from pathlib import Path

DOCS = Path(__file__).parent
PLACE = re.compile(r'(<!-- table (\S+): "(.+?)"(?:, rows "(.+?)")? -->).*?(<!-- end of table -->)', re.DOTALL)


def table(page: Path, header: str, rows: str | None) -> str:
    """Returns the lines of a table.

    Raises:
        ValueError: the page has no such table, or none of its rows begins with ``rows``.
    """
    found = re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE)
    for lines in (block.splitlines(keepends=True) for block in found):
        if lines[0].startswith(header):
            kept = [line for line in lines[2:] if rows is None or line.startswith(rows)]
            if kept:
                return "".join([*lines[:2], *kept])
    raise ValueError(f"{page} has no table with a header {header!r} and rows {rows!r}, expected the start of both lines")


def with_tables(page: Path) -> str:
    """Returns the text of a page with its tables as the benchmarks have them now."""

    def filled(place: re.Match[str]) -> str:
        return f"{place[1]}\n\n{table(page.parent / place[2], place[3], place[4])}\n{place[5]}"

    return PLACE.sub(filled, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for path in sorted(DOCS.rglob("*.md")):
        path.write_text(with_tables(path), encoding="utf-8")
