"""The main job, run as a user runs it."""

import json

import pytest
import torch
from helpers.processes import run_script
from helpers.scripts import SCRIPT, SENTENCES, run, train, words_of
from helpers.slow import slow
from safetensors.torch import load_file


@pytest.mark.slow
def test_losses_are_equal_on_one_device_three_replicas_two_ranks_and_shards(tmp_path):
    common = "--vocabulary 500 --steps 12 --batch-size 24"
    layouts = {
        "one": ("--devices cpu", 1),
        "replicas": ("--devices cpu,cpu,cpu --micro-batch-size 3", 1),
        "torchrun": ("--micro-batch-size 5", 2),
        "fsdp": ("--micro-batch-size 5 --strategy fsdp", 2),
    }
    losses = {}
    validation = {}
    states = {}
    for name, (flags, ranks) in layouts.items():
        _, lines, summary = train(tmp_path / name, common, flags, ranks=ranks)
        losses[name] = [line["loss"] for line in lines if "loss" in line]
        validation[name] = summary["validation_loss"]
        assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
        assert summary["ranks"] == ranks
        states[name] = load_file(tmp_path / name / "model.safetensors")
    assert losses["one"][-1] < losses["one"][0]
    for name in ("replicas", "torchrun", "fsdp"):
        assert losses[name] == pytest.approx(losses["one"], rel=1e-4)
        assert validation[name] == pytest.approx(validation["one"], rel=1e-4)
        assert states[name].keys() == states["one"].keys()
        torch.testing.assert_close(
            list(states[name].values()), list(states["one"].values()), rtol=0, atol=0.04
        )  # 12 steps of Adam move an element by 0.036 at most


@pytest.mark.parametrize("task", ["digits", slow("text --vocabulary 500")])
def test_losses_with_dropout_are_equal_in_all_layouts(tmp_path, task):
    flags = f"--task {task} --steps 5 --batch-size 23 --dropout 0.1"
    layouts = {
        "torch's own": ("--devices cpu", 1),
        "one": ("--devices cpu --reproducible", 1),
        "simulated": ("--simulate 4 --reproducible", 1),
        "ranks": ("--micro-batch-size 3 --reproducible", 2),
    }
    losses = {}
    for name, (layout, ranks) in layouts.items():
        _, lines, _ = train(tmp_path / name, flags, layout, ranks=ranks)
        losses[name] = [line["loss"] for line in lines if "loss" in line]
    assert len(losses["one"]) == 5
    assert losses["torch's own"] != pytest.approx(losses["one"], rel=1e-3)
    assert losses["simulated"] == pytest.approx(losses["one"], rel=1e-5)
    assert losses["ranks"] == pytest.approx(losses["one"], rel=1e-5)


