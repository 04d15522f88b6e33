"""Batch normalisation in training, with what comes after it, taken apart so that each map is read as often as it must.

Of a channel of z with mean m and variance v over all pixels of a batch, r = 1 / sqrt(v + eps), weight w and offset b:

    y  = relu(r w z + (b - m r w) + other)                          forward
    g  = (sum of y's gradients) where the ReLU let through
    db = sum of g,  dw = r sum of g (z - m)                         backward, over all pixels
    dz = r w (g - db / n - (z - m) r dw / n)
       = r w  g  -  r w t  z  +  r w (m t - db / n),   t = r dw / n

So a map is read twice forward, once for m and v and once for y, and its gradients twice backward, once for db and dw
and once for dz. What a channel multiplies and adds with is worked out once:

    known (4, c)    m, r, r w, b - m r w
    grads (5, c)    dw, db, r w, -r w t, r w (m t - db / n)

On a GPU these are the kernels of `efcil.models.resnet_kernels`; elsewhere the lines below.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def _channel(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1)


def _wide(z: Tensor) -> Tensor:
    """In at least float32."""
    return z.to(torch.promote_types(z.dtype, torch.float32))


def _affine(z: Tensor, known: Tensor) -> Tensor:
    return _wide(z) * _channel(known[2]) + _channel(known[3])


class Norm:
    """One batch normalisation of a network that learns. Maps are (n, c, h, w), on a GPU with channels last."""

    def __init__(self, bn: nn.BatchNorm2d):
        self.bn = bn
        self.room: Any = None  # where the kernels of a GPU add up

    def _room(self) -> Any:
        from efcil.accel import resnet_kernels

        if self.room is None or self.room.sums.device != self.bn.weight.device:
            self.room = resnet_kernels.Room(self.bn)
        return self.room

    def known(self, z: Tensor) -> Tensor:
        """Return what `applied` needs of each channel (4, c); running statistics go on."""
        bn = self.bn
        if z.is_cuda:
            from efcil.accel import resnet_kernels

            return resnet_kernels.moments(bn, self._room(), z)
        var, mean = torch.var_mean(_wide(z), (0, 2, 3), correction=0)
        count = z.numel() / z.shape[1]
        rstd = (var + bn.eps).rsqrt()
        factor = rstd * bn.weight
        assert bn.running_mean is not None
        assert bn.running_var is not None
        assert bn.momentum is not None
        bn.running_mean.lerp_(mean, bn.momentum)
        bn.running_var.lerp_(var * (count / (count - 1)), bn.momentum)
        return torch.stack([mean, rstd, factor, bn.bias - mean * factor])

    def applied(
        self, z: Tensor, known: Tensor, relu: bool, other: Tensor | None = None, known_other: Tensor | None = None
    ) -> Tensor:
        """Return y; `other` is normalised as well where what is `known_other` of it is given."""
        if z.is_cuda:
            from efcil.accel import resnet_kernels

            return resnet_kernels.apply(z, known, other, known_other, relu)[0]
        y = _affine(z, known)
        if other is not None:
            y = y + (other if known_other is None else _affine(other, known_other))
        return (y.relu() if relu else y).to(z.dtype)

    def ended(
        self, z: Tensor, known: Tensor, relu: bool, other: Tensor, known_other: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return y, and what tells `back_sums` where it is above zero: on a GPU a bit of each number, elsewhere y."""
        if z.is_cuda:
            from efcil.accel import resnet_kernels

            return resnet_kernels.apply(z, known, other, known_other, relu, told=relu)
        y = self.applied(z, known, relu, other, known_other)
        return y, y

    def back_sums(
        self,
        z: Tensor,
        known: Tensor,
        relu: bool,
        g: Tensor,
        other: Tensor | None = None,
        out: Tensor | None = None,
        keep: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return grads (5, c), and the gradient before the ReLU if it is to be kept, else the one that was given.

        There is one gradient of y or two, which are added; one of (n, c) is the same for all pixels. Where the ReLU let
        through is told from what `ended` says, `out`, or without it from z alone, where nothing was added.
        """
        bn = self.bn
        if z.is_cuda:
            from efcil.accel import resnet_kernels

            return resnet_kernels.back_sums(bn, self._room(), g, other, out, z, known, relu, keep)
        whole = g if g.dim() == 4 else g[:, :, None, None].expand_as(z)
        masked = self._masked(z, known, relu, _wide(whole) + (0 if other is None else other), out)
        if keep:
            g = masked.to(z.dtype)
            masked = _wide(g)
        mean, rstd = known[0], known[1]
        of_offset = masked.sum((0, 2, 3))
        of_weight = rstd * (masked * (_wide(z) - _channel(mean))).sum((0, 2, 3))
        count, slope = z.numel() / z.shape[1], rstd * bn.weight
        tilt = of_weight * rstd / count
        return torch.stack([of_weight, of_offset, slope, -slope * tilt, slope * (mean * tilt - of_offset / count)]), g

    def back(self, z: Tensor, known: Tensor, relu: bool, g: Tensor, grads: Tensor) -> Tensor:
        """Return dz; with `relu` the gradient is one behind the ReLU."""
        if z.is_cuda:
            from efcil.accel import resnet_kernels

            return resnet_kernels.back_apply(g, z, known, grads, relu)
        masked = self._masked(z, known, relu, _wide(g), None)
        return (masked * _channel(grads[2]) + _wide(z) * _channel(grads[3]) + _channel(grads[4])).to(z.dtype)

    @staticmethod
    def _masked(z: Tensor, known: Tensor, relu: bool, g: Tensor, out: Tensor | None) -> Tensor:
        if not relu:
            return g
        return torch.where((_affine(z, known) if out is None else out) > 0, g, 0)
