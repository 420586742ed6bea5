"""The predictions at scale: their traffic is the counted one."""

import dataclasses

import pytest
from helpers.benchmarks import BENCHMARKS, load
from helpers.releases import released_at_once


@pytest.fixture
def scale(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS / "scale")
    import counting
    import prediction

    return prediction, counting


def predicted(scale, layout, gpus, per_host=8):
    prediction, counting = scale
    job = prediction.Job(parameters=counting.PARAMETERS, units=counting.UNITS)
    network = prediction.Network(gpus_per_host=per_host)
    return job, network, prediction.collectives(layout, job, gpus, network)


@pytest.mark.parametrize(("layout", "gpus"), [("DDP", 8), ("DDP", 64), ("FSDP2", 8), ("FSDP2", 64), ("HSDP", 16), ("HSDP", 64)])
def test_traffic_is_what_the_fake_process_group_counts(scale, layout, gpus):
    _, counting = scale
    _, _, expected = predicted(scale, layout, gpus)
    hosts = gpus // 8 if layout == "HSDP" else 1
    counter = counting.count_ddp(gpus) if layout == "DDP" else counting.count_fsdp(hosts, gpus // hosts)
    assert counter.bytes == {part.operation: part.size for part in expected}
    assert counter.calls == {part.operation: part.calls for part in expected}


@released_at_once
@pytest.mark.parametrize("gpus", [2, 8])
def test_traffic_and_bytes_are_what_simulated_devices_count(scale, gpus):
    prediction, counting = scale
    job, network, expected = predicted(scale, "replicas", gpus)
    sent, held = counting.count_replicas(gpus)
    each, broadcast = sum(part.sent for part in expected), 4 * counting.PARAMETERS
    assert sent == pytest.approx([*[each] * (gpus - 1), each - broadcast], rel=0.01)  # the last device broadcasts nothing
    assert held == pytest.approx([prediction.persistent_bytes("replicas", job, gpus, network)] * gpus, rel=0.02)


def test_time_is_that_of_the_formula(scale):
    prediction, _ = scale
    network = prediction.Network(inside=100.0, outside=80.0, efficiency=1.0, launch=1, hop_inside=2, hop_outside=3, tree_hop=100)
    gather = prediction.Collective("all_gather", 160, calls=2, ranks=16, hosts=2)
    assert gather.seconds(network) == 2 * (1 + 14 * 2 + 1 * 3) + 160 * 15 / 16 / 80
    reduce = prediction.Collective("all_reduce", 160, calls=2, ranks=16, hosts=2, share=8)
    assert reduce.seconds(network) == 2 * (1 + 2 * (14 * 2 + 1 * 3)) + 2 * 160 * 15 / 16 / 10
    trees = dataclasses.replace(network, tree_hop=1)
    assert reduce.seconds(trees) == 2 * (1 + 2 * (7 + 1)) + 2 * 160 / 10
    assert prediction.Collective("all_reduce", 160, calls=2, ranks=1, hosts=1).seconds(network) == 0


@released_at_once
def test_tables_of_the_page_and_of_the_readme_are_up_to_date(monkeypatch):
    main = load("scale", monkeypatch)
    table = main.table(main.Job(), main.Network())
    readme = (BENCHMARKS / "scale" / "README.md").read_text()
    assert table in readme
    assert main.counted_table() in readme
