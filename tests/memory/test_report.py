"""The report of an estimate.

Pages about reports and plans: complete without a network, with the numbers of the report.
"""

import contextlib
import dataclasses
import functools
import html
import re
from pathlib import Path

import pytest
import torch
from helpers.memory_problems import estimated
from torch import nn

from balanced_parallel import memory, simulate
from balanced_parallel.memory.report import holders_table, parse_each
from balanced_parallel.runtime.values import format_bytes, parse_bytes

REPLICAS = {"layout": "replicas", "devices": 2, "device_kind": "cpu"}
SMALL = nn.Linear(64, 3), nn.CrossEntropyLoss(), torch.empty(8, 64), torch.zeros(8).long()


@pytest.mark.usefixtures("one_trace")
def test_report_has_timeline_phases_and_source_lines():
    report = estimated("language model", 24, **REPLICAS)
    assert max(report.timeline[0]) == report.allocated[0]
    assert 0 < report.phases["backward"] < report.phases["update"] < len(report.timeline[0])
    sizes = [holder.bytes for holder in report.where[0]]
    assert sizes == sorted(sizes, reverse=True)
    for where in report.where:
        assert any(
            holder.module.startswith("layers.") and holder.part == "saved activations"
            for holder in where
        )
    assert any("memory_problems.py:" in holder.line for holder in report.where[0])
    assert report.flops > 0
    for text in ("parameters", "saved activations", "layers.", "MiB"):
        assert text in str(report)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.rows = 3


