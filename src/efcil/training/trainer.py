"""The one training loop. Every learner trains through `train`; what differs is the loss it hands in.

Randomness of an epoch is a function of (seed, task, epoch), so a run that goes on from a checkpoint sees the same
batches as one that was never stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from efcil.accel.captured_step import CapturedStep
from efcil.accel.machine import Machine
from efcil.accel.prefetch import Ahead, seen_at_rest
from efcil.data.augment import Transform
from efcil.errors import TrainingError
from efcil.randomness import Purpose, generator, seed_of
from efcil.training.batch import FrozenForward
from efcil.training.distributed import running_statistics
from efcil.training.image_batches import Pixels
from efcil.training.loader import LastBatch, StoredBatch, batches, epoch_batches, filled, several_epochs
from efcil.training.memory import memory_guard
from efcil.training.schedule import Schedule
from efcil.training.step import HandOver, Loss, Optimiser, Rule, Step


@dataclass(frozen=True)
class EpochReport:
    """What an epoch tells: for progress, logs and checkpoints."""

    task: int
    epoch: int  # 0 is the first of the task
    epochs: int  # of the task, all stages together
    loss: float
    lr: float


@dataclass(frozen=True)
class Middle:
    """An epoch that was left in the middle: what is needed to finish it as if nothing had happened."""

    epoch: int  # of the task, the one that is not finished
    steps: int  # of it that are done
    total: Tensor  # their loss
    noise: Tensor | None  # state of the generator that the loss draws from


class Stopped(KeyboardInterrupt):
    """Training was asked to stop, finished its step and saved what it had."""


OnStop = Callable[[int, Middle, Optimiser], None]  # task, where its epoch stands, and the optimiser


def train(
    module: nn.Module,
    loss: Loss,
    pixels: Pixels,
    labels: Tensor,
    *,
    schedule: Schedule,
    transform: Transform | None,
    batch_size: int,
    last_batch: LastBatch,
    machine: Machine,
    seed: int,
    task: int,
    rule: Rule = "sgd",
    momentum: float = 0.9,
    noise: torch.Generator | None = None,
    frozen: FrozenForward | None = None,
    views: int = 0,
    hand_over: HandOver = lambda updates: None,
    before: int = 0,
    epochs: int | None = None,
    start: int = 0,
    momenta: dict[str, Tensor] | None = None,
    middle: Middle | None = None,
    after_epoch: Callable[[EpochReport, Optimiser], None] = lambda report, optimiser: None,
    stop: Callable[[], bool] = lambda: False,
    on_stop: OnStop = lambda task, middle, optimiser: None,
) -> None:
    """Train `module` in place from epoch `start` on; `after_epoch` sees every finished epoch whose loss is finite.

    When `stop` says so, the step is finished, `on_stop` sees where it stands, and `Stopped` is raised; with that as
    `middle` training goes on in the middle of epoch `start`.

    `noise` is what the loss draws from, seeded anew for each epoch. What `frozen` says of a batch is computed ahead
    where that pays, else in the step. `views` are further augmentations of each image. `hand_over` connects backward
    pass and optimizer where that is supported. Of a task in several stages this is the one after `before` epochs of
    `epochs` in all; randomness and reports count through it.
    """
    optimiser = Optimiser(module, schedule, machine, rule, momentum)
    if momenta is not None:
        optimiser.load_momenta(momenta)
    group = machine.group
    group.copy_first_([*module.state_dict().values(), *optimiser.momenta().values()])
    module.train()
    plain = Step(loss, optimiser, pixels, machine, running_statistics(module), frozen, views)
    plain.before_update = getattr(module, "before_update", None)
    step: Step | CapturedStep = plain

    def source(epoch: int) -> torch.Generator:
        return generator(machine.device, Purpose.EPOCH, seed, task, before + epoch)

    how = (pixels.images, labels, transform, batch_size, last_batch)

    ahead_of = None if frozen is None else frozen.ahead

    def several(block: range) -> Sequence[Sequence[StoredBatch]]:
        found = several_epochs(*how, [source(epoch) for epoch in block], group, views)
        return found if ahead_of is None else seen_at_rest(found, ahead_of, pixels, machine)

    ahead = Ahead(
        lambda epoch: epoch_batches(*how, source(epoch), group, views),
        several,
        pixels.images,
        schedule.epochs,
        machine,
    )
    wholes = list(batches(filled(len(labels), batch_size, last_batch), min(batch_size, len(labels)), last_batch))
    with memory_guard(f"training task {task + 1}"), optimiser.taking(hand_over, group):
        for epoch in range(start, schedule.epochs):
            optimiser.rate.fill_(schedule.rate(epoch))
            if noise is not None:
                noise.manual_seed(seed_of(Purpose.NOISE, seed, task, before + epoch))
            steps, done = 0, 0
            if middle is not None and epoch == start:
                done = middle.steps
                if group.is_first:  # the sum of all processes
                    plain.total.copy_(middle.total)
                if noise is not None and middle.noise is not None:
                    noise.set_state(middle.noise.cpu())
            for keep_aspect, batch in zip(wholes, ahead.take(epoch), strict=True):
                steps += 1
                if steps <= done:
                    continue
                plain.weight = group.begin_batch(keep_aspect.stop - keep_aspect.start)
                if machine.capture and machine.knows(module) and step is plain:
                    step = CapturedStep(plain, module, *batch, noise=noise)
                step(*batch)
                if group.any(stop()):
                    drawn = None if noise is None else noise.get_state()
                    total = group.sum_(plain.total.clone())
                    on_stop(task, Middle(before + epoch, steps, total, drawn), optimiser)
                    group.barrier()  # nobody ends, and ends the others, before it is kept
                    raise Stopped
            ahead.prepare(epoch + 1)
            mean = group.sum_(plain.total).item() / steps
            plain.total.zero_()
            rate = schedule.rate(epoch)
            if not mean < float("inf"):
                raise TrainingError(
                    f"the loss is {mean} in task {task + 1}, epoch {before + epoch + 1} (learning rate {rate:g}): the "
                    "last good checkpoint is kept; lower the rate (--set first.lr=... or later.lr=...) in a new --out"
                )
            after_epoch(EpochReport(task, before + epoch, epochs or schedule.epochs, mean, rate), optimiser)
