"""The one training loop. Every learner trains through `train`; what differs is the loss it hands in.

Randomness of an epoch is a function of (seed, task, epoch), so a run that goes on from a checkpoint sees the same
batches as one that was never stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from efcil.accel.captured_step import CapturedStep
from efcil.accel.execution import Execution
from efcil.accel.prefetch import Prefetcher, precompute_teacher
from efcil.data.augment import Transform
from efcil.errors import TrainingError
from efcil.randomness import RngStream, derive_seed, generator
from efcil.training.batch import FrozenForward
from efcil.training.distributed import running_statistics
from efcil.training.image_batches import ImageBatches
from efcil.training.loader import LastBatch, StoredBatch, batch_slices, epoch_batches, padded_count, several_epochs
from efcil.training.memory import memory_guard
from efcil.training.schedule import Schedule
from efcil.training.step import Loss, Optimizer, Rule, SetGradientSink, Step


@dataclass(frozen=True)
class EpochReport:
    """Summary of an epoch for progress, logs and checkpoints."""

    task: int
    epoch: int  # 0 is the first of the task
    epochs: int  # of the task, all stages together
    loss: float
    lr: float


@dataclass(frozen=True)
class MidEpochState:
    """State of an interrupted epoch, enough to finish it as if nothing had happened."""

    epoch: int  # of the task, the one that is not finished
    steps: int  # of it that are done
    loss_sum: Tensor  # their loss
    generator_state: Tensor | None  # state of the generator that the loss draws from


class TrainingInterrupted(KeyboardInterrupt):
    """Training was interrupted after a step, and its state was saved."""


OnInterrupt = Callable[[int, MidEpochState, Optimizer], None]  # task, state of its epoch, optimizer


def train(
    module: nn.Module,
    loss: Loss,
    pixels: ImageBatches,
    labels: Tensor,
    *,
    schedule: Schedule,
    transform: Transform | None,
    batch_size: int,
    last_batch: LastBatch,
    execution: Execution,
    seed: int,
    task: int,
    rule: Rule = "sgd",
    momentum: float = 0.9,
    loss_generator: torch.Generator | None = None,
    frozen: FrozenForward | None = None,
    views: int = 0,
    set_gradient_sink: SetGradientSink = lambda gradient_sink: None,
    epoch_offset: int = 0,
    epochs: int | None = None,
    first_epoch: int = 0,
    optimizer_state: dict[str, Tensor] | None = None,
    mid_epoch: MidEpochState | None = None,
    after_epoch: Callable[[EpochReport, Optimizer], None] = lambda report, optimizer: None,
    stop: Callable[[], bool] = lambda: False,
    on_interrupt: OnInterrupt = lambda task, mid_epoch, optimizer: None,
) -> None:
    """Train `module` in place from epoch `first_epoch` on; call `after_epoch` after every epoch whose loss is finite.

    When `stop` says so, the step is finished, `on_interrupt` sees where it stands, and `TrainingInterrupted` is raised;
    with that as `mid_epoch` training goes on in the middle of epoch `first_epoch`.

    `loss_generator` is what the loss draws from, seeded anew for each epoch. What `frozen` says of a batch is computed
    ahead where that pays, else in the step. `views` are further augmentations of each image. `set_gradient_sink`
    connects the backward pass and the optimizer where that is supported. Of a task in several stages this is the one
    after `epoch_offset` of `epochs` in all; randomness and reports count through it.
    """
    optimizer = Optimizer(module, schedule, execution, rule, momentum)
    if optimizer_state is not None:
        optimizer.load_state_dict(optimizer_state)
    world = execution.world
    world.broadcast_([*module.state_dict().values(), *optimizer.state_dict().values()])
    module.train()
    plain = Step(loss, optimizer, pixels, execution, running_statistics(module), frozen, views)
    plain.before_update = getattr(module, "before_update", None)
    step: Step | CapturedStep = plain

    def epoch_generator(epoch: int) -> torch.Generator:
        return generator(execution.device, RngStream.EPOCH, seed, task, epoch_offset + epoch)

    data = (pixels.images, labels, transform, batch_size, last_batch)

    ahead_of = None if frozen is None else frozen.ahead

    def load_epochs(block: range) -> Sequence[Sequence[StoredBatch]]:
        found = several_epochs(*data, [epoch_generator(epoch) for epoch in block], world, views)
        return found if ahead_of is None else precompute_teacher(found, ahead_of, pixels, execution)

    prefetcher = Prefetcher(
        lambda epoch: epoch_batches(*data, epoch_generator(epoch), world, views),
        load_epochs,
        pixels.images,
        schedule.epochs,
        execution,
    )
    batch_bounds = list(
        batch_slices(padded_count(len(labels), batch_size, last_batch), min(batch_size, len(labels)), last_batch)
    )
    early = world.size == 1 and plain.before_update is None  # neither a sum over processes nor a hook needs them all
    with memory_guard(f"training task {task + 1}"), optimizer.optimizer_in_backward(set_gradient_sink, early):
        for epoch in range(first_epoch, schedule.epochs):
            optimizer.lr.fill_(schedule.lr_at(epoch))
            if loss_generator is not None:
                loss_generator.manual_seed(derive_seed(RngStream.NOISE, seed, task, epoch_offset + epoch))
            steps, done = 0, 0
            if mid_epoch is not None and epoch == first_epoch:
                done = mid_epoch.steps
                if world.is_main:  # the sum of all processes
                    plain.loss_sum.copy_(mid_epoch.loss_sum)
                if loss_generator is not None and mid_epoch.generator_state is not None:
                    loss_generator.set_state(mid_epoch.generator_state.cpu())
            for keep_aspect, batch in zip(batch_bounds, prefetcher.get(epoch), strict=True):
                steps += 1
                if steps <= done:
                    continue
                plain.weight = world.begin_batch(keep_aspect.stop - keep_aspect.start)
                if execution.cuda_graphs and execution.knows(module) and step is plain:
                    step = CapturedStep(plain, module, *batch, loss_generator=loss_generator)
                step(*batch)
                if world.any(stop()):
                    drawn = None if loss_generator is None else loss_generator.get_state()
                    loss_sum = world.all_reduce_(plain.loss_sum.clone())
                    on_interrupt(task, MidEpochState(epoch_offset + epoch, steps, loss_sum, drawn), optimizer)
                    world.barrier()  # nobody ends, and ends the others, before it is kept
                    raise TrainingInterrupted
            prefetcher.prefetch(epoch + 1)
            mean = world.all_reduce_(plain.loss_sum).item() / steps
            plain.loss_sum.zero_()
            lr = schedule.lr_at(epoch)
            if not mean < float("inf"):
                raise TrainingError(
                    f"the loss is {mean} in task {task + 1}, epoch {epoch_offset + epoch + 1} (learning rate {lr:g}): "
                    "the last good checkpoint is kept; lower the rate (--set first.lr=... or later.lr=...) in a new "
                    "--out"
                )
            after_epoch(EpochReport(task, epoch_offset + epoch, epochs or schedule.epochs, mean, lr), optimizer)