@pytest.mark.parametrize(
    ("task", "layouts"),
    [
        ("digits", ["one", "ranks"]),
        slow("digits --precision bf16", ["one", "replicas", "ranks", "3 ranks"]),
        slow("text --vocabulary 500", ["one", "replicas", "simulated", "ranks", "3 ranks"]),
    ],
)
def test_bits_are_equal_in_all_layouts(tmp_path, monkeypatch, task, layouts):
    """Batches of 60 rows end with a smaller micro-batch. The number of threads is that of ranks, whatever the machine has."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    flags = f"--task {task} --steps 4 --batch-size 60 --dropout 0.1 --reproducible bits"
    found = {
        "one": ("--devices cpu", 1),
        "replicas": ("--devices cpu,cpu,cpu", 1),
        "simulated": ("--simulate 4", 1),
        "ranks": ("", 2),
        "3 ranks": ("", 3),
    }
    digests = []
    lines = []
    for name in layouts:
        layout, ranks = found[name]
        output, metrics, summary = train(tmp_path / name, flags, layout, ranks=ranks)
        assert f"\ndigest of the parameters: {summary['digest']}\n" in output
        assert (summary["micro_batch_size"], summary["ranks"]) == (8, ranks)
        digests.append(summary["digest"])
        lines.append(metrics)
    assert len(lines[0]) == 4
    assert digests == digests[:1] * len(layouts)
    assert lines == lines[:1] * len(layouts)


def test_digits_task_reaches_95_percent_accuracy(tmp_path):
    output, lines, summary = train(tmp_path / "run", "--task digits")
    assert summary["accuracy"] >= 0.95
    assert len(lines) == 200
    *_, results, wrote = output.splitlines()
    loss = summary["validation_loss"]
    accuracy = summary["accuracy"]
    assert results == f"validation loss {loss:.4f}, baseline loss 2.3026, accuracy {accuracy:.4f}"
    assert wrote == f"wrote {tmp_path}/run/metrics.jsonl, summary.json, model.safetensors"


@pytest.mark.slow
def test_custom_text_with_a_short_last_batch_and_simulated_gpus_of_all_ranks(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(SENTENCES)
    flags = f"--data {text} --steps 6 --batch-size 13"  # There are 35 rows: two epochs.
    flags += " --precision bf16 --workers 1 --devices cpu,cpu"
    _, lines, summary = train(tmp_path / "run", flags)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert summary["validation_loss"] < summary["baseline_loss"]
    flags = "--simulate 2 --task digits --steps 3 --precision bf16"
    output, _, summary = train(tmp_path / "sim", flags, ranks=2)
    assert (summary["ranks"], len(summary["peak_bytes"])) == (2, 2)
    assert output.count("balanced_parallel, this rank ") == 1


@pytest.mark.parametrize("table", [slow(""), "--table"], ids=["line", "table"])
def test_out_of_memory_prints_one_line_and_the_table_if_asked(tmp_path, table):
    text = tmp_path / "text.txt"
    text.write_text(SENTENCES)
    flags = f"--simulate 2 --memory 4MiB --micro-batch-size 12 --steps 2 --data {text}"
    done = run(flags, table, "--out", tmp_path)
    assert done.returncode == 1
    assert ("optimizer state" in done.stdout) == bool(table)
    assert len(done.stderr.splitlines()) == 1
    assert "out of memory. Tried to allocate" in done.stderr
    assert "Give --micro-batch-size auto, fewer rows or more --memory." in done.stderr


def test_a_run_out_of_memory_goes_on_in_smaller_micro_batches(tmp_path):
    flags = "--task digits --simulate 2 --batch-size 256 --steps 3"
    _, expected, whole = train(tmp_path / "whole", flags)
    memory = max(whole["peak_bytes"]) * 2 // 3
    done = run("--out", tmp_path / "small", flags, f"--memory {memory}B")
    assert done.returncode == 0, done.stderr
    lines = [
        json.loads(line) for line in (tmp_path / "small" / "metrics.jsonl").read_text().splitlines()
    ]
    size = json.loads((tmp_path / "small" / "summary.json").read_text())["micro_batch_size"]
    assert whole["micro_batch_size"] is None
    assert size in (64, 32, 16)
    assert f"from now on at most {size}" in done.stderr
    losses = [[line["loss"] for line in found if "loss" in line] for found in (expected, lines)]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_loss_that_is_nan_ends_the_run(tmp_path):
    done = run("--task digits --steps 6 --learning-rate 1e30 --devices cpu --out", tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "train.py: error: the loss of step 2 is nan: begin anew with a smaller --learning-rate or --precision fp32, or go on "
        "from an earlier checkpoint\n"
    )
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["step"] for line in lines] == [1]
    assert not (tmp_path / "summary.json").exists()


def test_plan_is_printed_without_training_also_where_the_script_is_copied(tmp_path):
    for name in ("train.py", "tasks.py", "comparison.py"):
        (tmp_path / name).write_text(SCRIPT.with_name(name).read_text())
    flags = words_of(
        ["--plan --simulate 2 --memory 3MiB --task digits --out", tmp_path / "nothing"]
    )
    done = run_script(tmp_path / "train.py", *flags)
    assert done.returncode == 0, done.stderr
    assert "rows per update on 2 x sim with 3.00 MiB" in done.stdout
    assert done.stdout.startswith("fits: yes, ")
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "comparison.py").unlink()  # Only --simulate needs it.
    flags = words_of(["--task digits --steps 2 --out", tmp_path / "out"])
    done = run_script(tmp_path / "train.py", *flags)
    assert done.returncode == 0, done.stderr
    assert len(SCRIPT.read_text().splitlines()) <= 203
