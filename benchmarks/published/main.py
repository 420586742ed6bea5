"""Predicted memory, compared with what others have measured on GPUs

Each row is a number that somebody else has published: the bytes that torch's counters or nvidia-smi show on a real GPU. The
program is rebuilt from its source, and ``memory.estimate`` predicts the same number on a machine without a GPU. Nothing is
fitted, except where a row says so. Run without arguments, it predicts all rows and writes the README beside it; ``--only TEXT``
prints the rows whose program has this text.
"""

import argparse
import functools
import platform
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate

from balanced_parallel import memory
from balanced_parallel.memory import MemoryReport

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import blocks  # noqa: E402
import models  # noqa: E402
from models import Program  # noqa: E402

MIB = 2**20
LIMIT = 0.02  # a larger difference is explained

Counter = Callable[[MemoryReport], int]


def allocated(report: MemoryReport) -> int:
    """Returns ``torch.cuda.max_memory_allocated``."""
    return report.allocated[0]


def without_workspace(report: MemoryReport) -> int:
    """Returns it for versions before 1.13 and for ROCm, where the workspace of cuBLAS is not torch's."""
    return report.allocated[0] - report.parts[0]["workspace"]


def rise(report: MemoryReport) -> int:
    """Returns the bytes above those before the forward."""
    parts = report.parts[0]
    return sum(size for name, size in parts.items() if name not in ("parameters", "inputs", "workspace"))


def reserved(report: MemoryReport) -> int:
    """Returns ``torch.cuda.max_memory_reserved``."""
    return report.reserved[0]


def process(report: MemoryReport, context: int) -> int:
    """Returns what nvidia-smi shows with a context of so many MiB."""
    return report.reserved[0] + context * MIB


@dataclass(frozen=True)
class Source:
    """A place where numbers are published."""

    name: str
    gpu: str
    torch: str
    counter: str
    read: Counter


