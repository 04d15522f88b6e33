"""The first convolution of a ResNet on a GPU, whose tensor cores want more than three channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from efcil.models.resnet import ResNet

IM2COL_CHANNELS = 32  # numbers that a small stem sees of a pixel, filled up: 27 of three channels


class StemConv(nn.Conv2d):
    """The first convolution. On a GPU images of three channels are filled up to eight with zeros.

    The product is the same; the tensor cores' convolutions want multiples of eight channels, and the one that cuDNN has
    for three takes 55 us instead of about 15 for 128 images of 32 pixels on an H200, a fortieth of the whole step.
    """

    @classmethod
    def over(cls, convolution: nn.Conv2d) -> StemConv:
        """Return a convolution as a stem, which shares its weight; a stem as it is. Nothing is drawn at random."""
        if isinstance(convolution, cls):
            return convolution
        assert isinstance(convolution.padding, tuple)
        size, stride, padding = convolution.kernel_size, convolution.stride, convolution.padding
        channels = (convolution.in_channels, convolution.out_channels)
        stem = cls(*channels, size, stride, padding=padding, bias=False, device="meta")  # type: ignore[arg-type] # pairs
        stem.weight = convolution.weight
        return stem.train(convolution.training)

    def forward(self, images: Tensor) -> Tensor:
        """(n, channels, h, w) to (n, width, h / stride, w / stride)."""
        return self.conv_padded(images) if images.is_cuda else super().forward(images)

    def conv_padded(self, images: Tensor) -> Tensor:
        """Convolve images and weights whose channels are filled up to a multiple of eight."""
        return F.conv2d(self.pad_channels(images), self.pad_channels(self.weight), None, self.stride, self.padding)

    def pad_channels(self, tensor: Tensor) -> Tensor:
        """Fill the channels of images or of weights up with zeros."""
        return F.pad(tensor, (0, 0, 0, 0, 0, -self.in_channels % 8))

    @property
    def is_small(self) -> bool:
        """Whether what it sees of a pixel, nine neighbors in each channel, are few enough numbers to be laid out."""
        how = (self.kernel_size, self.stride, self.padding)
        return how == ((3, 3), (1, 1), (1, 1)) and 9 * self.in_channels <= IM2COL_CHANNELS

    def im2col(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Lay out what a small stem sees of each pixel, (n, channels, h, w) to (n, IM2COL_CHANNELS, h, w), zero-padded.

        Then the convolution is one of 1 x 1, for which cuDNN has faster kernels than for one of few channels.
        """
        if images.is_cuda:
            from efcil.accel import resnet_kernels

            return resnet_kernels.im2col(images, dtype, IM2COL_CHANNELS)
        seen = F.unfold(images.to(dtype), 3, padding=1).unflatten(2, images.shape[2:])
        return F.pad(seen, (0, 0, 0, 0, 0, IM2COL_CHANNELS - seen.shape[1]))

    def weight_to_im2col(self, weight: Tensor) -> Tensor:
        """Bring its weight (or one of its size) to (width, IM2COL_CHANNELS, 1, 1)."""
        return F.pad(weight.flatten(1), (0, IM2COL_CHANNELS - 9 * self.in_channels))[:, :, None, None]

    def weight_from_im2col(self, weight: Tensor) -> Tensor:
        """Undo `weight_to_im2col`."""
        return weight[:, : 9 * self.in_channels, 0, 0].unflatten(1, self.weight.shape[1:])


def with_stems(module: nn.Module) -> None:
    """Let the first convolution of every ResNet in a module be a `StemConv`; parameters keep their names and places."""
    for network in module.modules():
        if type(network) is ResNet and type(network.conv1) is nn.Conv2d:
            network.conv1 = StemConv.over(network.conv1)
