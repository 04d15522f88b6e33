"""SGD with momentum: torch's own rule, without the class around it, which loads torch's compiler for two seconds.

With gradient g, weight w, momentum m, decay d, rate r and what is remembered of earlier steps b:

    b = m b + g + d w
    w = w - r b

A parameter may be updated as soon as its own gradient is there (`SGD.take`), while those of other layers are still
computed. On a GPU that is one kernel, which reads the gradient in the precision it was computed in, and writes the
weight in the precision that the next products read as well (`SGD.followed`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from efcil.errors import TrainingError


class SGD:
    """What it remembers of each parameter is in `state`, under the name that torch.optim.SGD has for it."""

    def __init__(self, parameters: Sequence[Tensor], rate: Tensor, momentum: float, weight_decay: float, fused: bool):
        self.parameters, self.rate = list(parameters), rate
        self.momentum, self.weight_decay, self.fused = momentum, weight_decay, fused
        self.state = {p: {"momentum_buffer": torch.zeros_like(p)} for p in self.parameters}
        self.taken: set[Tensor] = set()  # updated in this step already
        self.copies: dict[Tensor, Tensor] = {}  # of parameters, in another precision

    def followed(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy of a parameter in another precision, which every update of the parameter writes anew."""
        copy = self.copies.get(parameter)
        if copy is None or copy.dtype != dtype:
            copy = self.copies[parameter] = torch.empty_like(parameter, dtype=dtype).copy_(parameter.detach())
        return copy

    def zero_grad(self) -> None:
        """Let go of all gradients: a step begins."""
        self.taken.clear()
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def take(self, parameter: Tensor, gradient: Tensor) -> None:
        """Update one parameter with its whole gradient, in whatever precision; `step` does not touch it any more."""
        self.taken.add(parameter)
        remembered, copy = self.state[parameter]["momentum_buffer"], self.copies.get(parameter)
        if gradient.stride() != parameter.stride():  # a part of something larger
            gradient = torch.empty_like(parameter).copy_(gradient)
        if parameter.is_cuda:
            from efcil.accel import training_kernels

            training_kernels.sgd(parameter, gradient, remembered, copy, self.rate, self.momentum, self.weight_decay)
            return
        gradient = gradient.to(parameter.dtype).add(parameter, alpha=self.weight_decay)
        parameter.sub_(self.rate * remembered.mul_(self.momentum).add_(gradient))
        if copy is not None:
            copy.copy_(parameter)

    @torch.no_grad()
    def step(self) -> None:
        """Update all that have a gradient."""
        learning = [p for p in self.parameters if p.grad is not None]
        if not self.taken.isdisjoint(learning):
            raise TrainingError(
                "a weight of the backbone has a gradient beside that of the features and was updated without it: this "
                "learner cannot run with the optimizer inside the backward pass; take --no-compile"
            )
        sgd(
            learning,
            [p.grad for p in learning],  # type: ignore[misc]
            [self.state[p]["momentum_buffer"] if self.momentum else None for p in learning],
            foreach=False,
            fused=self.fused,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.rate,  # type: ignore[arg-type] # a tensor, so that a captured step follows the schedule
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        self.refresh(learning)

    @torch.no_grad()
    def refresh(self, changed: Sequence[Tensor] | None = None) -> None:
        """Write the copies of parameters that were changed otherwise, by default of all."""
        followed = [p for p in (self.parameters if changed is None else changed) if p in self.copies]
        if followed:
            torch._foreach_copy_([self.copies[p] for p in followed], followed)
