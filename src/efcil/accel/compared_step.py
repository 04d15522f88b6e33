"""Capture the step of a learner from another package, and compare it with the eager one before it is trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from efcil.accel import captured_step
from efcil.training.step import Step

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # of a step's loss, and of what it changes
ROUNDING = 8 * torch.finfo(torch.float32).eps  # of a value that changes little
PLAIN = (int, float, str, tuple, type(None))  # attributes that are put back: counters and flags


class State:
    """All that a training step reads and changes: tensors by kind, and a learner's counters."""

    def __init__(self, step: Step, module: nn.Module, generator: torch.Generator | None):
        self.step, self.module, self.generator = step, module, generator
        self.drawn = None if generator is None else generator.get_state()
        outside = vars(nn.Module()).keys()
        self.plain = {k: v for k, v in vars(module).items() if k not in outside and isinstance(v, PLAIN)}
        self.attributes = {k: v for k, v in vars(module).items() if isinstance(v, Tensor)}
        self.tensors: Mapping[str, Sequence[Tensor]] = {
            "loss": [step.loss_sum],
            "weights": list(module.parameters()),
            "buffers": list(module.buffers()),
            "optimizer": list(step.optimizer.state_dict().values()),
            "attributes": list(self.attributes.values()),
        }
        self.values = {kind: [t.detach().clone() for t in tensors] for kind, tensors in self.tensors.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for kind, tensors in self.tensors.items():
            for tensor, value in zip(tensors, self.values[kind], strict=True):
                tensor.copy_(value)
        vars(self.module).update(self.plain | self.attributes)
        self.step.optimizer.sync_copies()
        if self.generator is not None and self.drawn is not None:
            self.generator.set_state(self.drawn)

    def difference(self, before: State, other: State, tolerance: float) -> str | None:
        """Return in words how another step from the state `before` differs from the one that led here, None if not."""
        for kind, mine in self.values.items():
            start, end = before.values[kind], other.values[kind]
            if len(mine) != len(end) or len(mine) != len(start):
                return f"{kind} are others"
            moved, apart = _distance(start, mine), _distance(mine, end)
            if not apart <= tolerance * moved + ROUNDING * _distance(mine):
                return f"{kind} {'differs' if kind == 'loss' else 'differ'} by {100 * apart / max(moved, 1e-30):.2g} %"
        return None


class ComparedStep:
    """A step that is captured, and replayed from then on if it does what the eager one does.

    The first `BATCHES` are computed both ways, from the same state, and what the eager step leaves is kept. Where the
    two differ, or the step cannot be captured, all steps are eager: the learner's `capturable` is set to False.
    """

    BATCHES = 3

    def __init__(
        self, step: Step, module: nn.Module, loss_generator: torch.Generator | None, note: Callable[[str], None]
    ):
        self.step, self.module, self.loss_generator, self.note = step, module, loss_generator, note
        self.tolerance = TOLERANCE[step.backend.dtype]
        self.captured: Callable[..., None] | None = None
        self.compared = 0

    def __call__(self, *batch: Tensor) -> None:
        """Take the step on a batch."""
        if self.compared == self.BATCHES:
            (self.captured or self.step)(*batch)
            return
        self.compared += 1
        before = self._state()
        self.step(*batch)
        eager = self._state()
        before.restore()
        difference = self._difference(batch, before, eager)
        eager.restore()
        if self.step.backend.world.any(difference is not None):  # all processes go the same way
            self.captured, self.compared = None, self.BATCHES
            self.module.capturable = False  # type: ignore[assignment] # not a parameter
            name = type(self.module).__name__
            self.note(
                f"{name} trains with eager steps: its captured step is another ({difference or 'in another process'}); "
                f"capturable = False in {name} skips the comparison"
            )

    def _state(self) -> State:
        return State(self.step, self.module, self.loss_generator)

    def _difference(self, batch: Sequence[Tensor], before: State, eager: State) -> str | None:
        try:
            if self.captured is None:
                named: dict[str, Any] = {"loss_generator": self.loss_generator}
                self.captured = captured_step.CapturedStep(self.step, self.module, *batch, **named)
                before.restore()  # counters of the learner, which the warm-up has moved
            self.captured(*batch)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return " ".join(f"it cannot be captured: {error}".split())[:200]
        return eager.difference(before, self._state(), self.tolerance)


def _distance(one: Sequence[Tensor], other: Sequence[Tensor] | None = None) -> float:
    """Return the Euclidean distance between tensors taken as one vector, of the others or of zero."""
    apart = [a.double() if other is None else a.double() - other[i].double() for i, a in enumerate(one)]
    return float(torch.stack([part.square().sum() for part in apart]).sum().sqrt()) if apart else 0.0