class Odd(nn.Module):
    """A layer that Python's ``contextlib`` calls."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.inner.register_forward_hook(keep_output)

    def forward(self, rows):
        with contextlib.ExitStack() as stack:
            stack.callback(self.inner, rows)
        return torch.cat([self.inner.kept] * 20, 1)


def keep_output(module, inputs, output):
    module.kept = output


@contextlib.contextmanager
def squares(rows):
    yield rows.square()


def squared(output, targets):
    with squares(output) as result:
        return result.mean()


@pytest.mark.usefixtures("one_trace")
@pytest.mark.parametrize("criterion", [squared, functools.partial(squared)])
def test_holders_name_modules_and_lines_of_the_user_also_in_the_backward(criterion):
    """A holder was of ``contextlib.py:137``, and the backward and a plain function had no module."""
    report = memory.estimate(
        Odd(), criterion, torch.empty(512, 64), torch.zeros(512), device_kind="cpu"
    )
    found = {
        (holder.part, holder.module, holder.line.replace(f"{__file__}:", ""))
        for holder in report.where[0]
    }
    lines = {
        line.strip(): number
        for number, line in enumerate(Path(__file__).read_text().splitlines(), 1)
    }
    square = lines["yield rows.square()"]
    assert (
        "saved activations",
        "inner",
        str(lines["with contextlib.ExitStack() as stack:"]),
    ) in found
    assert (
        "saved activations",
        "Odd",
        str(lines["return torch.cat([self.inner.kept] * 20, 1)"]),
    ) in found
    assert ("temporaries", "criterion", f"backward of {square}") in found
    assert not any(
        "contextlib" in holder.line or torch.__path__[0] in holder.line
        for holder in report.where[0]
    )
    assert sum(holder.bytes for holder in report.where[0]) <= report.allocated[0]


@pytest.fixture(scope="module")
def report():
    return memory.estimate(*SMALL, **REPLICAS)


def test_another_number_of_rows_says_whether_it_fits(report):
    assert report.at(64, "1MiB").fits is True
    for call, form in (
        (report.at, r"at\(rows, capacity\)"),
        (report.largest, r"largest\(capacity\)"),
    ):
        with pytest.raises(
            TypeError, match=rf"missing 1 required .*, expected MemoryReport\.{form}"
        ):
            call()
    assert report.at(64, "1KiB").fits is False
    assert report.at(8).fits is None  # a CPU of any size
    assert report.at(8) == report.allocated
    on_gpu = memory.estimate(
        nn.Linear(64, 3), nn.MSELoss(), torch.empty(8, 64), torch.empty(8, 3), device_kind="t4"
    )
    assert on_gpu.at(8).fits is True
    assert on_gpu.at(2**40).fits is False


@pytest.mark.usefixtures("one_trace")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's compiler imports it
def test_a_compiled_module_is_estimated_with_a_sentence():
    inner = nn.Sequential(nn.Linear(64, 3))
    inner[0].compile()
    batch = torch.empty(8, 64), torch.empty(8, 3)
    plain = memory.estimate(nn.Linear(64, 3), nn.MSELoss(), *batch, device_kind="cpu")
    for net in (torch.compile(nn.Linear(64, 3)), inner):
        compiled = memory.estimate(net, nn.MSELoss(), *batch, device_kind="cpu")
        assert compiled.allocated == plain.allocated
        assert "this is the estimate of the uncompiled module" in str(compiled)
    assert "compiled" not in str(plain)


ADAM = functools.partial(torch.optim.Adam, foreach=False)


def wide_net():
    """Returns a net whose gradients and output are large beside its activations."""
    layers = [m for _ in range(4) for m in (nn.Linear(256, 256), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(256, 1024))


def peak_of_loop(batch, keeps_gradients, keeps_outputs):
    """Returns the peak of a plain loop on a simulated device."""
    with simulate(devices=1) as cluster:
        net, inputs, targets = wide_net().to("sim:0"), *(each.to("sim:0") for each in batch)
        optimizer = ADAM(net.parameters())
        for _ in range(3):
            if not keeps_gradients:
                optimizer.zero_grad()
            outputs = net(inputs)
            loss = nn.functional.cross_entropy(outputs, targets)
            if keeps_gradients:
                optimizer.zero_grad()
            if not keeps_outputs:
                del outputs
            loss.backward()
            optimizer.step()
            del loss
        return cluster.peak[0]


@pytest.mark.parametrize("keeps_outputs", [False, True])
@pytest.mark.parametrize("keeps_gradients", [False, True])
def test_what_a_loop_keeps_is_predicted(keeps_gradients, keeps_outputs):
    """The usual loop, with zero_grad() between forward and backward, needed more than was predicted,
    and so did one that keeps the output until the next forward."""
    batch = torch.zeros(256, 256), torch.zeros(256, dtype=torch.int64)
    loop = {"keeps_gradients": keeps_gradients, "keeps_outputs": keeps_outputs}
    settings = {"optimizer": ADAM, "device_kind": "sim"}
    report = memory.estimate(wide_net(), nn.CrossEntropyLoss(), *batch, **settings, **loop)
    assert report.allocated[0] == pytest.approx(peak_of_loop(batch, **loop), rel=0.01)


def test_a_report_tells_what_a_loop_needs_that_keeps_more():
    batch = torch.zeros(256, 256), torch.zeros(256, dtype=torch.int64)
    settings = {"optimizer": ADAM, "device_kind": "sim"}
    usual = memory.estimate(wide_net(), nn.CrossEntropyLoss(), *batch, **settings)
    assert "after the forward" in usual.assumed["zero_grad"]
    report = memory.estimate(
        wide_net(), nn.CrossEntropyLoss(), *batch, **settings, keeps_gradients=False
    )
    for note, loop in {"zero_grad": (True, False), "outputs": (False, True)}.items():
        (told,) = re.findall("needs (.*) more", report.assumed[note])
        needed = report.allocated[0] + parse_bytes(told.replace(" ", ""))
        assert needed == pytest.approx(peak_of_loop(batch, *loop), rel=0.01)


@pytest.mark.parametrize("layout", ["replicas", "ddp", "fsdp"])
def test_rows_are_those_of_all_ranks(layout, tmp_path):
    """They were those of one rank with ddp and fsdp."""
    rows = 24 if layout == "replicas" else 8
    problem = nn.Linear(64, 3), nn.MSELoss(), torch.zeros(rows, 64), torch.zeros(rows, 3)
    report = memory.estimate(*problem, layout=layout, devices=3, device_kind="sim")
    assert report.rows == 24
    assert report.at(24) == report.allocated
    assert report.at(22) == report.allocated
    assert report.at(25)[0] > report.allocated[0]
    assert report.at(24, report.allocated[0]).fits
    assert not report.at(25, report.allocated[0]).fits
    assert report.largest(report.allocated[0]) == 24
    report.save_html(tmp_path / "page.html", report.allocated[0])
    assert verdict_of(tmp_path / "page.html").startswith("fits: yes, ")


def verdict_of(path):
    """Returns the first line of a page."""
    return re.search('<body>\n<h1 id="verdict">(.*)</h1>', path.read_text())[1]


def test_page_has_the_peak_and_its_holders_and_needs_no_network(report, tmp_path):
    page = tmp_path / "page.html"
    peak = format_bytes(report.allocated[0])
    missing, left = (format_bytes(abs(size - report.allocated[0])) for size in (1024, 2**20))
    report.save_html(page, "1KiB")
    assert verdict_of(page) == f"does not fit: {peak} of 1.00 KiB, {missing} too much"
    report.save_html(page)
    assert verdict_of(page) == f"needs {peak}"
    report.save_html(page, "1MiB")
    assert verdict_of(page) == f"fits: yes, {peak} of 1.00 MiB, {left} left"
    text = page.read_text()
    assert f'<p id="peak">peak of tensors: {peak} on device 0; ' in text
    assert holders_table(report, 0, "html") in text
    assert all(name in text for name in ("forward", "backward", "update", "capacity 1.00 MiB"))
    without_library = re.sub(r"<script[^>]*>/\*\*.*?</script>", "", text, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)=["']https?:""", without_library)


