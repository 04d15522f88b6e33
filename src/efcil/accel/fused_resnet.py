"""Train a ResNet on a GPU as one autograd function: few kernels per layer, work off the critical path on branches.

A step of 128 small images is hundreds of kernels of a few microseconds. Here a layer is a convolution and two kernels
forward; backward two kernels and two convolutions (`efcil.accel.batch_norm`). While a step is captured as a CUDA graph,
two branches run beside its main one and fill what that leaves free:

    weights    backward each weight's gradient, for which nothing waits until all are there, and the weight's update
               where somebody takes gradients; forward, where nobody does, all weights in the precision of the products
    shortcut   the convolution and normalization of a shortcut, beside the layers that it goes around

Where two gradients meet, at the output of a block, they are added by the kernel that reads them. Outside of a capture,
and on a CPU, everything happens in order; the arithmetic is the same.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from efcil.accel.batch_norm import BatchNorm
from efcil.accel.stem import StemConv
from efcil.models.resnet import BasicBlock, Bottleneck, PadShortcut, ResNet

CAST_BUCKET = 1 << 22  # numbers in the gradients that are cast together, which is faster than one by one
# Gradients of a block's output: of the layers behind it, and of their shortcut.
OutputGradients = tuple[Tensor, Tensor | None]


def _channels_last(maps: Tensor) -> Tensor:
    """On a GPU with channels last, as its kernels want them."""
    return maps.contiguous(memory_format=torch.channels_last) if maps.is_cuda else maps


class ConvNorm:
    """A convolution and the normalization behind it."""

    def __init__(self, convolution: nn.Module, norm: nn.Module):
        assert isinstance(convolution, nn.Conv2d)
        assert isinstance(norm, nn.BatchNorm2d)
        assert isinstance(convolution.padding, tuple)
        self.convolution, self.norm = convolution, BatchNorm(norm)
        self.stride, self.padding = convolution.stride, convolution.padding

    def low_precision_buffer(self, dtype: torch.dtype) -> Tensor:
        """Room for the weight in another precision."""
        return torch.empty_like(self.convolution.weight, dtype=dtype)

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """(n, inputs, h, w) to (n, outputs, h / stride, w / stride)."""
        return torch.convolution(x, weight, None, self.stride, self.padding, (1, 1), False, (0, 0), 1)

    def gradient(self, dz: Tensor, x: Tensor, weight: Tensor, of_weight: bool) -> Tensor:
        """Of the convolution's input, or of its weight."""
        sizes = (None, self.stride, self.padding, (1, 1), False, (0, 0), 1, (not of_weight, of_weight, False))
        found: Tensor = torch.ops.aten.convolution_backward(dz, x, weight, *sizes)[int(of_weight)]
        return self.crop_gradient(found) if of_weight else found

    def crop_gradient(self, found: Tensor) -> Tensor:
        """Of a weight's gradient that part which is the weight's own."""
        return found


