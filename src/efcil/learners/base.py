"""Base class of all learners: their hooks and their training options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from efcil.accel.backend import Backend
from efcil.config import Options, whole_number
from efcil.core.class_stats import ClassStats
from efcil.data import augment
from efcil.data.preprocessing import Preprocessing
from efcil.learners.networks import TeacherStudent
from efcil.models import BackboneSource, published_preprocessing
from efcil.randomness import RngStream, generator
from efcil.tasks import Task
from efcil.training.batch import Batch, FrozenForward
from efcil.training.extraction import extract
from efcil.training.image_batches import ImageBatches
from efcil.training.loader import LastBatch
from efcil.training.schedule import Schedule
from efcil.training.step import Rule

ImageView = Literal["clean", "augmented", "pseudo"]
"""Which images features are computed from: the task's as stored, augmented as in training, or the pseudo-images."""


class TrainingOptions(Options):
    """Training options that every learner has."""

    RESNET_ONLY: ClassVar[tuple[str, ...]] = ("width",)
    """Options that a preset gives to ResNets alone: with any other backbone it leaves them at their defaults."""

    backbone: BackboneSource = "resnet18"
    """Network that computes the features."""
    weights: str | None = None
    """Weights that it begins with: pretrained (its published ones), or a file; null: random."""
    stem: str = "cifar"
    """First layers of a ResNet: cifar (3x3), small (3x3, pooling) or imagenet (7x7, stride 2, pooling)."""
    width: int | None = Field(default=None, ge=1)
    """Channels of the first stage; null: the backbone's own."""
    augment: str = "none"
    """Augmentation: none, cifar, cifar-brightness, cifar-autoaugment, crop-flip, resized-crop, digits, glyphs."""
    crop: int | None = Field(default=None, ge=1)
    """Side of the network's input in pixels; null: the stored size."""
    train_crop: int | None = Field(default=None, ge=1)
    """Side of the random crops of augmented images that training sees; null: all of them."""
    batch_size: int = Field(default=128, ge=2)
    """Images per step."""
    optimizer: Rule = "sgd"
    """Optimizer."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of sgd."""
    last_batch: LastBatch = "wrap"
    """A last batch that is not full is filled from the epoch's start, kept, or dropped."""
    first: Schedule = Schedule(epochs=200, lr=0.1, milestones=(60, 120, 160), weight_decay=5e-4)
    """Schedule of the first task."""
    later: Schedule = Schedule(epochs=100, lr=0.05, milestones=(45, 90), weight_decay=2e-4)
    """Schedule of each later task."""

    def preprocessing(self) -> Preprocessing | None:
        """Return what the weights were trained to see, None where that is not known: images stay as they are."""
        return None if self.weights is None else published_preprocessing(self.backbone)

    def with_epochs(self, epochs: int | None) -> Self:
        """Return the same options with another number of epochs per task."""
        if epochs is None:
            return self
        epochs = whole_number("epochs", epochs, 1)
        return self.model_copy(update={"first": self.first.rescaled(epochs), "later": self.later.rescaled(epochs)})


class LearnedTask(Protocol):
    """What `after_task` uses of a task that the backbone has just learned."""

    labels: Tensor

    def new(self) -> Tensor:
        """Features (n, dim) of the task's images."""

    def old_new_pairs(self, view: ImageView) -> tuple[Tensor, Tensor]:
        """Features of the same images before and after the task; with view `pseudo` also of pseudo-images."""

    def pixels(self) -> ImageBatches:
        """The images."""


class Learner(TeacherStudent, ABC):
    """A student that learns task after task, and a teacher: the student as it was when the task began.

    Five hooks: `before_task`; for each of the task's `stages` the `training_data`, and the `loss` of its batches; then
    `after_task`. A run that is resumed inside a stage calls `training_data` again, with `state` restored. A learner may
    define `before_update(parameters)` as well, called between the backward pass and the update.
    """

    options_type: type[TrainingOptions] = TrainingOptions
    all_data = False  # trains on the data of all tasks so far: only the joint upper bound
    views = 0  # further augmented views of each image that the loss looks at
    needs_stats = False  # needs the statistics of old classes before a task, shifted as a method shifts them
    capturable = False  # of another package: whether a step may be captured; compared with the eager one first
    trains = True  # whether the backbone is trained in any task
    starts_pretrained = False  # the backbone has learned before the first task
    can_freeze = False  # freezes its backbone where a task's training is not worth its shift
    frozen = False  # whether it did
    same_features = True  # whether features keep their dimension from task to task, as statistics of them must

    def __init__(self, options: Any, channels: int, backend: Backend, seed: int, size: int | None = None):
        """`size` is the side of the stored images, for backbones whose features depend on it."""
        super().__init__(options, channels, backend, seed, size)
        self.num_old_classes = 0  # classes learned before this task
        self.task_classes: Tensor | None = None  # positions of the classes in this task, where old ones are among them
        self.old_stats: ClassStats | None = None  # of the classes before this task, where the learner needs them
        self.loss_generator = torch.Generator(backend.device)  # random source of the loss; reseeded in each epoch

    def check(self, classes: int) -> None:
        """Reject options that cannot work with this number of classes, before training starts."""

    def features_of(self, backbone: nn.Module, pixels: ImageBatches, crop: int | None) -> Tensor:
        """Return what classifiers and shifts see of images, (n, dim); `crop` cuts out their center."""
        return extract(self.feature_extractor(backbone), pixels, self.backend, crop)

    def prepare(self, pixels: ImageBatches, progress: Callable[[int, int], None]) -> None:
        """Compute ahead of all tasks what no training changes: nothing, where the backbone is trained."""

    def stages(self, task: int) -> tuple[Schedule, ...]:
        """Schedule of each training stage of a task (0 is the first); none if the backbone stays frozen."""
        return (self.options.later if task else self.options.first,)

    def transform(self, stored: int) -> augment.Transform | None:
        """Augmentation while training, for images stored at a size."""
        whole = augment.make_transform(self.options.augment, self.options.crop or stored)
        if self.options.train_crop is None:
            return whole
        window = augment.RandomWindow(self.options.train_crop)
        return window if whole is None else augment.Compose([whole, window])

    def before_task(self, task: Task) -> None:
        """Copy the student to the frozen teacher, and give the head a row for each new class."""
        self.num_old_classes = task.first_class
        self._copy_to_teacher()
        self.head.add_classes(len(task.classes), generator("cpu", RngStream.WEIGHTS, self.seed, task.index))

    def frozen_forward(self) -> FrozenForward | None:
        """Return the frozen network whose outputs the loss of this stage needs, None if it needs none."""
        return None

    def training_data(self, stage: int, pixels: ImageBatches, labels: Tensor) -> tuple[ImageBatches, Tensor]:
        """Return the training images and labels of a stage."""
        return pixels, labels

    def freeze(self) -> None:
        """Go back to the backbone before this task, for good: for learners that `can_freeze`."""
        raise NotImplementedError

    def pseudo_images(self) -> Tensor | None:
        """Return this task's pseudo-images of old classes (m, c, h, w), or None."""
        return None

    def after_task(self, task: LearnedTask) -> None:
        """Store what later tasks need of this one."""

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch: normalized images (n, c, h, w), positions in the class order (n,)."""
