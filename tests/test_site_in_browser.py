"""The documentation site in Chromium: the search finds pages, and no page is wider than a phone or a window."""

import functools
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers.questions import ANSWERS

ROOT = Path(__file__).parents[1]
WIDER = """
const width = document.documentElement.clientWidth;
return [...document.querySelectorAll("article *")]
  .filter((e) => e.getBoundingClientRect().right > width + 1 && !e.closest("pre, .table-wrapper"))
  .map((e) => e.tagName + ": " + e.textContent.slice(0, 60));
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-c", "docs", ".", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=folder)
    ) as server:
        threading.Thread(target=server.serve_forever).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def browser():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for flag in ("--headless", "--no-sandbox", "--window-size=1280,900"):
        options.add_argument(flag)
    with webdriver.Chrome(options=options) as driver:
        yield driver


def found(site, browser, words):
    """Returns the pages that the search finds, the best first."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get(f"{site[1]}/search.html?q={words.replace(' ', '+')}")
    WebDriverWait(browser, 20).until(
        lambda driver: "found" in driver.find_element(By.CLASS_NAME, "search-summary").text
    )
    results = browser.find_elements(By.CSS_SELECTOR, "ul.search li a")
    return [result.get_attribute("href").removeprefix(f"{site[1]}/") for result in results]


@pytest.mark.browser
def test_the_search_puts_the_right_page_first(site, browser):
    first = {words: found(site, browser, words)[0].partition(".html")[0] for words in ANSWERS}
    assert first == ANSWERS


@pytest.mark.browser
def test_the_search_finds_names(site, browser):
    pages = found(site, browser, "ignore_index")
    assert any("reference/balanced_parallel.loss_weight.html" in page for page in pages)


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_a_phone_or_a_window(site, browser, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    pages = [
        path
        for path in site[0].rglob("*.html")
        if "_modules" not in path.parts and path.name != "index.html"
    ]
    assert len(pages) > 30
    for path in pages:
        browser.get(f"{site[1]}/{path.relative_to(site[0]).as_posix()}")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width, path
        assert not browser.execute_script(WIDER), path


CUT = """
return [...document.querySelectorAll("article table")].filter((table) => {
  const frame = table.closest(".table-wrapper") || table.parentElement;
  return frame.scrollWidth > frame.clientWidth + 1;
}).length;
"""
# Tables of many columns scroll. The first has two lists of numbers.
SCROLL = {1280: {"docs/balance.html"}, 390: {"docs/balance.html", "docs/savings.html"}}


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280])
def test_pictures_of_tables_show_all_of_their_columns(site, browser, width):
    from selenium.webdriver.common.by import By

    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    pages = {
        path.relative_to(site[0]).as_posix()
        for path in [*site[0].glob("docs/*.html"), *site[0].glob("docs/recipes/*.html")]
    }
    pictures = 0
    cut = set()
    for page in ["README.html", *sorted(pages)]:
        browser.get(f"{site[1]}/{page}")
        cut |= {page} if browser.execute_script(CUT) else set()
        for table in browser.find_elements(By.CSS_SELECTOR, "article table"):
            browser.execute_script("arguments[0].scrollIntoView()", table)
            assert len(browser.get_screenshot_as_png()) > 5000, page  # a blank one is smaller
            pictures += 1
    assert pictures > 30
    assert cut == SCROLL[width]
