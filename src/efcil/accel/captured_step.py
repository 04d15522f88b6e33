"""Capture a training step as a CUDA graph and replay it."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from efcil.accel.streams import own_stream
from efcil.training.step import Step


class CapturedStep:
    """The same step recorded once as a CUDA graph and replayed; an odd-sized batch takes the plain way."""

    WARM_UP = 3  # steps before a thread's first capture: lazy initialisation, trials and compilation happen there
    known = threading.local()

    def __init__(
        self, step: Step, module: nn.Module, batch: Tensor, *rest: Tensor, noise: torch.Generator | None = None
    ):
        self.step, self.total, self.noise, self.weight = step, step.total, noise, step.weight
        self.batch, self.rest = batch.clone(), [tensor.clone() for tensor in rest]  # labels, and what is seen at rest
        kept = [*module.state_dict().values(), *step.optimiser.momenta().values(), step.total]
        saved = [t.clone() for t in kept]
        drawn = noise.get_state() if noise is not None else None
        with step.machine.capturing():  # one thread compiles at a time; others replay what they have
            step.machine.convolving(self._record)
        for tensor, value in zip(kept, saved, strict=True):  # the warm-up must leave no trace
            tensor.copy_(value)
        step.optimiser.refresh()
        if noise is not None and drawn is not None:
            noise.set_state(drawn)

    def _record(self) -> None:
        step, warm = self.step, getattr(self.known, "warm", False)
        stream = own_stream(self.batch.device, "warm-up")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(1 if warm else self.WARM_UP):  # later ones see new sizes
                step(self.batch, *self.rest)
        self.known.warm = True
        torch.cuda.current_stream().wait_stream(stream)
        step.optimiser.update.zero_grad()
        self.graph = torch.cuda.CUDAGraph()
        if self.noise is not None:
            self.graph.register_generator_state(self.noise)  # each replay draws on from where the generator stands
        first = own_stream(self.batch.device, "capture")
        if torch.cuda.mem_get_info()[0] < torch.cuda.memory_reserved():  # a graph has memory of its own
            torch.cuda.empty_cache()
        with torch.cuda.stream(first):
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                step(self.batch, *self.rest)
            finally:
                self.graph.capture_end()

    def __call__(self, batch: Tensor, *rest: Tensor) -> None:
        """Replay the recorded step on a new batch."""
        if batch.shape != self.batch.shape or self.step.weight != self.weight:  # so all processes take the same way
            self.step(batch, *rest)
            return
        for own, new in zip((self.batch, *self.rest), (batch, *rest), strict=True):
            own.copy_(new)
        self.graph.replay()
