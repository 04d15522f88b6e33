"""The networks of a learner: a student, its frozen teacher, the backbone after the first task, and their state."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor, nn

from efcil import models
from efcil.accel.backend import Backend
from efcil.errors import ConfigError
from efcil.models.heads import CosineHead, GrowingHead


class Classifier(nn.Module):
    """A backbone and its auxiliary head."""

    def __init__(self, backbone: nn.Module, head: GrowingHead):
        super().__init__()
        self.backbone, self.head = backbone, head


class TeacherStudent(nn.Module):
    """A student and its teacher, the student as it was when the task began."""

    last_relu = True  # whether the backbone ends in a ReLU

    def __init__(self, options: Any, channels: int, backend: Backend, seed: int, size: int | None = None):
        """`size` is the side of the stored images, for backbones whose features depend on it."""
        super().__init__()
        self.options, self.channels, self.backend, self.seed = options, channels, backend, seed
        wanted = options.preprocessing()
        self.input_size = options.crop or (size if wanted is None else wanted.size)
        own = options.weights == models.PRETRAINED and not models.is_published(options.backbone)
        self.weights = None if own else options.weights  # a module of one's own has those it came with
        self.student = self._new_classifier(seed)
        self.teacher = copy.deepcopy(self.student)
        self.teacher.requires_grad_(False)
        self.anchor: nn.Module | None = None  # copy of the backbone after the first task, where a method needs it
        # Compiled once for all tasks: weights are copied into the same modules, the growing head stays outside.
        self.student_features = backend.trainable(self.student.backbone)
        self.teacher_features = backend.maybe_compile(self.teacher.backbone)

    def _new_classifier(self, seed: int, weights: str | None = None) -> Classifier:
        o = self.options
        backbone = models.build(
            o.backbone,
            stem=o.stem,
            width=o.width,
            channels=self.channels,
            seed=seed,
            last_relu=self.last_relu,
            size=self.input_size,
            weights=weights,
        )
        return self.backend.place(Classifier(backbone, self.new_head(backbone.num_features)))

    def load_weights(self) -> None:
        """Give the student the weights that the options name."""
        if self.weights is not None:
            self.student.backbone.load_state_dict(self._new_classifier(self.seed, self.weights).backbone.state_dict())

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

    def _copy_to_teacher(self) -> None:
        self.teacher.head.resize_like(self.head.state_dict())
        self.teacher.requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())

    def train(self, mode: bool = True) -> Self:
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
