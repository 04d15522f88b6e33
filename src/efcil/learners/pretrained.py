"""A pretrained backbone that is never trained, and one that is trained gently on the first task and then frozen.

With features that do not change, a method is its classifier: class statistics add, and one class at a time is all at
once. Features of an image are computed once (`efcil.training.feature_cache`).

Zhou et al., "Revisiting Class-Incremental Learning with Pre-Trained Models: Generalizability and Adaptivity are All You
Need", IJCV 2024: SimpleCIL is the nearest mean on a frozen backbone; APER adapts the backbone on the first task before.

State between tasks: none beside the backbone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from pydantic import Field
from torch import Tensor, nn

from efcil.config import Options
from efcil.data.preprocessing import Interpolation, Preprocessing
from efcil.errors import ConfigError
from efcil.learners.first_task import FirstTask
from efcil.learners.lwf import LwFOptions
from efcil.models import PRETRAINED, BackboneSource, backbone_name
from efcil.training.feature_cache import FeatureCache
from efcil.training.image_batches import ImageBatches
from efcil.training.schedule import Schedule

SHORT = Schedule(epochs=10, lr=0.001, milestones=(), lr_schedule="cosine", weight_decay=5e-4)


class InputOptions(Options):
    """What the network sees of an image, where it is not what its weights were trained to see (null)."""

    size: int | None = Field(default=None, ge=1)
    """Side in pixels."""
    crop: float | None = Field(default=None, gt=0, le=1)
    """Share of the short side that the central square takes."""
    interpolation: Interpolation | None = None
    """How pixels are resampled: nearest, bilinear, bicubic or lanczos."""
    mean: tuple[float, ...] | None = None
    """Subtracted from each channel of pixels in [0, 1]."""
    std: tuple[float, ...] | None = None
    """By which each channel is divided."""


class PretrainedOptions(LwFOptions):
    """Options of training, of which only the backbone's count."""

    backbone: BackboneSource = "efficientnet-lite0"
    """Network that computes the features."""
    weights: str | None = PRETRAINED
    """Weights that it begins with: pretrained (its published ones), or a file; null: random."""
    input: InputOptions = InputOptions()
    """What the network sees of an image."""

    def preprocessing(self) -> Preprocessing | None:
        """Return what the network sees of an image: what its weights were trained with, and what `input` replaces."""
        given = self.input.model_dump(exclude_none=True)
        known = super().preprocessing()
        if known is None and given:
            if "size" not in given:
                raise ConfigError(f"input.size is missing: what {backbone_name(self.backbone)} sees is not known")
            return Preprocessing(**given)
        return None if known is None else replace(known, **given)


class Pretrained(FirstTask):
    """Frozen from the start; features of an image are computed once, by whichever run."""

    options_type = PretrainedOptions
    trains = False
    starts_pretrained = True
    _cache: FeatureCache | None = None

    def stages(self, task: int) -> tuple[Schedule, ...]:
        """Return no stage for any task."""
        return ()

    def prepare(self, pixels: ImageBatches, progress: Callable[[int, int], None]) -> None:
        """Compute the features of images that are not cached yet."""
        if self.backend.world.size == 1:
            self._features.features(pixels, progress)

    def features_of(self, backbone: nn.Module, pixels: ImageBatches, crop: int | None) -> Tensor:
        """Return features, from the cache where they are there."""
        if pixels.augmentation is not None or self.backend.world.size > 1:
            return super().features_of(backbone, pixels, crop)
        return self._features.features(pixels)

    @property
    def _features(self) -> FeatureCache:
        if self._cache is None:
            self._cache = FeatureCache(self.feature_extractor(self.backbone), self.backend, self.options.crop)
        return self._cache

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        super().load_state(state)
        self._cache = None  # it belongs to the weights


class AdaptFirstOptions(PretrainedOptions):
    """Options of training, with a short and gentle schedule."""

    first: Schedule = SHORT
    """Schedule of the first task."""


class AdaptFirst(FirstTask):
    """Fine-tuned with cross-entropy on the first task, then frozen."""

    options_type = AdaptFirstOptions
    starts_pretrained = True
