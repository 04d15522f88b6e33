"""The features of a task that the backbone has just learned, as shifts and classifiers see them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from efcil.core.class_stats import ClassStats
from efcil.core.feature_maps import FeatureMap
from efcil.core.gram_storage import GRAMS, StorageSpec
from efcil.data.augment import Transform
from efcil.errors import ConfigError
from efcil.learners.base import ImageView, Learner
from efcil.randomness import RngStream, generator
from efcil.training.extraction import extract
from efcil.training.image_batches import ImageBatches
from efcil.training.image_store import select

R = TypeVar("R")
SAVED = {  # name in a file -> which backbone, and which view of the images
    "new": ("new", "clean"),
    "old": ("old", "clean"),
    "first": ("first", "clean"),
    "new_pseudo": ("new", "pseudo"),
    "old_pseudo": ("old", "pseudo"),
}


class TaskFeatures:
    """Features of a task's images, computed when they are first asked for, or read from a file.

    `learner` is there while the task's images are; features that were saved know no learner.
    """

    def __init__(
        self,
        index: int,
        labels: Tensor,
        seed: int,
        learner: Learner | None = None,
        pixels: ImageBatches | None = None,
        transform: Transform | None = None,
    ):
        self.index = index
        self.labels = labels  # (n,), positions in the class order
        self.seed = seed
        self.layout: tuple[int, ...] = () if learner is None else learner.feature_layout
        self.backbone_unchanged = False  # the backbone did not learn in this task: nothing moves
        self._learner, self._transform = learner, transform
        self._pixels: dict[ImageView, ImageBatches] = {} if pixels is None else {"clean": pixels}
        self._newest = "new"  # or "first": which backbone `new` means
        self._map: FeatureMap | None = None
        self._saved_pseudo = False
        self._found: dict[Hashable, Any] = {}

    @classmethod
    def from_saved(cls, index: int, seed: int, tensors: Mapping[str, Tensor], layout: Sequence[int]) -> TaskFeatures:
        """Return the features of a run that saved them; its images and backbones are gone."""
        features = cls(index, tensors["labels"], seed)
        features.layout = tuple(layout)
        features._found = {key: tensors[name] for name, key in SAVED.items() if name in tensors}
        features._saved_pseudo = "old_pseudo" in tensors
        return features

    # --- what it can be narrowed to -----------------------------------------------------------------------------------

    def with_first_backbone(self) -> TaskFeatures:
        """Return the task as methods with a backbone that is frozen after the first task see it."""
        other = copy.copy(self)
        other._newest, other._found = "first", {k: v for k, v in self._found.items() if k == ("first", "clean")}
        return other

    def subset(self, rows: Tensor) -> TaskFeatures:
        """Return the task as if it had these images (n,) alone; features that are known are not computed again."""
        other = copy.copy(self)
        clean = self._pixels["clean"]
        other.labels, other._pixels = self.labels[rows], {"clean": clean.with_images(select(clean.images, rows))}
        computed = ("new", "old", "first")
        known = {key: value for key, value in self._found.items() if isinstance(key, tuple) and key[0] in computed}
        other._found = {key: value[rows] for key, value in known.items() if key[1] == "clean"}
        return other

    def mapped(self, feature_map: FeatureMap | None) -> TaskFeatures:
        """Return the same task behind a feature map."""
        if feature_map is None:
            return self

        def behind() -> TaskFeatures:
            other = copy.copy(self)
            other._map, other._found = feature_map, {}
            other._features = lambda when, view: feature_map(self._features(when, view), self.layout)  # type: ignore[method-assign]
            return other

        return self.cached(("mapped", feature_map), behind)

    # --- features -----------------------------------------------------------------------------------------------------

    @property
    def has_pseudo_images(self) -> bool:
        """Whether there are pseudo-images of old classes."""
        if self._learner is None:
            return self._saved_pseudo
        return self._learner.pseudo_images() is not None

    def new(self, view: ImageView = "clean") -> Tensor:
        """Features (n, dim) of the task's images under the backbone that has just learned them."""
        return self._features(self._newest, view)

    def old(self, view: ImageView = "clean") -> Tensor:
        """Features (n, dim) of the same images under the backbone before this task."""
        return self._features("old", view)

    def old_new_pairs(self, view: ImageView = "clean") -> tuple[Tensor, Tensor]:
        """Return old and new features of the same images, from which a shift is estimated.

        `pseudo`: of the task's images and of the pseudo-images of old classes, where there are any.
        """
        if view == "pseudo" and self.has_pseudo_images:
            old = self.cached(("pairs", "old"), lambda: torch.cat([self.old(), self.old("pseudo")]))
            return old, self.cached(("pairs", "new"), lambda: torch.cat([self.new(), self.new("pseudo")]))
        view = "clean" if view == "pseudo" else view
        return self.old(view), self.new(view)

    def _features(self, when: str, view: ImageView) -> Tensor:
        if self._learner is None:
            if (when, view) not in self._found:
                raise ConfigError(f"the {view} features of the {when} backbone were not saved; run the method anew")
            found: Tensor = self._found[when, view]
            return found
        r = self._learner
        backbone = {"first": lambda: r.first_backbone, "new": lambda: r.backbone, "old": lambda: r.old_backbone}[when]()
        crop = None if view == "augmented" else r.options.crop  # augmentation has cropped already
        extractor = r.feature_extractor(backbone)
        return self.cached((when, view), lambda: extract(extractor, self.pixels(view), r.execution, crop))

    def stats(self, view: ImageView = "clean", storage: StorageSpec = GRAMS) -> ClassStats:
        """Return the statistics of the task's classes under the new backbone (Eq. 15)."""

        def computed() -> ClassStats:
            if storage == GRAMS and self._learner is not None:
                return self._learner.execution.world.class_stats(self.new(view), self.labels)
            # Factors do not sum; each of several processes has all features and makes the same ones.
            return ClassStats.from_features(self.new(view), self.labels, storage)

        return self.cached(("stats", view, storage), computed)

    def cached(self, key: Hashable, compute: Callable[[], R]) -> R:
        """Compute something about this task once, however many methods ask for it."""
        if key not in self._found:
            self._found[key] = compute()
        found: R = self._found[key]
        return found

    # --- images -------------------------------------------------------------------------------------------------------

    @property
    def learner(self) -> Learner:
        """The learner, for shifts and classifiers that need more than features."""
        if self._learner is None:
            raise ConfigError("the backbones and images of this run are gone; run the method anew")
        return self._learner

    def pixels(self, view: ImageView = "clean") -> ImageBatches:
        """Return the task's images themselves; gone when the task is."""
        if view not in self._pixels:
            r = self.learner
            clean = self._pixels["clean"]
            if view == "pseudo":
                images = r.pseudo_images()
                assert images is not None, "asked for where there are none"
                self._pixels[view] = clean.with_images(images)
            elif self._transform is None:
                self._pixels[view] = clean
            else:  # one draw: old and new features are of the same augmented images
                source = generator(r.execution.device, RngStream.VIEW, r.seed, self.index)
                self._pixels[view] = clean.augmented(self._transform, source)
        return self._pixels[view]
