"""Constants of devices: their memory, the rounding of allocations, and memory of a process that no
tensor holds.

A device of this machine says its memory itself. For all others there is a table of GPUs.
"""

import re
from dataclasses import dataclass

import torch

from ..runtime import values
from ..runtime.devices import visible_devices

_MIB = 2**20
GIB = 2**30
_WORKSPACE = 4096 * 1024 * 2 + 16 * 1024 * 8  # aten/src/ATen/cuda/CUDABlas.cpp, ":4096:2:16:8"
_WORKSPACE_FROM_HOPPER = 4096 * 1024 * 8  # the same, ":4096:8" from compute capability 9.0 on


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device. Sizes are bytes.

    Attributes:
        capacity: total memory, as torch reports it. None for no limit.
        rounds_to: the allocator's smallest block.
        workspace: memory of each of cuBLAS's handles, allocated at its first matrix product. A
            thread has a handle of its own: that of the forward, and that of the backward.
        context: memory of the driver and of kernels, outside of the allocator.
        is_gpu: the allocator hands out parts of larger segments, which may stay partly empty, and
            attention uses fused kernels, as on CUDA.
        expandable: segments grow, by the allocator's setting ``expandable_segments``.
        like_cuda: autocast, dropout and optimizers choose the same operators as on CUDA.
        has_bf16: it multiplies matrices in bf16.
    """

    name: str
    capacity: int | None
    rounds_to: int = 512  # c10/core/AllocatorConfig.h, kMinBlockSize
    workspace: int = 0
    context: int = 0
    is_gpu: bool = True
    expandable: bool = False
    like_cuda: bool = True
    has_bf16: bool = True

    def remarks(self, precision: str) -> dict[str, str]:
        """Returns what a user may not expect of the kind."""
        remarks = {}
        others = [
            f"{name} with {values.format_bytes(other.capacity)}"
            for name, other in KINDS.items()
            if other.capacity and name.startswith(f"{self.name}-") and not name.endswith("-ti")
        ]
        if others:
            remarks["device"] = f"assumed: {self.name}, not {', '.join(others)}"
        if precision == "bf16" and not self.has_bf16:
            remarks["precision"] = f"torch emulates bf16 on {self.name}, slowly: it has fp16"
        return remarks


KIND_SOURCES = {
    "workspace": "assumed: cuBLAS's default of torch's CUDABlas.cpp, for the thread of the forward and that of the backward",
    "context": "assumed: 3.5 MiB per multiprocessor, public out-of-memory errors with CUDA 11.7 and newer, which load "
    "kernels lazily; older versions take more than 1 GiB",
}


# Name, total GiB, multiprocessors and compute capability (0 for AMD). The memory is that of public
# out-of-memory errors of torch ("total capacity"), rounded down to half a GiB: less than the name
# of the GPU says. That of GB200 and of AMD is assumed.
_GPUS = """
    gb200 184 152 10, b200 178 148 10, gh200 94 132 9, h200 139.5 132 9, h20 95 78 9,
    h100 79 132 9, h100-pcie 79 114 9, h100-nvl 93 132 9, a100 79 108 8, a100-40gb 39 108 8,
    a40 44 84 8, a30 23.5 56 8, a10 22 72 8, a10g 21.5 80 8, l40s 44 142 8,
    l40 44 142 8, l4 22 58 8, t4 14.5 40 7, v100 31.5 80 7, v100-16gb 15.5 80 7,
    p100 15.5 56 6, rtxpro6000 94.5 188 12, rtx6000-ada 44 142 8, rtx6000 23.5 72 7, rtx8000 47 72 7,
    a6000 47 84 8, a5000 23.5 64 8, a4000 15.5 48 8, rtx5090 31 170 12, rtx5080 15 84 12,
    rtx5070-ti 15 70 12, rtx4090 23.5 128 8, rtx4080 15.5 76 8, rtx4070 11.5 46 8, rtx3090 23.5 82 8,
    rtx3080 9.5 68 8, rtx3070 7.5 46 8, rtx3060 11.5 28 8, rtx2080-ti 10.5 68 7, gtx1080-ti 10.5 28 6,
    titan-rtx 23.5 72 7, mi325x 255.5 304 0, mi300x 191.5 304 0, mi250x 63.5 110 0, mi250 63.5 104 0,
    mi210 63.5 104 0
