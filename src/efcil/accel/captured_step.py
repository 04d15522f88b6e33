"""Capture a training step as a CUDA graph and replay it."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from efcil.accel.streams import thread_stream
from efcil.training.step import Step


class CapturedStep:
    """The same step recorded once as a CUDA graph and replayed; an odd-sized batch runs eagerly."""

    WARM_UP = 3  # steps before a thread's first capture: lazy initialization, trials and compilation happen there
    thread_state = threading.local()

    def __init__(
        self,
        step: Step,
        module: nn.Module,
        batch: Tensor,
        *extras: Tensor,
        loss_generator: torch.Generator | None = None,
    ):
        self.step, self.loss_sum, self.loss_generator, self.weight = step, step.loss_sum, loss_generator, step.weight
        self.batch = batch.clone()
        self.extras = [tensor.clone() for tensor in extras]  # labels and the teacher's outputs
        tensors = [*module.state_dict().values(), *step.optimizer.state_dict().values(), step.loss_sum]
        saved = [t.clone() for t in tensors]
        drawn = loss_generator.get_state() if loss_generator is not None else None
        with step.backend.exclusive_capture():  # one thread compiles at a time; others replay what they have
            step.backend.run_on_autotune_thread(self._record)
        for tensor, value in zip(tensors, saved, strict=True):  # the warm-up must leave no trace
            tensor.copy_(value)
        step.optimizer.sync_copies()
        if loss_generator is not None and drawn is not None:
            loss_generator.set_state(drawn)

    def _record(self) -> None:
        step, warm = self.step, getattr(self.thread_state, "warm", False)
        stream = thread_stream(self.batch.device, "warm-up")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(1 if warm else self.WARM_UP):  # later ones see new sizes
                step(self.batch, *self.extras)
        self.thread_state.warm = True
        torch.cuda.current_stream().wait_stream(stream)
        step.optimizer.update.zero_grad()
        self.graph = torch.cuda.CUDAGraph()
        if self.loss_generator is not None:
            self.graph.register_generator_state(self.loss_generator)  # each replay continues the sequence
        stream = thread_stream(self.batch.device, "capture")
        if torch.cuda.mem_get_info()[0] < torch.cuda.memory_reserved():  # a graph has memory of its own
            torch.cuda.empty_cache()
        with torch.cuda.stream(stream):
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                step(self.batch, *self.extras)
            finally:
                self.graph.capture_end()

    def __call__(self, batch: Tensor, *extras: Tensor) -> None:
        """Replay the recorded step on a new batch."""
        if batch.shape != self.batch.shape or self.step.weight != self.weight:  # so all processes take the same way
            self.step(batch, *extras)
            return
        for own, new in zip((self.batch, *self.extras), (batch, *extras), strict=True):
            own.copy_(new)
        self.graph.replay()


class CaptureAtFirstBatch:
    """A step that is captured when its first batch is there."""

    def __init__(self, step: Step, module: nn.Module, loss_generator: torch.Generator | None):
        self.step, self.module, self.loss_generator = step, module, loss_generator
        self.captured: CapturedStep | None = None

    def __call__(self, *batch: Tensor) -> None:
        """Take the step on a batch."""
        if self.captured is None:
            self.captured = CapturedStep(self.step, self.module, *batch, loss_generator=self.loss_generator)
        self.captured(*batch)
