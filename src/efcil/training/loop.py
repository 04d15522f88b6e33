"""The one training loop. Every method trains through `train`; what differs is the loss it hands in.

Randomness of an epoch is a function of (seed, task, epoch), so a run that goes on from a checkpoint sees the same
batches as one that was never stopped.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from efcil.data.augment import CHUNK_BYTES, CentreCrop, Parameters, Transform
from efcil.errors import TrainingError
from efcil.training.distributed import ALONE, Group, running_statistics
from efcil.training.images import Store, fetched
from efcil.training.machine import Machine, Purpose, generator, memory_guard, own_stream, seed_of
from efcil.training.schedule import Schedule
from efcil.training.updates import SGD

LastBatch = Literal["wrap", "keep", "drop"]
Rule = Literal["sgd", "adam"]
Loss = Callable[..., Tensor]  # normalised images (n, c, h, w), labels (n,), what `Resting` says of them -> scalar
Resting = Callable[[Tensor], Tensor]  # normalised images -> what networks at rest make of them, (n, ...)
Batch = tuple[Tensor, ...]  # images, labels and, where it was computed ahead, what networks at rest make of the images
HandOver = Callable[[SGD | None], None]  # tells who finds gradients who takes them at once, if anybody
AT_REST = 2560 * 3 * 32 * 32  # numbers in the images that networks at rest look at at once


class Pixels:
    """uint8 images and how they become the network's input."""

    def __init__(
        self,
        images: Store,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        machine: Machine,
        short: int | None = None,
    ):
        self.images = images  # (n, channels, height, width) uint8
        self.short = short  # short side at which their centre is cut out; None: the stored one
        shape = (1, len(mean), 1, 1)
        self.scale = (1 / (255 * torch.tensor(std, dtype=torch.float64))).float().view(shape).to(machine.device)
        self.offset = (
            (torch.tensor(mean, dtype=torch.float64) / torch.tensor(std, dtype=torch.float64)).float().view(shape)
        ).to(machine.device)
        self.format = torch.channels_last if machine.device.type == "cuda" else torch.contiguous_format
        self.at_once = machine.branches  # normalised by one kernel
        self.view: tuple[Transform, Parameters] | None = None  # how they are changed when they are taken

    def centre(self, crop: int | None) -> CentreCrop | None:
        """Return how the `crop` x `crop` in their middle are cut out, None where there is nothing to cut."""
        if crop is None or crop == self.images.shape[-1]:
            return None
        return CentreCrop(crop, self.short)

    def showing(self, images: Store) -> Pixels:
        """Return other images with the same normalisation."""
        other = copy.copy(self)
        other.images, other.view = images, None
        return other

    def changed(self, transform: Transform, source: torch.Generator) -> Pixels:
        """Return the same images augmented, each in one way that is drawn now; the work is done when they are taken."""
        other = copy.copy(self)
        other.view = (transform, transform.draw(len(self.images), source))
        return other

    def taken(self, parts: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the uint8 images of each part's rows."""
        parts = list(parts)
        for rows, batch in zip(parts, fetched(self.images, parts), strict=True):
            if self.view is not None:
                transform, drawn = self.view
                batch = transform.apply(batch, {name: value[rows] for name, value in drawn.items()})
            yield batch

    def batches(self, size: int) -> Iterator[Tensor]:
        """Yield all images, `size` at a time."""
        return self.taken(torch.arange(len(self.images), device=self.images.device).split(size))

    def normalise(self, batch: Tensor) -> Tensor:
        """Pixels 0 .. 255 -> (pixel / 255 - mean) / std."""
        if self.at_once and batch.is_cuda:
            from efcil.training import kernels

            return kernels.normalised(batch, self.scale, self.offset)
        return (batch.float() * self.scale - self.offset).contiguous(memory_format=self.format)


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


def batches(count: int, size: int, last: LastBatch) -> Iterator[slice]:
    """Slices of a permuted epoch; `wrap` expects a permutation that `shuffled` has filled up.

    >>> [(b.start, b.stop) for b in batches(10, 4, "keep")], [(b.start, b.stop) for b in batches(10, 4, "drop")]
    ([(0, 4), (4, 8), (8, 10)], [(0, 4), (4, 8)])
    """
    size = min(size, count)
    stop = count // size * size if last == "drop" else count
    for start in range(0, stop, size):
        yield slice(start, min(start + size, stop))


def filled(count: int, size: int, last: LastBatch) -> int:
    """Return how many rows an epoch of `count` images has: `wrap` fills the last batch up."""
    return count + (-count % min(size, count) if last == "wrap" else 0)


def shuffled(count: int, size: int, last: LastBatch, source: torch.Generator) -> Tensor:
    """Return a random order of `count` rows; `wrap` repeats its head until every batch is full."""
    order = torch.randperm(count, generator=source, device=source.device)
    missing = filled(count, size, last) - count
    return torch.cat([order, order[:missing]]) if missing else order


Drawn = tuple[Tensor, Parameters, list[slice]]  # of an epoch: rows in order, their augmentation, its batches


def drawn_epoch(
    count: int, transform: Transform | None, size: int, last: LastBatch, source: torch.Generator, group: Group
) -> Drawn:
    """Draw an epoch, the same in every process, and keep this one's rows of each batch."""
    order = shuffled(count, size, last, source)
    drawn = transform.draw(len(order), source) if transform is not None else {}
    cuts = list(batches(len(order), min(size, count), last))
    if group.size == 1:
        return order, drawn, cuts
    rows = torch.arange(len(order), device=order.device)
    parts = [rows[cut][group.shard(cut.stop - cut.start)] for cut in cuts]
    own, stops = torch.cat(parts), torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).tolist()
    cuts = [slice(start, stop) for start, stop in itertools.pairwise(stops)]
    return order[own], {name: value[own] for name, value in drawn.items()}, cuts


