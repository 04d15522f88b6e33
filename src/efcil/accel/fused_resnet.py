"""A ResNet that learns on a GPU, as one function: few kernels a layer, and what nobody waits for beside the others.

A step of 128 small images is hundreds of kernels of a few microseconds. Here a layer is a convolution and two kernels
forward; backward two kernels and two convolutions (`efcil.accel.batch_norm`). While a step is captured as a CUDA graph,
two branches run beside its main one and fill what that leaves free:

    weights    backward each weight's gradient, for which nothing waits until all are there, and the weight's update
               where somebody takes gradients; forward, where nobody does, all weights in the precision of the products
    shortcut   the convolution and normalisation of a shortcut, beside the layers that it goes around

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

from efcil.accel.batch_norm import Norm
from efcil.models.resnet import BasicBlock, Bottleneck, PadShortcut, ResNet, Stem

LOT = 1 << 22  # numbers in the gradients that are brought to another precision at once: one by one they take longer
Pair = tuple[Tensor, Tensor | None]  # gradients of a block's output: of the layers behind it, and of their shortcut


def _last(maps: Tensor) -> Tensor:
    """On a GPU with channels last, as its kernels want them."""
    return maps.contiguous(memory_format=torch.channels_last) if maps.is_cuda else maps


class Layer:
    """A convolution and the normalisation behind it."""

    def __init__(self, convolution: nn.Module, norm: nn.Module):
        assert isinstance(convolution, nn.Conv2d)
        assert isinstance(norm, nn.BatchNorm2d)
        assert isinstance(convolution.padding, tuple)
        self.convolution, self.norm = convolution, Norm(norm)
        self.stride, self.padding = convolution.stride, convolution.padding

    def low(self, dtype: torch.dtype) -> Tensor:
        """Room for the weight in another precision."""
        return torch.empty_like(self.convolution.weight, dtype=dtype)

    def convolved(self, x: Tensor, weight: Tensor) -> Tensor:
        """(n, inputs, h, w) to (n, outputs, h / stride, w / stride)."""
        return torch.convolution(x, weight, None, self.stride, self.padding, (1, 1), False, (0, 0), 1)

    def gradient(self, dz: Tensor, x: Tensor, weight: Tensor, of_weight: bool) -> Tensor:
        """Of the convolution's input, or of its weight."""
        sizes = (None, self.stride, self.padding, (1, 1), False, (0, 0), 1, (not of_weight, of_weight, False))
        found: Tensor = torch.ops.aten.convolution_backward(dz, x, weight, *sizes)[int(of_weight)]
        return self.own(found) if of_weight else found

    def own(self, found: Tensor) -> Tensor:
        """Of a weight's gradient that part which is the weight's own."""
        return found


