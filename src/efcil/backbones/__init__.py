"""Backbones: images (n, channels, height, width) in, features (n, dim) out."""

from efcil.backbones.resnet import NAMES, STEMS, ResNet, build

__all__ = ["NAMES", "STEMS", "ResNet", "build"]
