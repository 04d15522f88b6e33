"""A ResNet that learns in a captured step: gradients of its weights are computed beside everything else.

In the backward pass the gradient of a layer's input is what the layer before it waits for; for the gradient of its
weight nothing waits until all are there. So while a step is captured as a CUDA graph, weights' gradients are recorded
on a second stream: a branch of the graph, whose kernels fill what those of the main chain leave free.

    spread      all weights to the precision of the products; backward the branch ends, and gradients are spread back
    convolved   a convolution; backward the branch goes on at each one

Both are operations that a compiler calls and does not look into. It must not write again where the branch may still
read: what is compiled of this needs `allow_buffer_reuse` and `inplace_buffers` off (`Machine.compiled`). Outside of a
capture, and on a CPU, everything happens in order, and the arithmetic is the same everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from efcil.backbones.resnet import BasicBlock, Bottleneck, PadShortcut, ResNet, Stem

_HOW = "Tensor x, Tensor weight, int[] stride, int[] padding"


@functools.cache
def _branch(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of the branch: one for all, since one thread captures at a time; it goes last."""
    return torch.cuda.Stream(device)


def _capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _gradient(grad: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any, of_weight: bool) -> Tensor:
    """Of a convolution's input, or of its weight."""
    how = (None, stride, padding, (1, 1), False, (0, 0), 1, (not of_weight, of_weight, False))
    found: Tensor = torch.ops.aten.convolution_backward(grad, x, weight, *how)[int(of_weight)]
    return found


def _copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = _copies(tensors, dtype)
    torch._foreach_copy_(copies, list(tensors))
    return copies


@torch.library.custom_op("efcil::spread", mutates_args=(), schema="(Tensor[] tensors, ScalarType dtype) -> Tensor[]")
def spread(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies in another precision, all in one launch."""
    return _cast(tensors, dtype)


@torch.library.custom_op("efcil::gathered", mutates_args=(), schema="(Tensor[] tensors, ScalarType dtype) -> Tensor[]")
def gathered(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The same, when the branch that made them has ended."""
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        branch = _branch(tensors[0].device)
        if _capturing(branch):
            torch.cuda.current_stream().wait_stream(branch)
    return _cast(tensors, dtype)


@torch.library.custom_op("efcil::convolved", mutates_args=(), schema=f"({_HOW}) -> Tensor")
def convolved(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """x (n, inputs, h, w) and weight (outputs, inputs, k, k), both of one precision."""
    return torch.convolution(x, weight, None, stride, padding, (1, 1), False, (0, 0), 1)


@torch.library.custom_op("efcil::both_gradients", mutates_args=(), schema=f"(Tensor grad, {_HOW}) -> (Tensor, Tensor)")
def both_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Of input and weight; while a step is captured the second on the branch, where it waits for `grad` alone."""
    how = (grad, x, weight, stride, padding)
    if not (grad.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _gradient(*how, False), _gradient(*how, True)
    branch = _branch(grad.device)
    branch.wait_stream(torch.cuda.current_stream())
    of_input = _gradient(*how, False)
    for read in (grad, x, weight):
        read.record_stream(branch)  # its memory is not handed out again in this capture
    with torch.cuda.stream(branch):
        return of_input, _gradient(*how, True)


@spread.register_fake
def _(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return _copies(tensors, dtype)


@gathered.register_fake
def _(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return _copies(tensors, dtype)


@convolved.register_fake
def _(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    return torch.convolution(x, weight, None, stride, padding, (1, 1), False, (0, 0), 1)


@both_gradients.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> tuple[Tensor, Tensor]:
    how = (grad, x, weight, stride, padding)
    return _gradient(*how, False), _gradient(*how, True)


def _keep_precision(ctx: Any, inputs: tuple[list[Tensor], torch.dtype], output: list[Tensor]) -> None:
    ctx.dtype = inputs[0][0].dtype


def _spread_back(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor], None]:
    return torch.ops.efcil.gathered(grads, ctx.dtype), None


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Sequence[int], Sequence[int]], output: Tensor) -> None:
    x, weight, ctx.stride, ctx.padding = inputs
    ctx.save_for_backward(x, weight)


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, weight = ctx.saved_tensors
    how = (grad, x, weight, ctx.stride, ctx.padding)
    of_input: Tensor | None = None
    of_weight: Tensor | None = None
    if ctx.needs_input_grad[0] and ctx.needs_input_grad[1]:
        of_input, of_weight = torch.ops.efcil.both_gradients(*how)
    elif ctx.needs_input_grad[1]:
        of_weight = _gradient(*how, True)  # of the first layer that learns: nothing is left to do beside it
    elif ctx.needs_input_grad[0]:
        of_input = _gradient(*how, False)
    return of_input, of_weight, None, None


spread.register_autograd(_spread_back, setup_context=_keep_precision)
convolved.register_autograd(_back, setup_context=_keep)


class InTraining:
    """The features of a ResNet as it learns, products in a given precision; the parameters are the network's own."""

    def __init__(self, backbone: ResNet, dtype: torch.dtype):
        self.backbone, self.dtype = backbone, dtype
        # As they stand in each block: its convolutions, then its shortcut's. `features` takes them in this order.
        self.convolutions = [module for module in backbone.modules() if isinstance(module, nn.Conv2d)]
        self.blocks = backbone.blocks()

    def features(self, images: Tensor) -> Tensor:
        """Features (n, dim) of images (n, channels, height, width)."""
        net, weights = self.backbone, iter(self._weights())
        x = _filled(net.conv1, images).to(self.dtype)
        x = net.maxpool(net.relu(net.bn1(_convolved(net.conv1, x, next(weights)))))
        for block in self.blocks:
            x = _through(block, x, weights)
        return x.mean((2, 3))

    def _weights(self) -> list[Tensor]:
        """All convolutions' weights in the precision of the products; those that do not learn have no gradient."""
        filled = [_filled(convolution, convolution.weight) for convolution in self.convolutions]
        learning = [weight for weight in filled if weight.requires_grad]
        spread_out = iter(torch.ops.efcil.spread(learning, self.dtype) if learning else [])
        return [next(spread_out) if weight.requires_grad else weight.to(self.dtype) for weight in filled]


def _filled(convolution: nn.Conv2d, tensor: Tensor) -> Tensor:
    """Fill channels up as `Stem` does; before weights are spread, so that no gradient is cut before it is gathered."""
    return convolution.fill(tensor) if isinstance(convolution, Stem) and tensor.is_cuda else tensor


def _convolved(convolution: nn.Conv2d, x: Tensor, weight: Tensor) -> Tensor:
    found: Tensor = torch.ops.efcil.convolved(x, weight, convolution.stride, convolution.padding)
    return found


def _through(block: BasicBlock | Bottleneck, x: Tensor, weights: Iterator[Tensor]) -> Tensor:
    """Compute what the block computes."""
    y = block.relu(block.bn1(_convolved(block.conv1, x, next(weights))))
    y = block.bn2(_convolved(block.conv2, y, next(weights)))
    if isinstance(block, Bottleneck):
        y = block.bn3(_convolved(block.conv3, block.relu(y), next(weights)))
    shortcut = x
    if isinstance(block.downsample, PadShortcut):
        shortcut = block.downsample(x)
    elif isinstance(block.downsample, nn.Sequential):
        convolution, norm = block.downsample
        assert isinstance(convolution, nn.Conv2d)
        shortcut = norm(_convolved(convolution, x, next(weights)))
    return F.relu(y + shortcut) if block.last_relu else y + shortcut
