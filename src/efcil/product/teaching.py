"""One teaching: the backbone learns the call's classes, statistics follow it, the classifier is fitted again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from efcil.accel.machine import Machine
from efcil.data.cache import MEAN, STD
from efcil.data.dataset import ImageSet
from efcil.features import TaskFeatures
from efcil.learners import Learner
from efcil.models.heads import CosineHead
from efcil.product.calibration import Optimism, draw_features, fit_temperature
from efcil.product.inputs import Images
from efcil.product.settings import planned, with_epochs
from efcil.protocol import fit_task
from efcil.randomness import Purpose, generator
from efcil.tasks import Task
from efcil.tensor_files import on_cpu
from efcil.training.image_batches import Pixels
from efcil.training.image_store import part, stored
from efcil.training.schedule import Schedule
from efcil.training.step import Optimiser
from efcil.training.trainer import EpochReport
from efcil.trajectory import Trajectory

HELD_OUT_FROM = 5  # pictures of a new class from which on some are not trained on, so that recall can be measured; ...
HELD_OUT_MOST = 20  # ... more of them would cost training more than the measure gains
MOST_EPOCHS = 200  # that a time budget is turned into: the paper's longest schedule
PROBE_STEPS = 4  # of training that are timed before epochs are planned

Told = Callable[[EpochReport], None]


@dataclass(frozen=True)
class Lesson:
    """What a call brings: pictures, their classes as positions, and which of those the model knew before."""

    images: Images  # (n, 3, size, size)
    labels: Tensor  # (n,) positions, on the CPU
    old: int  # classes known before
    new: int  # classes that are new; their positions follow
    teaching: int  # how many there were before
    training: int  # how often the backbone has learned before
    share: float  # of a new class's pictures that is held out

    @property
    def task_classes(self) -> Tensor:
        """Positions of the classes in the call, ascending."""
        return torch.unique(self.labels)

    def held_out(self, seed: int) -> Tensor:
        """Which pictures (n,) are not trained on: a share of each new class that has enough of them."""
        source = generator("cpu", Purpose.HELD_OUT, seed, self.teaching)
        chosen = torch.zeros(len(self.labels), dtype=torch.bool)
        for label in range(self.old, self.old + self.new):
            rows = (self.labels == label).nonzero()[:, 0]
            order = torch.randperm(len(rows), generator=source)
            if self.share and len(rows) >= HELD_OUT_FROM:
                chosen[rows[order[: min(HELD_OUT_MOST, max(1, round(self.share * len(rows))))]]] = True
        return chosen


@dataclass(frozen=True)
class Learned:
    """What a teaching returns; the trajectory has changed in place."""

    recall: dict[int, float]  # percent, by position
    temperature: float
    optimism: Optimism


def pixels_of(images: Images, machine: Machine) -> Pixels:
    """Put pictures on the device."""
    return Pixels(stored(images, machine.device), MEAN, STD, machine)


def teach(
    lesson: Lesson,
    trajectory: Trajectory,
    *,
    rests: bool,
    imprints: bool,
    frozen: bool,
    optimism: Optimism,
    epochs: int | None,
    deadline: float | None,
    after_epoch: Told,
    solving: Callable[[], None],
) -> Learned:
    """Teach a trajectory of one method in place; its backbone learns unless it `rests`.

    With `imprints` the auxiliary head gets its new rows without training, for a backbone that rests only this time.
    `deadline` (of `time.monotonic`) is when the teaching should be over: epochs are planned for it after the first
    steps were timed. Held-out pictures are kept from training; recall is measured on them with a preview that has not
    seen them; then the classifier is fitted to all, so that none is wasted.
    """
    learner = trajectory.learner
    assert learner is not None
    machine, seed = learner.machine, learner.seed
    labels, held = lesson.labels.to(machine.device), lesson.held_out(seed)
    everything = pixels_of(lesson.images, machine)
    transform = learner.transform(lesson.images.shape[-1])
    found = Learned({}, 0.0, optimism)

    def fit() -> None:
        rows = (~held).numpy()
        shown = ImageSet(lesson.images[rows], lesson.labels.numpy()[rows])
        task = Task(lesson.training, lesson.old, lesson.new, shown)
        pixels = pixels_of(shown.images, machine)
        classes = lesson.task_classes
        learner.task_classes = classes.to(machine.device) if int(classes[0]) < lesson.old else None
        own = labels[(~held).to(machine.device)]
        options = with_epochs(learner.options, epochs)
        if deadline is not None:
            options = with_epochs(options, _affordable(learner, task, pixels, own, deadline))
        learner.options = options
        fit_task(learner, task, pixels, own, transform, after_epoch=lambda report, optimiser: after_epoch(report))

    def measure(features: TaskFeatures) -> None:
        nonlocal found
        features.new()
        if imprints:
            _imprint(learner, features, lesson)
        elif lesson.old and not rests:
            features.old()
        if bool(held.any()):
            found = _measured(trajectory, features, held.to(machine.device), optimism, seed)
            if frozen:  # the statistics alone decide, so that merged models equal one taught on both
                found = replace(found, optimism=optimism)

    if rests:
        learner.num_old_classes = lesson.old
    features = trajectory.learn_task(
        lesson.teaching, everything, labels, transform, None if rests else fit, solving, measure
    )
    temperature = calibrated(trajectory, found.optimism, seed)
    if temperature is None:  # no Grams: from the held-out pictures, or from all where none are
        scores = trajectory.logits(label_of(trajectory), features.new())
        temperature = found.temperature or fit_temperature(scores, features.labels)
    return Learned(found.recall, temperature, found.optimism)


def label_of(trajectory: Trajectory) -> str:
    """Return the label of the one method of a model's trajectory."""
    (label,) = trajectory.parts
    return label