class First(Layer):
    """The stem: a small one sees images that are laid out for it, a larger one those whose channels are filled up."""

    def __init__(self, stem: Stem, norm: nn.Module):
        super().__init__(stem, norm)
        self.stem = stem
        if stem.is_small:
            self.stride, self.padding = (1, 1), (0, 0)

    def images(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Images as the convolution sees them."""
        return self.stem.patches(images, dtype) if self.stem.is_small else self.filled(images.to(dtype))

    def weight(self, dtype: torch.dtype) -> Tensor:
        """The weight that goes with them."""
        weight = self.stem.weight.detach().to(dtype)
        return _last(self.stem.over_patches(weight)) if self.stem.is_small else self.filled(weight)

    def filled(self, tensor: Tensor) -> Tensor:
        """Fill channels up as `Stem` does."""
        return _last(self.stem.fill(tensor)) if tensor.is_cuda else tensor

    def own(self, found: Tensor) -> Tensor:
        """Of a weight's gradient that part which is the weight's own."""
        return self.stem.of_patches(found) if self.stem.is_small else found[:, : self.stem.in_channels]


class Block:
    """The layers of a residual block, and where they stand among all."""

    def __init__(self, block: BasicBlock | Bottleneck, numbers: Iterator[int]):
        self.layers = [(next(numbers), Layer(*pair)) for pair in block.layers()]
        self.relu = block.last_relu
        self.pad = block.downsample if isinstance(block.downsample, PadShortcut) else None
        self.shortcut: tuple[int, Layer] | None = None
        if isinstance(block.downsample, nn.Sequential):
            self.shortcut = (next(numbers), Layer(*block.downsample))

    def all(self) -> list[Layer]:
        """Every layer, in the order of their numbers."""
        numbered = self.layers if self.shortcut is None else [*self.layers, self.shortcut]
        return [layer for _, layer in numbered]


class Updates(Protocol):
    """Who updates weights as soon as their gradients are found, as `efcil.accel.optim.SGD` does."""

    def take(self, parameter: Tensor, gradient: Tensor) -> None:
        """Update a weight with its whole gradient."""

    def followed(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight in another precision, which is updated with it."""


@dataclass
class Kept:
    """What the backward pass needs of a layer: its input, what came out of the convolution, and what is known of it."""

    x: Tensor
    z: Tensor
    known: Tensor


@functools.cache
def _branch(device: torch.device, name: str) -> torch.cuda.Stream:
    """Return the stream of a branch: one for all, since one thread captures at a time."""
    return torch.cuda.Stream(device, -1)  # behind steps, before what is prepared for later ones


class InTraining:
    """The features of a ResNet as it learns, products in a given precision; the parameters are the network's own.

    Only a whole network learns this way. Where a part of it rests, and where gradients of the images are asked for,
    `otherwise` computes them.
    """

    def __init__(self, backbone: ResNet, dtype: torch.dtype, otherwise: Callable[[Tensor], Tensor] | None = None):
        self.backbone, self.dtype = backbone, dtype
        self.otherwise = backbone if otherwise is None else otherwise
        self.updates: Updates | None = None
        self.copies: list[Tensor] = []  # weights behind the stem in the precision of products, where they are followed
        self.started: weakref.WeakSet[Pass] = weakref.WeakSet()
        numbers = itertools.count(1)
        self.stem = First(backbone.conv1, backbone.bn1)
        self.blocks = [Block(block, numbers) for block in backbone.blocks()]
        self.layers = [self.stem, *(layer for block in self.blocks for layer in block.all())]
        norms = [layer.norm.bn for layer in self.layers]
        self.learned = [
            *(layer.convolution.weight for layer in self.layers),
            *(norm.weight for norm in norms),
            *(norm.bias for norm in norms),
        ]

    def __call__(self, images: Tensor) -> Tensor:
        """Features (n, dim) of images (n, channels, height, width)."""
        whole = all(layer.norm.bn.training for layer in self.layers) and all(p.requires_grad for p in self.learned)
        if not whole or images.requires_grad or not torch.is_grad_enabled():
            return self.otherwise(images)
        found: Tensor = _Features.apply(self, images, *self.learned)
        return found

    def hand_over(self, updates: Updates | None) -> None:
        """Let somebody update weights while other gradients are still computed, or nobody any more."""
        self.updates, self.copies = updates, []
        if updates is not None:
            self.copies = [updates.followed(layer.convolution.weight, self.dtype) for layer in self.layers[1:]]

    @property
    def capturing(self) -> bool:
        """Whether what happens now is recorded, and may be in branches."""
        return self.learned[0].is_cuda and torch.cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def beside(self, name: str) -> Iterator[None]:
        """Record what follows on a branch, which begins where the current one is now."""
        if not self.capturing:
            yield
            return
        branch = _branch(self.learned[0].device, name)
        branch.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(branch):
            yield

    def join(self, name: str) -> None:
        """Let the current branch wait for another."""
        if self.capturing:
            torch.cuda.current_stream().wait_stream(_branch(self.learned[0].device, name))


class _Features(torch.autograd.Function):
    """All layers forward and backward."""

    @staticmethod
    def forward(ctx: Any, net: InTraining, images: Tensor, *learned: Tensor) -> Tensor:
        ctx.pass_ = Pass(net)
        return ctx.pass_.forward(images)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.pass_.backward(grad)


class Pass:
    """One batch on its way through the network and back."""

    def __init__(self, net: InTraining):
        self.net = net
        self.alone = True  # no other batch is on its way at the same time: what is found is the whole gradient
        self.kept: dict[int, Kept] = {}
        self.let_through: list[Tensor] = []  # of the blocks: where their last ReLU did
        self.pooled: tuple[Tensor, Tensor] | None = None  # what the stem's pooling saw, and where its maxima are
        self.alive: list[Any] = []  # what a branch may still read
        self.gradients: list[Any] = [None] * len(net.learned)  # None where somebody took it
        self.waiting: list[tuple[int, Tensor]] = []  # weights' gradients in the precision of the products

    def forward(self, images: Tensor) -> Tensor:
        """Features (n, dim)."""
        net = self.net
        net.started.add(self)
        behind = net.copies or [layer.low(net.dtype) for layer in net.layers[1:]]
        with net.beside("weights"):
            if not net.copies:
                torch._foreach_copy_(behind, [layer.convolution.weight.detach() for layer in net.layers[1:]])
            tracked = [layer.norm.bn.num_batches_tracked for layer in net.layers]
            torch._foreach_add_([count for count in tracked if count is not None], 1)
        self.low = [net.stem.weight(net.dtype), *behind]
        z, known = self.convolved(0, net.stem.images(images, net.dtype))
        x = net.stem.norm.applied(z, known, relu=True)
        if not isinstance(net.backbone.maxpool, nn.Identity):
            x = self.pool(x)
        net.join("weights")
        for block in net.blocks:
            x = self.through(block, x)
        self.area = x.shape[2] * x.shape[3]
        return x.mean((2, 3))

    def convolved(self, number: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the convolution makes of x, and what is known of it."""
        layer = self.net.layers[number]
        z = layer.convolved(x, self.low[number])
        known = layer.norm.known(z)
        self.kept[number] = Kept(x, z, known)
        return z, known

    def through(self, block: Block, x: Tensor) -> Tensor:
        """Compute what the block computes."""
        other, known_other = x if block.pad is None else _last(block.pad(x)), None
        if block.shortcut is not None:
            with self.net.beside("shortcut"):
                other, known_other = self.convolved(block.shortcut[0], x)
        for number, layer in block.layers[:-1]:
            x = layer.norm.applied(*self.convolved(number, x), relu=True)
        number, last = block.layers[-1]
        z, known = self.convolved(number, x)
        if block.shortcut is not None:
            self.net.join("shortcut")
        x, let_through = last.norm.ended(z, known, block.relu, other, known_other)
        self.let_through.append(let_through)
        return x

    def backward(self, grad: Tensor) -> list[Tensor | None]:
        """Gradients of all that learned, for that of the features."""
        net = self.net
        if len(net.started) > 1:
            for each in net.started:
                each.alone = False
        net.started.discard(self)
        pair: Pair = ((grad / self.area).to(net.dtype).contiguous(), None)
        for block, let_through in zip(reversed(net.blocks), reversed(self.let_through), strict=True):
            pair = self.back_through(block, let_through, pair)
        if self.pooled is not None:
            pair = (self.unpool(pair), None)
        of_input, of_norm = pair
        grads, before = self.back_sums(0, relu=True, g=of_input, other=of_norm, keep=of_norm is not None)
        dz = self.back(0, of_norm is None, before, grads)
        self.update(0, self.weight(0, dz))
        with net.beside("weights"):
            self.widen()
        net.join("weights")
        found, self.gradients = self.gradients, []  # held here they would be copied for the parameters
        return found

    def back_through(self, block: Block, let_through: Tensor, pair: Pair) -> Pair:
        """Return the gradients of the block's input: of its layers, and of its shortcut."""
        number = block.layers[-1][0]
        grads, before = self.back_sums(number, block.relu, pair[0], pair[1], let_through, keep=True)
        around: Tensor = before
        if block.shortcut is not None:
            with self.net.beside("shortcut"):
                around = self.back_convolved(block.shortcut[0], before)
        elif block.pad is not None:
            around = _last(block.pad.back(before, self.kept[block.layers[0][0]].x))
        g = self.of_input(number, self.back(number, False, before, grads))
        for inner, _ in reversed(block.layers[:-1]):
            g = self.back_convolved(inner, g, relu=True)
        if block.shortcut is not None:
            self.net.join("shortcut")
        self.keep(*pair, before)
        return g, around

    def back_convolved(self, number: int, g: Tensor, relu: bool = False) -> Tensor:
        """Return the gradient of a layer's input, for that of its output."""
        grads, _ = self.back_sums(number, relu, g)
        self.keep(g)
        return self.of_input(number, self.back(number, relu, g, grads))

    def back_sums(self, number: int, relu: bool, g: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Gradients of a normalisation's weight and offset are found; return them, and the gradient before the ReLU."""
        kept, count = self.kept[number], len(self.net.layers)
        grads, before = self.net.layers[number].norm.back_sums(kept.z, kept.known, relu, g, *more, **named)
        self.gradients[count + number], self.gradients[2 * count + number] = grads[0], grads[1]
        return grads, before

    def back(self, number: int, relu: bool, g: Tensor, grads: Tensor) -> Tensor:
        """Return the gradient of what came out of a convolution."""
        kept = self.kept[number]
        return self.net.layers[number].norm.back(kept.z, kept.known, relu, g, grads)

    def of_input(self, number: int, dz: Tensor) -> Tensor:
        """Return the gradient of a convolution's input; that of its weight is computed beside it."""
        of_weight = self.weight(number, dz)
        found = self.net.layers[number].gradient(dz, self.kept[number].x, self.low[number], of_weight=False)
        self.update(number, of_weight)
        return found

    def weight(self, number: int, dz: Tensor) -> Tensor:
        """Begin the gradient of a convolution's weight, on the branch."""
        with self.net.beside("weights"):
            found = self.net.layers[number].gradient(dz, self.kept[number].x, self.low[number], of_weight=True)
        self.keep(dz, found)
        return found

    def update(self, number: int, of_weight: Tensor) -> None:
        """Begin a weight's update, on the branch, after all that reads the weight: it writes what products read."""
        with self.net.beside("weights"):
            if self.net.updates is not None and self.alone:
                self.net.updates.take(self.net.layers[number].convolution.weight, of_weight)
            else:
                self.waiting.append((number, of_weight))
            if sum(waiting.numel() for _, waiting in self.waiting) >= LOT:
                self.widen()

    def widen(self) -> None:
        """Bring the weights' gradients that are there to the weights' own precision."""
        together: list[tuple[Tensor, Tensor]] = []
        for number, found in self.waiting:
            full = self.gradients[number] = torch.empty_like(self.net.layers[number].convolution.weight)
            if full.stride() == found.stride():
                together.append((full, found))
            else:  # one of these in a list, and all of it would be copied one by one
                full.copy_(found)
        if together:
            torch._foreach_copy_([full for full, _ in together], [found for _, found in together])
        self.waiting.clear()

    def keep(self, *tensors: Tensor | None) -> None:
        """Hold on to what a branch reads: its memory must not be given away before the branch has ended."""
        if self.net.capturing:
            self.alive.append(tensors)

    def pool(self, x: Tensor) -> Tensor:
        """Max-pool the stem's output."""
        how = self.net.backbone.maxpool
        assert isinstance(how, nn.MaxPool2d)
        y, where = F.max_pool2d(x, how.kernel_size, how.stride, how.padding, return_indices=True)
        self.pooled = (x, where)
        return _last(y)

    def unpool(self, pair: Pair) -> Tensor:
        """Return the gradient of the stem's output."""
        how = self.net.backbone.maxpool
        assert isinstance(how, nn.MaxPool2d)
        assert self.pooled is not None
        x, where = self.pooled
        grad = pair[0] if pair[1] is None else pair[0] + pair[1]
        sizes = ([how.kernel_size] * 2, [how.stride] * 2, [how.padding] * 2, [1, 1], False)
        return _last(torch.ops.aten.max_pool2d_with_indices_backward(grad, x, *sizes, where))
