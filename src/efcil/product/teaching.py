"""One teaching: the backbone learns the call's classes, statistics follow it, the classifier is fitted again."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from efcil.accel.backend import Backend
from efcil.data.cache import MEAN, STD
from efcil.data.dataset import ImageSet
from efcil.features import TaskFeatures
from efcil.learners import Learner
from efcil.models.heads import CosineHead
from efcil.product.calibration import CalibrationOffset, draw_features, fit_temperature
from efcil.product.inputs import Images
from efcil.product.model_config import rescale_schedule, with_epochs
from efcil.randomness import RngStream, generator
from efcil.tasks import Task
from efcil.tensor_files import to_cpu
from efcil.training.callbacks import Callback, EpochReport
from efcil.training.image_batches import ImageBatches
from efcil.training.image_store import select, to_device
from efcil.training.schedule import Schedule
from efcil.training.state import TaskData, TrainState
from efcil.training.trainer import Trainer
from efcil.trajectory import Trajectory

MIN_IMAGES_FOR_VALIDATION = (
    5  # pictures of a new class from which on some are not trained on, so that recall can be measured; ...
)
MAX_VALIDATION_IMAGES = 20  # ... more of them would cost training more than the measure gains
MAX_EPOCHS = 200  # that a time budget is turned into: the paper's longest schedule
PROBE_STEPS = 4  # of training that are timed before epochs are planned


@dataclass(frozen=True)
class UpdatePlan:
    """How a model is updated."""

    freeze_backbone: bool  # in this update
    imprint: bool  # give the auxiliary head its new rows without training, as the backbone learns again later
    frozen: bool  # the backbone never learns again
    calibration_offset: CalibrationOffset
    epochs: int | None = None  # None: those of the options
    deadline: float | None = None  # of `time.monotonic`: the number of epochs is chosen to end by then


@dataclass(frozen=True)
class UpdateBatch:
    """What a call brings: pictures, their classes as positions, and which of those the model knew before."""

    images: Images  # (n, 3, size, size)
    labels: Tensor  # (n,) positions, on the CPU
    num_old: int  # classes known before
    num_new: int  # classes that are new; their positions follow
    update: int  # how many there were before
    backbone_update: int  # how often the backbone has learned before
    val_fraction: float  # of a new class's pictures that is held out

    @property
    def task_classes(self) -> Tensor:
        """Positions of the classes in the call, ascending."""
        return torch.unique(self.labels)

    def validation_mask(self, seed: int) -> Tensor:
        """Which pictures (n,) are not trained on: a share of each new class that has enough of them."""
        source = generator("cpu", RngStream.VALIDATION, seed, self.update)
        chosen = torch.zeros(len(self.labels), dtype=torch.bool)
        for label in range(self.num_old, self.num_old + self.num_new):
            rows = (self.labels == label).nonzero()[:, 0]
            order = torch.randperm(len(rows), generator=source)
            if self.val_fraction and len(rows) >= MIN_IMAGES_FOR_VALIDATION:
                chosen[rows[order[: min(MAX_VALIDATION_IMAGES, max(1, round(self.val_fraction * len(rows))))]]] = True
        return chosen


@dataclass(frozen=True)
class UpdateResult:
    """What a teaching returns; the trajectory has changed in place."""

    recall: dict[int, float]  # percent, by position
    temperature: float
    calibration_offset: CalibrationOffset


def pixels_of(images: Images, backend: Backend) -> ImageBatches:
    """Put pictures on the device."""
    return ImageBatches(to_device(images, backend.device), MEAN, STD, backend)


def teach(batch: UpdateBatch, trajectory: Trajectory, plan: UpdatePlan, callback: Callback) -> UpdateResult:
    """Teach a trajectory of one method in place.

    Held-out images are kept from training; recall is measured on them with a preview that has not seen them; then the
    classifier is fitted to all, so that none is wasted.
    """
    learner = trajectory.learner
    assert learner is not None
    backend, seed = learner.backend, learner.seed
    labels, validation = batch.labels.to(backend.device), batch.validation_mask(seed)
    everything = pixels_of(batch.images, backend)
    transform = learner.transform(batch.images.shape[-1])
    found = UpdateResult({}, 0.0, plan.calibration_offset)

    def fit() -> None:
        rows = (~validation).numpy()
        shown = ImageSet(batch.images[rows], batch.labels.numpy()[rows])
        task = Task(batch.backbone_update, batch.num_old, batch.num_new, shown)
        pixels = pixels_of(shown.images, backend)
        classes = batch.task_classes
        learner.task_classes = classes.to(backend.device) if int(classes[0]) < batch.num_old else None
        own = labels[(~validation).to(backend.device)]
        options, data = with_epochs(learner.options, plan.epochs), TaskData(task, pixels, own, transform)
        if plan.deadline is not None:
            options = with_epochs(options, _affordable_epochs(learner, data, plan.deadline))
        learner.options = options
        Trainer(learner, [callback]).fit(data)

    def measure(features: TaskFeatures) -> None:
        nonlocal found
        features.new()
        if plan.imprint:
            _imprint(learner, features, batch)
        elif batch.num_old and not plan.freeze_backbone:
            features.old()
        if bool(validation.any()):
            found = _validate(trajectory, features, validation.to(backend.device), plan.calibration_offset, seed)
            if plan.frozen:  # the statistics alone decide, so that merged models equal one taught on both
                found = replace(found, calibration_offset=plan.calibration_offset)

    if plan.freeze_backbone:
        learner.num_old_classes = batch.num_old
    every = Task(batch.update, batch.num_old, batch.num_new, ImageSet(batch.images, batch.labels.numpy()))
    data, on_training_end = (
        TaskData(every, everything, labels, transform),
        partial(callback.on_training_end, batch.update),
    )
    features = trajectory.learn_task(data, None if plan.freeze_backbone else fit, on_training_end, measure)
    temperature = calibrate(trajectory, found.calibration_offset, seed)
    if temperature is None:  # no Grams: from the held-out pictures, or from all where none are
        scores = trajectory.logits(label_of(trajectory), features.new())
        temperature = found.temperature or fit_temperature(scores, features.labels)
    return UpdateResult(found.recall, temperature, found.calibration_offset)


def label_of(trajectory: Trajectory) -> str:
    """Return the label of the one method of a model's trajectory."""
    (label,) = trajectory.parts
    return label


