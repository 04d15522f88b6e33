"""PASS: self-supervision by rotations, feature distillation, and augmented prototypes of old classes.

Zhu et al., "Prototype Augmentation and Self-Supervision for Incremental Learning", CVPR 2021.

Idea: each image is learned in four rotations, each a class of its own, so that features are richer than one task
requires. Features must stay near the teacher's, and the head must still classify the old classes' prototypes when noise
of the classes' usual spread is added to them. Predictions use the head's rows for images that are not rotated
(classifiers/learner_head.py).

State between tasks: a prototype per class, dim numbers, and its four rows of the head, 4 (dim + 1); one radius.

Differences from the published code (the authors', and PyCIL's, which the DPCR paper used):

- The backbone is a plain ResNet-18. Theirs is called resnet18_cbam, but its blocks create attention modules and never
  call them: it computes the same.
- Prototypes are means over the training images without augmentation, as in PyCIL; the authors' are over augmented ones.
- The radius is the first task's in the paper and the authors' code (`radius_classes=first`); PyCIL's also includes each
  later task's classes (`all`, the preset `paper`).
- A step draws `batch_size` prototypes in the authors' code (`proto_draws=batch`), in PyCIL that times old // new
  classes (`balanced`, the preset `paper`), which fails with fewer old classes than new; we draw one batch then.
- `proto_weight` is 10 in both; the DPCR paper tuned it: 0.1 on CIFAR-100 and Tiny-ImageNet, 10 on ImageNet-100.
- Theirs run the network twice on a batch, once for logits and once for features, which updates the running statistics
  of batch normalization twice per step; we run it once.
- The rate drops after 45 and 90 epochs, as in PyCIL; the authors' own scheduler steps before the epoch, one sooner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from efcil.accel.backend import Backend
from efcil.errors import DataError
from efcil.learners.base import LearnedTask, Learner, TrainingOptions
from efcil.models.heads import GrowingHead, LinearHead
from efcil.training.batch import Batch, FrozenForward
from efcil.training.schedule import Schedule
from efcil.training.step import Rule

TURNS = 4  # rotations by 0, 90, 180 and 270 degrees: rows of the head per class


class PASSOptions(TrainingOptions):
    """Training options, and the weights of PASS's terms."""

    batch_size: int = Field(default=64, ge=2)
    """Images per step, before they are rotated."""
    optimizer: Rule = "adam"
    """Optimizer."""
    first: Schedule = Schedule(epochs=101, lr=1e-3, milestones=(45, 90), weight_decay=2e-4)
    """Schedule of the first task."""
    later: Schedule = Schedule(epochs=101, lr=1e-3, milestones=(45, 90), weight_decay=2e-4)
    """Schedule of each later task."""
    softmax_temperature: float = Field(default=0.1, gt=0)
    """Logits are divided by it."""
    fkd_weight: float = Field(default=10.0, ge=0)
    """Weight of the distance to the teacher's features."""
    proto_weight: float = Field(default=10.0, ge=0)
    """Weight of the classification of old prototypes."""
    proto_draws: Literal["batch", "balanced"] = "batch"
    """Prototypes per step: batch_size, or that times old // new classes (balanced)."""
    radius_classes: Literal["first", "all"] = "first"
    """Classes whose spread sets the noise: those of the first task, or all so far."""


def rotate(images: Tensor) -> Tensor:
    """Return images (n, c, s, s) at each of the four rotations, (4 n, c, s, s)."""
    height, width = images.shape[2:]
    if height != width:
        raise DataError(
            f"pass rotates images by 90 degrees and needs square images, got {height} x {width}; "
            "use square images or an augmentation with crop=..."
        )
    layout = torch.contiguous_format if images.is_contiguous() else torch.channels_last
    turned = torch.cat([torch.rot90(images, turn, (2, 3)) for turn in range(TURNS)])
    return turned.contiguous(memory_format=layout)


