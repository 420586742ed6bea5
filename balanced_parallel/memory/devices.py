"""Constants of devices: the rounding of allocations, and memory of a process that no tensor holds.

Those of GPUs are assumed from documents and source code. None was measured on a GPU yet.
"""

from dataclasses import dataclass

import torch

from ..runtime.devices import visible_devices


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device. Sizes are bytes.

    Attributes:
        rounds_to: the allocator's smallest block.
        workspace: memory of cuBLAS, allocated at the first matrix product.
        context: memory of the driver and of kernels, outside of the allocator.
        segments: the allocator hands out parts of larger segments, which may stay partly empty.
        like_cuda: autocast, dropout and optimizers choose the same operators as on CUDA.
        fuses: attention and recurrent layers use fused kernels, as on CUDA.
    """

    name: str
    capacity: int | None
    rounds_to: int = 512  # c10/core/AllocatorConfig.h, kMinBlockSize
    workspace: int = 4096 * 1024 * 2 + 16 * 1024 * 8  # aten/src/ATen/cuda/CUDABlas.cpp, ":4096:2:16:8"
    context: int = 500 * 2**20  # not documented; about the number that nvidia-smi shows for an idle process
    segments: bool = True
    like_cuda: bool = True
    fuses: bool = True

    @property
    def beside_tensors(self) -> int:
        """Bytes that no tensor holds."""
        return self.workspace + self.context


KIND_SOURCES = {
    "workspace": "assumed: cuBLAS's default of torch's CUDABlas.cpp; seen by others, discuss.pytorch.org/t/178671",
    "context": "assumed: no document has a number; state free bytes from torch.cuda.mem_get_info where there is a GPU",
}


_HOPPER = 4096 * 1024 * 8  # CUDABlas.cpp, ":4096:8" from compute capability 9.0 on
GIB = 2**30
# Capacities are "total capacity" in public out-of-memory errors of torch, rounded down: less than the name of the GPU says.
KINDS = {
    kind.name: kind
    for kind in (
        DeviceKind("b200", 178 * GIB, workspace=_HOPPER),  # assumed
        DeviceKind("h200", 139 * GIB, workspace=_HOPPER),  # assumed
        DeviceKind("h100", 78 * GIB, workspace=_HOPPER),  # assumed
        DeviceKind("a100", 79 * GIB),  # wbfwonderful/Vad-R1#11
        DeviceKind("a100-40gb", 39 * GIB),  # TianheWu/CoSeR#10
        DeviceKind("l40s", 44 * GIB),  # Wan-Video/Wan2.1#205
        DeviceKind("l4", 22 * GIB),  # nvidia-smi shows 23034 MiB, lmstudio-ai/lmstudio-bug-tracker#1638
        DeviceKind("a10", 22 * GIB),  # assumed, as for the L4
        DeviceKind("rtx4090", 47 * GIB // 2),  # 3DTopia/Phidias-Diffusion#8
        DeviceKind("rtx3090", 47 * GIB // 2),  # XChenZ/havatar#6
        DeviceKind("v100", 63 * GIB // 2),  # liucongg/ChatGLM-Finetuning#73
        DeviceKind("t4", 29 * GIB // 2),  # Zheng-Chong/CatVTON#133
        DeviceKind("sim", None, workspace=0, context=0, segments=False, fuses=False),  # as simulate() counts
        DeviceKind("cpu", None, rounds_to=1, workspace=0, context=0, segments=False, like_cuda=False, fuses=False),
    )
}


def find_kind(name: str | None) -> DeviceKind:
    """Returns the kind of that name. ``None`` is the kind of this machine's accelerator, else an H200."""
    if name is None:
        device = visible_devices()[0]
        if device.type == "sim":
            return KINDS["sim"]
        full = torch.get_device_module(device).get_device_name(device) if device.type == "cuda" else ""
        words = full.lower().replace("geforce rtx ", "rtx").replace("-", " ").split()
        return next((kind for kind in KINDS.values() if kind.name in words), KINDS["h200"])
    if name not in KINDS:
        raise ValueError(f"device_kind={name!r}, expected one of {', '.join(KINDS)}")
    return KINDS[name]
