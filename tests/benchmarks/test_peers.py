"""The benchmark of other frameworks: its counts, and two of its programs on a small case."""

import pytest
from helpers.benchmarks import BENCHMARKS, load


@pytest.fixture
def peers(monkeypatch):
    return load("peers", monkeypatch)


def test_lines_are_counted_without_docstrings_comments_and_lines_for_the_simulation(peers):
    plain = peers.code_lines("plain")
    trainer = peers.code_lines("trainer")
    assert plain[0] == "import torch"
    assert not any('"""' in line or "# simulation" in line for line in plain + trainer)
    assert "# simulation" in (BENCHMARKS / "peers" / "trainer.py").read_text()
    assert peers.changed_lines("plain") == (0, 0)
    added, removed = peers.changed_lines("ours_replicas")
    assert len(peers.code_lines("ours_replicas")) == len(plain) + added - removed
    assert 0 < removed < len(plain)


@pytest.mark.parametrize(
    ("name", "dims", "expected"),
    [
        ("gloo:all_reduce", [[8]], 4 * 32 * 3 / 4),
        ("gloo:all_gather", [[2]], 2 * 8 * 3),
        ("c10d::_reduce_scatter_base_", [[2], [8], []], -2 * 32 * 3 / 4),
        ("aten::add", [[8]], 0),
    ],
)
def test_bytes_of_a_collective_are_those_of_a_ring(peers, name, dims, expected):
    """A reduce-scatter of gloo is an all-reduce as well, so its own event takes half of that away."""
    from measuring import event_bytes

    kinds = ["float"] * len(dims) if [] not in dims else ["float", "float", "Scalar"]
    assert event_bytes(name, {"Input Dims": dims, "Input type": kinds}, ranks=4) == expected


def test_an_unknown_collective_is_an_error(peers):
    from measuring import event_bytes

    with pytest.raises(ValueError, match="gloo:scatter"):
        event_bytes("gloo:scatter", {"Input Dims": [[8]], "Input type": ["float"]}, ranks=4)


def test_errors_and_memory_of_two_programs(peers):
    """Ragged rows, several micro-batches, and a last batch that does not fill the devices."""
    from launching import Layout, environment, measure

    gradients = peers.GRADIENTS._replace(rows=19, batch_size=8)
    memory = peers.MEMORY._replace(words=512, width=16, layers=1, rows=25, batch_size=8)

    def measured(program, devices):
        layout = Layout(devices, 1)
        with environment(0, layout) as cluster:
            return measure(0, cluster, layout, program, gradients, memory)

    plain = measured("plain", 1)
    torch_replicas = measured("data_parallel", 2)
    ours = measured("ours_replicas", 2)
    assert max(peers.errors([ours], plain)) < 1e-12
    assert min(peers.errors([torch_replicas], plain)) > 1e-3
    assert len(ours.memory) == len(torch_replicas.memory) == 2
    assert max(one.peak for one in ours.memory) < max(one.peak for one in torch_replicas.memory)
    assert max(one.through for one in ours.memory) < max(
        one.through for one in torch_replicas.memory
    )


def test_page_has_a_row_for_every_program(peers):
    page = (BENCHMARKS / "peers" / "README.md").read_text()
    for row in peers.PROGRAMS:
        assert f"| {row.title} " in page
        added, removed = peers.changed_lines(row.program)
        assert row.program == "plain" or f"+{added} -{removed}" in page
