"""Claims of the page about rows of unequal length, measured again on a small scale."""

from helpers.benchmarks import load


def test_cut_by_cost_pads_less_on_every_number_of_devices(monkeypatch):
    benchmark = load("cost", monkeypatch)
    images = benchmark.image_problem()
    for devices in (2, 4, 8):
        found = benchmark.mean_padding(images, 64, devices, batches=5)
        assert found.bound <= found.cut <= 0.5 * found.whole
        assert found.four <= 1.5 * found.bound


def test_cut_by_cost_lowers_the_peak_and_keeps_the_gradients(monkeypatch):
    benchmark = load("cost", monkeypatch)
    images = benchmark.image_problem()
    batch = sorted(benchmark.sampled(images, 100, seed=0), key=images.cost)[:12]  # small ones
    expected = benchmark.plain_gradients(images, batch)
    equal, cut = (benchmark.measure(images, batch, 3, by_cost, expected) for by_cost in (False, True))
    assert max(cut[0]) < 0.8 * max(equal[0])
    assert max(equal[1], cut[1]) < 1e-10
