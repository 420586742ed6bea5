"""What is known of devices before there is one: how memory is rounded, and what a process needs beside tensors.

The constants of GPUs are from documents and source, and assumed: nothing here was measured on a GPU yet.
"""

from dataclasses import dataclass

import torch

from ..runtime.devices import visible_devices

__all__: list[str] = []


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device. Bytes.

    ``rounds_to``: the allocator's smallest block. ``workspace``: what cuBLAS takes from the allocator at the first product.
    ``context``: what the driver and the kernels take outside of the allocator. ``segments``: whether memory is handed out of
    larger segments, which may stay partly empty. ``like_cuda``: autocast, dropout and optimizers choose what they choose on
    CUDA. ``fuses``: so does attention. ``scratch``: what
    operators allocate for themselves can be measured here.
    """

    name: str
    capacity: int | None
    rounds_to: int = 512  # c10/core/AllocatorConfig.h, kMinBlockSize
    workspace: int = 4096 * 1024 * 2 + 16 * 1024 * 8  # aten/src/ATen/cuda/CUDABlas.cpp, ":4096:2:16:8"
    context: int = 500 * 2**20  # no vendor's document has a number: about what nvidia-smi shows for an idle process
    segments: bool = True
    like_cuda: bool = True
    fuses: bool = True
    scratch: bool = False

    def sources(self) -> dict[str, str]:
        """Where the constants are from."""
        return {
            "workspace": "assumed: cuBLAS's default of torch's CUDABlas.cpp; seen by others, discuss.pytorch.org/t/178671",
            "context": "assumed: no document has a number; state free bytes from torch.cuda.mem_get_info where there is a GPU",
        }


_HOPPER = 4096 * 1024 * 8  # CUDABlas.cpp, ":4096:8" from compute capability 9.0 on
GIB = 2**30
KINDS = {
    kind.name: kind
    for kind in (
        DeviceKind("b200", 180 * GIB, workspace=_HOPPER),
        DeviceKind("h200", 141 * 10**9, workspace=_HOPPER),
        DeviceKind("h100", 80 * GIB, workspace=_HOPPER),
        DeviceKind("a100", 80 * GIB),
        DeviceKind("a100-40gb", 40 * GIB),
        DeviceKind("l40s", 48 * GIB),
        DeviceKind("l4", 24 * GIB),
        DeviceKind("a10", 24 * GIB),
        DeviceKind("rtx4090", 24 * GIB),
        DeviceKind("rtx3090", 24 * GIB),
        DeviceKind("v100", 32 * GIB),
        DeviceKind("t4", 16 * GIB),
        DeviceKind("sim", None, workspace=0, context=0, segments=False, fuses=False),  # what simulate() counts
        DeviceKind("cpu", None, rounds_to=1, workspace=0, context=0, segments=False, like_cuda=False, fuses=False, scratch=True),
    )
}


def find_kind(name: str | None) -> DeviceKind:
    """The kind of that name; of this machine's accelerator where none is given, else an H200.

    Raises:
        ValueError: there is none of that name.
    """
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
