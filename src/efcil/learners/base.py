"""Base class of all learners: a student that learns tasks, its frozen teacher, and the training options."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn

from efcil import models
from efcil.accel.execution import Execution
from efcil.config import Options
from efcil.core.class_stats import ClassStats
from efcil.data import augment
from efcil.errors import ConfigError
from efcil.models.heads import CosineHead, GrowingHead
from efcil.randomness import RngStream, generator
from efcil.tasks import Task
from efcil.training.batch import Batch, FrozenForward
from efcil.training.image_batches import ImageBatches
from efcil.training.loader import LastBatch
from efcil.training.schedule import Schedule
from efcil.training.step import Rule

ImageView = Literal["clean", "augmented", "pseudo"]
"""Which images features are computed from: the task's as stored, augmented as in training, or the pseudo-images."""


class TrainingOptions(Options):
    """Training options that every learner has."""

    backbone: str = "resnet18"
    stem: str = "cifar"
    width: int | None = Field(default=None, ge=1)  # channels of the first stage; None: the backbone's own
    augment: str = "none"
    crop: int | None = Field(default=None, ge=1)  # side of the network's input; None: the stored size
    batch_size: int = Field(default=128, ge=2)
    optimizer: Rule = "sgd"
    momentum: float = Field(default=0.9, ge=0, lt=1)  # of sgd
    last_batch: LastBatch = "wrap"  # a batch that is not full: filled from the epoch's head, kept, or dropped
    first: Schedule = Schedule(epochs=200, lr=0.1, milestones=(60, 120, 160), weight_decay=5e-4)
    later: Schedule = Schedule(epochs=100, lr=0.05, milestones=(45, 90), weight_decay=2e-4)


class Classifier(nn.Module):
    """A backbone and its auxiliary head."""

    def __init__(self, backbone: nn.Module, head: GrowingHead):
        super().__init__()
        self.backbone, self.head = backbone, head


class LearnedTask(Protocol):
    """What `after_task` uses of a task that the backbone has just learned."""

    labels: Tensor

    def new(self) -> Tensor:
        """Features (n, dim) of the task's images."""

    def old_new_pairs(self, view: ImageView) -> tuple[Tensor, Tensor]:
        """Features of the same images before and after the task; with view `pseudo` also of pseudo-images."""

    def pixels(self) -> ImageBatches:
        """The images."""


