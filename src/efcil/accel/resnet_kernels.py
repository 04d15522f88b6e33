"""Batch normalization on a GPU in two kernels forward and two backward (`efcil.accel.batch_norm` has the formulas).

Maps are rows of channels: (n, c, h, w) with channels last is (n h w, c). Two kernels add up over rows:

    im2col            images                       what a small stem sees of each pixel
    batch_stats       sums of z                    stats (4, c)
    normalize         z, stats                     the output and, if asked for, a mask of where it is above zero
    backward_reduce   sums of gradients            grads (5, c) and, if asked for, the gradient before the ReLU
    backward_apply    gradients, z, stats, grads   the gradient of z

A sum over rows is made in parts, one for each program, and parts are added up as whole numbers of a small unit: in
whatever order they arrive, the sum is the same to the bit. The program that arrives last works out what the next kernel
multiplies and adds with: it loads two or three numbers a channel, and no program computes a root. Nobody waits for
anybody, so any number of runs may share the GPU.

The tiles were the fastest of those timed on an H200 at the sizes of a ResNet-18 (docs/dev/performance.md).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

TILE, WIDE = 64, 64  # rows and channels of a tile of kernels that add up
# Tiles that `batch_stats` loads at once; of fewer rows than FEW_ROWS two, as in `backward_reduce`.
LOADS, FEW_ROWS = 4, 8192
ROWS_FORWARD, ROWS_BACKWARD = 32, 64  # rows of a tile of the others
IM2COL_PIXELS = 128  # of a tile of `im2col`
WARPS = 4
MAX_PROGRAMS = 264  # that add up, at most: two for each multiprocessor of an H200
# A sum may have 2**63 units. Forward a unit is this share of the running deviation, or of the running variance: maps of
# a million rows may be a thousand times as large as they were before. Backward the unit is this: a weight whose
# gradient is beyond 100,000 has long been lost.
FIXED_POINT_SHARE = tl.constexpr(2.0**-18)
FIXED_POINT_UNIT = tl.constexpr(2.0**-46)


@triton.jit
def _tile(rows, C, FULL: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """A program's channels and which there are, which of its numbers there are, where they stand, and from where."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    own = c < C
    r = tl.arange(0, BM)
    here = (tl.program_id(0) * BM + r < rows)[:, None]
    if not FULL:
        here = here & own[None, :]
    return c, own, here, r[:, None] * C + c[None, :], tl.program_id(0).to(tl.int64) * BM * C


@triton.jit
def _accumulate(sums, C, c, own, one, two):
    """Add this program's part to both sums of channels c, (2, C) whole numbers; who counts next sees all of it."""
    tl.atomic_add(sums + c, one.to(tl.int64), mask=own, sem="relaxed")
    tl.atomic_add(sums + C + c, two.to(tl.int64), mask=own, sem="relaxed")
    tl.debug_barrier()


@triton.jit
def _pop_sums(sums, C, c, own, BC: tl.constexpr):
    """Both sums of channels c; they begin anew at zero."""
    one = tl.load(sums + c, mask=own, other=0, cache_modifier=".cg").to(tl.float32)
    two = tl.load(sums + C + c, mask=own, other=0, cache_modifier=".cg").to(tl.float32)
    nothing = tl.zeros((BC,), tl.int64)
    tl.store(sums + c, nothing, mask=own)
    tl.store(sums + C + c, nothing, mask=own)
    return one, two


