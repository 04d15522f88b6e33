"""An idea for the training step: a ResNet of basic blocks as one autograd function, with few kernels a layer.

    python benchmarks/fused.py [--out FILE.json] [--steps 200]    time it against the product's compiled step (CUDA)
    python benchmarks/fused.py --check                            compare it with autograd, in float32

Not part of the product: whether it pays is what is measured here. A compiled step of 128 images has 296 kernels, and
its normalisation and pointwise work takes twice what its bytes need (docs/performance.md). Here a normalisation takes
two kernels forward and two backward. Sums over rows are made in parts, and the last program to arrive adds them up; the
two gradients that meet at a block's output are added where they are read; gradients of weights, for which nothing
waits, are computed on a branch beside the others. All of it is captured in the step's graph as the compiled one is.

`--check` needs Triton alone: without a GPU its interpreter runs the kernels on the CPU.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import triton
import triton.language as tl

from efcil import backbones
from efcil.experiment import commit
from efcil.representations.lwf import LwF
from efcil.training.machine import Machine, own_stream

gpu = importlib.import_module("gpu" if __name__ == "__main__" else "benchmarks.gpu")  # the file beside this one


@triton.jit
def _moments(
    z,
    part,
    mean,
    rstd,
    run_mean,
    run_var,
    count,
    rows,
    C,
    chunks,
    eps,
    momentum,
    per: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """Mean and 1 / deviation of each channel of z (rows, C); the last program of a channel block adds up the parts."""
    i, j = tl.program_id(0), tl.program_id(1)
    c = j * BC + tl.arange(0, BC)
    total = tl.zeros((BM, BC), tl.float32)
    square = tl.zeros((BM, BC), tl.float32)
    for step in range(0, per, 2 * BM):  # two tiles on their way at once
        r = i * per + step + tl.arange(0, BM)
        s = r + BM
        x = tl.load(z + r[:, None] * C + c[None, :], mask=(r < rows)[:, None], other=0.0)
        y = tl.load(z + s[:, None] * C + c[None, :], mask=(s < rows)[:, None], other=0.0)
        x, y = x.to(tl.float32), y.to(tl.float32)
        total += x + y
        square += x * x + y * y
    own = tl.minimum(per, rows - i * per).to(tl.float32)
    m = tl.sum(total, 0) / own
    tl.store(part + i * C + c, m)
    tl.store(part + (chunks + i) * C + c, tl.sum(square, 0) - own * m * m)
    tl.debug_barrier()
    if tl.atomic_add(count + j, 1, sem="acq_rel") == chunks - 1:
        k = tl.arange(0, PARTS)  # all parts in one load: the others wait for this program
        n = tl.where(k < chunks, tl.minimum(per, rows - k * per), 0).to(tl.float32)[:, None]
        at = part + k[:, None] * C + c[None, :]
        ms = tl.load(at, mask=(k < chunks)[:, None], other=0.0, cache_modifier=".cg")
        vs = tl.load(at + chunks * C, mask=(k < chunks)[:, None], other=0.0, cache_modifier=".cg")
        mu = tl.sum(ms * n, 0) / rows
        away = ms - mu[None, :]
        var = tl.sum(vs + n * away * away, 0) / rows
        tl.store(mean + c, mu)
        tl.store(rstd + c, 1.0 / tl.sqrt(var + eps))
        tl.store(run_mean + c, (1 - momentum) * tl.load(run_mean + c) + momentum * mu)
        tl.store(run_var + c, (1 - momentum) * tl.load(run_var + c) + momentum * var * (rows / (rows - 1.0)))
        tl.store(count + j, 0)


@triton.jit
def _apply(
    z,
    mean,
    rstd,
    gamma,
    beta,
    other,
    out,
    rows,
    C,
    ADD: tl.constexpr,
    RELU: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """out = relu(normalised z + other)."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    here = (r < rows)[:, None]
    at = r[:, None] * C + c[None, :]
    x = tl.load(z + at, mask=here, other=0.0).to(tl.float32)
    slope = tl.load(rstd + c) * tl.load(gamma + c)
    y = x * slope[None, :] + (tl.load(beta + c) - tl.load(mean + c) * slope)[None, :]
    if ADD:
        y += tl.load(other + at, mask=here, other=0.0).to(tl.float32)
    if RELU:
        y = tl.maximum(y, 0.0)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=here)


