"""Predicted memory, compared with what others have measured on GPUs

Each row is a number that somebody else has published: the bytes that torch's counters or nvidia-smi show on a real GPU. The
program is rebuilt from its source, and ``memory.estimate`` predicts the same number on a machine without a GPU. Changes
that were made after a comparison are named below the table. Run without arguments, it predicts all rows and writes the README
beside it; ``--only TEXT`` prints the rows whose program has this text.
"""

import argparse
import functools
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from balanced_parallel import memory
from balanced_parallel.memory import MemoryReport

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import blocks  # noqa: E402
import models  # noqa: E402
from models import Program  # noqa: E402
from reports import environment, introduction, table  # noqa: E402

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


_GPUMEMNET = functools.partial(process, context=1429)
SOURCES = {
    "L": Source("Liger-Kernel, benchmark/data/all_benchmark_data.csv", "A100-SXM4-80GB", "not stated", "allocated", allocated),
    "C": Source("apple/ml-cross-entropy, README", "A100-SXM4-80GB", "2.4.1", "allocated", rise),
    "Z": Source(
        "PyTorch's tutorial of ZeroRedundancyOptimizer", "V100-SXM2-32GB", "1.8 or newer", "allocated", without_workspace
    ),
    "V": Source(
        "PyTorch's tutorial of the optimizer step in the backward", "A100-SXM4-40GB", "2.1 or newer", "snapshot", allocated
    ),
    "G": Source("LitGPT, tutorials/resource-tables.md", "A100-SXM4-40GB", "2.1.0", "allocated", allocated),
    "T": Source("torchtune, README", "A100-SXM4-80GB", "not stated", "active", allocated),
    "AO": Source("torchao, torchao/optim/README.md", "A100-SXM4-80GB", "not stated", "allocated", allocated),
    "S": Source("benchmark of transformers' pull request 28802", "A100-SXM4-80GB", "not stated", "allocated", allocated),
    "R": Source("optimum-benchmark, results on ROCm", "AMD Instinct MI250", "2.2.2", "allocated", allocated),
    "R'": Source("optimum-benchmark, results on ROCm", "AMD Instinct MI250", "2.2.2", "reserved", reserved),
    "N": Source("GPUMemNet", "A100-SXM4-40GB", "not stated", "nvidia-smi", _GPUMEMNET),
}


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


def _rows(source: str, name: str, build: Callable[[int], Program], published: dict[int, float], reason: str = "") -> list[Row]:
    return [Row(source, name.format(size), number, functools.partial(build, size), reason) for size, number in published.items()]


