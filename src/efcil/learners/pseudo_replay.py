"""LwF with distillation on pseudo-images of old classes, and feature distillation; equations in docs/dpcr-plus.md.

Before a task, pseudo-images are synthesized by feature inversion: gradient steps on the task's images until their
features under the old backbone match samples from the Gaussian of an old class. Training uses both. Pseudo-images have
no label and contribute only to distillation, which thus constrains the backbone in the feature regions of old classes
and not only on the new images. They are discarded after the task. The Gaussian has the mean of the class and the pooled
covariance of all classes, from the statistics that the trajectory stores and shifts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from efcil.accel.backend import Backend
from efcil.core.gaussian import pooled_covariance
from efcil.core.linear_algebra import DTYPE, covariance_root
from efcil.errors import ConfigError
from efcil.learners.lwf import LwF, LwFOptions
from efcil.losses import UNLABELED, Criterion, FeatureDistillLoss, LwFLoss, TaskClassLoss
from efcil.models import ResNet, backbone_name, is_resnet
from efcil.models.multi_stage import MultiStageFeatures
from efcil.randomness import RngStream, generator
from efcil.tasks import Task
from efcil.training.extraction import extract
from efcil.training.feature_inversion import invert_features
from efcil.training.image_batches import ImageBatches
from efcil.training.image_store import concat
from efcil.training.memory import memory_guard

CHUNK = 2000  # pseudo-images per chunk


class PseudoReplayOptions(LwFOptions):
    """LwF's options, and those of pseudo-images and features."""

    RESNET_ONLY: ClassVar[tuple[str, ...]] = ("width", "intermediate_stages", "flip_tta")
    pseudo_ratio: float = Field(default=1.0, ge=0)
    """Pseudo-images per image of the task while training; 0: LwF."""
    pseudo_ratio_shift: float | None = Field(default=None, ge=0)
    """Pseudo-images per image for the shift, where it uses more than training; null: as many."""
    pseudo_noise: float = Field(default=1.0, ge=0)
    """Spread of the targets around the class mean, as a factor; 0: the mean itself."""
    pseudo_step_size: float = Field(default=0.09, gt=0)
    """Root mean square change of a normalized pixel per iteration."""
    pseudo_iterations: int = Field(default=6, ge=1)
    """Iterations that turn an image into a pseudo-image."""
    feature_distill_weight: float = Field(default=0.0, ge=0)
    """Weight of feature distillation through a linear projector."""
    intermediate_stages: int = Field(default=0, ge=0, le=3)
    """Stages before the last one whose 2x2-pooled maps are features, too."""
    flip_tta: bool = False
    """Features are the mean over an image and its mirror image."""


