"""A pretrained backbone that is never trained, and one that is fine-tuned gently on the first task and then frozen.

With a frozen backbone a method is its classifier: class statistics add, so learning one class at a time equals learning
all at once. Features of an image are computed once (`efcil.training.feature_cache`).

Zhou et al., "Revisiting Class-Incremental Learning with Pre-Trained Models: Generalizability and Adaptivity are All You
Need", IJCV 2024: SimpleCIL is the nearest mean on a frozen backbone; APER first adapts the backbone on the first task.

State between tasks: none but the backbone.
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
    """Preprocessing that replaces that of the pretrained weights; null keeps it."""

    size: int | None = Field(default=None, ge=1)
    """Side in pixels."""
    crop: float | None = Field(default=None, gt=0, le=1)
    """Side of the center crop, as a fraction of the short side."""
    interpolation: Interpolation | None = None
    """Interpolation of the resize: nearest, bilinear, bicubic or lanczos."""
    mean: tuple[float, ...] | None = None
    """Mean of each channel, for pixels in [0, 1]."""
    std: tuple[float, ...] | None = None
    """Standard deviation of each channel."""


class PretrainedOptions(LwFOptions):
    """Training options, of which only those of the backbone have an effect."""

    backbone: BackboneSource = "efficientnet-lite0"
    """Network that computes the features."""
    weights: str | None = PRETRAINED
    """Initial weights: pretrained (the published ones), a file, or null for random."""
    input: InputOptions = InputOptions()
    """Preprocessing of images."""

    def preprocessing(self) -> Preprocessing | None:
        """Return the preprocessing of the weights, with the values of `input` replaced."""
        given = self.input.model_dump(exclude_none=True)
        known = super().preprocessing()
        if known is None and given:
            if "size" not in given:
                name = backbone_name(self.backbone)
                raise ConfigError(f"input.size is missing: the preprocessing of {name} is unknown")
            return Preprocessing(**given)
        return None if known is None else replace(known, **given)


class Pretrained(FirstTask):
    """Frozen from the start; features of an image are computed once and shared by all runs."""

    options_type = PretrainedOptions
    trains = False
    starts_pretrained = True
    _cache: FeatureCache | None = None

    def stages(self, task: int) -> tuple[Schedule, ...]:
        """Return no stage for any task."""
        return ()

    def prepare(self, pixels: ImageBatches, progress: Callable[[int, int], None]) -> None:
        """Compute features of images that are not in the cache."""
        if self.backend.world.size == 1:
            self._features.features(pixels, progress)

    def features_of(self, backbone: nn.Module, pixels: ImageBatches, crop: int | None) -> Tensor:
        """Return features, from the cache if possible."""
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