def epoch_batches(
    images: Store,
    labels: Tensor,
    transform: Transform | None,
    size: int,
    last: LastBatch,
    source: torch.Generator,
    group: Group = ALONE,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the augmented batches of one epoch. Draws come first, for the whole epoch: chunks do not change them."""
    order, drawn, cuts = drawn_epoch(len(labels), transform, size, last, source, group)
    row = math.prod(images.shape[1:])
    per_chunk = max(1, CHUNK_BYTES[images.device.type] // (row * cuts[0].stop))  # batches in a chunk
    if not isinstance(images, Tensor):
        per_chunk = 1
    chunks = [cuts[first : first + per_chunk] for first in range(0, len(cuts), per_chunk)]
    rows = (order[chunk[0].start : chunk[-1].stop] for chunk in chunks)
    for chunk, pixels in zip(chunks, fetched(images, rows), strict=True):
        begin, end = chunk[0].start, chunk[-1].stop
        if transform is not None:
            pixels = transform.apply(pixels, {name: value[begin:end] for name, value in drawn.items()})
        targets = labels[order[begin:end]]
        for cut in chunk:
            yield pixels[cut.start - begin : cut.stop - begin], targets[cut.start - begin : cut.stop - begin]


def several_epochs(
    images: Store,
    labels: Tensor,
    transform: Transform | None,
    size: int,
    last: LastBatch,
    sources: Sequence[torch.Generator],
    group: Group = ALONE,
) -> list[list[tuple[Tensor, Tensor]]]:
    """Return the batches of several epochs, augmented in one go: the same bytes as `epoch_batches`, fewer launches."""
    epochs = [drawn_epoch(len(labels), transform, size, last, source, group) for source in sources]
    orders, drawn, cuts = [e[0] for e in epochs], [e[1] for e in epochs], epochs[0][2]
    rows = torch.cat(orders)
    pixels, targets = images[rows], labels[rows]
    if transform is not None:
        pixels = transform.apply(pixels, {name: torch.cat([d[name] for d in drawn]) for name in drawn[0]})
    of_each = zip(pixels.split(len(orders[0])), targets.split(len(orders[0])), strict=True)
    return [[(x[cut], y[cut]) for cut in cuts] for x, y in of_each]


@torch.no_grad()
def seen_at_rest(
    epochs: Sequence[Sequence[Batch]], resting: Resting, pixels: Pixels, machine: Machine
) -> list[list[Batch]]:
    """Add to the batches of epochs what networks at rest make of their images, in batches as large as a GPU likes.

    All of one size, the last one filled up: a new size would be compiled and tried out anew.
    """
    parts = [batch[0] for epoch in epochs for batch in epoch]
    rows = torch.cat(parts)
    size = max(len(parts[0]), AT_REST // math.prod(rows.shape[1:]))

    def looked() -> Tensor:
        found = []
        with machine.autocast():
            for part in rows.split(size):
                full = torch.cat([part, part[:1].expand(size - len(part), -1, -1, -1)])
                found.append(resting(pixels.normalise(full))[: len(part)])
        return torch.cat(found)

    with machine.uncaptured():
        seen = iter(machine.convolving(looked).split([len(part) for part in parts]))
    return [[(*batch, next(seen)) for batch in epoch] for epoch in epochs]


class Ahead:
    """On a GPU, prepares the next epochs beside the steps of this one, on a stream of its own, where they fit.

    Images are augmented, and networks at rest look at them. Of small tasks several epochs at once: an epoch of 2,500
    images is a hundred launches of little work each. They are begun as many epochs before the first of them is needed,
    so that steps, which go first on the GPU, do not wait for them.
    """

    MOST = 8  # epochs at once

    def __init__(
        self,
        one: Callable[[int], Iterable[Batch]],  # the batches of an epoch
        several: Callable[[range], Sequence[Sequence[Batch]]],  # of several epochs
        images: Store,
        last: int,  # epochs in all
        machine: Machine,
    ):
        self.one, self.several, self.last = one, several, last
        fit = CHUNK_BYTES[machine.device.type] // max(1, images.numel()) if isinstance(images, Tensor) else 0
        self.at_once = min(self.MOST, fit)
        self.stream = own_stream(machine.device, "ahead") if machine.device.type == "cuda" and fit else None
        self.ready: dict[int, tuple[Sequence[Batch], torch.cuda.Event]] = {}  # and what tells that they are there
        self.taken: Sequence[Batch] = []
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())  # the images must be there

    def prepare(self, epoch: int) -> None:
        """Begin the batches of `epoch` and of those after it, where fewer are begun than belong together."""
        first = max(self.ready, default=epoch - 1) + 1
        if self.stream is not None and first < self.last and len(self.ready) < self.at_once:
            block = range(first, min(first + self.at_once, self.last))
            with torch.cuda.stream(self.stream):
                found = self.several(block)
                there = self.stream.record_event()
            self.ready |= {number: (batches, there) for number, batches in zip(block, found, strict=True)}

    def take(self, epoch: int) -> Iterable[Batch]:
        """Return an epoch's batches; the caller waits for the device before it asks for the next."""
        if self.stream is None:
            return self.one(epoch)
        if epoch not in self.ready:
            self.prepare(epoch)
        found, there = self.ready.pop(epoch)
        torch.cuda.current_stream().wait_event(there)
        self.taken = found  # kept until the next is taken: the steps that read it are done by then
        return self.taken


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
    ):
        self.loss, self.optimiser, self.pixels, self.machine = loss, optimiser, pixels, machine
        self.statistics, self.weight = list(statistics), 1.0
        self.total = torch.zeros((), device=machine.device, dtype=torch.float64)

    def __call__(self, batch: Tensor, labels: Tensor, *seen: Tensor) -> None:
        """Forward, backward, update."""
        self.optimiser.update.zero_grad()
        with self.machine.autocast():
            loss = self.loss(self.pixels.normalise(batch), labels, *seen)
        if self.machine.group.size > 1:
            loss = loss * self.weight
        loss.backward()
        if self.machine.group.size > 1:
            self._join()
        self.optimiser.update.step()
        self.total += loss.detach()

    @torch.no_grad()
    def _join(self) -> None:
        if self.statistics:
            torch._foreach_mul_(self.statistics, self.weight)
        gradients = [p.grad for p in self.optimiser.named.values() if p.grad is not None]
        self.machine.group.sum_all_([*gradients, *self.statistics])


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
    resting: Resting | None = None,
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

    `noise` is what the loss draws from, seeded anew for each epoch. What `resting` makes of a batch is the loss's third
    argument where it takes one and it pays to compute it ahead; elsewhere the loss has to see to it. `hand_over` is
    told who takes gradients as soon as they are found. Of a task in
    several stages this is the one after `before` epochs of `epochs` in all; randomness and reports count through it.
    """
    optimiser = Optimiser(module, schedule, machine, rule, momentum)
    if momenta is not None:
        optimiser.load_momenta(momenta)
    group = machine.group
    group.copy_first_([*module.state_dict().values(), *optimiser.momenta().values()])
    module.train()
    plain = Step(loss, optimiser, pixels, machine, running_statistics(module))
    step: Step | CapturedStep = plain

    def source(epoch: int) -> torch.Generator:
        return generator(machine.device, Purpose.EPOCH, seed, task, before + epoch)

    how = (pixels.images, labels, transform, batch_size, last_batch)

    asked = resting if len(inspect.signature(loss).parameters) > 2 else None  # a plugin's loss may know two arguments

    def several(block: range) -> Sequence[Sequence[Batch]]:
        found = several_epochs(*how, [source(epoch) for epoch in block], group)
        return found if asked is None else seen_at_rest(found, asked, pixels, machine)

    ahead = Ahead(
        lambda epoch: epoch_batches(*how, source(epoch), group),
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
            for whole, batch in zip(wholes, ahead.take(epoch), strict=True):
                steps += 1
                if steps <= done:
                    continue
                plain.weight = group.begin_batch(whole.stop - whole.start)
                if machine.capture and step is plain:
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
