"""Dropout by row in one Triton kernel, for CUDA. Random numbers are never in memory.

Triton comes with torch for CUDA.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _dropout(  # type: ignore[no-untyped-def]
    x, out, mask, seeds, keep, scale, lines, length, LINES: tl.constexpr, QUADS: tl.constexpr
):
    line = (tl.program_id(0) * LINES + tl.arange(0, LINES))[:, None]
    quad = (tl.program_id(1) * QUADS + tl.arange(0, QUADS))[None, :]
    seed = tl.load(seeds + line, line < lines, other=0).to(tl.uint64, bitcast=True)
    zero = tl.zeros([LINES, QUADS], tl.uint32)
    w0, w1, w2, w3 = tl.philox(
        seed + tl.zeros([LINES, QUADS], tl.uint64), quad.to(tl.uint32) + zero, zero, zero, zero
    )
    for lane in tl.static_range(4):
        word = w0 if lane == 0 else (w1 if lane == 1 else (w2 if lane == 2 else w3))
        stays = (word & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08 < keep  # 2 ** -24
        place = line.to(tl.int64) * length + 4 * quad + lane
        inside = (line < lines) & (4 * quad + lane < length)
        value = tl.load(x + place, inside, other=0.0)
        tl.store(out + place, tl.where(stays, value * scale, 0.0), inside)
        tl.store(mask + place, stays, inside)


def dropout(x: Tensor, p: float, seeds: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Returns the output and the mask, as ``torch.native_dropout`` does.

    ``seeds`` are those of the lines, ``[..., 1]``.
    """
    x = x.contiguous()
    seeds = seeds.contiguous()
    out = torch.empty_like(x)
    mask = torch.empty_like(x, dtype=torch.bool)
    quads = min(128, triton.next_power_of_2(-(-length // 4)))
    lines = max(1, 128 // quads)
    grid = triton.cdiv(seeds.numel(), lines), triton.cdiv(-(-length // 4), quads)
    scale = 1 / (1 - p) if p < 1 else 0.0
    _dropout[grid](
        x, out, mask, seeds, 1 - p, scale, seeds.numel(), length, LINES=lines, QUADS=quads
    )
    return out, mask