"""
_OTHER_GPUS = {"ti", "ada", "laptop", "mig"}  # words that make another GPU of a name


def _gpu(name: str, capacity: int, processors: int, capability: int) -> DeviceKind:
    """Returns the kind of a GPU.

    AMD's libraries allocate their workspaces themselves: they are part of the context.
    """
    workspace = _WORKSPACE_FROM_HOPPER if capability >= 9 else _WORKSPACE * bool(capability)
    context = processors * 7 * _MIB // 2
    return DeviceKind(
        name,
        capacity,
        workspace=workspace,
        context=context,
        has_bf16=capability not in range(1, 8),
    )


_ROWS = [entry.split() for entry in _GPUS.split(",")]
KINDS = {
    name: _gpu(name, int(float(size) * GIB), *map(int, rest)) for name, size, *rest in _ROWS
} | {
    "sim": DeviceKind("sim", None, is_gpu=False),
    "cpu": DeviceKind("cpu", None, rounds_to=1, is_gpu=False, like_cuda=False),
}


def find_kind(name: str | None) -> DeviceKind:
    """Returns the kind of a name, such as ``"a100"`` or ``"NVIDIA A100-SXM4-40GB"``.

    ``None`` is this machine's GPU, of NVIDIA or AMD, or an H200 on a machine without an
    accelerator.

    The memory of a GPU of this machine is what torch reports, also of one that the table does not
    have.

    Raises:
        ValueError: neither the table nor this machine has such a device, or the name is None and
            this machine's accelerator is not known, such as ``xpu`` and ``mps``.
    """
    device = visible_devices()[0]
    assumed = {"cpu": "h200", "sim": "sim"}.get(device.type, "")
    present = KINDS.get(assumed)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        kind = _in_table(properties.name)
        capability = 0 if torch.version.hip else properties.major
        called = kind.name if kind else properties.name
        present = _gpu(
            called, properties.total_memory, properties.multi_processor_count, capability
        )
    if name is None:
        if present is not None:
            return present
        raise ValueError(
            f"the allocator of {device.type} devices is not known, expected a GPU of NVIDIA or AMD: name a similar one, and give "
            "its memory: device_kind='a100', capacity='24GiB', or --device-kind a100 --memory 24GiB. In place of memory.fit use "
            "TrainStep(micro_batch_size='auto')"
        )
    values.check_type("device_kind", name, str, "a name; memory.compare_kinds takes several")
    kind = _in_table(name)
    if present is not None and present.name in (name, kind and kind.name):
        return present
    if kind is None:
        similar = [other for other in KINDS if name.lower() in other] or KINDS
        raise ValueError(
            f"device_kind={name!r}, expected one of {', '.join(similar)}, or a name that torch.cuda.get_device_name returns. For "
            "another GPU name a similar one, and give its memory: capacity='24GiB', or --memory 24GiB"
        )
    return kind


def _in_table(name: str) -> DeviceKind | None:
    """Returns the kind whose words are all in ``name``, the one with the most of them.

    Its memory is below a size in the name.
    """
    words = set(re.sub(r"(rtx|gtx|pro) (?=pro|\d)", r"\1", name.lower()).replace("-", " ").split())
    sizes = [int(word[:-2]) * GIB for word in words if re.fullmatch(r"\d+gb", word)]
    fitting = [
        kind
        for kind in KINDS.values()
        if set(kind.name.split("-")) >= words & _OTHER_GPUS
        and words.issuperset(kind.name.split("-"))
        and all((kind.capacity or 0) < size for size in sizes)
    ]
    return max(fitting, key=lambda kind: kind.name.count("-"), default=None)
