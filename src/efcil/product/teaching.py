"""One update of a model: train the backbone, shift the statistics, refit the classifier."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from efcil.accel.backend import Backend
from efcil.classifiers.shared_covariance import SharedCovariance
from efcil.data.dataset import ImageSet
from efcil.data.preprocessing import Preprocessing
from efcil.features import TaskFeatures
from efcil.learners import Learner
from efcil.models.heads import CosineHead
from efcil.product.calibration import CalibrationOffset, draw_features, fit_temperature
from efcil.product.evidence import NO_EVIDENCE, Evidence, gather
from efcil.product.evidence import temperature as temperature_of
from efcil.product.inputs import Images
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

MIN_IMAGES_FOR_VALIDATION = 5  # minimum images of a new class to hold some out for recall
MAX_VALIDATION_IMAGES = 20  # held-out images per class, at most
MAX_EPOCHS = 200  # limit for time budgets, the longest schedule of the paper
PROBE_STEPS = 4  # training steps to time before planning epochs


@dataclass(frozen=True)
class UpdatePlan:
    """Options of an update."""

    freeze_backbone: bool  # freeze the backbone in this update
    imprint: bool  # set head rows of new classes without training, as the backbone is trained again later
    frozen: bool  # the backbone is frozen permanently
    calibration_offset: CalibrationOffset
    evidence: Evidence = NO_EVIDENCE  # of earlier updates
    epochs: int | None = None  # None: as in the options
    deadline: float | None = None  # on the `time.monotonic` clock; limits the number of epochs

    def frozen_discriminant(self, trajectory: Trajectory) -> bool:
        """Whether learned images can be scored as new ones, so that none need be held out."""
        return self.frozen and discriminant_of(trajectory) is not None


@dataclass(frozen=True)
class UpdateBatch:
    """Images and labels of an update, with the number of old and new classes."""

    images: Images | Tensor  # (n, 3, size, size), or features (n, dim) where the backbone is frozen
    labels: Tensor  # (n,) positions, on the CPU
    num_old: int  # number of old classes
    num_new: int  # number of new classes, at the following positions
    update: int  # index of the update
    backbone_update: int  # number of earlier backbone updates
    val_fraction: float  # held-out fraction of new classes
    preprocessing: Preprocessing  # of the images

    @property
    def task_classes(self) -> Tensor:
        """Positions of the classes in the batch, ascending."""
        return torch.unique(self.labels)

    def validation_mask(self, seed: int) -> Tensor:
        """Return a mask (n,) of held-out images, a fraction of each new class with enough images."""
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
    """Result of an update, which changes the trajectory in place."""

    recall: dict[int, tuple[int, int]]  # class position -> right, of so many held-out images
    temperature: float
    calibration_offset: CalibrationOffset
    evidence: Evidence = NO_EVIDENCE  # of all updates


def pixels_of(images: Images, backend: Backend, preprocessing: Preprocessing) -> ImageBatches:
    """Move images to the device, to be normalized as the backbone expects."""
    return ImageBatches(to_device(images, backend.device), preprocessing.mean, preprocessing.std, backend)


def teach(batch: UpdateBatch, trajectory: Trajectory, plan: UpdatePlan, callback: Callback) -> UpdateResult:
    """Update a trajectory of one method in place.

    Recall is measured on held-out images with a preview; then the classifier is fitted to all images.
    """
    learner = trajectory.learner
    assert learner is not None
    backend, seed = learner.backend, learner.seed
    labels, validation = batch.labels.to(backend.device), batch.validation_mask(seed)
    found = UpdateResult({}, 0.0, plan.calibration_offset)

    def measure(features: TaskFeatures) -> None:
        nonlocal found
        features.new()
        if plan.imprint:
            _imprint(learner, features, batch)
        elif batch.num_old and not plan.freeze_backbone:
            features.old()
        if bool(validation.any()) and not plan.frozen_discriminant(trajectory):
            found = _validate(trajectory, features, validation.to(backend.device), plan.calibration_offset, seed)
            if plan.frozen:  # depend only on statistics, so that merging equals joint training
                found = replace(found, calibration_offset=plan.calibration_offset)

    if plan.freeze_backbone:
        learner.num_old_classes = batch.num_old
    if isinstance(batch.images, Tensor):
        saved = {"labels": labels, "new": batch.images}
        features = TaskFeatures.from_saved(batch.update, seed, saved, learner.feature_layout)
        features.backbone_unchanged = True
        callback.on_training_end(batch.update)
        measure(features)
        trajectory.update(features)
    else:
        everything = pixels_of(batch.images, backend, batch.preprocessing)
        every = Task(batch.update, batch.num_old, batch.num_new, ImageSet(batch.images, batch.labels.numpy()))
        data = TaskData(every, everything, labels, learner.transform(batch.images.shape[-1]))
        fit = None if plan.freeze_backbone else partial(_train, learner, batch, ~validation, plan, callback)
        on_training_end = partial(callback.on_training_end, batch.update)
        features = trajectory.learn_task(data, fit, on_training_end, measure)
    if plan.frozen_discriminant(trajectory):
        return _gathered(trajectory, features, batch, plan)
    temperature = calibrate(trajectory, found.calibration_offset, seed)
    if temperature is None:  # without Grams: fit on held-out images, or on all if there are none
        scores = trajectory.logits(label_of(trajectory), features.new())
        temperature = found.temperature or fit_temperature(scores, features.labels)
    return UpdateResult(found.recall, temperature, found.calibration_offset)


def discriminant_of(trajectory: Trajectory) -> SharedCovariance | None:
    """Return the classifier of a trajectory if it can say how it would score learned images as new ones."""
    classifier = trajectory.parts[label_of(trajectory)].classifier
    return classifier if isinstance(classifier, SharedCovariance) else None


def _gathered(trajectory: Trajectory, features: TaskFeatures, batch: UpdateBatch, plan: UpdatePlan) -> UpdateResult:
    """Score the images as if each had not been learned."""
    classifier = discriminant_of(trajectory)
    assert classifier is not None
    evidence, recall = plan.evidence, dict[int, tuple[int, int]]()
    if batch.val_fraction:
        found, recall = gather(classifier, features.new(), features.labels)
        evidence = evidence.merge(found)
    return UpdateResult(recall, temperature_of(classifier, evidence), plan.calibration_offset, evidence)


def _train(learner: Learner, batch: UpdateBatch, chosen: Tensor, plan: UpdatePlan, callback: Callback) -> None:
    """Train a learner on the chosen images (n,) of a batch."""
    assert isinstance(batch.images, np.ndarray)
    rows, backend = chosen.cpu().numpy(), learner.backend
    shown = ImageSet(batch.images[rows], batch.labels.numpy()[rows])
    task = Task(batch.backbone_update, batch.num_old, batch.num_new, shown)
    classes = batch.task_classes
    learner.task_classes = classes.to(backend.device) if int(classes[0]) < batch.num_old else None
    pixels, labels = pixels_of(shown.images, backend, batch.preprocessing), backend.tensor(shown.labels)
    options = learner.options.with_epochs(plan.epochs)
    data = TaskData(task, pixels, labels, learner.transform(batch.images.shape[-1]))
    if plan.deadline is not None:
        options = options.with_epochs(_affordable_epochs(learner, data, plan.deadline))
    learner.options = options
    Trainer(learner, [callback]).fit(data)


def label_of(trajectory: Trajectory) -> str:
    """Return the label of the single method of a trajectory."""
    (label,) = trajectory.parts
    return label


def _imprint(learner: Learner, learned: TaskFeatures, batch: UpdateBatch) -> None:
    """Set head rows of new classes to their normalized mean features (weight imprinting)."""
    head = learner.head
    if batch.num_new and isinstance(head, CosineHead):
        means = learned.stats().select(range(batch.num_old, batch.num_old + batch.num_new)).mean
        own = learner.feature_layout[0]  # the head sees the last stage alone
        head.append_weights(normalize(means[:, :own], dim=1))


def _validate(
    trajectory: Trajectory, features: TaskFeatures, validation: Tensor, calibration_offset: CalibrationOffset, seed: int
) -> UpdateResult:
    """Measure recall and temperature on held-out images with a preview fitted without them."""
    label = label_of(trajectory)
    trial = trajectory.preview(features.subset((~validation).nonzero()[:, 0]))
    scores, labels = trial.logits(label, features.new()[validation]), features.labels[validation]
    right = (scores.argmax(1) == labels).double()
    recall = {c: (int(right[labels == c].sum()), int((labels == c).sum())) for c in labels.unique().tolist()}
    temperature, stats = fit_temperature(scores, labels), trial.stats(label)
    if stats is not None and scores.shape[1] > 1:
        drawn, places = draw_features(stats.select(labels.unique()), seed)
        ideal = fit_temperature(trial.mapped_logits(label, drawn), labels.unique()[places])
        calibration_offset = calibration_offset.merge(math.log(temperature / ideal), len(labels))
    return UpdateResult(recall, temperature, calibration_offset)


def calibrate(trajectory: Trajectory, calibration_offset: CalibrationOffset, seed: int) -> float | None:
    """Fit the temperature on features sampled from all class statistics; None without Grams."""
    label = label_of(trajectory)
    stats = trajectory.stats(label)
    if stats is None:
        return None
    drawn, places = draw_features(stats, seed)
    return fit_temperature(trajectory.mapped_logits(label, drawn), places) * calibration_offset.factor


class _Stopwatch(Callback):
    """Records the end times of epochs."""

    def __init__(self, backend: Backend):
        self.backend = backend
        self.moments: list[float] = []

    def on_epoch_end(self, report: EpochReport, state: TrainState) -> None:
        self.backend.synchronize()
        self.moments.append(time.monotonic())


def _affordable_epochs(learner: Learner, data: TaskData, deadline: float) -> int:
    """Time some training steps, undo them, and return the number of epochs until the deadline."""
    options, batch = learner.options, learner.options.batch_size
    before = to_cpu(learner.state(teacher=False))
    rows = torch.arange(min(len(data.labels), PROBE_STEPS * batch), device=data.labels.device)
    watch = _Stopwatch(learner.backend)

    def short(schedule: Schedule) -> Schedule:
        return schedule.rescaled(2)  # the first epoch is warm-up

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