_silu, _gelu = (functools.partial(blocks.mlp, *settings) for settings in (("silu", 4), ("gelu_pytorch_tanh", 8)))
_phi, _stable, _llama, _ = (functools.partial(models.lora, name) for name in models.LORA)
_mobile, _resnet, _vgg = (functools.partial(models.convolutional, name) for name in ("MobileNetV2", "ResNet-50", "VGG-16"))
_CUDNN = "workspaces and kernels of cuDNN"
_LITGPT = "the program is rebuilt: how it rotates and what it keeps until the next loss is partly a guess"
_VOCABULARY = {4096: 1280.126, 8192: 2560.126, 16384: 5120.126, 32768: 10240.126, 65536: 20480.125, 131072: 40960.125}
_BERT = {
    (4, 256): 764.834,
    (4, 512): 1225.602,
    (8, 256): 1225.065,
    (8, 512): 2134.262,
    (16, 256): 2134.262,
    (16, 512): 3961.013,
}
_QLORA = {
    ("phi-1.5", False): 3.78,
    ("phi-1.5", True): 3.72,
    ("StableLM-3B", False): 6.35,
    ("StableLM-3B", True): 6.19,
    ("Llama-2-7B", False): 14.14,
    ("Llama-2-7B", True): 13.84,
}
_SHARDED = {
    ("phi-1.5", 2, 1044): {1: 4.86, 2: 5.05, 4: 5.88},
    ("StableLM-3B", 2, 1034): {1: 12.75, 2: 12.94, 4: 13.45},
    ("Llama-2-7B", 2, 1304): {1: 22.18, 2: 22.47, 4: 23.39},
    ("Llama-2-13B", 4, 1304): {1: 35.57},
}
_FSDP1 = "flat parameters of FSDP1, and random lengths after the first micro-batch"
_WIDTHS = {1024: 80.02, 2048: 160.031, 4096: 320.055, 8192: 640.102, 16384: 1280.195, 32768: 2560.383}
ROWS = [
    *_rows("L", "cross entropy of 16384 x {}", blocks.cross_entropy, _VOCABULARY),
    *_rows("L", "MLP of Llama, silu, 4 x {}", _silu, {1024: 1294.25, 2048: 1992.25, 4096: 3452.25, 8192: 6372.25}),
    *_rows("L", "MLP of Llama, gelu, 8 x {}", _gelu, {1024: 1992.25, 2048: 3452.25, 4096: 6372.25, 8192: 12212.25}),
    *_rows("L", "LayerNorm of 4096 x {}", blocks.layer_norm, {1024: 80.062, 2048: 160.094, 4096: 320.156, 16384: 1280.531}),
    *_rows("L", "RMSNorm of Llama, 2048 x {}", blocks.rms_norm, _WIDTHS),
    *_rows("C", "head of Gemma 2 with its loss, {} tokens", blocks.gemma_head, {8192: 28000.0}),
    *_rows("Z", "20 linear layers, DDP, Adam, ZeRO-1 of {}", models.linear_layers, {1: 1697e6 / MIB, 2: 1361e6 / MIB}),
    Row("V", "ViT-L/16, 1 image, Adam", _gigabytes(6), functools.partial(models.vit_large, False), "about 6 GB"),
    Row("V", "ViT-L/16, step in the backward", _gigabytes(4), functools.partial(models.vit_large, True), "about 4 GB"),
    *_rows("G", "LoRA of phi-1.5, {} x 1044", _phi, {1: _gigabytes(4.82), 2: _gigabytes(6.76), 4: _gigabytes(10.68)}, _LITGPT),
    *_rows(
        "G", "LoRA of StableLM-3B, {} x 1034", _stable, {1: _gigabytes(9.69), 2: _gigabytes(12.1), 4: _gigabytes(16.92)}, _LITGPT
    ),
    *_rows("G", "LoRA of Llama-2-7B, {} x 1304", _llama, {1: _gigabytes(21.3), 2: _gigabytes(29.07)}, _LITGPT),
    *[
        Row(
            "G",
            f"QLoRA of {name}, {'nf4-dq' if nested else 'nf4'}, 1 row",
            _gigabytes(size),
            functools.partial(models.qlora, name, nested),
            _LITGPT,
        )
        for (name, nested), size in _QLORA.items()
    ],
    *[
        Row(
            "G",
            f"LoRA of {name}, FSDP of {ranks}, {rows} x {length}",
            _gigabytes(size),
            functools.partial(models.sharded_lora, name, ranks, rows),
            _FSDP1,
        )
        for (name, ranks, length), sizes in _SHARDED.items()
        for rows, size in sizes.items()
    ],
    Row("T", "Llama 3.2 3B, bf16, 2 x 4096, AdamW", 60 * 1024, models.llama_3b, "torchtune copies keys and values per head"),
    Row("AO", "DINOv2 giant, bf16, 32 images, checkpointed", _gigabytes(9.82), models.vit_giant),
    Row("R", "GPT-2, 2 x 16, AdamW", 2506.73664e6 / MIB, models.gpt2),
    Row("R", "BERT, 2 x 16, AdamW", 2195.345408e6 / MIB, models.bert_base),
    *[
        Row(
            "S",
            f"BERT in float16, {rows} x {length}",
            size * 1e6 / MIB,
            functools.partial(models.bert_half, rows, length),
            "see below",
        )
        for (rows, length), size in _BERT.items()
    ],
    Row("R'", "GPT-2, 2 x 16, AdamW", 2894.06976e6 / MIB, models.gpt2),
    Row("R'", "BERT, 2 x 16, AdamW", 2497.708032e6 / MIB, models.bert_base),
    *_rows("N", "MobileNetV2, {} images", _mobile, {32: 4544, 128: 12578}, _CUDNN),
    *_rows("N", "ResNet-50, {} images", _resnet, {32: 5262, 128: 15120}, _CUDNN),
    *_rows("N", "VGG-16, {} images", _vgg, {32: 8222, 128: 24408}, _CUDNN),
]


def predict(row: Row) -> MemoryReport:
    """Returns the report of a row's program on its GPU."""
    program = row.build()
    # Most of these programs call zero_grad() behind the step.
    settings = {"device_kind": SOURCES[row.source].gpu, "keeps_gradients": False} | program.settings
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
        *(row.source.rstrip("'"), row.name, source.gpu, source.torch, source.counter),
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
    if options.only:
        print(table(lines, HEADERS))
        return
    sources = {source.name: key.rstrip("'") for key, source in SOURCES.items()}
    values = {
        "introduction": introduction(__doc__),
        "table": table(lines, HEADERS),
        "sources": "\n".join(f"- {key}: {name}" for name, key in sources.items()),
        "environment": f"{environment()}, {(time.perf_counter() - started) / 60:.1f} minutes",
    }
    (HERE / "README.md").write_text((HERE / "page.md").read_text().format(**values))


if __name__ == "__main__":
    main()
