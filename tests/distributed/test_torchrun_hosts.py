"""``torchrun --nnodes=2``: two hosts, made of network namespaces, with two ranks each."""

import json

import pytest
from helpers.hosts import run_on_two_hosts
from helpers.scripts import SCRIPT, train

TEXT = " ".join(str(number * number % 61) for number in range(2600))  # rows that differ


def test_losses_on_two_hosts_equal_those_of_one_process(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    flags = ["--data", tmp_path / "text.txt", "--steps", 4, "--batch-size", 13, "--devices", "cpu"]
    hosts = run_on_two_hosts(SCRIPT, *flags, "--out", tmp_path / "hosts")
    assert [host.returncode for host in hosts] == [0, 0], "\n".join(host.stderr for host in hosts)
    _, expected, _ = train(tmp_path / "one", *flags)
    summary = json.loads((tmp_path / "hosts" / "summary.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "hosts" / "metrics.jsonl").read_text().splitlines()]
    assert summary["ranks"] == 4
    assert hosts[1].stdout == ""  # rank 0 prints, on the first host
    for name, count in (("loss", 4), ("validation_loss", 2)):
        values = [line[name] for line in lines if name in line]
        assert len(values) == count
        assert values == pytest.approx([line[name] for line in expected if name in line], rel=1e-5)