SOURCES = {
    "L": Source("Liger-Kernel, benchmark/data/all_benchmark_data.csv", "A100-SXM4-80GB", "2.4", "allocated", allocated),
    "C": Source("apple/ml-cross-entropy, README", "A100-SXM4-80GB", "2.4.1", "allocated", rise),
    "Z": Source("PyTorch's tutorial of ZeroRedundancyOptimizer", "V100-SXM2-32GB", "1.8", "allocated", without_workspace),
    "V": Source("PyTorch's tutorial of the optimizer step in the backward", "A100-SXM4-40GB", "2.1", "snapshot", allocated),
    "G": Source("LitGPT, tutorials/resource-tables.md", "A100-SXM4-40GB", "2.1.0", "allocated", allocated),
    "T": Source("torchtune, README", "A100-SXM4-80GB", "2.5", "active", allocated),
    "AO": Source("torchao, torchao/optim/README.md", "A100-SXM4-80GB", "2.5", "allocated", allocated),
    "R": Source("optimum-benchmark, results on ROCm", "AMD Instinct MI250", "2.2.2", "allocated", allocated),
    "Rr": Source("optimum-benchmark, results on ROCm", "AMD Instinct MI250", "2.2.2", "reserved", reserved),
    "TT": Source("torchtitan, llama3_h100_202412_torchtitan.md", "NVIDIA H100 80GB HBM3", "2.6", "reserved", reserved),
    "N": Source("GPUMemNet", "A100-SXM4-40GB", "1.13", "nvidia-smi", functools.partial(process, context=1429)),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A published number, in MiB, and the program that used it."""

    source: str
    name: str
    published: float
    build: Callable[[], Program]
    reason: str = ""


def _gigabytes(number: float) -> float:
    return number * 1e9 / MIB


_WINOGRAD = "workspaces of cuDNN; kernels of cuDNN are part of nvidia-smi's number"
_LITGPT = "rebuilt from its source; how it computes norms and rotary positions in the end is a guess"
_ROUNDED = "published as about {} GB"
ROWS = [
    *(Row("L", f"cross entropy of 16384 x {words}", size, functools.partial(blocks.cross_entropy, words))
      for words, size in {4096: 1280.126, 8192: 2560.126, 16384: 5120.126, 32768: 10240.126, 65536: 20480.125, 131072: 40960.125}.items()),
    *(Row("L", f"MLP of Llama, silu, 4 x {length}", size, functools.partial(blocks.mlp, 4, length, "silu"))
      for length, size in {1024: 1294.25, 2048: 1992.25, 4096: 3452.25, 8192: 6372.25}.items()),
    *(Row("L", f"MLP of Llama, gelu, 8 x {length}", size, functools.partial(blocks.mlp, 8, length, "gelu_pytorch_tanh"))
      for length, size in {1024: 1992.25, 2048: 3452.25, 4096: 6372.25, 8192: 12212.25}.items()),
    *(Row("L", f"LayerNorm of 4096 x {width}", size, functools.partial(blocks.layer_norm, width))
      for width, size in {1024: 80.0625, 2048: 160.094, 4096: 320.156, 8192: 640.281, 16384: 1280.531}.items()),
    *(Row("L", f"RMSNorm of Llama, 2048 x {width}", size, functools.partial(blocks.rms_norm, width))
      for width, size in {1024: 80.02, 2048: 160.031, 4096: 320.055, 8192: 640.102, 16384: 1280.195, 32768: 2560.383}.items()),
    Row("C", "head of Gemma 2 with its loss, 8192 tokens", 28000.0, blocks.gemma_head),
    Row("Z", "20 linear layers, DDP, Adam", 1697e6 / MIB, functools.partial(models.linear_layers, 1)),
    Row("Z", "20 linear layers, DDP, ZeRO-1 of 2 ranks", 1361e6 / MIB, functools.partial(models.linear_layers, 2)),
    Row("V", "ViT-L/16, 1 image, Adam", _gigabytes(6), functools.partial(models.vit_large, False), _ROUNDED.format(6)),
    Row("V", "ViT-L/16, step in the backward", _gigabytes(4), functools.partial(models.vit_large, True), _ROUNDED.format(4)),
    *(Row("G", f"LoRA of {name}, {rows} rows", _gigabytes(size), functools.partial(models.lora, name, rows), _LITGPT)
      for name, sizes in {"phi-1.5": {1: 4.82, 2: 6.76, 4: 10.68}, "StableLM-3B": {1: 9.69, 2: 12.10, 4: 16.92},
                          "Llama-2-7B": {1: 21.30, 2: 29.07}}.items() for rows, size in sizes.items()),
    Row("T", "Llama 3.2 3B, bf16, 2 x 4096, AdamW", 60 * 1024, models.llama_3b, "torchtune copies keys and values per head"),
    Row("AO", "DINOv2 giant, bf16, 32 images, checkpointed", _gigabytes(9.82), models.vit_giant),
    Row("R", "GPT-2, 2 x 16, AdamW", 2506.73664e6 / MIB, models.gpt2),
    Row("R", "BERT, 2 x 16, AdamW", 2195.345408e6 / MIB, models.bert_base),
    Row("Rr", "GPT-2, 2 x 16, AdamW", 2894.06976e6 / MIB, models.gpt2),
    Row("Rr", "BERT, 2 x 16, AdamW", 2497.708032e6 / MIB, models.bert_base),
    Row("TT", "Llama 3.1 8B, FSDP2 of 8", 82.4 * 1024, functools.partial(models.llama_8b, 8),
        "streams of FSDP2 have pools of their own on a GPU"),
    Row("TT", "Llama 3.1 8B, FSDP2 of 128", 67.0 * 1024, functools.partial(models.llama_8b, 128),
        "streams of FSDP2 have pools of their own on a GPU"),
    *(Row("N", f"{name}, {rows} images", size, functools.partial(models.convolutional, name, rows), _WINOGRAD)
      for name, sizes in {"MobileNetV2": {32: 4544, 128: 12578}, "ResNet-50": {32: 5262, 128: 15120},
                          "VGG-16": {32: 8222, 128: 24408}}.items() for rows, size in sizes.items()),
]  # fmt: skip


def predict(row: Row) -> MemoryReport:
    """Returns the report of a row's program on its GPU."""
    program = row.build()
    settings = {"device_kind": SOURCES[row.source].gpu} | program.settings
    with warnings.catch_warnings(action="ignore"):
        return memory.estimate(program.module, program.criterion, program.inputs, program.targets, **settings)


def difference(row: Row, report: MemoryReport) -> float:
    """Returns the prediction's relative difference from the published number."""
    return SOURCES[row.source].read(report) / MIB / row.published - 1


def line(row: Row, report: MemoryReport) -> list[str]:
    """Returns the cells of a row."""
    source, error = SOURCES[row.source], difference(row, report)
    beyond = (report.at_most[0] - report.nvidia_smi[0]) / MIB
    predicted = source.read(report) / MIB
    bound = f" (at most {predicted + beyond:.0f})" if beyond else ""
    return [
        *(row.source[:1] if row.source == "Rr" else row.source, row.name, source.gpu, source.torch, source.counter),
        *(f"{row.published:.1f}", f"{predicted:.1f}{bound}", f"{error:+.2%}", row.reason if abs(error) > LIMIT else ""),
    ]


HEADERS = ["source", "program", "GPU", "torch", "counter", "published, MiB", "predicted", "difference", "reason"]


def main() -> None:
    """Predicts the rows, and writes the README unless some rows are selected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose program has this text; nothing is written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines, started = [], time.perf_counter()
    for row in ROWS:
        if options.only in row.name:
            before = time.perf_counter()
            lines.append(line(row, predict(row)))
            print(f"{time.perf_counter() - before:5.1f} s", *lines[-1], sep="  ", file=sys.stderr)
    table = tabulate(lines, HEADERS, "github", disable_numparse=True)
    if options.only:
        print(table)
        return
    title, rest = (__doc__ or "").split("\n\n", 1)
    sources = {source.name: key[:1] if key == "Rr" else key for key, source in SOURCES.items()}
    values = {
        "title": title,
        "introduction": rest.split(" Run without")[0].strip(),
        "table": table,
        "sources": "\n".join(f"- {key}: {name}" for name, key in sources.items()),
        "environment": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{(time.perf_counter() - started) / 60:.1f} minutes",
    }
    (HERE / "README.md").write_text((HERE / "page.md").read_text().format(**values))


if __name__ == "__main__":
    main()