@triton.jit
def _batch_stats(
    z,
    stats,
    gamma,
    beta,
    run_mean,
    run_var,
    sums,
    count,
    rows,
    per,
    parts,
    C,
    eps,
    momentum,
    FULL: tl.constexpr,
    LOADS: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """Mean, 1 / deviation, factor and offset of each channel of z (rows, C), into `stats` (4, C).

    Sums are of distances from the running mean, in shares of the running deviation; every program has loaded both
    before the last one writes them.
    """
    i, j = tl.program_id(0), tl.program_id(1)
    c = j * BC + tl.arange(0, BC)
    own = c < C
    about = tl.load(run_mean + c, mask=own, other=0.0)
    weight = tl.load(gamma + c, mask=own, other=0.0)  # what the last program needs as well, or it would wait for it
    offset = tl.load(beta + c, mask=own, other=0.0)
    before = tl.load(run_var + c, mask=own, other=0.0)
    unit = tl.sqrt(before + eps) * FIXED_POINT_SHARE
    unit_square = (before + eps) * FIXED_POINT_SHARE
    total = tl.zeros((BM, BC), tl.float32)
    square = tl.zeros((BM, BC), tl.float32)
    z += i.to(tl.int64) * per * C
    end = tl.minimum(per, rows - i * per)
    for first in range(0, per, LOADS * BM):
        for tile in tl.static_range(LOADS):
            r = first + tile * BM + tl.arange(0, BM)
            here = (r < end)[:, None]
            if not FULL:
                here = here & own[None, :]
            x = tl.load(z + r[:, None] * C + c[None, :], mask=here, other=0.0).to(tl.float32)
            x = tl.where(here, x - about[None, :], 0.0)
            total += x
            square += x * x
    _accumulate(sums, C, c, own, tl.sum(total, 0) / unit, tl.sum(square, 0) / unit_square)
    if tl.atomic_add(count + j, 1, sem="acq_rel") == parts - 1:
        away, apart = _pop_sums(sums, C, c, own, BC)
        away = away * (unit / rows)
        var = tl.maximum(apart * (unit_square / rows) - away * away, 0.0)
        mean = about + away
        rstd = 1.0 / tl.sqrt(var + eps)
        factor = rstd * weight
        tl.store(stats + c, mean, mask=own)
        tl.store(stats + C + c, rstd, mask=own)
        tl.store(stats + 2 * C + c, factor, mask=own)
        tl.store(stats + 3 * C + c, offset - mean * factor, mask=own)
        tl.store(run_mean + c, about + momentum * away, mask=own)
        tl.store(run_var + c, before + momentum * (var * (rows / (rows - 1.0)) - before), mask=own)
        tl.store(count + j, 0)


@triton.jit
def _normalize(
    z,
    stats,
    other,
    other_stats,
    out,
    bits,
    rows,
    C,
    OTHER: tl.constexpr,
    RELU: tl.constexpr,
    BITS: tl.constexpr,
    FULL: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """out = relu(normalized z + other); OTHER: 0 none, 1 as it is, 2 normalized too. BITS: see `_unpack_mask`."""
    c, own, here, at, base = _tile(rows, C, FULL, BM, BC)
    x = tl.load(z + base + at, mask=here, other=0.0).to(tl.float32)
    if OTHER > 0:
        o = tl.load(other + base + at, mask=here, other=0.0).to(tl.float32)
    factor = tl.load(stats + 2 * C + c, mask=own, other=0.0)
    offset = tl.load(stats + 3 * C + c, mask=own, other=0.0)
    y = x * factor[None, :] + offset[None, :]
    if OTHER == 1:
        y += o
    if OTHER == 2:
        factor = tl.load(other_stats + 2 * C + c, mask=own, other=0.0)
        offset = tl.load(other_stats + 3 * C + c, mask=own, other=0.0)
        y += o * factor[None, :] + offset[None, :]
    if RELU:
        y = tl.maximum(y, 0.0)
    low = y.to(out.dtype.element_ty)
    tl.store(out + base + at, low, mask=here)
    if BITS:
        each = tl.reshape((low > 0).to(tl.int32), (BM, BC // 8, 8)) << tl.arange(0, 8)[None, None, :]
        r = tl.program_id(0) * BM + tl.arange(0, BM)
        to = r.to(tl.int64)[:, None] * (C // 8) + (tl.program_id(1) * (BC // 8) + tl.arange(0, BC // 8))[None, :]
        tl.store(bits + to, tl.sum(each, 2).to(tl.uint8), mask=(r < rows)[:, None])


@triton.jit
def _unpack_mask(bits, r, end, C, BM: tl.constexpr, BC: tl.constexpr):
    """Which of a tile's numbers are above zero: of eight channels of a row a byte, so that an eighth of it is read."""
    at = r[:, None] * (C // 8) + (tl.program_id(1) * (BC // 8) + tl.arange(0, BC // 8))[None, :]
    byte = tl.load(bits + at, mask=(r < end)[:, None], other=0).to(tl.int32)
    return tl.reshape((byte[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1, (BM, BC)) > 0


@triton.jit
def _backward_reduce(
    g1,
    g2,
    out,
    z,
    stats,
    gamma,
    grads,
    masked,
    sums,
    count,
    rows,
    per,
    parts,
    C,
    area,
    GIVEN: tl.constexpr,
    RELU: tl.constexpr,
    KEEP: tl.constexpr,
    FULL: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """Gradients of weight and offset, and what `_backward_apply` multiplies with, into `grads` (5, C).

    GIVEN: 0 one gradient for every `area` rows, 1 one a row, 2 two a row. RELU: 0 none, 1 from the sign of z, 2 from
    `out`, 3 from its bits, which stand in its place.
    KEEP: the gradient before the ReLU goes into `masked`.
    """
    i, j = tl.program_id(0), tl.program_id(1)
    c = j * BC + tl.arange(0, BC)
    own = c < C
    mean = tl.load(stats + c, mask=own, other=0.0)
    rstd = tl.load(stats + C + c, mask=own, other=0.0)
    weight = tl.load(gamma + c, mask=own, other=0.0)
    factor = tl.load(stats + 2 * C + c, mask=own, other=0.0)[None, :]
    offset = tl.load(stats + 3 * C + c, mask=own, other=0.0)[None, :]
    s1 = tl.zeros((BM, BC), tl.float32)
    s2 = tl.zeros((BM, BC), tl.float32)
    base = i.to(tl.int64) * per * C
    end = tl.minimum(per, rows - i * per)
    for first in range(0, per, 2 * BM):
        for half in tl.static_range(2):
            r = first + half * BM + tl.arange(0, BM)
            here = (r < end)[:, None]
            if not FULL:
                here = here & own[None, :]
            at = r[:, None] * C + c[None, :]
            x = tl.load(z + base + at, mask=here, other=0.0).to(tl.float32)
            if GIVEN == 0:
                image = (i * per + r) // area
                g = tl.load(g1 + image[:, None] * C + c[None, :], mask=here, other=0.0).to(tl.float32)
            else:
                g = tl.load(g1 + base + at, mask=here, other=0.0).to(tl.float32)
            if GIVEN == 2:
                g += tl.load(g2 + base + at, mask=here, other=0.0).to(tl.float32)
            if RELU == 1:
                g = tl.where(x * factor + offset > 0, g, 0.0)
            if RELU == 2:
                g = tl.where(tl.load(out + base + at, mask=here, other=0.0) > 0, g, 0.0)
            if RELU == 3:
                g = tl.where(_unpack_mask(out + i.to(tl.int64) * per * (C // 8), r, end, C, BM, BC), g, 0.0)
            if KEEP:
                low = g.to(masked.dtype.element_ty)
                tl.store(masked + base + at, low, mask=here)
                g = low.to(tl.float32)
            s1 += g
            s2 += g * (x - mean[None, :])
    _accumulate(sums, C, c, own, tl.sum(s1, 0) / FIXED_POINT_UNIT, tl.sum(s2, 0) * (rstd / FIXED_POINT_UNIT))
    if tl.atomic_add(count + j, 1, sem="acq_rel") == parts - 1:
        of_offset, of_weight = _pop_sums(sums, C, c, own, BC)
        of_offset = of_offset * FIXED_POINT_UNIT
        of_weight = of_weight * FIXED_POINT_UNIT
        slope = weight * rstd
        tilt = of_weight * rstd / rows
        tl.store(grads + c, of_weight, mask=own)
        tl.store(grads + C + c, of_offset, mask=own)
        tl.store(grads + 2 * C + c, slope, mask=own)
        tl.store(grads + 3 * C + c, -slope * tilt, mask=own)
        tl.store(grads + 4 * C + c, slope * (mean * tilt - of_offset / rows), mask=own)
        tl.store(count + j, 0)


@triton.jit
def _backward_apply(
    g1, z, stats, grads, dz, rows, C, RELU: tl.constexpr, FULL: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):
    """dz = grads[2] g + grads[3] z + grads[4], where the ReLU let through."""
    c, own, here, at, base = _tile(rows, C, FULL, BM, BC)
    g = tl.load(g1 + base + at, mask=here, other=0.0).to(tl.float32)
    x = tl.load(z + base + at, mask=here, other=0.0).to(tl.float32)
    if RELU:
        factor = tl.load(stats + 2 * C + c, mask=own, other=0.0)
        offset = tl.load(stats + 3 * C + c, mask=own, other=0.0)
        g = tl.where(x * factor[None, :] + offset[None, :] > 0, g, 0.0)
    d = g * tl.load(grads + 2 * C + c, mask=own, other=0.0)[None, :]
    d += x * tl.load(grads + 3 * C + c, mask=own, other=0.0)[None, :]
    d += tl.load(grads + 4 * C + c, mask=own, other=0.0)[None, :]
    tl.store(dz + base + at, d.to(dz.dtype.element_ty), mask=here)


@triton.jit
def _im2col(
    images, out, height, width, n, c, h, w, SEEN: tl.constexpr, K: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr
):
    """Pixel by pixel, K numbers each: its 3 x 3 neighbors in each channel; n, c, h, w are the images' strides."""
    image = tl.program_id(0).to(tl.int64)
    place, k = tl.arange(0, BH * BW), tl.arange(0, K)
    y, x = tl.program_id(1) * BH + place // BW, place % BW
    there = ((y < height) & (x < width))[:, None]
    near_y = y[:, None] + ((k % 9) // 3)[None, :] - 1
    near_x = x[:, None] + (k % 3)[None, :] - 1
    inside = (near_y >= 0) & (near_y < height) & (near_x >= 0) & (near_x < width) & (k < SEEN)[None, :] & there
    at = (k // 9)[None, :] * c + near_y * h + near_x * w
    found = tl.load(images + image * n + at, mask=inside, other=0.0)
    to = (y * width + x)[:, None] * K + k[None, :]
    tl.store(out + image * (height * width * K) + to, found.to(out.dtype.element_ty), mask=there)


def im2col(images: Tensor, dtype: torch.dtype, size: int) -> Tensor:
    """See `efcil.accel.stem.StemConv.im2col`; the result has its channels last."""
    count, channels, height, width = images.shape
    out = torch.empty(count, height, width, size, dtype=dtype, device=images.device)
    across = triton.next_power_of_2(width)
    down = max(1, IM2COL_PIXELS // across)
    tiles = {"SEEN": 9 * channels, "K": size, "BH": down, "BW": across, "num_warps": WARPS}
    _im2col[(count, triton.cdiv(height, down))](images, out, height, width, *images.stride(), **tiles)
    return out.permute(0, 3, 1, 2)


def _check_channels_last(*maps: Tensor) -> None:
    """A kernel would read other numbers from maps whose channels do not come last."""
    assert all(m.dim() < 4 or m.is_contiguous(memory_format=torch.channels_last) for m in maps)


def _tile_width(channels: int) -> int:
    return min(WIDE, triton.next_power_of_2(channels))


def _reduction_grid(z: Tensor, loads: int = 2) -> tuple[tuple[int, int], tuple[int, ...], dict[str, int]]:
    """Grid of a kernel that adds up and loads so many tiles at once, its sizes, and its tiles."""
    channels = z.shape[1]
    rows, wide, lot = z.numel() // channels, _tile_width(channels), loads * TILE
    beside = triton.cdiv(channels, wide)
    most = max(1, min(MAX_PROGRAMS // beside, triton.cdiv(rows, lot)))
    per = triton.cdiv(rows, most * lot) * lot
    parts = triton.cdiv(rows, per)
    tiles = {"FULL": channels % wide == 0, "BM": TILE, "BC": wide, "num_warps": WARPS}
    return (parts, beside), (rows, per, parts, channels), tiles


def _elementwise_grid(z: Tensor, each: int) -> tuple[tuple[int, int], tuple[int, int], dict[str, int]]:
    """Grid of a kernel that does not, and has so many rows a tile, its sizes, and its tiles."""
    channels = z.shape[1]
    rows, wide = z.numel() // channels, _tile_width(channels)
    return (
        (triton.cdiv(rows, each), triton.cdiv(channels, wide)),
        (rows, channels),
        {"FULL": channels % wide == 0, "BM": each, "BC": wide, "num_warps": WARPS},
    )


class ReductionWorkspace:
    """Where the kernels of a normalization add up, and count who has arrived; every kernel leaves zeros."""

    def __init__(self, bn: nn.BatchNorm2d):
        where = bn.weight.device
        self.sums = torch.zeros(2, bn.num_features, dtype=torch.int64, device=where)
        self.count = torch.zeros(triton.cdiv(bn.num_features, WIDE), dtype=torch.int32, device=where)


def batch_stats(bn: nn.BatchNorm2d, workspace: ReductionWorkspace, z: Tensor) -> Tensor:
    """See `efcil.accel.batch_norm.BatchNorm.stats`."""
    loads = LOADS if z.numel() >= FEW_ROWS * z.shape[1] else 2
    grid, sizes, tiles = _reduction_grid(z, loads)
    stats = bn.weight.new_empty(4, z.shape[1])
    _check_channels_last(z)
    state: tuple[Any, ...] = (bn.weight, bn.bias, bn.running_mean, bn.running_var, workspace.sums, workspace.count)
    _batch_stats[grid](z, stats, *state, *sizes, bn.eps, bn.momentum, LOADS=loads, **tiles)
    return stats


def normalize(
    z: Tensor, stats: Tensor, other: Tensor | None, other_stats: Tensor | None, relu: bool, return_mask: bool = False
) -> tuple[Tensor, Tensor]:
    """See `efcil.accel.batch_norm.BatchNorm.normalize` and `normalize_add_relu`; the mask is bits or the output."""
    out, kind = torch.empty_like(z), 0 if other is None else 1 if other_stats is None else 2
    grid, sizes, tiles = _elementwise_grid(z, ROWS_FORWARD)
    both = (z if other is None else other, stats if other_stats is None else other_stats)
    _check_channels_last(z, *both, out)
    as_bits = return_mask and tiles["FULL"] and tiles["BC"] % 8 == 0
    bits = torch.empty(z.numel() // 8, dtype=torch.uint8, device=z.device) if as_bits else out
    _normalize[grid](z, stats, *both, out, bits, *sizes, OTHER=kind, RELU=relu, BITS=as_bits, **tiles)
    return out, bits


def backward_reduce(
    bn: nn.BatchNorm2d,
    workspace: ReductionWorkspace,
    g: Tensor,
    other: Tensor | None,
    out: Tensor | None,
    z: Tensor,
    stats: Tensor,
    relu: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """See `efcil.accel.batch_norm.BatchNorm.backward_reduce`."""
    grads = bn.weight.new_empty(5, z.shape[1])
    masked = torch.empty_like(z) if keep else g
    grid, sizes, tiles = _reduction_grid(z)
    tensors = (g, g if other is None else other, z if out is None else out, z, stats, bn.weight, grads, masked)
    _check_channels_last(*tensors)
    given = 2 if other is not None else 1 if g.dim() == 4 else 0
    mask_kind = 1 if out is None else 3 if out.dtype == torch.uint8 else 2
    flags = {"GIVEN": given, "RELU": mask_kind if relu else 0, "KEEP": keep}
    _backward_reduce[grid](*tensors, workspace.sums, workspace.count, *sizes, z.shape[2] * z.shape[3], **flags, **tiles)
    return grads, masked


def backward_apply(g: Tensor, z: Tensor, stats: Tensor, grads: Tensor, relu: bool) -> Tensor:
    """See `efcil.accel.batch_norm.BatchNorm.backward_apply`."""
    dz = torch.empty_like(z)
    grid, sizes, tiles = _elementwise_grid(z, ROWS_BACKWARD)
    _check_channels_last(g, z, dz)
    _backward_apply[grid](g, z, stats, grads, dz, *sizes, RELU=relu, **tiles)
    return dz
