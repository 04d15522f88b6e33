"""Features of the current task for shifts and classifiers."""

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
from efcil.training.image_batches import ImageBatches
from efcil.training.image_store import select

R = TypeVar("R")
SAVED = {  # name in a file -> (backbone, view of the images)
    "new": ("new", "clean"),
    "old": ("old", "clean"),
    "first": ("first", "clean"),
    "new_pseudo": ("new", "pseudo"),
    "old_pseudo": ("old", "pseudo"),
}


class TaskFeatures:
    """Features of a task's images, computed on first access or loaded from a file.

    Features loaded from a file have no `learner`.
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
        self.backbone_unchanged = False  # the backbone was not trained in this task
        self._learner, self._transform = learner, transform
        self._pixels: dict[ImageView, ImageBatches] = {} if pixels is None else {"clean": pixels}
        self._newest = "new"  # or "first", "old": the backbone of `new`
        self._map: FeatureMap | None = None
        self._saved_pseudo = False
        self._cache: dict[Hashable, Any] = {}

    @classmethod
    def from_saved(cls, index: int, seed: int, tensors: Mapping[str, Tensor], layout: Sequence[int]) -> TaskFeatures:
        """Restore features saved by a run, without its images and backbones."""
        features = cls(index, tensors["labels"], seed)
        features.layout = tuple(layout)
        features._cache = {key: tensors[name] for name, key in SAVED.items() if name in tensors}
        features._saved_pseudo = "old_pseudo" in tensors
        features.backbone_unchanged = "old" in tensors and torch.equal(tensors["old"], tensors["new"])
        return features

    # --- derived tasks ------------------------------------------------------------------------------------------------

    def with_first_backbone(self) -> TaskFeatures:
        """Return the task with features of the backbone after the first task."""
        other = copy.copy(self)
        other._newest, other._cache = "first", {k: v for k, v in self._cache.items() if k == ("first", "clean")}
        return other

    def before(self) -> TaskFeatures:
        """Return the task with features of the backbone before it, as if that had not been trained."""
        other = copy.copy(self)
        other._newest, other.backbone_unchanged = "old", True
        other._cache = {k: v for k, v in self._cache.items() if k == ("old", "clean")}
        return other

    def subset(self, rows: Tensor) -> TaskFeatures:
        """Return the task restricted to these images (n,); computed features are reused."""
        other = copy.copy(self)
        other.labels, other._pixels = self.labels[rows], {}
        if (clean := self._pixels.get("clean")) is not None:
            other._pixels["clean"] = clean.with_images(select(clean.images, rows))
        computed = ("new", "old", "first")
        reusable = {key: value for key, value in self._cache.items() if isinstance(key, tuple) and key[0] in computed}
        other._cache = {key: value[rows] for key, value in reusable.items() if key[1] == "clean"}
        return other

    def mapped(self, feature_map: FeatureMap | None) -> TaskFeatures:
        """Return the task with features transformed by a feature map."""
        if feature_map is None:
            return self

        def build() -> TaskFeatures:
            other = copy.copy(self)
            other._map, other._cache = feature_map, {}
            other._features = lambda when, view: feature_map(self._features(when, view), self.layout)  # type: ignore[method-assign]
            return other

        return self.cached(("mapped", feature_map), build)

    # --- features -----------------------------------------------------------------------------------------------------

    @property
    def has_pseudo_images(self) -> bool:
        """Whether pseudo-images of old classes are available."""
        if self._learner is None:
            return self._saved_pseudo
        return self._learner.pseudo_images() is not None

    def new(self, view: ImageView = "clean") -> Tensor:
        """Return features (n, dim) of the task's images from the backbone after this task."""
        return self._features(self._newest, view)

    def old(self, view: ImageView = "clean") -> Tensor:
        """Return features (n, dim) of the same images from the backbone before this task."""
        return self._features("old", view)

    def old_new_pairs(self, view: ImageView = "clean") -> tuple[Tensor, Tensor]:
        """Return old and new features of the same images, to estimate a shift from.

        With view `pseudo`, pseudo-images of old classes are appended, if available.
        """
        if view == "pseudo" and self.has_pseudo_images:
            old = self.cached(("pairs", "old"), lambda: torch.cat([self.old(), self.old("pseudo")]))
            return old, self.cached(("pairs", "new"), lambda: torch.cat([self.new(), self.new("pseudo")]))
        view = "clean" if view == "pseudo" else view
        return self.old(view), self.new(view)

    def _features(self, when: str, view: ImageView) -> Tensor:
        if self._learner is None:
            if (when, view) not in self._cache:
                raise ConfigError(
                    f"the {view} features of the {when} backbone were not saved; "
                    "run the method again with --save-features"
                )
            saved: Tensor = self._cache[when, view]
            return saved
        r = self._learner
        backbone = {"first": lambda: r.first_backbone, "new": lambda: r.backbone, "old": lambda: r.old_backbone}[when]()
        crop = None if view == "augmented" else r.options.crop  # augmented images are cropped already
        return self.cached((when, view), lambda: r.features_of(backbone, self.pixels(view), crop))

    def stats(self, view: ImageView = "clean", storage: StorageSpec = GRAMS) -> ClassStats:
        """Return class statistics of the task from the new backbone (Eq. 15)."""

        def computed() -> ClassStats:
            if storage == GRAMS and self._learner is not None:
                return self._learner.backend.world.class_stats(self.new(view), self.labels)
            # Factors cannot be summed across processes; every process computes them from all features.
            return ClassStats.from_features(self.new(view), self.labels, storage)

        return self.cached(("stats", view, storage), computed)

    def cached(self, key: Hashable, compute: Callable[[], R]) -> R:
        """Compute a value once per task and share it between methods."""
        if key not in self._cache:
            self._cache[key] = compute()
        value: R = self._cache[key]
        return value

    # --- images -------------------------------------------------------------------------------------------------------

    @property
    def learner(self) -> Learner:
        """Learner, for shifts and classifiers that need more than features."""
        if self._learner is None:
            raise ConfigError(
                "the backbones and images of this run are not available; run the method again with `efcil run`"
            )
        return self._learner

    def pixels(self, view: ImageView = "clean") -> ImageBatches:
        """Return the task's images, available until the task is closed."""
        if view not in self._pixels:
            r = self.learner
            clean = self._pixels["clean"]
            if view == "pseudo":
                images = r.pseudo_images()
                assert images is not None, "pseudo-images are not available"
                self._pixels[view] = clean.with_images(images)
            elif self._transform is None:
                self._pixels[view] = clean
            else:  # augment once: old and new features need the same augmented images
                source = generator(r.backend.device, RngStream.VIEW, r.seed, self.index)
                self._pixels[view] = clean.augmented(self._transform, source)
        return self._pixels[view]
