"""FOSTER: a second backbone boosts the old one, then both are compressed into one.

Wang et al., "FOSTER: Feature Boosting and Compression for Class-Incremental Learning", ECCV 2022, with the settings of
PyCIL, which the DPCR paper used.

Idea: as gradient boosting adds a learner for the errors of those before it, a new backbone is trained beside the frozen
old one, on new images and exemplars (boosting, after a first task of plain cross-entropy). Both are then distilled into
the student, so that the model does not grow from task to task (compression).

Two classifiers are evaluated (classifiers/learner_head.py). `compressed`: the single backbone, which survives the task;
the paper's FOSTER. `boosted`: the two backbones before compression; the paper's FOSTER B4. PyCIL logs the second as
"CNN top1", so that is the one in the DPCR paper's table. In the first task they are the same.

State between tasks: the compressed backbone; its head, dim + 1 numbers per class; `memory` images in all. A checkpoint
holds the two backbones of `boosted` as well, so that it can be evaluated again; the next task does not use them.

Differences from the paper, all as in PyCIL: the whole head on old and new features learns; the paper also allows zeros
for the new classes on old features (PyCIL's oofc = ft and az). Every class has a weight of its own, instead of one for
all old and one for all new classes. Weights are not aligned after a stage (is_teacher_wa, is_student_wa = false).
Exemplars are herded with the features of the boosted model, old and new, not with the compressed ones.

Difference from PyCIL: class weights use the actual number of images, for an old class that of its exemplars. PyCIL
assumes memory // old classes for old classes and 500 for new ones of CIFAR-100, which is equal on balanced sets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from efcil.accel.backend import Backend
from efcil.learners.base import ImageView, LearnedTask
from efcil.learners.networks import Classifier
from efcil.learners.rehearsal import Rehearsal, RehearsalOptions
from efcil.losses import distillation, new_class_loss
from efcil.models.heads import GrowingHead, LinearHead
from efcil.randomness import RngStream, generator
from efcil.tasks import Task
from efcil.training.batch import Batch, FrozenForward
from efcil.training.image_batches import ImageBatches
from efcil.training.schedule import Schedule


class FOSTEROptions(RehearsalOptions):
    """Options of training, memory and the two stages; `later` is the schedule of boosting."""

    first: Schedule = Schedule(epochs=200, lr=0.1, lr_schedule="cosine", weight_decay=5e-4)
    """Schedule of the first task."""
    later: Schedule = Schedule(epochs=170, lr=0.1, lr_schedule="cosine", weight_decay=5e-4)
    """Schedule of boosting in later tasks."""
    compression: Schedule = Schedule(epochs=130, lr=0.1, lr_schedule="cosine")
    """Schedule of compression in later tasks."""
    boosting_beta: float = Field(default=0.96, ge=0, lt=1)
    """Beta of the class weights while boosting; 0: all weights are one."""
    compression_beta: float = Field(default=0.97, ge=0, lt=1)
    """Beta of the class weights during compression; 0: all weights are one."""
    okd_weight: float = Field(default=1.0, ge=0)
    """Weight of the distillation of old logits while boosting."""
    temperature: float = Field(default=2.0, gt=0)
    """Temperature of the distillation."""


def class_weights(counts: Tensor, beta: float) -> Tensor:
    """Return weights (classes,) with mean one, inverse to the effective number of images (1 - beta^n) / (1 - beta).

    >>> [round(w, 6) for w in class_weights(torch.tensor([1, 2]), 0.5).tolist()]
    [1.2, 0.8]
    """
    inverse = 1 / (1 - beta ** counts.double())
    return (inverse / inverse.mean()).float()


class SideBySide(nn.Module):
    """Concatenated features of several backbones."""

    def __init__(self, dim: int, *parts: nn.Module):
        super().__init__()
        self.parts, self.num_features = nn.ModuleList(parts), dim * len(parts)  # dim per backbone

    def forward(self, images: Tensor) -> Tensor:
        """Return features (n, parts dim) of images (n, c, h, w)."""
        return torch.cat([part(images) for part in self.parts], 1)


class Booster(nn.Module):
    """New backbone, head on old and new features, and auxiliary head on new features."""

    def __init__(self, backbone: nn.Module, dim: int):
        super().__init__()
        self.backbone = backbone
        self.head, self.auxiliary = LinearHead(2 * dim), LinearHead(dim)

    def begin(self, old: Classifier, classes: int, source: torch.Generator) -> None:
        """Start from the old network's backbone and head; draw the remaining weights from `source`."""
        self.backbone.load_state_dict(old.backbone.state_dict())
        for head in (self.head, self.auxiliary):
            head.resize_like({"weight": head.weight[:0], "bias": head.bias[:0]})
            head.add_classes(classes, source)
        old_state = old.head.state_dict()
        num_old, dim = old_state["weight"].shape
        with torch.no_grad():
            self.head.weight[:num_old, :dim] = old_state["weight"]
            self.head.bias[:num_old] = old_state["bias"]

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state with any number of classes."""
        for name, head in (("head.", self.head), ("auxiliary.", self.auxiliary)):
            head.resize_like({k.removeprefix(name): v for k, v in state.items() if k.startswith(name)})
        self.load_state_dict(dict(state))


class _BoostedFeatures:
    """A learned task with the features of the boosted model, the leading columns."""

    def __init__(self, task: LearnedTask, dim: int):
        self.task, self.dim, self.labels = task, dim, task.labels

    def new(self) -> Tensor:
        """Return features (n, 2 dim), or (n, dim) in the first task."""
        return self.task.new()[:, : self.dim]

    def old_new_pairs(self, view: ImageView) -> tuple[Tensor, Tensor]:
        """Return old and new features of the same images."""
        old, new = self.task.old_new_pairs(view)
        return old[:, : self.dim], new[:, : self.dim]

    def pixels(self) -> ImageBatches:
        """Return the images."""
        return self.task.pixels()


class FOSTER(Rehearsal):
    """Learner with a student, kept between tasks, and a booster, used only in a task and its evaluation."""

    options_type = FOSTEROptions
    same_features = False

    def __init__(self, options: Any, channels: int, backend: Backend, seed: int, size: int | None = None):
        super().__init__(options, channels, backend, seed, size)
        self.dim = self.student.head.state_dict()["weight"].shape[1]  # feature dimension of one backbone
        self.booster = backend.place(Booster(self._new_classifier(seed).backbone, self.dim))
        self.booster.requires_grad_(False)
        self.booster_features = backend.maybe_compile(self.booster.backbone)
        self.boosting = False  # False in the first task and the compression stage, where the student is trained
        self.weights: Tensor | None = None  # (classes,) for the stage

    def new_head(self, dim: int) -> GrowingHead:
        """Make a linear head."""
        return LinearHead(dim)

    @property
    def boosted(self) -> bool:
        """Whether a boosted model exists, from the second task on."""
        return len(self.booster.head.bias) > 0

    @property
    def boosted_head(self) -> GrowingHead:
        """Head of the boosted model on the leading features of `backbone`; in the first task the only head."""
        return self.booster.head if self.boosted else self.head

    @property
    def backbone(self) -> nn.Module:
        """Old, new and compressed features, (n, 3 dim); in the first task the only backbone, (n, dim)."""
        if not self.boosted:
            return self.student.backbone
        return SideBySide(self.dim, self.teacher.backbone, self.booster.backbone, self.student.backbone)

    def stages(self, task: int) -> tuple[Schedule, ...]:
        """Return one stage for the first task, boosting and compression for later ones."""
        o = self.options
        return (o.later, o.compression) if task else (o.first,)

    def before_task(self, task: Task) -> None:
        """Initialize the new backbone from the old network, like the student."""
        super().before_task(task)
        if task.index:
            source = generator("cpu", RngStream.WEIGHTS, self.seed, task.index, 1)
            self.booster.begin(self.teacher, task.seen, source)

    def training_data(self, stage: int, pixels: ImageBatches, labels: Tensor) -> tuple[ImageBatches, Tensor]:
        """Make the booster or the student trainable, with the stage's class weights; return all images."""
        pixels, labels = super().training_data(stage, pixels, labels)
        self.boosting = bool(self.num_old_classes) and stage == 0
        self.booster.requires_grad_(self.boosting)
        self.student.requires_grad_(not self.boosting)
        beta = self.options.boosting_beta if self.boosting else self.options.compression_beta
        self.weights = class_weights(torch.bincount(labels), beta)
        return pixels, labels

    def train(self, mode: bool = True) -> FOSTER:
        """Set the mode of the network trained in this stage; the others stay in evaluation mode."""
        super().train(mode and not self.boosting)
        self.booster.train(mode and self.boosting)
        return self

    def frozen_forward(self) -> FrozenForward | None:
        """Return the features of the old backbone, or of the boosted model for compression."""
        if not self.num_old_classes:
            return None
        old_backbone = self.backend.frozen(self.teacher.backbone, self.teacher_features)
        if self.boosting:
            return old_backbone
        added = self.backend.frozen(self.booster.backbone, self.booster_features)
        assert old_backbone.ahead is not None
        assert added.ahead is not None
        return FrozenForward(_concat(old_backbone.call, added.call), _concat(old_backbone.ahead, added.ahead))

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of the stage."""
        if not self.num_old_classes:
            return new_class_loss(self.head(self.student_features(batch.images)), batch.labels, 0)
        return self._boosting(batch) if self.boosting else self._compression(batch)

    def _boosting(self, batch: Batch) -> Tensor:
        """Return the boosting loss: cross-entropy of aligned and auxiliary logits, and distillation of old logits."""
        assert self.weights is not None
        added = self.booster_features(batch.images)
        auxiliary = self.booster.auxiliary(added)
        old_features = batch.teacher
        with torch.no_grad():
            target = self.teacher.head(old_features)
        logits = self.booster.head(torch.cat([old_features, added], 1)).float()
        aligned = logits / self.weights  # logits of classes with few images are scaled down
        distilled = distillation(logits[:, : self.num_old_classes], target, self.options.temperature)
        classified = new_class_loss(aligned, batch.labels, 0) + new_class_loss(auxiliary, batch.labels, 0)
        return classified + self.options.okd_weight * distilled

    def _compression(self, batch: Batch) -> Tensor:
        """Return the compression loss: distillation of the boosted model with class-weighted predictions."""
        assert self.weights is not None
        temperature = self.options.temperature
        logits = self.head(self.student_features(batch.images))
        with torch.no_grad():
            # weight softmax(z / T), normalized, is softmax((z + T log weight) / T)
            target = self.booster.head(batch.teacher).float() + temperature * self.weights.log()
        return distillation(logits, target, temperature)

    def after_task(self, task: LearnedTask) -> None:
        """Herd with the features of the boosted model, as PyCIL does."""
        super().after_task(_BoostedFeatures(task, 2 * self.dim))

    def state(self, teacher: bool) -> dict[str, Tensor]:
        """Return the student and the exemplars; from the second task on also the boosted model, for its evaluation."""
        tensors = super().state(teacher or self.boosted)
        if self.boosted:
            tensors |= {f"booster.{k}": v for k, v in self.booster.state_dict().items()}
        return tensors

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        super().load_state(state)
        booster_state = {k.removeprefix("booster."): v for k, v in state.items() if k.startswith("booster.")}
        if booster_state:
            self.booster.load(booster_state)


def _concat(*calls: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda images: torch.cat([call(images) for call in calls], 1)