@triton.jit
def _back_sums(
    g1,
    g2,
    out,
    z,
    mean,
    rstd,
    part,
    dgamma,
    dbeta,
    masked,
    count,
    rows,
    C,
    chunks,
    TWO: tl.constexpr,
    RELU: tl.constexpr,
    per: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """Sums over rows of g and g * normalised z; with two gradients their masked sum is written as well."""
    i, j = tl.program_id(0), tl.program_id(1)
    c = j * BC + tl.arange(0, BC)
    mu, sd = tl.load(mean + c)[None, :], tl.load(rstd + c)[None, :]
    s1 = tl.zeros((BM, BC), tl.float32)
    s2 = tl.zeros((BM, BC), tl.float32)
    for step in range(0, per, BM):
        r = i * per + step + tl.arange(0, BM)
        here = (r < rows)[:, None]
        at = r[:, None] * C + c[None, :]
        x = tl.load(z + at, mask=here, other=0.0)
        g = tl.load(g1 + at, mask=here, other=0.0)
        if RELU:
            o = tl.load(out + at, mask=here, other=0.0)
        if TWO:
            h = tl.load(g2 + at, mask=here, other=0.0)
            g = g.to(tl.float32) + h.to(tl.float32)
        g = g.to(tl.float32)
        if RELU:
            g = tl.where(o > 0, g, 0.0)
        if TWO:
            low = g.to(masked.dtype.element_ty)
            tl.store(masked + at, low, mask=here)
            g = low.to(tl.float32)
        s1 += g
        s2 += g * ((x.to(tl.float32) - mu) * sd)
    tl.store(part + i * C + c, tl.sum(s1, 0))
    tl.store(part + (chunks + i) * C + c, tl.sum(s2, 0))
    tl.debug_barrier()
    if tl.atomic_add(count + j, 1, sem="acq_rel") == chunks - 1:
        k = tl.arange(0, PARTS)
        at = part + k[:, None] * C + c[None, :]
        t1 = tl.sum(tl.load(at, mask=(k < chunks)[:, None], other=0.0, cache_modifier=".cg"), 0)
        t2 = tl.sum(tl.load(at + chunks * C, mask=(k < chunks)[:, None], other=0.0, cache_modifier=".cg"), 0)
        tl.store(dbeta + c, t1)
        tl.store(dgamma + c, t2)
        tl.store(count + j, 0)


@triton.jit
def _back_apply(
    g1, out, z, mean, rstd, gamma, dgamma, dbeta, dz, rows, C, RELU: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):
    """dz = gamma / deviation * (g - mean of g - normalised z * mean of g * normalised z)."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    here = (r < rows)[:, None]
    at = r[:, None] * C + c[None, :]
    g = tl.load(g1 + at, mask=here, other=0.0).to(tl.float32)
    x = tl.load(z + at, mask=here, other=0.0).to(tl.float32)
    if RELU:
        g = tl.where(tl.load(out + at, mask=here, other=0.0) > 0, g, 0.0)
    sd, mu = tl.load(rstd + c), tl.load(mean + c)
    slope, tilt = tl.load(gamma + c) * sd, tl.load(dgamma + c) * sd / rows
    d = slope[None, :] * (g - (tl.load(dbeta + c) / rows - mu * tilt)[None, :] - x * tilt[None, :])
    tl.store(dz + at, d.to(dz.dtype.element_ty), mask=here)


class Norm:
    """One batch normalisation, with what comes after it: the sum with a shortcut, and the ReLU."""

    SUMS, EACH = (64, 8), (64, 4)  # rows of a tile and warps, of kernels that add up and of those that do not
    PARTS = 256  # of the rows, at most: what the last program adds up

    def __init__(self, bn: nn.BatchNorm2d):
        self.bn, self.channels = bn, bn.num_features
        self.mean, self.rstd = torch.empty_like(bn.weight), torch.empty_like(bn.weight)
        self.count = torch.zeros_like(bn.weight, dtype=torch.int32)  # programs that have arrived
        self.part = bn.weight.new_empty(2 * self.PARTS * self.channels)

    def plan(self, z: Tensor) -> tuple[int, int, int, int]:
        """Rows, channels of a tile, parts, and rows of a part."""
        rows, wide = z.numel() // self.channels, min(64, self.channels)
        tile = 2 * self.SUMS[0]
        parts = max(1, min(self.PARTS, 264 * wide // self.channels, -(-rows // tile)))
        per = -(-rows // (parts * tile)) * tile
        return rows, wide, -(-rows // per), per

    def forward(self, z: Tensor, other: Tensor | None, relu: bool) -> Tensor:
        """relu(normalised z + other), all (n, c, h, w) with channels last."""
        bn, (rows, wide, parts, per) = self.bn, self.plan(z)
        sums = {"PARTS": self.PARTS, "BM": self.SUMS[0], "BC": wide, "num_warps": self.SUMS[1]}
        state = (self.mean, self.rstd, bn.running_mean, bn.running_var, self.count)
        grid = (parts, self.channels // wide)
        _moments[grid](z, self.part, *state, rows, self.channels, parts, bn.eps, bn.momentum, per=per, **sums)
        out = torch.empty_like(z)
        how = {"ADD": other is not None, "RELU": relu, "BM": self.EACH[0], "BC": wide, "num_warps": self.EACH[1]}
        both = (z if other is None else other, out)
        grid = (triton.cdiv(rows, self.EACH[0]), self.channels // wide)
        _apply[grid](z, self.mean, self.rstd, bn.weight, bn.bias, *both, rows, self.channels, **how)
        return out

    def backward(self, g: Tensor, other: Tensor | None, out: Tensor, z: Tensor, relu: bool) -> tuple[Tensor, ...]:
        """Gradients of z, of the sum, of the weight and of the bias, for the sum of two gradients of the output."""
        rows, wide, parts, per = self.plan(z)
        slope, offset = torch.empty_like(self.mean), torch.empty_like(self.mean)
        masked = g if other is None else torch.empty_like(z)
        sums = {"PARTS": self.PARTS, "BM": self.SUMS[0], "BC": wide, "num_warps": self.SUMS[1]}
        how = {"TWO": other is not None, "RELU": relu, "per": per, **sums}
        given = (g, g if other is None else other, out, z, self.mean, self.rstd, self.part, slope, offset, masked)
        _back_sums[(parts, self.channels // wide)](*given, self.count, rows, self.channels, parts, **how)
        dz = torch.empty_like(z)
        grid = (triton.cdiv(rows, self.EACH[0]), self.channels // wide)
        how = {"RELU": relu and other is None, "BM": self.EACH[0], "BC": wide, "num_warps": self.EACH[1]}
        given = (masked, out, z, self.mean, self.rstd, self.bn.weight, slope, offset, dz)
        _back_apply[grid](*given, rows, self.channels, **how)
        return dz, masked, slope, offset


def gradient(g: Tensor, x: Tensor, weight: Tensor, conv: nn.Conv2d, of_weight: bool) -> Tensor:
    """Of a convolution's input, or of its weight."""
    how = (None, conv.stride, conv.padding, (1, 1), False, (0, 0), 1, (not of_weight, of_weight, False))
    return torch.ops.aten.convolution_backward(g, x, weight, *how)[int(of_weight)]


class Fused:
    """Features of a ResNet in training: stem without pooling, basic blocks, shortcuts of 1 x 1 or none."""

    def __init__(self, net: nn.Module, dtype: torch.dtype, beside: bool = True):
        self.net, self.dtype = net, dtype
        stages = (net.layer1, net.layer2, net.layer3, net.layer4)
        self.blocks = [block for stage in stages if isinstance(stage, nn.Sequential) for block in stage]
        self.convs, self.norms = [net.conv1], [Norm(net.bn1)]
        for block in self.blocks:
            shortcut = () if block.downsample is None else (block.downsample,)
            self.convs += [block.conv1, block.conv2, *(s[0] for s in shortcut)]
            self.norms += [Norm(block.bn1), Norm(block.bn2), *(Norm(s[1]) for s in shortcut)]
        first = net.conv1.weight
        self.missing = -first.shape[1] % 8 if first.is_cuda else 0  # channels of zeros, as the product's stem has them
        filled = first.new_zeros(first.shape[0], self.missing, *first.shape[2:])
        weights = [torch.cat([first.detach(), filled], 1), *(conv.weight.detach() for conv in self.convs[1:])]
        self.low = [w.to(dtype, memory_format=torch.channels_last, copy=True) for w in weights]
        self.side = own_stream(first.device, "weights") if beside and first.is_cuda else None
        norms = [norm.bn for norm in self.norms]
        self.learned = [*(c.weight for c in self.convs), *(n.weight for n in norms), *(n.bias for n in norms)]

    def __call__(self, images: Tensor) -> Tensor:
        """Features (n, dim) of images (n, channels, h, w)."""
        return Backbone.apply(self, images, *self.learned)


class Backbone(torch.autograd.Function):
    """Forward and backward of all layers."""

    @staticmethod
    def forward(ctx: Any, fused: Fused, images: Tensor, *learned: Tensor) -> Tensor:
        """Keep what goes into each convolution and comes out of it."""
        net, low, norms = fused.net, fused.low, fused.norms
        stem = low[0][:, : images.shape[1]]
        torch._foreach_copy_([stem, *low[1:]], [conv.weight.detach() for conv in fused.convs])
        torch._foreach_add_([norm.bn.num_batches_tracked for norm in norms], 1)
        x = nn.functional.pad(images.to(fused.dtype), (0, 0, 0, 0, 0, fused.missing))
        x = x.contiguous(memory_format=torch.channels_last)
        z = torch.conv2d(x, low[0], None, net.conv1.stride, net.conv1.padding)
        a = norms[0].forward(z, None, True)
        ctx.fused, ctx.kept, k = fused, [(x, z, a)], 1
        for block in fused.blocks:
            z1 = torch.conv2d(a, low[k], None, block.conv1.stride, block.conv1.padding)
            a1 = norms[k].forward(z1, None, True)
            z2 = torch.conv2d(a1, low[k + 1], None, block.conv2.stride, block.conv2.padding)
            z3, other = None, a
            if block.downsample is not None:
                z3 = torch.conv2d(a, low[k + 2], None, block.downsample[0].stride)
                other = norms[k + 2].forward(z3, None, False)
            out = norms[k + 1].forward(z2, other, block.last_relu)
            ctx.kept.append((a, z1, a1, z2, z3, out))
            a, k = out, k + 2 + (z3 is not None)
        return a.mean((2, 3))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Through the blocks from the last to the first; a gradient is a pair where a shortcut begins."""
        fused, kept = ctx.fused, ctx.kept
        low, norms, side = fused.low, fused.norms, fused.side
        weights: list[Any] = [None] * len(norms)
        slopes, offsets = list(weights), list(weights)
        alive = []  # until the branch has joined

        def learn(k: int, dz: Tensor, x: Tensor) -> None:
            alive.append((dz, x))
            if side is None:
                weights[k] = gradient(dz, x, low[k], fused.convs[k], True)
                return
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                weights[k] = gradient(dz, x, low[k], fused.convs[k], True)

        def through(k: int, g: Tensor, other: Tensor | None, out: Tensor, z: Tensor, relu: bool, x: Tensor) -> Any:
            dz, total, slopes[k], offsets[k] = norms[k].backward(g, other, out, z, relu)
            learn(k, dz, x)
            return (gradient(dz, x, low[k], fused.convs[k], False) if k else None), total

        last = kept[-1][-1]
        spread = (g / (last.shape[2] * last.shape[3])).to(last.dtype)[:, :, None, None]
        one = torch.empty_like(last).copy_(spread.expand_as(last))
        two = torch.zeros_like(last)
        k = len(norms)
        for block, (x, z1, a1, z2, z3, out) in zip(reversed(fused.blocks), reversed(kept[1:]), strict=True):
            k -= 2 + (z3 is not None)
            inner, total = through(k + 1, one, two, out, z2, block.last_relu, a1)
            one, _ = through(k, inner, None, a1, z1, True, x)
            two = total if z3 is None else through(k + 2, total, None, out, z3, False, x)[0]
        x, z, a = kept[0]
        through(0, one, two, a, z, True, x)
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        weights[0] = weights[0][:, : fused.net.conv1.in_channels]
        full = [torch.empty_like(conv.weight) for conv in fused.convs]
        torch._foreach_copy_(full, weights)
        return None, None, *full, *slopes, *offsets


def check() -> float:
    """Largest deviation from autograd: features, running statistics and gradients, each against its largest number."""
    worst = 0.0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.allow_tf32 = False
    for name, width in (("resnet10", 8), ("resnet18", 16)):
        plain = backbones.build(name, width=width).to(device, memory_format=torch.channels_last).train()
        draw = torch.Generator().manual_seed(0)
        for module in plain.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.data.copy_(torch.rand(module.num_features, generator=draw) + 0.5)
                module.bias.data.copy_(torch.randn(module.num_features, generator=draw) / 3)
        other = copy.deepcopy(plain)
        images, towards = torch.randn(6, 3, 8, 8, generator=draw).to(device), torch.randn(6, 8 * width, generator=draw)
        found = []
        for net, features in ((plain, plain), (other, Fused(other, torch.float32))):
            answer = features(images.contiguous(memory_format=torch.channels_last))
            (answer * towards.to(device)).sum().backward()
            found.append([answer.detach(), *(p.grad for p in net.parameters()), *(b.float() for b in net.buffers())])
        worst = max(worst, *(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*found, strict=True)))
    return worst


def kernels(call: Callable[[], object], steps: int = 5, most: int = 30) -> list[tuple[str, float, float]]:
    """Return the kernels that take longest: name, how many in a step, microseconds of all of them in it."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            call()
        torch.cuda.synchronize()
    found = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)[:most]
    return [(e.key[:80], e.count / steps, e.self_device_time_total / steps) for e in found]