class Learner(nn.Module, ABC):
    """A student that learns task after task, and a teacher: the student as it was when the task began.

    Five hooks: `before_task`; for each of the task's `stages` the `training_data`, and the `loss` of its batches; then
    `after_task`. A run that is resumed inside a stage calls `training_data` again, with `state` restored. A learner may
    define `before_update(parameters)` as well, called between the backward pass and the update.
    """

    options_type: type[TrainingOptions] = TrainingOptions
    all_data = False  # trains on the data of all tasks so far: only the joint upper bound
    views = 0  # further augmented views of each image that the loss looks at
    last_relu = True  # whether the backbone ends in a ReLU
    needs_stats = False  # needs the statistics of old classes before a task, shifted as a method shifts them
    capturable = False  # of another package: whether a step may be captured; compared with the eager one first
    same_features = True  # whether features keep their dimension from task to task, as statistics of them must

    def __init__(self, options: Any, channels: int, execution: Execution, seed: int, size: int | None = None):
        """`size` is the side of the stored images, for backbones whose features depend on it."""
        super().__init__()
        self.options, self.channels, self.execution, self.seed = options, channels, execution, seed
        self.input_size = options.crop or size
        self.student = self._new_classifier(seed)
        self.teacher = copy.deepcopy(self.student)
        self.teacher.requires_grad_(False)
        self.num_old_classes = 0  # classes learned before this task
        self.task_classes: Tensor | None = None  # positions of the classes in this task, where old ones are among them
        self.old_stats: ClassStats | None = None  # of the classes before this task, where the learner needs them
        self.anchor: nn.Module | None = None  # copy of the backbone after the first task, where a method needs it
        self.loss_generator = torch.Generator(execution.device)  # random source of the loss; reseeded in each epoch
        # Compiled once for all tasks: weights are copied into the same modules, the growing head stays outside.
        self.student_features = execution.trainable(self.student.backbone)
        self.teacher_features = execution.maybe_compile(self.teacher.backbone)

    def _new_classifier(self, seed: int) -> Classifier:
        o = self.options
        backbone = models.build(
            o.backbone,
            stem=o.stem,
            width=o.width,
            channels=self.channels,
            seed=seed,
            last_relu=self.last_relu,
            size=self.input_size,
        )
        return self.execution.place(Classifier(backbone, self.new_head(backbone.num_features)))

    def new_head(self, dim: int) -> GrowingHead:
        """Make the auxiliary head, without classes yet."""
        return CosineHead(dim)

    @property
    def backbone(self) -> nn.Module:
        """The backbone as it is now."""
        return self.student.backbone

    @property
    def old_backbone(self) -> nn.Module:
        """The backbone as it was before this task."""
        return self.teacher.backbone

    def feature_extractor(self, backbone: nn.Module) -> nn.Module:
        """Return the module that computes features for classifiers and shifts: the backbone's own come first."""
        return backbone

    @property
    def feature_layout(self) -> tuple[int, ...]:
        """Number of features of each stage that `feature_extractor` returns, the last stage's first."""
        return (int(self.student.backbone.num_features),)  # type: ignore[arg-type]

    @property
    def head(self) -> GrowingHead:
        """The auxiliary head."""
        return self.student.head

    @property
    def first_backbone(self) -> nn.Module:
        """The backbone as it was after the first task."""
        if self.anchor is None:
            raise ConfigError("the first backbone was not kept: name a method with a frozen backbone before training")
        return self.anchor

    def keep_first(self) -> None:
        """Keep a copy of the backbone: called after the first task when a method uses a frozen backbone."""
        self.anchor = copy.deepcopy(self.student.backbone).requires_grad_(False).eval()

    def check(self, classes: int) -> None:
        """Reject options that cannot work with this number of classes, before training starts."""

    def stages(self, task: int) -> tuple[Schedule, ...]:
        """Schedule of each training stage of a task (0 is the first); none if the backbone stays frozen."""
        return (self.options.later if task else self.options.first,)

    def transform(self, stored: int) -> augment.Transform | None:
        """Augmentation while training, for images stored at a size."""
        return augment.make_transform(self.options.augment, self.options.crop or stored)

    def before_task(self, task: Task) -> None:
        """Copy the student to the frozen teacher, and give the head a row for each new class."""
        self.num_old_classes = task.first_class
        self._copy_to_teacher()
        self.head.add_classes(len(task.classes), generator("cpu", RngStream.WEIGHTS, self.seed, task.index))

    def _copy_to_teacher(self) -> None:
        self.teacher.head.resize_like(self.head.state_dict())
        self.teacher.requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())

    def frozen_forward(self) -> FrozenForward | None:
        """Return the frozen network whose outputs the loss of this stage needs, None if it needs none."""
        return None

    def training_data(self, stage: int, pixels: ImageBatches, labels: Tensor) -> tuple[ImageBatches, Tensor]:
        """Return the training images and labels of a stage."""
        return pixels, labels

    def pseudo_images(self) -> Tensor | None:
        """Return this task's pseudo-images of old classes (m, c, h, w), or None."""
        return None

    def after_task(self, task: LearnedTask) -> None:
        """Store what later tasks need of this one."""

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch: normalized images (n, c, h, w), positions in the class order (n,)."""

    def train(self, mode: bool = True) -> Learner:
        """Set the student's mode; the teacher is always in evaluation mode."""
        self.student.train(mode)
        self.teacher.eval()
        return self

    def state(self, teacher: bool) -> dict[str, Tensor]:
        """Return the student's tensors; with `teacher`, in the middle of a task, the teacher's as well."""
        kept = {f"student.{k}": v for k, v in self.student.state_dict().items()}
        if self.anchor is not None:
            kept |= {f"anchor.{k}": v for k, v in self.anchor.state_dict().items()}
        return kept | ({f"teacher.{k}": v for k, v in self.teacher.state_dict().items()} if teacher else {})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        for name, classifier in (("student.", self.student), ("teacher.", self.teacher)):
            own = {k.removeprefix(name): v for k, v in state.items() if k.startswith(name)}
            if own:
                classifier.head.resize_like({k.removeprefix("head."): v for k, v in own.items()})
                classifier.load_state_dict(own)
        self.teacher.requires_grad_(False)
        first = {k.removeprefix("anchor."): v for k, v in state.items() if k.startswith("anchor.")}
        if first:
            self.keep_first()
            self.first_backbone.load_state_dict(first)
