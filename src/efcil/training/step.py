"""Take one step of training on one batch: loss, gradients, update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from efcil.accel.machine import Machine
from efcil.accel.optim import SGD
from efcil.training.batch import Batch, FrozenForward
from efcil.training.distributed import Group
from efcil.training.image_batches import Pixels
from efcil.training.schedule import Schedule

Rule = Literal["sgd", "adam"]
Loss = Callable[[Batch], Tensor]
HandOver = Callable[[SGD | None], None]  # tells who finds gradients who takes them at once, if anybody


class Optimiser:
    """SGD with momentum, or Adam, whose learning rate is a tensor, so that a captured step follows the schedule."""

    def __init__(
        self, module: nn.Module, schedule: Schedule, machine: Machine, rule: Rule = "sgd", momentum: float = 0.9
    ):
        self.named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.rate = torch.tensor(schedule.lr, device=machine.device)
        on_gpu = machine.device.type == "cuda"
        own, decay = list(self.named.values()), schedule.weight_decay
        self.update: SGD | torch.optim.Adam
        if rule == "sgd":
            self.update = SGD(own, self.rate, momentum, decay, fused=on_gpu)
        else:
            self.update = torch.optim.Adam(own, self.rate, weight_decay=decay, fused=on_gpu, capturable=on_gpu)
            for parameter in own:  # made here, not by the first step: a captured step finds them in place
                state = self.update.state[parameter]
                state |= {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                state["step"] = torch.zeros((), device=machine.device)

    def momenta(self) -> dict[str, Tensor]:
        """What the rule remembers of each parameter, by name."""
        return {f"{key}.{name}": v for name, p in self.named.items() for key, v in self.update.state[p].items()}

    def load_momenta(self, momenta: dict[str, Tensor]) -> None:
        """Take up momenta again, in place."""
        for name, own in self.momenta().items():
            own.copy_(momenta[name])

    def refresh(self) -> None:
        """Parameters were changed by somebody else."""
        if isinstance(self.update, SGD):
            self.update.refresh()

    @contextlib.contextmanager
    def taking(self, hand_over: HandOver, group: Group) -> Iterator[None]:
        """Meanwhile whoever finds a gradient may hand it over at once, where it is not summed over processes first."""
        hand_over(self.update if isinstance(self.update, SGD) and group.size == 1 else None)
        try:
            yield
        finally:
            hand_over(None)


class Step:
    """One step of training on one batch; adds the loss to `total`.

    Of several processes each has its share of the batch, and `weight` is that share's part in the loss. Gradients and
    running `statistics` are summed over the processes with these weights: after the step all hold the same.
    """

    def __init__(
        self,
        loss: Loss,
        optimiser: Optimiser,
        pixels: Pixels,
        machine: Machine,
        statistics: Sequence[Tensor] = (),
        frozen: FrozenForward | None = None,
        views: int = 0,
    ):
        self.loss, self.optimiser, self.pixels, self.machine = loss, optimiser, pixels, machine
        self.frozen, self.views = frozen, views
        self.before_update: Callable[[list[nn.Parameter]], None] | None = None  # a learner's hook
        self.statistics, self.weight = list(statistics), 1.0
        self.total = torch.zeros((), device=machine.device, dtype=torch.float64)

    def __call__(self, images: Tensor, labels: Tensor, *more: Tensor) -> None:
        """Forward, backward, update; `more` are the views, and the frozen network's outputs if they are known."""
        self.optimiser.update.zero_grad()
        with self.machine.autocast():
            loss = self.loss(self.batch(images, labels, *more))
        if self.machine.group.size > 1:
            loss = loss * self.weight
        loss.backward()
        if self.machine.group.size > 1:
            self._join()
        if self.before_update is not None:
            self.before_update([p for p in self.optimiser.named.values() if p.grad is not None])
        self.optimiser.update.step()
        self.total += loss.detach()

    def batch(self, images: Tensor, labels: Tensor, *more: Tensor) -> Batch:
        """Return what the loss gets; the frozen network's outputs are computed beside the student's where that pays."""
        views = tuple(self.pixels.normalise(view) for view in more[: self.views])
        inputs, known = self.pixels.normalise(images), more[self.views :]
        if known or self.frozen is None:
            return Batch(inputs, labels, views, known[0] if known else None)
        with torch.no_grad(), self.machine.beside():
            teacher = self.frozen.call(inputs)
        return Batch(inputs, labels, views, teacher, self.machine.join)

    @torch.no_grad()
    def _join(self) -> None:
        if self.statistics:
            torch._foreach_mul_(self.statistics, self.weight)
        gradients = [p.grad for p in self.optimiser.named.values() if p.grad is not None]
        self.machine.group.sum_all_([*gradients, *self.statistics])
