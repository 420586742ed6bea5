"""Predicted step time and memory on 8 to 4,096 GPUs

A GPT of 1.3 billion parameters with 16,384 tokens per GPU, by the alpha-beta model. Nothing here was measured on GPUs. Run
without arguments, it writes the README beside it, down to its formulas, and the picture of docs/clusters.md. The arguments are
those of the network and of the job.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from tabulate import tabulate

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from prediction import LAYOUTS, Job, Network, Prediction, collectives, persistent_bytes, predict  # noqa: E402

PICTURE = HERE.parents[1] / "docs" / "images" / "scale.png"
GPUS = [8, 64, 512, 4096]


def predictions(gpus: list[int], job: Job, network: Network) -> list[Prediction]:
    """Returns all predictions that are possible."""
    found = [predict(layout, count, job, network) for count in gpus for layout in LAYOUTS]
    return [prediction for prediction in found if prediction is not None]


def table(job: Job, network: Network) -> str:
    """Returns a table with a row for each number of GPUs and each layout."""
    rows = [
        [
            f"{one.gpus:,}",
            one.layout,
            f"{1000 * one.communication:.0f}",
            f"{1000 * one.overlapped:.0f} to {1000 * one.sequential:.0f}",
            f"{one.sent / 1e9:.1f}",
            f"{one.bytes / 2**30:.1f}",
        ]
        for one in predictions(GPUS, job, network)
    ]
    headers = ["GPUs", "layout", "communication (ms)", "step (ms)", "sent per GPU (GB)", "memory per GPU (GiB)"]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def counted_table() -> str:
    """Returns a table of predicted and counted traffic of a small network."""
    import counting

    job, network = Job(parameters=counting.PARAMETERS, units=counting.UNITS), Network()
    rows = []
    for layout, hosts, local in (("DDP", 1, 64), ("FSDP2", 1, 64), ("HSDP", 8, 8)):
        counter = counting.count_ddp(64) if layout == "DDP" else counting.count_fsdp(hosts, local)
        for part in collectives(layout, job, 64, network):
            counts = [counter.calls[part.operation], f"{counter.bytes[part.operation]:,}"]
            rows.append([layout, 64, part.operation, part.calls, *counts[:1], f"{part.size:,.0f}", *counts[1:]])
    sent, held = counting.count_replicas(8)
    expected = sum(part.sent for part in collectives("replicas", job, 8, network))
    rows.append(["replicas", 8, "sent by a device", "", "", f"{expected:,.0f}", f"{max(sent):,}"])
    memory = persistent_bytes("replicas", job, 8, network)
    rows.append(["replicas", 8, "memory of a device", "", "", f"{memory:,.0f}", f"{max(held):,}"])
    headers = ["layout", "ranks", "collective", "calls predicted", "counted", "bytes predicted", "bytes counted"]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def draw(path: Path, job: Job, network: Network) -> None:
    """Draws step times and memory over the number of GPUs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for layout, marker in zip(LAYOUTS, "sovD", strict=True):
        found = [one for one in predictions([2**power for power in range(3, 13)], job, network) if one.layout == layout]
        gpus = [one.gpus for one in found]
        (line,) = left.plot(gpus, [1000 * one.sequential for one in found], marker=marker, label=layout)
        least, most = ([1000 * getattr(one, name) for one in found] for name in ("overlapped", "sequential"))
        left.fill_between(gpus, least, most, alpha=0.15, color=line.get_color())
        right.plot(gpus, [one.bytes / 2**30 for one in found], marker=marker, label=layout)
    left.axhline(1000 * job.compute, color="gray", linestyle=":", label="computation alone")
    left.set(xlabel="GPUs", ylabel="ms per step", title="Predicted step (line: no overlap; area: up to full overlap)")
    right.set(xlabel="GPUs", ylabel="GiB per GPU", title="Predicted memory without activations")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(GPUS, [f"{count:,}" for count in GPUS])
        axis.set_ylim(bottom=0)
        axis.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def settings(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """Adds an argument for each field of a dataclass."""
    for field in dataclasses.fields(kind):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=type(field.default), default=field.default, help="default: %(default)s")


def main() -> None:
    """Prints the table. With the default settings, writes the README and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    settings(parser, Network)
    settings(parser, Job)
    flags = vars(parser.parse_args())
    network, job = (kind(**{field.name: flags[field.name] for field in dataclasses.fields(kind)}) for kind in (Network, Job))
    predicted = table(job, network)
    if (network, job) != (Network(), Job()):
        print(predicted)
        return
    _, *formulas = (HERE / "README.md").read_text().partition("\n## Formula\n")
    title, rest = (__doc__ or "").split("\n\n", 1)
    text = f"""# {title}

{rest.split("Run")[0].strip()}
[Several hosts](../../docs/clusters.md#scale-predicted-times-and-bytes) says which layout follows from it.

{predicted}

The first number of a step is for communication that overlaps fully, the second for none that overlaps. Memory holds parameters,
gradients and AdamW's state in float32, and buffers of the communication. Activations come on top. The traffic is counted by
the tests.

Traffic of an update of a small network, predicted and counted: in torch's fake process group, and on simulated devices.

{counted_table()}

To reproduce (it writes this file and the picture), and to predict another cluster or model:

```bash
.venv/bin/python benchmarks/scale/main.py
.venv/bin/python benchmarks/scale/main.py --outside 50e9 --parameters 7000000000 --units 32
```
{"".join(formulas)}"""
    (HERE / "README.md").write_text(text)
    draw(PICTURE, job, network)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
