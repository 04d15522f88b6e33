"""Batch normalization in training, with what comes after it, taken apart so that each map is read as often as it must.

Of a channel of z with mean m and variance v over all pixels of a batch, r = 1 / sqrt(v + eps), weight w and offset b:

    y  = relu(r w z + (b - m r w) + other)                          forward
    g  = (sum of y's gradients) where the ReLU let through
    db = sum of g,  dw = r sum of g (z - m)                         backward, over all pixels
    dz = r w (g - db / n - (z - m) r dw / n)
       = r w  g  -  r w t  z  +  r w (m t - db / n),   t = r dw / n

So a map is read twice forward, once for m and v and once for y, and its gradients twice backward, once for db and dw
and once for dz. What a channel multiplies and adds with is worked out once:

    stats (4, c)    m, r, r w, b - m r w
    grads (5, c)    dw, db, r w, -r w t, r w (m t - db / n)

On a GPU these are the kernels of `efcil.accel.resnet_kernels`; elsewhere the lines below.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def _channel(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1)


def _upcast(z: Tensor) -> Tensor:
    """In at least float32."""
    return z.to(torch.promote_types(z.dtype, torch.float32))


def _affine(z: Tensor, stats: Tensor) -> Tensor:
    return _upcast(z) * _channel(stats[2]) + _channel(stats[3])


class BatchNorm:
    """One batch normalization of a network that learns. Maps are (n, c, h, w), on a GPU with channels last."""

    def __init__(self, bn: nn.BatchNorm2d):
        self.bn = bn
        self.workspace: Any = None  # where the kernels of a GPU add up

    def _get_workspace(self) -> Any:
        from efcil.accel import resnet_kernels

        if self.workspace is None or self.workspace.sums.device != self.bn.weight.device:
            self.workspace = resnet_kernels.ReductionWorkspace(self.bn)
        return self.workspace

    def batch_stats(self, z: Tensor) -> Tensor:
        """Return each channel's factors for `normalize` (4, c) and update the running statistics."""
        bn = self.bn
        if z.is_cuda:
            from efcil.accel import resnet_kernels

            return resnet_kernels.batch_stats(bn, self._get_workspace(), z)
        var, mean = torch.var_mean(_upcast(z), (0, 2, 3), correction=0)
        count = z.numel() / z.shape[1]
        rstd = (var + bn.eps).rsqrt()
        factor = rstd * bn.weight
        assert bn.running_mean is not None
        assert bn.running_var is not None
        assert bn.momentum is not None
        bn.running_mean.lerp_(mean, bn.momentum)
        bn.running_var.lerp_(var * (count / (count - 1)), bn.momentum)
        return torch.stack([mean, rstd, factor, bn.bias - mean * factor])

    def normalize(
        self, z: Tensor, stats: Tensor, relu: bool, other: Tensor | None = None, other_stats: Tensor | None = None
    ) -> Tensor:
        """Return y; with `other_stats`, `other` is normalized as well."""
        if z.is_cuda:
            from efcil.accel import resnet_kernels

            return resnet_kernels.normalize(z, stats, other, other_stats, relu)[0]
        y = _affine(z, stats)
        if other is not None:
            y = y + (other if other_stats is None else _affine(other, other_stats))
        return (y.relu() if relu else y).to(z.dtype)

    def normalize_add_relu(
        self, z: Tensor, stats: Tensor, relu: bool, other: Tensor, other_stats: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return y and a mask for `backward_reduce` of where it is above zero: bits on a GPU, elsewhere y itself."""
        if z.is_cuda:
            from efcil.accel import resnet_kernels

            return resnet_kernels.normalize(z, stats, other, other_stats, relu, return_mask=relu)
        y = self.normalize(z, stats, relu, other, other_stats)
        return y, y

    def backward_reduce(
        self,
        z: Tensor,
        stats: Tensor,
        relu: bool,
        g: Tensor,
        other: Tensor | None = None,
        out: Tensor | None = None,
        keep: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return grads (5, c), and the gradient before the ReLU if it is to be kept, else the one that was given.

        There is one gradient of y or two, which are added; one of (n, c) is the same for all pixels. Where the ReLU let
        through is the mask `out` of `normalize_add_relu`; without it, it is computed from z, if nothing was added.
        """
        bn = self.bn
        if z.is_cuda:
            from efcil.accel import resnet_kernels

            return resnet_kernels.backward_reduce(bn, self._get_workspace(), g, other, out, z, stats, relu, keep)
        whole = g if g.dim() == 4 else g[:, :, None, None].expand_as(z)
        masked = self._masked(z, stats, relu, _upcast(whole) + (0 if other is None else other), out)
        if keep:
            g = masked.to(z.dtype)
            masked = _upcast(g)
        mean, rstd = stats[0], stats[1]
        of_offset = masked.sum((0, 2, 3))
        of_weight = rstd * (masked * (_upcast(z) - _channel(mean))).sum((0, 2, 3))
        count, slope = z.numel() / z.shape[1], rstd * bn.weight
        tilt = of_weight * rstd / count
        return torch.stack([of_weight, of_offset, slope, -slope * tilt, slope * (mean * tilt - of_offset / count)]), g

    def backward_apply(self, z: Tensor, stats: Tensor, relu: bool, g: Tensor, grads: Tensor) -> Tensor:
        """Return dz; with `relu` the gradient is one behind the ReLU."""
        if z.is_cuda:
            from efcil.accel import resnet_kernels

            return resnet_kernels.backward_apply(g, z, stats, grads, relu)
        masked = self._masked(z, stats, relu, _upcast(g), None)
        return (masked * _channel(grads[2]) + _upcast(z) * _channel(grads[3]) + _channel(grads[4])).to(z.dtype)

    @staticmethod
    def _masked(z: Tensor, stats: Tensor, relu: bool, g: Tensor, out: Tensor | None) -> Tensor:
        if not relu:
            return g
        return torch.where((_affine(z, stats) if out is None else out) > 0, g, 0)