def _imprint(learner: Learner, learned: TaskFeatures, batch: UpdateBatch) -> None:
    """Give the auxiliary head a row for each new class without training: the direction of its mean feature."""
    head = learner.head
    if batch.num_new and isinstance(head, CosineHead):
        means = learned.stats().select(range(batch.num_old, batch.num_old + batch.num_new)).mean
        own = learner.feature_layout[0]  # the head sees the last stage alone
        head.append_weights(normalize(means[:, :own], dim=1))


def _validate(
    trajectory: Trajectory, features: TaskFeatures, validation: Tensor, calibration_offset: CalibrationOffset, seed: int
) -> UpdateResult:
    """Return recall on held-out pictures and the temperature that fits them, by a preview without them."""
    label = label_of(trajectory)
    trial = trajectory.preview(features.subset((~validation).nonzero()[:, 0]))
    scores, labels = trial.logits(label, features.new()[validation]), features.labels[validation]
    right = (scores.argmax(1) == labels).double()
    recall = {c: round(100 * float(right[labels == c].mean()), 2) for c in labels.unique().tolist()}
    temperature, stats = fit_temperature(scores, labels), trial.stats(label)
    if stats is not None and scores.shape[1] > 1:
        drawn, places = draw_features(stats.select(labels.unique()), seed)
        ideal = fit_temperature(trial.logits(label, drawn), labels.unique()[places])
        calibration_offset = calibration_offset.merge(math.log(temperature / ideal), len(labels))
    return UpdateResult(recall, temperature, calibration_offset)


def calibrate(trajectory: Trajectory, calibration_offset: CalibrationOffset, seed: int) -> float | None:
    """Return the temperature from features drawn from all classes' statistics; None where no Grams are kept."""
    label = label_of(trajectory)
    stats = trajectory.stats(label)
    if stats is None:
        return None
    drawn, places = draw_features(stats, seed)
    return fit_temperature(trajectory.logits(label, drawn), places) * calibration_offset.factor


class _Stopwatch(Callback):
    """Notes when epochs end."""

    def __init__(self, backend: Backend):
        self.backend = backend
        self.moments: list[float] = []

    def on_epoch_end(self, report: EpochReport, state: TrainState) -> None:
        self.backend.synchronize()
        self.moments.append(time.monotonic())


def _affordable_epochs(learner: Learner, data: TaskData, deadline: float) -> int:
    """Time some steps of training, undo them, and return how many epochs can be done until the deadline."""
    options, batch = learner.options, learner.options.batch_size
    before = to_cpu(learner.state(teacher=False))
    rows = torch.arange(min(len(data.labels), PROBE_STEPS * batch), device=data.labels.device)
    watch = _Stopwatch(learner.backend)

    def short(schedule: Schedule) -> Schedule:
        return rescale_schedule(schedule, 2)  # the first one warms up

    learner.options = options.model_copy(update={"first": short(options.first), "later": short(options.later)})
    images = data.images.with_images(select(data.images.images, rows))
    try:
        Trainer(learner, [watch]).fit(replace(data, images=images, labels=data.labels[rows]))
    finally:
        learner.options = options
        learner.load_state({k: v.to(learner.backend.device) for k, v in before.items()})
    epoch = (watch.moments[1] - watch.moments[0]) * -(-len(data.labels) // batch) / -(-len(rows) // batch)
    left = deadline - time.monotonic()
    return max(1, min(MAX_EPOCHS, int(left / max(epoch, 1e-6)) - 1))  # one for what comes after training