class PseudoReplay(LwF):
    """Learner that synthesizes pseudo-images of old classes from the statistics of the trajectory."""

    options_type = PseudoReplayOptions
    needs_stats = True

    def __init__(self, options: Any, channels: int, backend: Backend, seed: int, size: int | None = None):
        named = [name for name in ("intermediate_stages", "flip_tta") if getattr(options, name)]
        if named and not is_resnet(options.backbone):
            raise ConfigError(
                f"{named[0]} needs the stages of a ResNet, not {backbone_name(options.backbone)}; omit it"
            )
        super().__init__(options, channels, backend, seed, size)
        stages = options.intermediate_stages
        if stages > 2 and isinstance(getattr(self.backbone, "layer4", None), nn.Identity):
            raise ConfigError(
                f"intermediate_stages={stages}: {options.backbone} has three stages with the last; use 2 or fewer"
            )
        self.generated: Tensor | None = None  # uint8 pseudo-images (m, c, h, w), as many per class, nearest seeds first
        self._own = self._learned = 0  # number of images and pseudo-images in the training set
        num_features: int = self.backbone.num_features  # type: ignore[assignment]
        self.projector = (
            backend.place(nn.Linear(num_features, num_features)) if options.feature_distill_weight else None
        )

    def feature_extractor(self, backbone: nn.Module) -> nn.Module:
        """Return the backbone, or a network that adds features of intermediate stages or of the mirror image."""
        o = self.options
        if not (o.intermediate_stages or o.flip_tta):
            return backbone
        assert isinstance(backbone, ResNet)
        return MultiStageFeatures(backbone, o.intermediate_stages, o.flip_tta)

    @property
    def feature_layout(self) -> tuple[int, ...]:
        """Number of features of the last stage and each intermediate stage."""
        extractor = self.feature_extractor(self.backbone)
        return extractor.layout if isinstance(extractor, MultiStageFeatures) else super().feature_layout

    def inversion_network(self, backbone: nn.Module) -> nn.Module:
        """Return the network for feature inversion: all features, without the mirror image."""
        if not self.options.intermediate_stages:
            return backbone
        assert isinstance(backbone, ResNet)
        return MultiStageFeatures(backbone, self.options.intermediate_stages, flip_tta=False)

    @property
    def feature_floor(self) -> float:
        """Return the lower bound of features: zero after the final ReLU of a ResNet, else minus infinity."""
        return 0.0 if self.last_relu and isinstance(self.backbone, ResNet) else -math.inf

    def before_task(self, task: Task) -> None:
        """Prepare the teacher and head as in LwF; reset the linear projector to the identity."""
        super().before_task(task)
        self.generated = None
        if self.projector is not None:
            nn.init.eye_(self.projector.weight)
            nn.init.zeros_(self.projector.bias)

    def _generate(self, pixels: ImageBatches, labels: Tensor) -> None:
        """Generate pseudo-images of the old classes from the task's images."""
        total = round(max(self.options.pseudo_ratio, self.options.pseudo_ratio_shift or 0) * len(labels))
        if not self.num_old_classes or not total:
            return
        stats = self.old_stats
        assert stats is not None, "the trajectory provides the statistics of old classes before a task"
        source = extract(self.inversion_network(self.old_backbone), pixels, self.backend).to(DTYPE)
        draws = generator("cpu", RngStream.PSEUDO, self.seed, self.num_old_classes)
        rows, goals = select_seeds_and_targets(
            stats.mean, pooled_covariance(stats), source, total, self.options.pseudo_noise, draws
        )
        self.old_backbone.eval()
        chunks = []
        with memory_guard("generating pseudo-images of old classes"):
            for part in torch.arange(len(rows), device=rows.device).split(CHUNK):
                (images,) = pixels.batches_of([rows[part]])
                chunks.append(self._invert(pixels, images, goals[part].clamp_min(self.feature_floor)))
        self.generated = torch.cat(chunks)
        self.backend.world.broadcast_([self.generated])  # rounding differs between GPUs

    def _invert(self, pixels: ImageBatches, images: Tensor, goals: Tensor) -> Tensor:
        """Optimize images until their features match `goals`, and round them to uint8."""
        black, white = -pixels.offset, 255 * pixels.scale - pixels.offset
        step = self.options.pseudo_step_size * images[0].numel() ** 0.5
        inputs = pixels.normalize(images)
        network = self.inversion_network(self.old_backbone)
        with self.backend.autocast():  # only the direction of the gradient is used
            inputs = invert_features(network, inputs, goals, step, self.options.pseudo_iterations, (black, white))
        return ((inputs + pixels.offset) / pixels.scale).round().clamp(0, 255).to(torch.uint8)

    def pseudo_images(self) -> Tensor | None:
        """Return the pseudo-images of this task."""
        return self.generated

    def training_data(self, stage: int, pixels: ImageBatches, labels: Tensor) -> tuple[ImageBatches, Tensor]:
        """Return the task's images and the unlabeled pseudo-images."""
        if self.generated is None:
            self._generate(pixels, labels)
        self._own, self._learned = len(labels), 0
        total = round(self.options.pseudo_ratio * len(labels))
        if self.generated is None or not total:
            return pixels, labels
        classes = self.num_old_classes
        pseudo = self.generated.unflatten(0, (classes, -1))[:, : max(1, total // classes)].flatten(0, 1)
        self._learned = len(pseudo)
        none = labels.new_full((len(pseudo),), UNLABELED)
        return pixels.with_images(concat(pixels.images, pseudo)), torch.cat([labels, none])

    def lwf_loss(self) -> LwFLoss:
        """Return the loss of Eq. 1, with feature distillation if its weight is positive."""
        loss, o = super().lwf_loss(), self.options
        if self.projector is None or not self.num_old_classes:
            return loss
        parts = (loss.head, loss.teacher_head, loss.num_old_classes, loss.distill_weight, loss.temperature)
        return FeatureDistillLoss(*parts, self.projector, o.feature_distill_weight)

    def criterion(self) -> Criterion:
        """Return the loss, in which pseudo-samples contribute only to distillation."""
        if not self._learned:
            return super().criterion()
        return TaskClassLoss(self.lwf_loss(), self.task_classes, self._learned / self._own)

    def state(self, teacher: bool) -> dict[str, Tensor]:
        """Return the tensors of the networks and, within a task, its pseudo-images."""
        tensors = super().state(teacher)
        if teacher and self.generated is not None:
            tensors["pseudo_images"] = self.generated
        if teacher and self.projector is not None:
            tensors |= {f"projector.{k}": v for k, v in self.projector.state_dict().items()}
        return tensors

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        super().load_state(state)
        self.generated = state.get("pseudo_images")
        projector_state = {k.removeprefix("projector."): v for k, v in state.items() if k.startswith("projector.")}
        if projector_state and self.projector is not None:
            self.projector.load_state_dict(projector_state)


def select_seeds_and_targets(
    means: Tensor, covariance: Tensor, source: Tensor, wanted: int, spread: float, draws: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Select seed images, rows (m,), and sample target features (m, dim).

    Each class gets the same number of seeds, nearest to its mean, and targets sampled from its Gaussian.
    """
    each = min(len(source), max(1, wanted // len(means)))
    rows = torch.cdist(means, source).topk(each, largest=False).indices.flatten()
    centers = means.repeat_interleave(each, 0)
    if not spread:
        return rows, centers
    noise = torch.randn(centers.shape, generator=draws, dtype=DTYPE).to(means.device)
    return rows, centers + spread * (noise @ covariance_root(covariance).T)
