"""PODNet: proxies, pooled outputs distillation, and a second stage on a balanced training set.

Douillard et al., "PODNet: Pooled Outputs Distillation for Small-Tasks Incremental Learning", ECCV 2020.

Idea: the outputs of every stage of the old backbone are distilled, but only up to sums over rows and columns, so that
the new one has room to learn. A class is several proxies, compared by cosine (models/heads.py). A second stage on as
many images of new classes as of old ones removes the bias. The trained head predicts (`cnn`); the nearest mean of
exemplars, which the paper also reports, is evaluated as well (`nme`).

State between tasks: `memory` images in all; ten proxies of dim numbers per class, and a scale.

Differences from the paper and its authors' code, all as in PyCIL, which the DPCR paper used:

- The loss has neither margin nor hinge, see `nca`; so has the authors' code.
- New proxies start at random, not at centers (k-means) of the new classes' features.
- The second stage trains everything but the old proxies, with the whole loss; theirs the classifier alone, at lr 0.05.
- POD weighs 5 (spatial) and 1 (flat) on every data set; theirs 3 and 1 on CIFAR-100, 8 and 10 on ImageNet-100.
- Gradients are not clipped.

Difference from PyCIL: its resnet32 for this method has convolutional shortcuts, ours zero-padded ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from efcil.accel.backend import Backend
from efcil.learners.base import LearnedTask
from efcil.learners.exemplars import Exemplars
from efcil.learners.rehearsal import Rehearsal, RehearsalOptions
from efcil.models import ResNet
from efcil.models.heads import GrowingHead, ProxyHead
from efcil.training.batch import Batch, FrozenForward
from efcil.training.extraction import extract
from efcil.training.image_batches import ImageBatches
from efcil.training.schedule import Schedule


class PODNetOptions(RehearsalOptions):
    """Options of training, memory, head, distillation, and the second stage of later tasks."""

    proxies: int = Field(default=10, ge=1)
    """Proxies per class of the cosine head."""
    spatial_weight: float = Field(default=5.0, ge=0)
    """Weight of the distillation of intermediate feature maps."""
    flat_weight: float = Field(default=1.0, ge=0)
    """Weight of the distillation of final features."""
    first: Schedule = Schedule(epochs=160, lr=0.1, lr_schedule="cosine", weight_decay=5e-4)
    """Schedule of the first task."""
    later: Schedule = Schedule(epochs=160, lr=0.1, lr_schedule="cosine", weight_decay=5e-4)
    """Schedule of later tasks."""
    balance: Schedule = Schedule(epochs=20, lr=0.005, lr_schedule="cosine", weight_decay=5e-4)
    """Schedule of the second stage of later tasks, on a balanced set."""


def nca(similarities: Tensor, labels: Tensor) -> Tensor:
    """Return max(s) - s_y + log(1 + sum_{i != y} exp(s_i - max(s))), mean over the batch of similarities (n, classes).

    The paper: [log(sum_{i != y} exp(eta s_i)) - eta (s_y - margin)]_+. The released code subtracts the margin from
    every similarity, where it cancels, omits the hinge, subtracts the largest similarity and includes the true class as
    exp(0). This equals cross-entropy if the true class is the most similar one, and exceeds it by at most log 2
    otherwise. The scale eta is part of the head.
    """
    true = labels[:, None]
    s = similarities.float()
    s = s - s.max(1, keepdim=True).values
    return (s.scatter(1, true, 0.0).logsumexp(1) - s.gather(1, true)[:, 0]).mean()


def pooled(maps: Tensor) -> Tensor:
    """Sum squared maps (n, c, h, w) over width and height and L2-normalize them: (n, c (h + w))."""
    square = maps.float().square()
    return normalize(torch.cat([square.sum(3).flatten(1), square.sum(2).flatten(1)], 1), dim=1)


def pod_spatial(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean distance of pooled maps (n, .), mean over batch and stages.

    The gradient of the norm at zero is zero, as for a student that equals its teacher.
    """
    distances = [torch.linalg.vector_norm(a - b, dim=1).mean() for a, b in zip(student, teacher, strict=True)]
    return torch.stack(distances).mean()


def pod_flat(student: Tensor, teacher: Tensor) -> Tensor:
    """Return 1 - cosine of features (n, dim), mean over the batch."""
    return 1 - cosine_similarity(student.float(), teacher.float(), dim=1).mean()


def observed(backbone: ResNet, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the features (n, dim) and the pooled maps of each stage."""
    maps = backbone.forward_intermediates(images)
    return maps[-1].mean((2, 3)), [pooled(stage) for stage in maps]


class PODNet(Rehearsal):
    """Learner that distills feature maps and features, and trains backbone and new proxies in both stages."""

    options_type = PODNetOptions
    last_relu = False

    def __init__(self, options: Any, channels: int, backend: Backend, seed: int, size: int | None = None):
        super().__init__(options, channels, backend, seed, size)
        student, teacher = self.student.backbone, self.teacher.backbone
        assert isinstance(student, ResNet)
        assert isinstance(teacher, ResNet)
        self.student_sees = backend.maybe_compile(lambda images: observed(student, images))
        self.teacher_sees = backend.maybe_compile(lambda images: observed(teacher, images))
        self.herded: Exemplars | None = None  # new images of the second stage

    def new_head(self, dim: int) -> GrowingHead:
        """Make a head of proxies."""
        return ProxyHead(dim, self.options.proxies)

    def stages(self, task: int) -> tuple[Schedule, ...]:
        """Return one stage for the first task, and a second, balanced one for later tasks."""
        return (*super().stages(task), *([self.options.balance] if task else []))

    def training_data(self, stage: int, pixels: ImageBatches, labels: Tensor) -> tuple[ImageBatches, Tensor]:
        """Return the new images and the exemplars; in the second stage as many new ones of a class as exemplars."""
        if stage:
            if self.herded is None:
                features = extract(self.backbone, pixels, self.backend, self.options.crop)
                self.herded = Exemplars.select(features, pixels, labels, self.quota(self.num_old_classes))
            pixels, labels = pixels.with_images(self.herded.images), self.herded.labels
        return super().training_data(stage, pixels, labels)

    def frozen_forward(self) -> FrozenForward | None:
        """Return the teacher's features and pooled maps."""
        return FrozenForward(self.teacher_sees) if self.num_old_classes else None

    def loss(self, batch: Batch) -> Tensor:
        """Return classification over all classes plus, from the second task on, both distillations."""
        features, maps = self.student_sees(batch.images)
        logits = self.head(features)
        loss = nca(logits, batch.labels)
        if self.num_old_classes:
            target, target_maps = batch.teacher
            o, num_classes = self.options, logits.shape[1]
            distilled = o.spatial_weight * pod_spatial(maps, target_maps) + o.flat_weight * pod_flat(features, target)
            loss = loss + math.sqrt(num_classes / (num_classes - self.num_old_classes)) * distilled
        return loss

    def after_task(self, task: LearnedTask) -> None:
        """Select the exemplars again, with the final features."""
        super().after_task(task)
        self.herded = None

    def state(self, teacher: bool) -> dict[str, Tensor]:
        """Return the networks' tensors, the exemplars, and in the middle of a second stage its herded images."""
        tensors = self.herded.state() if teacher and self.herded is not None else {}
        return super().state(teacher) | {f"herded.{k}": v for k, v in tensors.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        super().load_state(state)
        herded = {k.removeprefix("herded."): v for k, v in state.items() if k.startswith("herded.")}
        self.herded = Exemplars.from_state(herded) if herded else None