def rotated(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return images (n, c, s, s) at each of the four rotations, (4 n, c, s, s), and the labels 4 class + rotation.

    >>> rotated(torch.zeros(2, 1, 3, 3), torch.tensor([0, 5]))[1].tolist()
    [0, 20, 1, 21, 2, 22, 3, 23]
    """
    return rotate(images), torch.cat([TURNS * labels + turn for turn in range(TURNS)])


def class_spread(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean (classes, dim) and tr(covariance) / dim (classes,) of each class, ascending, in float64.

    The covariance divides by n - 1; of a single image it is zero.

    >>> means, spread = class_spread(torch.tensor([[1.0, 0.0], [3.0, 2.0], [5.0, 5.0]]), torch.tensor([4, 4, 7]))
    >>> means.tolist(), spread.tolist()
    ([[2.0, 1.0], [5.0, 5.0]], [2.0, 0.0])
    """
    means, spreads = [], []
    for label in labels.unique().tolist():
        class_features = features[labels == label].double()
        means.append(class_features.mean(0))
        spreads.append(
            (class_features - means[-1]).square().sum() / (max(len(class_features) - 1, 1) * class_features.shape[1])
        )
    return torch.stack(means), torch.stack(spreads)


class PASS(Learner):
    """A linear head with four rows per class; stores a prototype of each old class, and one radius."""

    options_type = PASSOptions

    def __init__(self, options: Any, channels: int, backend: Backend, seed: int, size: int | None = None):
        super().__init__(options, channels, backend, seed, size)
        self.prototypes = self.head.weight.new_zeros(0, self.head.weight.shape[1])  # (old classes, dim)
        self.radius = self.prototypes.new_zeros((), dtype=torch.float64)

    def new_head(self, dim: int) -> GrowingHead:
        """Make a linear head with a row for each rotation of a class."""
        return LinearHead(dim, TURNS)

    @property
    def head(self) -> LinearHead:
        """The head, four rows per class."""
        assert isinstance(self.student.head, LinearHead)
        return self.student.head

    def frozen_forward(self) -> FrozenForward | None:
        """Return the teacher's features of all rotations."""
        teacher = self.teacher_features
        return FrozenForward(lambda images: teacher(rotate(images))) if self.num_old_classes else None

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of all rotations; from the second task on plus feature distillation and prototype loss."""
        turned, targets = rotated(batch.images, batch.labels)
        features = self.student_features(turned)
        loss = self.classification(features, targets)
        if self.num_old_classes:
            before = batch.teacher
            # As published: the norm of the difference over the whole batch, neither squared nor averaged.
            loss = loss + self.options.fkd_weight * self.backend.world.norm(features.float() - before.float())
            loss = loss + self.options.proto_weight * self.classification(*self.augmented())
        return loss

    def classification(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return cross-entropy over all classes so far, in float32: the temperature amplifies rounding errors
        tenfold."""
        with torch.autocast(self.backend.device.type, enabled=False):
            return cross_entropy(self.head(features.float()) / self.options.softmax_temperature, targets)

    def augmented(self) -> tuple[Tensor, Tensor]:
        """Sample prototype_c + radius N(0, I) for old classes, with labels of unrotated class c."""
        count: int = self.options.batch_size
        if self.options.proto_draws == "balanced":
            new = len(self.head.bias) // TURNS - self.num_old_classes
            count *= max(1, self.num_old_classes // new)
        device, dim = self.prototypes.device, self.prototypes.shape[1]
        drawn = torch.randint(self.num_old_classes, (count,), generator=self.loss_generator, device=device)
        noise = torch.randn(count, dim, generator=self.loss_generator, device=device)
        return self.prototypes[drawn] + self.radius.float() * noise, TURNS * drawn

    def after_task(self, task: LearnedTask) -> None:
        """Store a prototype of each new class, and update the radius: the root of the mean spread of classes."""
        num_old = len(self.prototypes)
        means, spread = class_spread(task.new(), task.labels)
        self.prototypes = torch.cat([self.prototypes, means.float()])
        if num_old == 0 or self.options.radius_classes == "all":
            self.radius = ((self.radius.square() * num_old + spread.sum()) / len(self.prototypes)).sqrt()

    def state(self, teacher: bool) -> dict[str, Tensor]:
        """Return the tensors of the networks, the prototypes and the radius."""
        return super().state(teacher) | {"prototypes": self.prototypes, "radius": self.radius}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        super().load_state(state)
        self.prototypes, self.radius = state["prototypes"], state["radius"]
