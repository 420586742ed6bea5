"""Measured numbers of the README and of docs/: each is on a benchmark's page to which its paragraph links, or has a month."""

import re
import runpy

import pytest
from helpers.pages import PAGES, ROOT

NUMBER = r"(?<![\w.,+-])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?![\w,]*\.?\d)"
UNITS = r"\s?(?:%|times\b|ms\b|µs\b|[KMG]iB\b)"
MEASURED = re.compile(rf"({NUMBER})(?=((?: (?:and|to|→) {NUMBER})?{UNITS})|)")
VERSIONS = re.compile(r"(?:Python|torch|version) \d+(?:\.\d+)+\S*(?: and \d+(?:\.\d+)+)?")
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
DATED = re.compile(rf"\b(?:{MONTHS}) 20\d\d\b")  # measured then, by a program that is not kept
NOT_MEASURED = {
    "docs/internals.md": {"25 MiB": "size of a bucket", "4 times": "calls of a layer"},
    "docs/savings.md": {"1 MiB": "default of an argument"},
}


def paragraphs(text):
    """Yields paragraphs, entries of lists and rows of tables, without code, copied tables, pictures and versions."""
    for pattern in (
        r"```.*?```",
        r"<!-- table .*?<!-- end of table -->",
        r"`[^`]+`",
        r"!\[.*?\]\(.*?\)",
    ):
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    yield from re.split(r"\n\s*\n|\n(?=\s*[-*|] ?)|\n(?=\d\. )", VERSIONS.sub("", text))


def measured(paragraph):
    """Returns the numbers of a paragraph that have a unit, and all decimal ones if it links to a benchmark."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    found = [(match[1], (match[2] or "").strip()) for match in MEASURED.finditer(words)]
    links = re.findall(r"\((?:\.\./)*(benchmarks/\w+/README\.md)", paragraph)
    return [
        (number, unit)
        for number, unit in found
        if unit or "e-" in number or (links and "." in number)
    ], links


def is_on(page, number, unit):
    """Returns True if a number of the page is this one, rounded to its digits. A number in percent stands there in percent."""
    pattern = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]\d+)?" + (r"(?=\s?%)" if unit.endswith("%") else "")
    values = [
        float(value.replace(",", "")) for value in re.findall(pattern, (ROOT / page).read_text())
    ]
    digits = len(number.partition("e")[0].partition(".")[2])
    if "e-" in number:
        return any(float(f"{value:.{digits}e}") == float(number) for value in values)
    return any(f"{value:.{digits}f}" == number.replace(",", "") for value in values)


def unlinked(page):
    """Returns the measured numbers of a page that are not on a benchmark's page to which their paragraph links."""
    return [
        f"{number} {unit} in: {paragraph.strip()[:120]}"
        for paragraph in paragraphs(PAGES[page])
        if not DATED.search(paragraph)
        for numbers, links in [measured(paragraph)]
        for number, unit in numbers
        if f"{number} {unit}".strip() not in NOT_MEASURED.get(page, ())
        and not any(is_on(link, number, unit) for link in links)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_measured_numbers_stand_on_a_linked_benchmark(page):
    missing = unlinked(page)
    assert not missing, "\n".join(
        ["not on a benchmark's page that the paragraph links to:", *missing]
    )


@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- table " in PAGES[page]])
def test_tables_are_those_of_the_benchmarks(page):
    assert runpy.run_path(ROOT / "docs" / "tables.py")["with_tables"](ROOT / page) == PAGES[page], (
        "run python docs/tables.py"
    )


def test_no_exception_is_left_over():
    for page, exceptions in NOT_MEASURED.items():
        found = {
            " ".join(pair).strip()
            for paragraph in paragraphs(PAGES[page])
            for pair in measured(paragraph)[0]
        }
        assert set(exceptions) <= found, page


def test_some_pages_have_copied_tables():
    assert sum("<!-- table " in text for text in PAGES.values())


def test_a_changed_number_is_found():
    paragraph = "The peak falls from [2.6 to 1.0](benchmarks/balance/README.md) times the mean, in 3 % of the time."
    numbers, (link,) = measured(paragraph)
    assert numbers == [("2.6", "to 1.0 times"), ("1.0", "times"), ("3", "%")]
    assert [is_on(link, *number) for number in numbers] == [True, True, False]
    assert not is_on(link, "2.7", "times")
    assert is_on("benchmarks/peers/README.md", "6e-16", "")
    assert not is_on("benchmarks/peers/README.md", "9e-16", "")
