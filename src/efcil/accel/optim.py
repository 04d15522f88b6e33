"""SGD with momentum: torch's own rule, without the class around it, which loads torch's compiler for two seconds.

With gradient g, weight w, momentum m, decay d, rate r and what is remembered of earlier steps b:

    b = m b + g + d w
    w = w - r b

A parameter may be updated as soon as its own gradient is there (`SGD.apply`), while those of other layers are still
computed. On a GPU that is one kernel, which reads the gradient in the precision it was computed in, and writes the
weight in the precision that the next products read as well (`SGD.low_precision_copy`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from efcil.errors import TrainingError


class SGD:
    """What it remembers of each parameter is in `state`, under the name that torch.optim.SGD has for it."""

    def __init__(self, parameters: Sequence[Tensor], lr: Tensor, momentum: float, weight_decay: float, fused: bool):
        self.parameters, self.lr = list(parameters), lr
        self.momentum, self.weight_decay, self.fused = momentum, weight_decay, fused
        self.state = {p: {"momentum_buffer": torch.zeros_like(p)} for p in self.parameters}
        self.applied: set[Tensor] = set()  # updated in this step already
        self.copies: dict[Tensor, Tensor] = {}  # of parameters, in another precision

    def low_precision_copy(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy of a parameter in another precision, kept in sync by every update."""
        copy = self.copies.get(parameter)
        if copy is None or copy.dtype != dtype:
            copy = self.copies[parameter] = torch.empty_like(parameter, dtype=dtype).copy_(parameter.detach())
        return copy

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.applied.clear()
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def apply(self, parameter: Tensor, gradient: Tensor) -> None:
        """Update one parameter with its whole gradient, in whatever precision; `step` does not touch it any more."""
        self.applied.add(parameter)
        buffer, copy = self.state[parameter]["momentum_buffer"], self.copies.get(parameter)
        if gradient.stride() != parameter.stride():  # a part of something larger
            gradient = torch.empty_like(parameter).copy_(gradient)
        if parameter.is_cuda:
            from efcil.accel import training_kernels

            training_kernels.sgd(parameter, gradient, buffer, copy, self.lr, self.momentum, self.weight_decay)
            return
        gradient = gradient.to(parameter.dtype).add(parameter, alpha=self.weight_decay)
        parameter.sub_(self.lr * buffer.mul_(self.momentum).add_(gradient))
        if copy is not None:
            copy.copy_(parameter)

    @torch.no_grad()
    def step(self) -> None:
        """Update all that have a gradient."""
        with_gradient = [p for p in self.parameters if p.grad is not None]
        if not self.applied.isdisjoint(with_gradient):
            raise TrainingError(
                "a weight of the backbone has a gradient beside that of the features and was updated without it: this "
                "learner cannot run with the optimizer inside the backward pass; take --no-compile"
            )
        sgd(
            with_gradient,
            [p.grad for p in with_gradient],  # type: ignore[misc]
            [self.state[p]["momentum_buffer"] if self.momentum else None for p in with_gradient],
            foreach=False,
            fused=self.fused,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,  # type: ignore[arg-type] # a tensor, so that a captured step follows the schedule
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        self.sync_copies(with_gradient)

    @torch.no_grad()
    def sync_copies(self, changed: Sequence[Tensor] | None = None) -> None:
        """Update the copies of parameters that were changed elsewhere, by default of all."""
        with_copies = [p for p in (self.parameters if changed is None else changed) if p in self.copies]
        if with_copies:
            torch._foreach_copy_([self.copies[p] for p in with_copies], with_copies)