def test_page_has_model_versions_and_date_and_a_meaning_for_each_colour(report, tmp_path):
    report.save_html(tmp_path / "page.html", "64KiB")
    text = (tmp_path / "page.html").read_text()
    title = re.search("<title>(.*)</title>", text)[1]
    versions = r"torch \S+, balanced_parallel \S+, \d{4}-\d\d-\d\d"
    assert re.fullmatch(
        rf"Linear: replicas on 2 x cpu, fp32, 1 micro-batch\(es\) of 8 rows \({versions}\)", title
    )
    colours = re.findall(r'"color":"(hsl[^"]*|red|gray)"', text)
    assert colours.count("red") == 1
    assert len(set(colours)) == 2 + report.devices
    assert "overflow-wrap: anywhere" in text
    assert "overflow-x" not in text  # columns wrap on a narrow screen, and none is cut


def test_page_of_a_plan_has_its_options(tmp_path):
    plan = memory.plan(*SMALL, batch_size=8, capacity="1GiB", devices=2, device_kind="sim")
    plan.save_html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert all(html.escape(choice.name) in text for choice in plan.choices)
    assert verdict_of(tmp_path / "plan.html") == plan.verdict
    assert (
        plan.chosen.allocated == plan.report.allocated
    )  # one peak in the text, the curve and both tables
    assert text.count(f"<td>{format_bytes(max(plan.report.allocated))}") >= 2
    assert plan._repr_html_().count("<tr") == len(plan.choices) + 1
    with pytest.raises(ValueError, match="this plan was read from JSON"):
        memory.MemoryPlan.from_json(plan.to_json()).save_html(tmp_path / "other.html")


def test_page_names_the_capacity_of_each_unequal_device_and_the_last_backward(tmp_path):
    report = memory.estimate(*SMALL, **REPLICAS, micro_batch_size=2)
    report.save_html(tmp_path / "page.html", ["2MiB", "1MiB"])
    assert verdict_of(tmp_path / "page.html").startswith(
        f"fits: yes, {format_bytes(report.allocated[1])} of 1.00 MiB, "
    )
    assert "last backward" in (tmp_path / "page.html").read_text()


@pytest.fixture
def browser():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for flag in ("--headless", "--no-sandbox", "--window-size=1200,900"):
        options.add_argument(flag)
    with webdriver.Chrome(options=options) as driver:
        yield driver


@pytest.mark.browser
def test_page_draws_the_memory_of_each_device(report, tmp_path, browser):
    report.save_html(tmp_path / "page.html", "64KiB")
    browser.get((tmp_path / "page.html").as_uri())
    peaks = browser.execute_script(
        "return document.getElementById('memory').data.map(line => Math.max(...line.y))"
    )
    assert peaks == pytest.approx([size / 1024 for size in report.allocated])


OVERLAPS = """
const texts = [...document.querySelectorAll("#memory text, #memory .modebar-btn")];
const boxes = texts.map((text) => [text.textContent, text.getBoundingClientRect()]).filter(([, box]) => box.width);
return boxes.flatMap(([name, a], place) => boxes.slice(place + 1)
  .filter(([, b]) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
  .map(([other]) => [name, other]));
"""


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280])
def test_page_fits_a_phone_and_no_texts_of_the_figure_overlap(tmp_path, browser, width):
    """Buttons covered the names of the devices, and the capacity that of the update."""
    settings = {**REPLICAS, "devices": 4, "micro_batch_size": 2}
    report = memory.estimate(*SMALL, **settings)
    report.save_html(tmp_path / "page.html", 2 * max(report.allocated))
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get((tmp_path / "page.html").as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    shown = browser.execute_script("return document.getElementById('memory').innerText")
    assert "device 3" in shown
    assert "capacity" in shown
    assert browser.execute_script(OVERLAPS) == []


@pytest.mark.parametrize(
    "size", [float("nan"), float("inf"), 1.5, True, torch.device("cpu"), [float("nan")]]
)
def test_other_capacities_are_named(size):
    """The error was "'float' object is not iterable"."""
    with pytest.raises(
        ValueError, match="is not a memory size, expected a positive number of bytes"
    ):
        parse_each(size, 1)
