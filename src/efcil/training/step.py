"""Take one step of training on one batch: loss, gradients, update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from efcil.accel.backend import Backend
from efcil.accel.optim import SGD
from efcil.errors import CheckpointError
from efcil.training.batch import Batch, FrozenForward
from efcil.training.image_batches import ImageBatches
from efcil.training.schedule import Schedule

Rule = Literal["sgd", "adam"]
Loss = Callable[[Batch], Tensor]


class Optimizer:
    """SGD with momentum, or Adam, whose learning rate is a tensor, so that a captured step follows the schedule."""

    def __init__(
        self, module: nn.Module, schedule: Schedule, backend: Backend, rule: Rule = "sgd", momentum: float = 0.9
    ):
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.lr = torch.tensor(schedule.lr, device=backend.device)
        on_gpu = backend.device.type == "cuda"
        own, decay = list(self.parameters.values()), schedule.weight_decay
        self.update: SGD | torch.optim.Adam
        if rule == "sgd":
            self.update = SGD(own, self.lr, momentum, decay, fused=on_gpu)
        else:
            self.update = torch.optim.Adam(own, self.lr, weight_decay=decay, fused=on_gpu, capturable=on_gpu)
            for parameter in own:  # made here, not by the first step: a captured step finds them in place
                state = self.update.state[parameter]
                state |= {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                state["step"] = torch.zeros((), device=backend.device)

    def state_dict(self) -> dict[str, Tensor]:
        """State of each parameter, by name."""
        return {f"{key}.{name}": v for name, p in self.parameters.items() for key, v in self.update.state[p].items()}

    def load_state_dict(self, optimizer_state: dict[str, Tensor]) -> None:
        """Restore state, in place; raise CheckpointError for that of another network."""
        for name, own in self.state_dict().items():
            found = optimizer_state.get(name)
            if found is None or found.shape != own.shape:
                why = "is missing" if found is None else f"has shape {tuple(found.shape)}, not {tuple(own.shape)}"
                raise CheckpointError(
                    f"the checkpoint does not fit this run ({name} {why}): start again in another --out"
                )
            own.copy_(found)

    def sync_copies(self) -> None:
        """Update low-precision copies after parameters were changed elsewhere."""
        if isinstance(self.update, SGD):
            self.update.sync_copies()


class Step:
    """One step of training on one batch; adds the loss to `loss_sum`.

    Of several processes each has its share of the batch, and `weight` is that share's part in the loss. Gradients and
    running `statistics` are summed over the processes with these weights: after the step all hold the same.
    """

    def __init__(
        self,
        loss: Loss,
        optimizer: Optimizer,
        pixels: ImageBatches,
        backend: Backend,
        statistics: Sequence[Tensor] = (),
        frozen: FrozenForward | None = None,
        views: int = 0,
    ):
        self.loss, self.optimizer, self.pixels, self.backend = loss, optimizer, pixels, backend
        self.frozen, self.views = frozen, views
        self.before_update: Callable[[list[nn.Parameter]], None] | None = None  # a learner's hook
        self.statistics, self.weight = list(statistics), 1.0
        self.loss_sum = torch.zeros((), device=backend.device, dtype=torch.float64)

    def __call__(self, images: Tensor, labels: Tensor, *more: Tensor) -> None:
        """Forward, backward, update; `more` are the views, and the frozen network's outputs if they are known."""
        self.optimizer.update.zero_grad()
        with self.backend.autocast():
            loss = self.loss(self.batch(images, labels, *more))
        if self.backend.world.size > 1:
            loss = loss * self.weight
        loss.backward()
        if self.backend.world.size > 1:
            self._join()
        if self.before_update is not None:
            self.before_update([p for p in self.optimizer.parameters.values() if p.grad is not None])
        self.optimizer.update.step()
        self.loss_sum += loss.detach()

    def batch(self, images: Tensor, labels: Tensor, *more: Tensor) -> Batch:
        """Return what the loss gets; the frozen network's outputs are computed beside the student's where that pays."""
        views = tuple(self.pixels.normalize(view) for view in more[: self.views])
        inputs, known = self.pixels.normalize(images), more[self.views :]
        if known or self.frozen is None:
            return Batch(inputs, labels, views, known[0] if known else None)
        with torch.no_grad(), self.backend.fork_stream():
            teacher = self.frozen.call(inputs)
        return Batch(inputs, labels, views, teacher, self.backend.join_stream)

    @torch.no_grad()
    def _join(self) -> None:
        if self.statistics:
            torch._foreach_mul_(self.statistics, self.weight)
        gradients = [p.grad for p in self.optimizer.parameters.values() if p.grad is not None]
        self.backend.world.all_reduce_many_([*gradients, *self.statistics])