def _imprint(learner: Learner, learned: TaskFeatures, lesson: Lesson) -> None:
    """Give the auxiliary head a row for each new class without training: the direction of its mean feature."""
    head = learner.head
    if lesson.new and isinstance(head, CosineHead):
        means = learned.stats().select(range(lesson.old, lesson.old + lesson.new)).mean
        head.extend(normalize(means, dim=1))


def _measured(trajectory: Trajectory, features: TaskFeatures, held: Tensor, optimism: Optimism, seed: int) -> Learned:
    """Return recall on held-out pictures and the temperature that fits them, by a preview without them."""
    label = label_of(trajectory)
    trial = trajectory.preview(features.subset((~held).nonzero()[:, 0]))
    scores, labels = trial.logits(label, features.new()[held]), features.labels[held]
    right = (scores.argmax(1) == labels).double()
    recall = {c: round(100 * float(right[labels == c].mean()), 2) for c in labels.unique().tolist()}
    temperature, stats = fit_temperature(scores, labels), trial.stats(label)
    if stats is not None and scores.shape[1] > 1:
        drawn, places = draw_features(stats.select(labels.unique()), seed)
        ideal = fit_temperature(trial.logits(label, drawn), labels.unique()[places])
        optimism = optimism.merge(math.log(temperature / ideal), len(labels))
    return Learned(recall, temperature, optimism)


def calibrated(trajectory: Trajectory, optimism: Optimism, seed: int) -> float | None:
    """Return the temperature from features drawn from all classes' statistics; None where no Grams are kept."""
    label = label_of(trajectory)
    stats = trajectory.stats(label)
    if stats is None:
        return None
    drawn, places = draw_features(stats, seed)
    return fit_temperature(trajectory.logits(label, drawn), places) * optimism.factor


def _affordable(learner: Learner, task: Task, pixels: Pixels, labels: Tensor, deadline: float) -> int:
    """Time some steps of training, undo them, and return how many epochs can be done until the deadline."""
    options, batch = learner.options, learner.options.batch_size
    before = on_cpu(learner.state(teacher=False))
    rows = torch.arange(min(len(labels), PROBE_STEPS * batch), device=labels.device)
    moments: list[float] = []

    def tick(report: EpochReport, optimiser: Optimiser) -> None:
        learner.machine.synchronise()
        moments.append(time.monotonic())

    def short(schedule: Schedule) -> Schedule:
        return planned(schedule, 2)  # the first one warms up

    learner.options = options.model_copy(update={"first": short(options.first), "later": short(options.later)})
    try:
        fit_task(
            learner,
            task,
            pixels.showing(part(pixels.images, rows)),
            labels[rows],
            learner.transform(pixels.images.shape[-1]),
            after_epoch=tick,
        )
    finally:
        learner.options = options
        learner.load_state({k: v.to(learner.machine.device) for k, v in before.items()})
    epoch = (moments[1] - moments[0]) * -(-len(labels) // batch) / -(-len(rows) // batch)
    left = deadline - time.monotonic()
    return max(1, min(MOST_EPOCHS, int(left / max(epoch, 1e-6)) - 1))  # one for what comes after training