def measure(steps: int) -> Iterator[dict[str, Any]]:
    """Yield milliseconds of the product's captured step without a teacher, compiled and with `Fused` in its place."""
    size, machine = gpu.Size(), Machine.choose("cuda")
    task = gpu.stream(size, None)[0]
    images, labels = (machine.tensor(array[: size.batch]) for array in (task.images, task.labels))
    tiles = [((64, 8), (64, 4), 256), ((128, 8), (64, 4), 256), ((32, 4), (64, 4), 256), ((64, 8), (64, 4), 128)]
    tiles += [((128, 8), (128, 8), 256), ((128, 8), (32, 4), 256)]
    for tile, beside in [(None, True), *((tile, True) for tile in tiles), (tiles[0], False)]:
        lwf = LwF(gpu.options_of(size), 3, machine, 0)
        lwf.begin(task)
        if tile is not None:
            Norm.SUMS, Norm.EACH, Norm.PARTS = tile
            lwf.student_features = Fused(lwf.student.backbone, torch.bfloat16, beside)
        call = gpu.one_step(lwf, images, labels)
        gpu.timed(call, 20, 1, machine.device)
        found = gpu.timed(call, steps, 5, machine.device)
        row = {"sums, each, parts": tile, "beside": beside, "ms": 1000 * found["median"], "raw": found["raw"]}
        print(json.dumps({key: row[key] for key in row if key != "raw"}), flush=True)
        if tile in (None, tiles[0]):
            row["kernels"] = kernels(call)
        yield row


def main() -> None:
    """Check, or time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    worst = check()
    print(f"largest deviation from autograd: {worst:.1e}")
    if worst > (1e-4 if asked.check else 1e-2):  # what is timed is stored with its deviation
        sys.exit("the fused backbone is not the backbone")
    if asked.check:
        return
    if not torch.cuda.is_available():
        sys.exit("timing needs a CUDA device; --check does not")
    found = {"machine": Machine.choose("cuda").name, "torch": torch.__version__, "commit": commit()}
    found |= {"command": "python benchmarks/fused.py", "deviation": worst, "rows": []}
    for row in measure(asked.steps):
        found["rows"].append(row)
        if asked.out is not None:
            asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
