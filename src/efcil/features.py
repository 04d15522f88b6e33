"""What a method may see of a task once the backbone has learned it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from efcil.core.class_stats import ClassStats
from efcil.core.gram_storage import GRAMS, StorageSpec
from efcil.data.augment import Transform
from efcil.learners import Learner
from efcil.learners.base import ImageView
from efcil.randomness import Purpose, generator
from efcil.training.extraction import extract
from efcil.training.image_batches import Pixels
from efcil.training.image_store import part

R = TypeVar("R")
View = Literal["clean", "augmented"]


class TaskFeatures:
    """A learned task as statistics, shift estimators and heads see it. Features are computed once, when asked for."""

    frozen = False  # whether `new` means the backbone after the first task
    rests = False  # whether the backbone has not changed since the task before: nothing moves then
    holders: tuple[int, ...] = ()  # identities of the statistics that methods hold, where all methods are known

    def __init__(self, index: int, learner: Learner, pixels: Pixels, labels: Tensor, transform: Transform | None):
        self.index = index
        self.labels = labels  # (n,), positions in the class order
        self.learner = learner
        self._pixels: dict[ImageView, Pixels] = {"clean": pixels}
        self._transform = transform
        self._found: dict[Hashable, Any] = {}

    @property
    def first(self) -> bool:
        """Whether there is no task before this one."""
        return self.index == 0

    @property
    def has_pseudo(self) -> bool:
        """Whether images were made in the place of old ones."""
        return self.learner.pseudo_images() is not None

    def at_first(self) -> TaskFeatures:
        """Return the same task as methods with a frozen backbone see it: new features are the first backbone's."""
        other = copy.copy(self)
        other._found, other.frozen = {}, True
        return other

    def only(self, rows: Tensor) -> TaskFeatures:
        """Return the task as if it had these images (n,) alone; features that are known are not computed again."""
        other = copy.copy(self)
        clean = self.pixels()
        other.labels, other._pixels = self.labels[rows], {"clean": clean.showing(part(clean.images, rows))}
        computed = ("new", "old", "first")
        kept = {key: value for key, value in self._found.items() if isinstance(key, tuple) and key[0] in computed}
        other._found = {key: value[rows] for key, value in kept.items() if key[1] == "clean"}
        return other

    def narrowed(self, dim: int) -> TaskFeatures:
        """Return the task as if the first `dim` numbers of what is read of an image were all."""
        return self.once(("narrowed", dim), lambda: Narrowed(self, dim))

    def new(self, view: ImageView = "clean") -> Tensor:
        """Features (n, dim) of the task's images under the backbone that has just learned them."""
        return self._features("first" if self.frozen else "new", view)

    def old(self, view: ImageView = "clean") -> Tensor:
        """Features (n, dim) of the same images under the backbone before this task."""
        return self._features("old", view)

    def pairs(self, view: ImageView = "clean") -> tuple[Tensor, Tensor]:
        """Old and new features that show how things moved.

        `pseudo`: of the images as they are, and of those made in the place of old ones, where there are any.
        """
        if view == "pseudo" and not self.has_pseudo:
            view = "clean"
        if view != "pseudo":
            return self.old(view), self.new(view)
        old = self.once(("pairs", "old"), lambda: torch.cat([self.old(), self.old("pseudo")]))
        return old, self.once(("pairs", "new"), lambda: torch.cat([self.new(), self.new("pseudo")]))

    def _features(self, when: str, view: ImageView) -> Tensor:
        r = self.learner
        if when == "first":
            backbone = r.first_backbone
        else:
            backbone = r.backbone if when == "new" else r.old_backbone
        crop = None if view == "augmented" else r.options.crop  # augmentation has cropped already
        return self.once(
            (when, view), lambda: extract(r.feature_extractor(backbone), self.pixels(view), r.machine, crop)
        )

    def stats(self, view: View = "clean", memory: StorageSpec = GRAMS) -> ClassStats:
        """Statistics of the task's classes under the new backbone (Eq. 15)."""
        if memory.form == "gram":
            group = self.learner.machine.group
            return self.once(("stats", view), lambda: group.class_stats(self.new(view), self.labels))
        # Factors do not sum; each of several processes has all features and makes the same ones.
        return self.once(("stats", view, memory), lambda: ClassStats.from_features(self.new(view), self.labels, memory))

    def merge(self, old: ClassStats | None, view: View = "clean", memory: StorageSpec = GRAMS) -> ClassStats:
        """Statistics of the old classes and of this task's."""
        new = self.stats(view, memory)
        return new if old is None else self.once(("merge", old, view, memory), lambda: old.merge(new, memory))

    def alone(self, stats: ClassStats) -> bool:
        """Whether only one method holds these statistics, so that they may go when they have moved."""
        return self.holders.count(id(stats)) == 1

    def once(self, key: Hashable, compute: Callable[[], R]) -> R:
        """Compute something about this task once, however many methods ask for it.

        Statistics in a key count by identity, and the key keeps them alive: an identity is never used again.
        """
        if key not in self._found:
            self._found[key] = compute()
        found: R = self._found[key]
        return found

    def pixels(self, view: ImageView = "clean") -> Pixels:
        """The task's images themselves, for methods that change them; gone when the task is."""
        if view not in self._pixels:
            clean, r = self._pixels["clean"], self.learner
            if view == "pseudo":
                made = r.pseudo_images()
                assert made is not None, "asked for where none were made"
                self._pixels[view] = clean.showing(made)
            elif self._transform is None:
                self._pixels[view] = clean
            else:  # one draw: old and new features are of the same augmented images
                source = generator(r.machine.device, Purpose.VIEW, r.seed, self.index)
                self._pixels[view] = clean.changed(self._transform, source)
        return self._pixels[view]


class Narrowed(TaskFeatures):
    """A task of which less is read than of `whole`: the first `dim` numbers of each image."""

    def __init__(self, whole: TaskFeatures, dim: int):
        super().__init__(whole.index, whole.learner, whole._pixels["clean"], whole.labels, whole._transform)
        self.whole, self.dim = whole, dim
        self.frozen, self.rests, self.holders = whole.frozen, whole.rests, whole.holders

    def pairs(self, view: ImageView = "clean") -> tuple[Tensor, Tensor]:
        """Old and new features that show how things moved."""
        old, new = self.whole.pairs(view)
        return old[:, : self.dim], new[:, : self.dim]

    def _features(self, when: str, view: ImageView) -> Tensor:
        return self.whole._features(when, view)[:, : self.dim]
