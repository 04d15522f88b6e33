"""The GPU of a Mac computes networks; everything else, float64 among it, which it does not have, stays on the CPU.

A network's weights stay on the CPU too. In training they are copied with each batch and their gradients come back,
through autograd; a frozen network is copied once. What calls a part of a network by itself (`forward_intermediates`) is
computed on the CPU. Nothing of this has run on a Mac yet: `Mps` is tested with the CPU in the place of its GPU, and
`mps_problem` compares a small network on both before it is used.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from efcil.accel.backend import Backend, Inference
from efcil.accel.folded_copy import folded_copy
from efcil.training.batch import FrozenForward

TOLERANCE = 1e-2  # of a value of size one; Apple's convolutions may round to fewer bits than the CPU's


@dataclass(frozen=True)
class Mps(Backend):
    """Compute networks on `accelerator`, everything else on the CPU."""

    accelerator: torch.device = field(default_factory=lambda: torch.device("mps"))

    @property
    def description(self) -> dict[str, Any]:
        """The fields of a summary that say what a run was computed on."""
        return super().description | {"device": "Apple GPU (MPS), statistics on the CPU"}

    def place(self, module: nn.Module) -> Any:
        """Keep a module on the CPU."""
        return module.to(self.device)

    def trainable(self, backbone: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return the forward pass on the accelerator, whose gradients arrive at the weights on the CPU."""
        return functools.partial(_forward, backbone, self.accelerator)

    def fold(self, backbone: nn.Module) -> nn.Module:
        """Return a frozen copy on the accelerator, which takes and returns tensors of the CPU."""
        own = folded_copy(backbone)
        return _Remote(copy.deepcopy(own) if own is backbone else own, self.accelerator)

    def inference(self, backbone: nn.Module) -> Inference:
        """Return how the features of many images are computed: in batches as large as fit."""
        return Inference(self.fold(backbone))

    def frozen(self, backbone: nn.Module, call: Callable[[Tensor], Tensor]) -> FrozenForward:
        """Return the features of a backbone that does not learn now."""
        remote = self.fold(backbone)
        return FrozenForward(remote, remote)


class _Remote(nn.Module):
    """A frozen network on another device."""

    def __init__(self, network: nn.Module, accelerator: torch.device):
        super().__init__()
        self.network, self.accelerator = network.to(accelerator).requires_grad_(False).eval(), accelerator

    def forward(self, images: Tensor) -> Tensor:
        """Compute there and return to the device of the images; gradients of images come back as well."""
        found: Tensor = self.network(images.to(self.accelerator)).to(images.device)
        return found


def _forward(module: nn.Module, accelerator: torch.device, images: Tensor) -> Tensor:
    """Compute a module with its weights copied to `accelerator`; running statistics are brought back."""
    weights = {name: weight.to(accelerator) for name, weight in module.named_parameters()}
    buffers = {name: buffer.to(accelerator, copy=True) for name, buffer in module.named_buffers()}
    features: Tensor = functional_call(module, (weights, buffers), (images.to(accelerator),))
    if module.training:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
    return features.to(images.device)


@functools.cache
def mps_problem(accelerator: str = "mps") -> str | None:
    """Return what a small network computes wrongly on a Mac's GPU, in training and in eval mode; None: nothing."""
    place = torch.device(accelerator)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1))
            images = torch.randn(4, 3, 16, 16)
        found, gradients = [], []
        for call in (network, functools.partial(_forward, network, place)):
            network.zero_grad()
            features = call(images).mean((2, 3))
            features.square().sum().backward()
            found.append(features.detach())
            gradients.append([weight.grad.clone() for weight in network.parameters() if weight.grad is not None])
        network.eval()
        with torch.no_grad():
            found += [network(images), _Remote(copy.deepcopy(network), place)(images)]
    except (RuntimeError, NotImplementedError, AssertionError, TypeError) as error:
        return f"fails ({' '.join(str(error).split())[:200]})"
    pairs = [found[:2], found[2:], *zip(*gradients, strict=True)]
    if not all(_is_close(one, other) for one, other in pairs):
        return "computes another result than the CPU"
    return None


def _is_close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * one.abs().max().clamp(min=1))