class FusedStem(ConvNorm):
    """The stem: a small one sees images that are laid out for it, a larger one those whose channels are filled up."""

    def __init__(self, stem: StemConv, norm: nn.Module):
        super().__init__(stem, norm)
        self.stem = stem
        if stem.is_small:
            self.stride, self.padding = (1, 1), (0, 0)

    def prepare_images(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Images as the convolution sees them."""
        return self.stem.im2col(images, dtype) if self.stem.is_small else self.pad_channels(images.to(dtype))

    def prepare_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight that goes with them."""
        weight = self.stem.weight.detach().to(dtype)
        return _channels_last(self.stem.weight_to_im2col(weight)) if self.stem.is_small else self.pad_channels(weight)

    def pad_channels(self, tensor: Tensor) -> Tensor:
        """Fill channels up as `StemConv` does."""
        return _channels_last(self.stem.pad_channels(tensor)) if tensor.is_cuda else tensor

    def crop_gradient(self, found: Tensor) -> Tensor:
        """Of a weight's gradient that part which is the weight's own."""
        return self.stem.weight_from_im2col(found) if self.stem.is_small else found[:, : self.stem.in_channels]


class ResidualBlock:
    """The layers of a residual block, and where they stand among all."""

    def __init__(self, block: BasicBlock | Bottleneck, numbers: Iterator[int]):
        self.layers = [(next(numbers), ConvNorm(*pair)) for pair in block.layers()]
        self.relu = block.last_relu
        self.pad = block.downsample if isinstance(block.downsample, PadShortcut) else None
        self.shortcut: tuple[int, ConvNorm] | None = None
        if isinstance(block.downsample, nn.Sequential):
            self.shortcut = (next(numbers), ConvNorm(*block.downsample))

    def all_layers(self) -> list[ConvNorm]:
        """Every layer, in the order of their numbers."""
        numbered = self.layers if self.shortcut is None else [*self.layers, self.shortcut]
        return [layer for _, layer in numbered]


class GradientSink(Protocol):
    """An optimizer that updates weights as soon as their gradients are computed, as `efcil.accel.optim.SGD`."""

    def apply(self, parameter: Tensor, gradient: Tensor) -> None:
        """Update a weight with its whole gradient."""

    def low_precision_copy(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight in another precision, which is updated with it."""


@dataclass
class SavedActivations:
    """What the backward pass needs of a layer: input, output of the convolution and its batch statistics."""

    x: Tensor
    z: Tensor
    stats: Tensor


@functools.cache
def _branch_stream(device: torch.device, name: str) -> torch.cuda.Stream:
    """Return the stream of a branch: one for all, since one thread captures at a time."""
    return torch.cuda.Stream(device, -1)  # behind steps, before what is prepared for later ones


class FusedResNet:
    """The features of a ResNet as it learns, products in a given precision; the parameters are the network's own.

    Only a whole network learns this way. Where a part of it is frozen, and where gradients of the images are asked for,
    `fallback` computes them.
    """

    def __init__(self, backbone: ResNet, dtype: torch.dtype, fallback: Callable[[Tensor], Tensor] | None = None):
        self.backbone, self.dtype = backbone, dtype
        self.fallback = backbone if fallback is None else fallback
        self.gradient_sink: GradientSink | None = None
        self.copies: list[Tensor] = []  # weights behind the stem in the precision of products, where they are followed
        self.started: weakref.WeakSet[ForwardBackward] = weakref.WeakSet()
        numbers = itertools.count(1)
        self.stem = FusedStem(StemConv.over(backbone.conv1), backbone.bn1)
        self.blocks = [ResidualBlock(block, numbers) for block in backbone.blocks()]
        self.layers = [self.stem, *(layer for block in self.blocks for layer in block.all_layers())]
        norms = [layer.norm.bn for layer in self.layers]
        self.parameters = [
            *(layer.convolution.weight for layer in self.layers),
            *(norm.weight for norm in norms),
            *(norm.bias for norm in norms),
        ]

    def __call__(self, images: Tensor) -> Tensor:
        """Features (n, dim) of images (n, channels, height, width)."""
        whole = all(layer.norm.bn.training for layer in self.layers) and all(p.requires_grad for p in self.parameters)
        if not whole or images.requires_grad or not torch.is_grad_enabled():
            return self.fallback(images)
        found: Tensor = _Features.apply(self, images, *self.parameters)
        return found

    def set_gradient_sink(self, gradient_sink: GradientSink | None) -> None:
        """Set the optimizer that updates weights during the backward pass, or None."""
        self.gradient_sink, self.copies = gradient_sink, []
        if gradient_sink is not None:
            self.copies = [
                gradient_sink.low_precision_copy(layer.convolution.weight, self.dtype) for layer in self.layers[1:]
            ]

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured, so that branches may be used."""
        return self.parameters[0].is_cuda and torch.cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Record what follows on a branch, which begins where the current one is now."""
        if not self.is_capturing:
            yield
            return
        branch = _branch_stream(self.parameters[0].device, name)
        branch.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(branch):
            yield

    def join(self, name: str) -> None:
        """Let the current branch wait for another."""
        if self.is_capturing:
            torch.cuda.current_stream().wait_stream(_branch_stream(self.parameters[0].device, name))


class _Features(torch.autograd.Function):
    """All layers forward and backward."""

    @staticmethod
    def forward(ctx: Any, net: FusedResNet, images: Tensor, *parameters: Tensor) -> Tensor:
        ctx.pass_ = ForwardBackward(net)
        return ctx.pass_.forward(images)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.pass_.backward(grad)


class ForwardBackward:
    """One batch on its way through the network and back."""

    def __init__(self, net: FusedResNet):
        self.net = net
        self.is_only_pass = True  # no other batch is on its way at the same time: what is found is the whole gradient
        self.saved: dict[int, SavedActivations] = {}
        self.relu_masks: list[Tensor] = []  # of the blocks: where their last ReLU did
        self.pooled: tuple[Tensor, Tensor] | None = None  # what the stem's pooling saw, and where its maxima are
        self.keepalive: list[Any] = []  # what a branch may still read
        self.gradients: list[Any] = [None] * len(net.parameters)  # None where somebody took it
        self.pending: list[tuple[int, Tensor]] = []  # weights' gradients in the precision of the products

    def forward(self, images: Tensor) -> Tensor:
        """Features (n, dim)."""
        net = self.net
        net.started.add(self)
        behind = net.copies or [layer.low_precision_buffer(net.dtype) for layer in net.layers[1:]]
        with net.fork("weights"):
            if not net.copies:
                torch._foreach_copy_(behind, [layer.convolution.weight.detach() for layer in net.layers[1:]])
            tracked = [layer.norm.bn.num_batches_tracked for layer in net.layers]
            torch._foreach_add_([count for count in tracked if count is not None], 1)
        self.low_weights = [net.stem.prepare_weight(net.dtype), *behind]
        z, stats = self.convolve(0, net.stem.prepare_images(images, net.dtype))
        x = net.stem.norm.normalize(z, stats, relu=True)
        if not isinstance(net.backbone.maxpool, nn.Identity):
            x = self.pool(x)
        net.join("weights")
        for block in net.blocks:
            x = self.forward_block(block, x)
        self.area = x.shape[2] * x.shape[3]
        return x.mean((2, 3))

    def convolve(self, number: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the convolution's output and its batch statistics."""
        layer = self.net.layers[number]
        z = layer.convolve(x, self.low_weights[number])
        stats = layer.norm.batch_stats(z)
        self.saved[number] = SavedActivations(x, z, stats)
        return z, stats

    def forward_block(self, block: ResidualBlock, x: Tensor) -> Tensor:
        """Compute what the block computes."""
        other, other_stats = x if block.pad is None else _channels_last(block.pad(x)), None
        if block.shortcut is not None:
            with self.net.fork("shortcut"):
                other, other_stats = self.convolve(block.shortcut[0], x)
        for number, layer in block.layers[:-1]:
            x = layer.norm.normalize(*self.convolve(number, x), relu=True)
        number, last = block.layers[-1]
        z, stats = self.convolve(number, x)
        if block.shortcut is not None:
            self.net.join("shortcut")
        x, relu_mask = last.norm.normalize_add_relu(z, stats, block.relu, other, other_stats)
        self.relu_masks.append(relu_mask)
        return x

    def backward(self, grad: Tensor) -> list[Tensor | None]:
        """Gradients of all that learned, for that of the features."""
        net = self.net
        if len(net.started) > 1:
            for each in net.started:
                each.is_only_pass = False
        net.started.discard(self)
        pair: OutputGradients = ((grad / self.area).to(net.dtype).contiguous(), None)
        for block, relu_mask in zip(reversed(net.blocks), reversed(self.relu_masks), strict=True):
            pair = self.backward_block(block, relu_mask, pair)
        if self.pooled is not None:
            pair = (self.unpool(pair), None)
        of_input, of_norm = pair
        grads, before = self.backward_reduce(0, relu=True, g=of_input, other=of_norm, keep=of_norm is not None)
        dz = self.backward_apply(0, of_norm is None, before, grads)
        self.update_weight(0, self.weight_gradient(0, dz))
        with net.fork("weights"):
            self.cast_gradients()
        net.join("weights")
        found, self.gradients = self.gradients, []  # held here they would be copied for the parameters
        return found

    def backward_block(self, block: ResidualBlock, relu_mask: Tensor, pair: OutputGradients) -> OutputGradients:
        """Return the gradients of the block's input: of its layers, and of its shortcut."""
        number = block.layers[-1][0]
        grads, before = self.backward_reduce(number, block.relu, pair[0], pair[1], relu_mask, keep=True)
        around: Tensor = before
        if block.shortcut is not None:
            with self.net.fork("shortcut"):
                around = self.backward_conv(block.shortcut[0], before)
        elif block.pad is not None:
            around = _channels_last(block.pad.backward_input(before, self.saved[block.layers[0][0]].x))
        g = self.input_gradient(number, self.backward_apply(number, False, before, grads))
        for inner, _ in reversed(block.layers[:-1]):
            g = self.backward_conv(inner, g, relu=True)
        if block.shortcut is not None:
            self.net.join("shortcut")
        self.retain(*pair, before)
        return g, around

    def backward_conv(self, number: int, g: Tensor, relu: bool = False) -> Tensor:
        """Return the gradient of a layer's input, for that of its output."""
        grads, _ = self.backward_reduce(number, relu, g)
        self.retain(g)
        return self.input_gradient(number, self.backward_apply(number, relu, g, grads))

    def backward_reduce(self, number: int, relu: bool, g: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Gradients of a normalization's weight and offset are found; return them, and the gradient before the ReLU."""
        saved, count = self.saved[number], len(self.net.layers)
        grads, before = self.net.layers[number].norm.backward_reduce(saved.z, saved.stats, relu, g, *more, **named)
        self.gradients[count + number], self.gradients[2 * count + number] = grads[0], grads[1]
        return grads, before

    def backward_apply(self, number: int, relu: bool, g: Tensor, grads: Tensor) -> Tensor:
        """Return the gradient of what came out of a convolution."""
        saved = self.saved[number]
        return self.net.layers[number].norm.backward_apply(saved.z, saved.stats, relu, g, grads)

    def input_gradient(self, number: int, dz: Tensor) -> Tensor:
        """Return the gradient of a convolution's input; that of its weight is computed beside it."""
        of_weight = self.weight_gradient(number, dz)
        found = self.net.layers[number].gradient(dz, self.saved[number].x, self.low_weights[number], of_weight=False)
        self.update_weight(number, of_weight)
        return found

    def weight_gradient(self, number: int, dz: Tensor) -> Tensor:
        """Begin the gradient of a convolution's weight, on the branch."""
        with self.net.fork("weights"):
            found = self.net.layers[number].gradient(dz, self.saved[number].x, self.low_weights[number], of_weight=True)
        self.retain(dz, found)
        return found

    def update_weight(self, number: int, of_weight: Tensor) -> None:
        """Begin a weight's update, on the branch, after all that reads the weight: it writes what products read."""
        with self.net.fork("weights"):
            if self.net.gradient_sink is not None and self.is_only_pass:
                self.net.gradient_sink.apply(self.net.layers[number].convolution.weight, of_weight)
            else:
                self.pending.append((number, of_weight))
            if sum(waiting.numel() for _, waiting in self.pending) >= CAST_BUCKET:
                self.cast_gradients()

    def cast_gradients(self) -> None:
        """Cast the pending gradients to the precision of their weights."""
        together: list[tuple[Tensor, Tensor]] = []
        for number, found in self.pending:
            full = self.gradients[number] = torch.empty_like(self.net.layers[number].convolution.weight)
            if full.stride() == found.stride():
                together.append((full, found))
            else:  # one of these in a list, and all of it would be copied one by one
                full.copy_(found)
        if together:
            torch._foreach_copy_([full for full, _ in together], [found for _, found in together])
        self.pending.clear()

    def retain(self, *tensors: Tensor | None) -> None:
        """Keep tensors alive that a branch reads: their memory must not be reused before the branch has ended."""
        if self.net.is_capturing:
            self.keepalive.append(tensors)

    def pool(self, x: Tensor) -> Tensor:
        """Max-pool the stem's output."""
        how = self.net.backbone.maxpool
        assert isinstance(how, nn.MaxPool2d)
        y, where = F.max_pool2d(x, how.kernel_size, how.stride, how.padding, return_indices=True)
        self.pooled = (x, where)
        return _channels_last(y)

    def unpool(self, pair: OutputGradients) -> Tensor:
        """Return the gradient of the stem's output."""
        how = self.net.backbone.maxpool
        assert isinstance(how, nn.MaxPool2d)
        assert self.pooled is not None
        x, where = self.pooled
        grad = pair[0] if pair[1] is None else pair[0] + pair[1]
        sizes = ([how.kernel_size] * 2, [how.stride] * 2, [how.padding] * 2, [1, 1], False)
        return _channels_last(torch.ops.aten.max_pool2d_with_indices_backward(grad, x, *sizes, where))
