"""`IncrementalClassifier`: an image classifier that learns new classes incrementally, without images of old ones."""

from __future__ import annotations

import datetime
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from efcil import models
from efcil.accel.backend import Backend
from efcil.data.dataset import format_list
from efcil.data.preprocessing import Preprocessing
from efcil.errors import ConfigError, DataError, EfcilError, MissingPackageError, ModelError, nearest, warn
from efcil.files import StrPath
from efcil.learners import LEARNERS, Learner
from efcil.methods import METHODS
from efcil.platform_support import memory
from efcil.product import model_directory
from efcil.product.calibration import CalibrationOffset
from efcil.product.confusions import confusion_matrix, most_confused
from efcil.product.evidence import ENOUGH, Evidence, expected_confusions
from efcil.product.evidence import temperature as temperature_of
from efcil.product.inputs import BATCH, CHANNELS, Images, map_labeled_images, read_images, read_labeled_images
from efcil.product.model_config import TEACHABLE, Adapt, ModelConfig, Request, resolve
from efcil.product.names import check_names
from efcil.product.progress import Callback, Progress, progress_callbacks
from efcil.product.state import ClassRecord, State
from efcil.product.teaching import (
    UpdateBatch,
    UpdatePlan,
    UpdateResult,
    calibrate,
    discriminant_of,
    label_of,
    pixels_of,
    teach,
)
from efcil.tensor_files import digest, to_cpu
from efcil.training.callbacks import Callback as TrainingCallback
from efcil.training.callbacks import EpochReport
from efcil.training.extraction import extract
from efcil.training.image_batches import ImageBatches
from efcil.training.state import TrainState
from efcil.trajectory import Trajectory

REJECTED = ""
FEW = 30  # pictures of a class: with fewer, adapting a pretrained backbone loses (results/benchmarks.jsonl)
SIMILAR = 10  # number of class pairs in a summary
SIMILAR_ROWS = 512  # classes compared with all at once
_UNFIT = (KeyError, RuntimeError, EfcilError, TypeError, ValueError, IndexError, AttributeError)


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """Immutable pair of a state and the modules that predict with it, replaced as a whole."""

    state: State
    backbone: nn.Module  # feature extractor
    trajectory: Trajectory

    def logits(self, features: Tensor) -> Tensor:
        """Return scores of all classes."""
        return self.trajectory.logits(label_of(self.trajectory), features)


class Network(nn.Module):
    """Full model as one module: uint8 images (n, 3, size, size) -> float32 probabilities (n, classes)."""

    scale: Tensor
    offset: Tensor

    def __init__(self, snapshot: _Snapshot, pixels: ImageBatches, crop: int | None):
        super().__init__()
        self.backbone, self.logits, self.temperature, self.crop = (
            snapshot.backbone,
            snapshot.logits,
            snapshot.state.temperature,
            crop,
        )
        self.register_buffer("scale", pixels.scale)
        self.register_buffer("offset", pixels.offset)

    def forward(self, images: Tensor) -> Tensor:
        """Return class probabilities."""
        if self.crop is not None:
            margin = (images.shape[-1] - self.crop) // 2
            images = images[:, :, margin : margin + self.crop, margin : margin + self.crop]
        features = self.backbone(images.float() * self.scale - self.offset)
        return torch.softmax(self.logits(features) / self.temperature, 1).float()


class IncrementalClassifier:
    """Incremental image classifier that stores class statistics, but no images or file names.

    By default the backbone is a pretrained, frozen EfficientNet-Lite0 (installed with efcil, no network needed) and the
    classifier is SLDA: an update is one pass over the new images and one solve. Learning classes one at a time, in any
    order, or merging models gives the same result as learning all classes at once. Images are resized, cropped and
    normalized as for the training of the backbone's weights.

    `method` and `backbone` select something else when a model is created:

    - `method="dpcr"` (or another one that trains), or `backbone="scratch"`: a ResNet-10 is trained from scratch on
      images of 64 pixels, for images that are unlike photographs. Each call of `learn` is one task: the backbone is
      trained on the classes of the call with distillation of old ones, the statistics of old classes are shifted, and
      the classifier is refitted. A call without new classes, or with a single class, only updates statistics.
    - `method="dpcr", backbone="efficientnet-lite0"`: the method's classifier on the pretrained backbone, frozen. Other
      pretrained backbones: `efficientnet-lite1`, `-lite2`, `timm/NAME`, or any backbone with `weights=FILE`. With
      `frozen=False` the backbone is trained further by methods that support it; `weights="none"` starts from random
      weights.

    After `freeze()` a trained backbone is frozen as well.

    A fraction `val_fraction` of each new class with at least 5 images, at most 20 images, is held out from training to
    measure `recall` in the class table; afterwards they are included in the statistics. With `val_fraction=0` all
    images are used for training, and updates equal the tasks of `efcil run`.

    `predict_proba` is calibrated without old images, see `efcil.product.calibration`.

    `forget` does not change the backbone, which may have been trained on the class. To remove its influence completely,
    train a new model without the class.

    >>> import numpy as np
    >>> night, snow = np.zeros((8, 32, 32, 3), np.uint8), np.full((8, 32, 32, 3), 255, np.uint8)
    >>> model = IncrementalClassifier("dpcr", backbone="resnet10", width=8, size=32, epochs=1)
    >>> model.learn([*night, *snow], ["night"] * 8 + ["snow"] * 8).predict([night[0], snow[0]]).tolist()
    ['night', 'snow']
    """

    def __init__(
        self,
        method: str | None = None,
        *,
        backbone: str | None = None,
        width: int | None = None,
        size: int | None = None,
        weights: StrPath | None = None,
        frozen: bool | None = None,
        adapt: Adapt = "none",
        epochs: int | None = None,
        budget: float | None = None,
        val_fraction: float = 0.1,
        options: Mapping[str, Any] | None = None,
        device: str = "auto",
        precision: str = "auto",
        seed: int = 0,
        progress: bool = True,
    ):
        """Create a model without classes.

        `weights`: "pretrained" (the published ones), "none", or a file of backbone weights (safetensors or a torch
        state dict, a model, a checkpoint). `size`: side of the pictures; the backbone's own by default. `width`: of a
        ResNet trained from scratch. `options`: dotted keys of training and method, as in `--set`. `epochs` or `budget`
        (seconds) apply to each update that trains and can also be passed to `learn`. `adapt`: whether the pretrained
        backbone is trained gently on your pictures, in the "first" update or in each ("always"); with ten or forty
        pictures a class of digits and glyphs "none" was better (docs/dev/performance.md).
        """
        _check_effort(epochs, budget)
        options = dict(options or {})
        backbone, width = options.pop("backbone", backbone), options.pop("width", width)
        request, gentle = Request(method, backbone, width, size, weights, frozen, seed, val_fraction, adapt).adapting()
        request = request.completed()
        self._config = resolve(request, gentle | options)
        self._backend = Backend.choose(device, precision, compile=False)
        self.epochs, self.budget, self.progress = epochs, budget, progress
        learner = self._new_learner()
        if request.weights is not None and self._config.published is None:
            _load_backbone(learner, self._config, request.weights)
        state = State(
            classes=(),
            weights=_weights(learner, with_backbone=self._config.published is None),
            statistics={},
            temperature=1.0,
            calibration_offset=CalibrationOffset(),
            backbone_updates=int(request.weights is not None and not learner.starts_pretrained),
            updates=0,
            frozen=bool(request.frozen),
            previous=None,
        )
        self._snapshot = self._for_serving(state, self._trajectory(state, learner))

    # --- parts --------------------------------------------------------------------------------------------------------

    def _new_learner(self, with_published: bool = True) -> Learner:
        config = self._config
        learner = LEARNERS[config.method.learner](config.training, CHANNELS, self._backend, config.seed, config.size)
        if with_published and config.published is not None:
            learner.load_weights()
        return learner

    def _for_training(self, state: State, with_published: bool = True) -> Learner:
        """Return a learner with the weights of a state; published ones may be left out if its backbone is not used."""
        if not state.weights:
            raise ModelError(f"the model has no weights for {self._config.training.backbone}")
        learner = self._new_learner(with_published)
        beside = {k: v for k, v in learner.state(teacher=False).items() if not k.startswith("student.")}
        weights = dict(state.weights)
        if self._config.published is not None and not _backbone_only(weights):
            weights |= _backbone_only(learner.student.state_dict())
        student = {f"student.{k}": v.to(self._backend.device) for k, v in weights.items()}
        try:
            learner.load_state(beside | student)
        except (RuntimeError, KeyError) as error:
            why = " ".join(str(error).split())[:200]
            raise ModelError(f"the weights do not fit {self._config.training.backbone}: {why}") from None
        return learner

    def _trajectory(self, state: State, learner: Learner | None = None, *, fit: bool = False) -> Trajectory:
        """Return a trajectory with a copy of a state's statistics, to be modified; with `fit`, to predict as well."""
        method = self._config.method
        trajectory = Trajectory(
            learner or self._for_training(state), {method.name: (method, self._config.options)}, freezes=True
        )
        if state.classes:  # copied, as operations may be in-place
            copies = {k: v.to(self._backend.device, copy=True) for k, v in state.statistics.items()}
            trajectory.load_state_dict(copies, fit)
        return trajectory

    def _for_serving(
        self, state: State, trajectory: Trajectory | None = None, backbone: nn.Module | None = None
    ) -> _Snapshot:
        """Return what predicts with a state; `backbone` is a feature extractor that serves it already."""
        trajectory = trajectory or self._trajectory(state, fit=True)
        learner = trajectory.learner
        assert learner is not None
        if backbone is None:
            backbone = self._backend.fold(learner.feature_extractor(learner.backbone).requires_grad_(False).eval())
        trajectory.learner = None  # free the memory of training
        return _Snapshot(state, backbone, trajectory)

    @property
    def _can_update_frozen(self) -> bool:
        """Whether the method can learn with a frozen backbone, that is, has more than a trained head."""
        return self._config.method.classifier.needs != "learner"

    @property
    def choice(self) -> str:
        """Components of the model, the reason for them, and the cost of an update, in one line."""
        config, frozen = self._config, self.frozen
        name, method = config.training.backbone, self.method
        if frozen:
            return (
                f"{name}, pretrained and frozen, with {method}: nothing is trained, as a few photographs teach less "
                f"than the millions that it has seen; one pass at {self.size} pixels and one solve of {self.dim:,} "
                "features, seconds for a hundred pictures"
            )
        return (
            f"{name} with {method}: trained on these pictures at {self.size} pixels, which takes minutes and many "
            "pictures a class; for photographs the pretrained default (no --method, no --backbone) is far better"
        )

    @property
    def method(self) -> str:
        """Name of the method."""
        return self._config.method.name

    @property
    def size(self) -> int:
        """Side of the images in pixels."""
        return self._config.size

    @property
    def preprocessing(self) -> Preprocessing:
        """Image size, crop, resampling and normalization in front of the backbone."""
        return self._config.preprocessing

    @property
    def dim(self) -> int:
        """Number of features."""
        return int(self._snapshot.backbone.num_features)  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self._backend.device

    @property
    def frozen(self) -> bool:
        """Whether the backbone is frozen permanently."""
        return self._snapshot.state.frozen

    @property
    def classes_(self) -> npt.NDArray[np.str_]:
        """Class names in learning order, the columns of `predict_proba`."""
        return np.array(self._snapshot.state.names, dtype=np.str_)

    def __repr__(self) -> str:
        return f"IncrementalClassifier({self.method}, {len(self._snapshot.state.classes)} classes)"

    # --- learning -----------------------------------------------------------------------------------------------------

    def learn(
        self,
        data: Any,
        labels: Any = None,
        *,
        epochs: int | None = None,
        budget: float | None = None,
        callbacks: Sequence[Callback] = (),
        skip_bad: bool = False,
    ) -> IncrementalClassifier:
        """Learn new classes or more images of old ones.

        `data`: a folder of class folders, a data set, or images (paths, bytes, Pillow images, arrays, tensors) with
        `labels`. `budget` limits the whole call in seconds, instead of `epochs`. `callbacks` are called with
        `Progress`. Ctrl-C, an exception in a callback or any other error leaves the model unchanged.
        """
        begin = time.monotonic()
        if epochs is None and budget is None:
            epochs, budget = self.epochs, self.budget
        _check_effort(epochs, budget)
        with progress_callbacks(callbacks, self.progress) as tell:
            choices = [] if self._snapshot.state.classes else [self.choice]  # reported once the pictures are found

            def reading(done: int, total: int) -> None:
                while choices:
                    tell(Progress("chosen", 1, 1, choices.pop()))
                tell(Progress("reading", done, total, f"reading images: {done} of {total}"))

            images, names = self._read(data, labels, skip_bad, reading)
            self._snapshot = self._updated(images, names, epochs, None if budget is None else begin + budget, tell)
            count = len(dict.fromkeys(names))
            pictures = f"{len(names)} picture{'s' * (len(names) != 1)}"
            tell(Progress("learned", 1, 1, f"learned {count} class{'es' * (count != 1)} from {pictures}"))
        return self

    def _read(
        self, data: Any, labels: Any, skip_bad: bool, reading: Callable[[int, int], None]
    ) -> tuple[Images | Tensor, list[str]]:
        """Return the images of an update or, with a frozen backbone, their features without keeping the images."""
        given = (data, labels, self.preprocessing)
        trajectory = self._snapshot.trajectory
        views = {part.classifier.stats_view for part in trajectory.parts.values()}
        if not self.frozen or views != {"clean"}:
            return read_labeled_images(*given, skip_bad=skip_bad, on_progress=reading)
        return map_labeled_images(*given, self._features_of_many, skip_bad=skip_bad, on_progress=reading)[:2]

    def _features_of_many(self, images: Images) -> Tensor:
        """Return the features of a batch; it is filled up, as numbers depend on its size in their last bits."""
        missing = -len(images) % BATCH
        images = np.concatenate([images, np.broadcast_to(images[:1], (missing, *images.shape[1:]))])
        return self._features(self._snapshot, images)[: len(images) - missing]

    def _updated(
        self, images: Images | Tensor, names: list[str], epochs: int | None, deadline: float | None, tell: Callback
    ) -> _Snapshot:
        state = self._snapshot.state
        taught = list(dict.fromkeys(names))
        check_names(taught, state.names)
        table = {name: place for place, name in enumerate(state.names)}
        again = [name for name in taught if name in table]
        new = [name for name in taught if name not in table]
        if again:
            self._check_supports("update", f"add images to existing classes ({format_list(again)})")
        table |= {name: len(state.classes) + place for place, name in enumerate(new)}
        positions = torch.tensor([table[name] for name in names])
        batch = UpdateBatch(
            images,
            positions,
            len(state.classes),
            len(new),
            state.updates,
            state.backbone_updates,
            self._config.val_fraction,
            self.preprocessing,
        )
        self._check_room(len(state.classes) + len(new))
        trajectory = self._trajectory(state)
        learner = trajectory.learner
        assert learner is not None
        is_frozen = state.frozen or not learner.stages(state.backbone_updates)
        freeze_backbone = is_frozen or (self._can_update_frozen and (not new or len(taught) == 1))
        if freeze_backbone and not is_frozen and self._config.method.reads_first_backbone:
            raise ModelError(
                f"{self.method} trains its backbone in the first update only, which needs two or more classes; "
                "add classes or give weights"
            )

        if not freeze_backbone and self._config.published is not None:
            _warn_of_few(names)
        plan = UpdatePlan(
            freeze_backbone=freeze_backbone,
            imprint=freeze_backbone and not is_frozen,
            frozen=state.frozen,
            calibration_offset=state.calibration_offset,
            evidence=state.evidence,
            epochs=epochs,
            deadline=deadline,
        )
        learned = teach(batch, trajectory, plan, _ReportProgress(tell))
        after = state.updated(
            classes=_table(state, names, new, learned),
            weights=state.weights if is_frozen or not new else _weights(learner),
            statistics=to_cpu(trajectory.state_dict()),
            temperature=learned.temperature,
            calibration_offset=learned.calibration_offset,
            evidence=learned.evidence,
            backbone_updates=state.backbone_updates + (not freeze_backbone),
            updates=state.updates + 1,
        )
        return self._for_serving(after.with_previous(state), trajectory)

    def _check_room(self, classes: int) -> None:
        """Refuse statistics of so many classes before they take the memory."""
        form = self._config.method.storage(self._config.options).form if self._config.method.keeps_gram else "mean"
        size, room = 8 * classes * self.dim * (self.dim + 1) // 2, memory()
        if form == "gram" and room is not None and size > room / 2:
            raise ModelError(
                f"a Gram of {self.dim} features for each of {classes:,} classes takes {size / 1e9:.1f} GB, more than "
                f"half of this machine's {room / 1e9:.1f} GB of memory; use options={{'gram_storage': 'factors'}} "
                "(--set gram_storage=factors) or a method with one covariance for all classes, as first-task+none+slda"
            )

    def freeze(self) -> IncrementalClassifier:
        """Freeze the backbone permanently: further updates take one forward pass and one solve."""
        if not self._can_update_frozen:
            raise ModelError(f"{self.method} only has a trained head and cannot learn with a frozen backbone; use dpcr")
        if not self._snapshot.state.backbone_updates:
            raise ModelError("the backbone is untrained; learn two or more classes first, or give weights")
        self._snapshot = replace(self._snapshot, state=self._snapshot.state.updated(frozen=True))
        return self

    # --- prediction ---------------------------------------------------------------------------------------------------

    def predict(
        self, images: Any, *, reject_below: float | None = None, reject_strange: float | None = None
    ) -> npt.NDArray[np.str_]:
        """Predict class names, or "" for "none of these".

        `reject_below` rejects images whose confidence is below this value (0 to 1). `reject_strange` rejects images
        whose `typicality` is below this value: 0.05 rejects about one in twenty images of known classes, and most
        images of other classes.
        """
        for name, value in (("reject_below", reject_below), ("reject_strange", reject_strange)):
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"{name} is {value}; wanted a number from 0 to 1")
        snapshot = self._require_classes()
        features = self._features(snapshot, read_images(images, self.preprocessing))
        probabilities = self._scored(snapshot, features)
        names = np.array([*snapshot.state.names, REJECTED], dtype=np.str_)
        best = probabilities.argmax(1)
        if reject_below is not None:
            best[probabilities.max(1, initial=0.0) < reject_below] = len(names) - 1
        if reject_strange is not None:
            best[self._p_value(snapshot, features) < reject_strange] = len(names) - 1
        return names[best]

    def scored(
        self, images: Any, typicality: bool = False
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64] | None]:
        """Return `predict_proba` and, if requested, `typicality` from a single pass over the images."""
        snapshot = self._require_classes()
        features = self._features(snapshot, read_images(images, self.preprocessing))
        return self._scored(snapshot, features), self._p_value(snapshot, features) if typicality else None

    def typicality(self, images: Any) -> npt.NDArray[np.float64]:
        """Return the share of known-class images that fit their class no better (n,), 0 to 1; small: of no class.

        Calibrated by leave-one-out scores of the training images, which need not be stored. Requires `slda` with at
        least two classes and 10 images, see `has_typicality`.
        """
        snapshot = self._require_classes()
        return self._p_value(snapshot, self._features(snapshot, read_images(images, self.preprocessing)))

    @property
    def has_typicality(self) -> bool:
        """Whether `typicality` and `reject_strange` are available for the current classes."""
        state = self._snapshot.state
        measured = len(state.classes) >= 2 and state.evidence.images >= ENOUGH
        return measured and state.frozen and discriminant_of(self._snapshot.trajectory) is not None

    def _p_value(self, snapshot: _Snapshot, features: Tensor) -> npt.NDArray[np.float64]:
        discriminant, evidence = discriminant_of(snapshot.trajectory), snapshot.state.evidence
        if discriminant is None or not snapshot.state.frozen:
            raise ModelError(
                f"{self.method} cannot detect images of unknown classes; use reject_below, or a model with slda"
            )
        if len(snapshot.state.classes) < 2 or evidence.images < ENOUGH:
            raise ModelError(
                f"typicality was measured on {evidence.images} images; it needs two classes and {ENOUGH} images, "
                "taught with val_fraction above 0"
            )
        share: npt.NDArray[np.float64] = evidence.p_value(discriminant.novelty_scores(features)).cpu().numpy()
        return share

    def predict_proba(self, images: Any) -> npt.NDArray[np.float64]:
        """Return class probabilities (n, classes), with columns as in `classes_`."""
        return self._probabilities(self._require_classes(), images)

    def _probabilities(self, snapshot: _Snapshot, images: Any) -> npt.NDArray[np.float64]:
        return self._scored(snapshot, self._features(snapshot, read_images(images, self.preprocessing)))

    def _scored(self, snapshot: _Snapshot, features: Tensor) -> npt.NDArray[np.float64]:
        with torch.no_grad():
            scores = snapshot.logits(features).double()
            scores -= scores.amax(1, keepdim=True)  # or the temperature might make them infinite
        probabilities: npt.NDArray[np.float64] = torch.softmax(scores / snapshot.state.temperature, 1).cpu().numpy()
        return probabilities

    def embed(self, images: Any) -> npt.NDArray[np.float32]:
        """Return features (n, dim) of images."""
        features: npt.NDArray[np.float32] = (
            self._features(self._snapshot, read_images(images, self.preprocessing)).cpu().numpy()
        )
        return features

    def _features(self, snapshot: _Snapshot, images: Images) -> Tensor:
        if len(images) == 0:
            return torch.zeros(0, self.dim, device=self.device)
        pixels = pixels_of(images, self._backend, self.preprocessing)
        return extract(snapshot.backbone, pixels, self._backend, self._config.training.crop)

    def score(self, data: Any, labels: Any = None, *, skip_bad: bool = False) -> float:
        """Return the accuracy (0 to 1) on images, or on the test part of a data set or folder.

        Raise DataError for unknown classes.
        """
        snapshot = self._require_classes()

        def answered(images: Images) -> Tensor:
            return torch.from_numpy(self._probabilities(snapshot, images).argmax(1))

        answers, names, _ = map_labeled_images(data, labels, self.preprocessing, answered, "test", skip_bad=skip_bad)
        strange = sorted(set(names) - set(snapshot.state.names))
        if strange:
            raise DataError(f"unknown classes: {format_list(strange)}; learn them or exclude these images")
        return float((np.array(snapshot.state.names)[answers.numpy()] == np.array(names)).mean())

    def network(self) -> Network:
        """Return the full model as one module for export: uint8 (n, 3, size, size) -> float32 probabilities."""
        snapshot = self._require_classes()
        nothing = np.zeros((1, CHANNELS, self.size, self.size), np.uint8)
        pixels = pixels_of(nothing, self._backend, self.preprocessing)
        crop = self._config.training.crop
        return Network(snapshot, pixels, crop).eval()

    def _require_classes(self) -> _Snapshot:
        snapshot = self._snapshot
        if not snapshot.state.classes:
            raise ModelError("the model has no classes yet; add some with learn")
        return snapshot

    # --- changing classes ---------------------------------------------------------------------------------------------

    def forget(self, names: str | Iterable[str], *, for_good: bool = False) -> IncrementalClassifier:
        """Remove classes (statistics and rows of the head) and refit the classifier.

        `undo` restores them, unless `for_good` deletes all earlier states. A backbone that was trained on these
        classes is unchanged.
        """
        state = self._require_classes().state
        gone = self._check_known([names] if isinstance(names, str) else names)
        kept = [place for place, name in enumerate(state.names) if name not in gone]
        if kept:
            self._check_supports("forget", "forget classes")
        learner = self._for_training(state, with_published=False)
        trajectory = self._trajectory(state, learner)
        positions = torch.tensor(kept, dtype=torch.int64, device=self.device)
        head: Any = learner.head
        head.select_classes(positions[positions < len(head.weight)])
        if kept:
            trajectory.retain(positions)
        after = state.updated(
            classes=tuple(state.classes[place] for place in kept),
            weights=_weights(learner, with_backbone=bool(_backbone_only(state.weights))),
            statistics=to_cpu(trajectory.state_dict()) if kept else {},
            temperature=self._recalibrate(trajectory, state) if kept else 1.0,
            previous=None,
        )
        after = after if for_good else after.with_previous(state)
        changed = trajectory if kept else self._trajectory(after, learner)
        self._snapshot = self._for_serving(after, changed, self._snapshot.backbone)
        return self

    def undo(self) -> IncrementalClassifier:
        """Restore the state before the last update, merge or `forget`; repeatable a few times, also after `load`."""
        before = self._snapshot.state.previous
        if before is None:
            raise ModelError(
                "there is nothing to undo: no update yet, all kept ones undone, or a class was forgotten for good"
            )
        try:
            self._snapshot = self._checked(before)
        except _UNFIT as error:
            raise ModelError(f"the model before the last update is damaged, this one is kept: {error}") from None
        return self

    def rename(self, mapping: Mapping[str, str]) -> IncrementalClassifier:
        """Rename classes, {old: new}."""
        state = self._require_classes().state
        self._check_known(mapping)
        names = [mapping.get(name, name) for name in state.names]
        doubled = sorted(name for name, count in Counter(names).items() if count > 1)
        if doubled:
            raise DataError(f"duplicate class name {format_list(doubled)}; use distinct names")
        check_names(names)

        def renamed(one: State) -> tuple[ClassRecord, ...]:
            return tuple(replace(record, name=mapping.get(record.name, record.name)) for record in one.classes)

        def earlier(one: State | None) -> State | None:
            return one and one.updated(classes=renamed(one), previous=earlier(one.previous))

        changed = state.updated(classes=renamed(state), previous=earlier(state.previous))
        self._snapshot = replace(self._snapshot, state=changed)
        return self

    def merge(self, other: IncrementalClassifier) -> IncrementalClassifier:
        """Merge another model with the same frozen backbone, method and options.

        The result equals a model trained on the images of both.
        """
        mine, theirs = self._require_classes().state, other._require_classes().state
        self._check_mergeable(other)
        check_names(theirs.names, mine.names)
        place = {name: index for index, name in enumerate(mine.names)}
        new = [record for record in theirs.classes if record.name not in place]
        place |= {record.name: len(mine.classes) + index for index, record in enumerate(new)}
        positions = torch.tensor([place[name] for name in theirs.names], device=self.device)
        trajectory = self._trajectory(mine, self._for_training(mine, with_published=False))
        trajectory.merge(other._trajectory(theirs, other._for_training(theirs, with_published=False)), positions)
        more = {record.name: record.images for record in theirs.classes}
        table = tuple(replace(r, images=r.images + more.get(r.name, 0)) for r in mine.classes) + tuple(new)
        after = mine.updated(
            classes=table,
            statistics=to_cpu(trajectory.state_dict()),
            temperature=self._recalibrate(trajectory, mine, mine.evidence.merge(theirs.evidence)),
            evidence=mine.evidence.merge(theirs.evidence),
            updates=mine.updates + theirs.updates,
        )
        self._snapshot = self._for_serving(after.with_previous(mine), trajectory, self._snapshot.backbone)
        return self

    def _check_mergeable(self, other: IncrementalClassifier) -> None:
        self._check_supports("merge", "merge models")
        if not (self.frozen and other.frozen):
            raise ModelError(
                "merging needs models with the same frozen backbone; "
                "create them with frozen=True and the same weights, or freeze() one model and train two copies"
            )
        mine, theirs = self._config.to_dict(), other._config.to_dict()
        for key in ("method", "options", "preprocessing"):
            if mine[key] != theirs[key]:
                raise ModelError(
                    f"the models differ in {key}: {mine[key]} and {theirs[key]}; merge models with equal options"
                )
        if self._fingerprint() != other._fingerprint():
            raise ModelError("the models have different backbones; merge models created with the same weights")

    def _fingerprint(self) -> str:
        own = _backbone_only(self._snapshot.state.weights)
        return digest(own) if own else f"{self._config.published}"

    def _check_known(self, names: Iterable[str]) -> set[str]:
        requested, known = list(names), dict.fromkeys(self._snapshot.state.names)
        for name in requested:
            if name not in known:
                raise DataError(f"unknown class {name!r}: {nearest(str(name), list(known))}")
        return set(requested)

    def _check_supports(self, capability: str, what: str) -> None:
        """Raise ModelError if the method does not support an operation."""
        if capability not in self._config.method.supports:
            able = [m.name for m in METHODS.values() if capability in m.supports and m.learner in TEACHABLE]
            raise ModelError(f"{self.method} cannot {what}; use one of {', '.join(able)}")

    def _recalibrate(self, trajectory: Trajectory, state: State, evidence: Evidence | None = None) -> float:
        discriminant = discriminant_of(trajectory)
        if state.frozen and discriminant is not None:
            return temperature_of(discriminant, evidence or state.evidence)
        return calibrate(trajectory, state.calibration_offset, self._config.seed) or state.temperature

    # --- summary ------------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return a summary of the model as plain values."""
        snapshot = self._snapshot
        shares = _expected(snapshot)
        records = snapshot.state.classes
        return {
            "format": model_directory.FORMAT,
            "method": self.method,
            "backbone": self._config.training.backbone,
            "frozen": snapshot.state.frozen,
            "size": self.size,
            "dim": self.dim,
            "classes": _described(snapshot, shares),
            "updates": snapshot.state.updates,
            "bytes": snapshot.state.size,
            "similar": _similar(snapshot),
            "confused": most_confused(records, shares),
            "confusions": confusion_matrix(records, shares),
        }

    # --- saving and loading -------------------------------------------------------------------------------------------

    def save(self, directory: StrPath) -> None:
        """Save the model, replacing an existing one atomically."""
        model_directory.save(directory, self._config, self._snapshot.state)

    @classmethod
    def load(
        cls, directory: StrPath, *, device: str = "auto", precision: str = "auto", progress: bool = True
    ) -> IncrementalClassifier:
        """Load a model saved by `save`."""
        config, state = model_directory.load(directory)
        model = cls.__new__(cls)
        model._config, model._backend = config, Backend.choose(device, precision, compile=False)
        model.epochs, model.budget, model.progress = None, None, progress
        try:
            model._snapshot = model._checked(state)
        except MissingPackageError:  # the model is sound
            raise
        except _UNFIT as error:
            what = f"weights or statistics do not fit its {model_directory.CARD}"
            raise ModelError(f"{directory}: {what}: {error}") from None
        return model

    def _checked(self, state: State) -> _Snapshot:
        """Return what predicts with a state that was read; parts that do not fit each other are an error (`_UNFIT`)."""
        snapshot = self._for_serving(state)
        if state.classes:
            dim = int(snapshot.backbone.num_features)  # type: ignore[arg-type]
            shape = tuple(snapshot.logits(torch.zeros(1, dim, device=self.device)).shape)
            if shape != (1, len(state.classes)):
                raise ModelError(f"the classifier has {shape[-1]} classes, the table {len(state.classes)}")
            places = list(range(len(state.classes)))
            for track in snapshot.trajectory.tracks.values():
                if track.stats is None or track.stats.classes.tolist() != places:
                    raise ModelError(f"the statistics do not match the {len(places)} classes in the table")
        return snapshot

    @classmethod
    def from_pretrained(
        cls,
        repo: str,
        *,
        revision: str | None = None,
        device: str = "auto",
        precision: str = "auto",
        progress: bool = True,
    ) -> IncrementalClassifier:
        """Load a model from a directory or, if no such directory exists, from the Hugging Face Hub.

        `repo` is OWNER/NAME, as given to `efcil push`; it needs the extra `hub`. `revision` is a branch, tag or commit.
        """
        if model_directory.exists(repo):
            return cls.load(repo, device=device, precision=precision, progress=progress)
        from efcil.product.hub import downloaded

        with downloaded(repo, revision) as place:
            return cls.load(place, device=device, precision=precision, progress=progress)


class _ReportProgress(TrainingCallback):
    """Training callback that reports `Progress`."""

    def __init__(self, report: Callback):
        self.report = report

    def on_epoch_end(self, report: EpochReport, state: TrainState) -> None:
        words = f"epoch {report.epoch + 1} of {report.epochs}, loss {report.loss:.3f}"
        self.report(Progress("training", report.epoch + 1, report.epochs, words, report.loss))

    def on_training_end(self, task: int) -> None:
        self.report(Progress("solving", 0, 1, "updating statistics, fitting the classifier"))


def _warn_of_few(names: Sequence[str]) -> None:
    """Warn where pictures are too few to adapt a pretrained backbone to."""
    name, count = min(Counter(names).items(), key=lambda item: item[1])
    if count < FEW:
        pictures = f"{count} picture{'s' * (count != 1)}"
        warn(
            f"adapting the backbone to {pictures} of class {name}: with fewer than {FEW} a class, adapt=none is better"
        )


def _check_effort(epochs: int | None, budget: float | None) -> None:
    if epochs is not None and budget is not None:
        raise ConfigError(f"epochs={epochs} and budget={budget} are exclusive; give one of them")
    if epochs is not None and epochs < 1:
        raise ConfigError(f"epochs is {epochs}; wanted one or more")
    if budget is not None and not 0 < budget < float("inf"):
        raise ConfigError(f"budget is {budget} seconds; wanted more than zero, and an end")


def _weights(learner: Learner, with_backbone: bool = True) -> dict[str, Tensor]:
    weights = learner.student.state_dict()
    return to_cpu(weights if with_backbone else {k: v for k, v in weights.items() if not k.startswith("backbone.")})


def _backbone_only(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if name.startswith("backbone.")}


def _table(state: State, names: list[str], new: list[str], learned: UpdateResult) -> tuple[ClassRecord, ...]:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    count = Counter(names)
    old = (replace(record, images=record.images + count[record.name]) for record in state.classes)
    table = [*old, *(ClassRecord(name, count[name], today, None) for name in new)]
    for place, (right, checked) in learned.recall.items():
        table[place] = replace(table[place], recall=round(100 * right / checked, 2), checked=checked)
    return tuple(table)


def _expected(snapshot: _Snapshot) -> Tensor | None:
    """Return the estimated shares of each class's images by the class that the current model predicts."""
    discriminant = discriminant_of(snapshot.trajectory)
    if discriminant is None or not snapshot.state.frozen or not snapshot.state.classes:
        return None
    return expected_confusions(discriminant, snapshot.state.evidence)


def _described(snapshot: _Snapshot, shares: Tensor | None) -> list[dict[str, Any]]:
    """Return the class table, with the recall to expect now, in percent: None where too little is known."""
    expected = [None] * len(snapshot.state.classes) if shares is None else (100 * shares.diag()).tolist()
    return [
        {**vars(record), "expected": None if share is None or record.images < ENOUGH else round(share, 1)}
        for record, share in zip(snapshot.state.classes, expected, strict=True)
    ]


def _similar(snapshot: _Snapshot) -> list[list[Any]]:
    """Return the class pairs with the highest cosine similarity of means or head rows."""
    rows = (
        snapshot.trajectory.parts[label_of(snapshot.trajectory)].classifier.prototypes
        if snapshot.state.classes
        else None
    )
    if rows is None or len(snapshot.state.classes) < 2:
        return []
    unit = normalize(rows.detach().double(), dim=1)
    names, pairs = snapshot.state.names, []
    for start in range(0, len(unit), SIMILAR_ROWS):  # all pairs of 10,000 classes at once would take 800 MB
        cosines = (unit[start : start + SIMILAR_ROWS] @ unit[start:].T).triu(1).cpu()
        cosines[~torch.ones_like(cosines, dtype=torch.bool).triu(1)] = -2
        values, places = cosines.flatten().topk(min(SIMILAR, cosines.numel()))
        found = zip(values.tolist(), places.tolist(), strict=True)
        pairs += [(v, start + i // cosines.shape[1], start + i % cosines.shape[1]) for v, i in found if v >= -1.5]
    pairs.sort(key=lambda pair: -pair[0])
    return [[names[one], names[other], round(cosine, 4)] for cosine, one, other in pairs[:SIMILAR]]


def _load_backbone(learner: Learner, config: ModelConfig, weights: StrPath) -> None:
    """Load backbone weights from a file or from timm."""
    name, backbone = str(config.training.backbone), learner.student.backbone
    if os.fspath(weights) == models.PRETRAINED and models.is_timm(name):
        source = models.build(name, seed=config.seed, size=config.size, weights=weights)
        backbone.load_state_dict(source.state_dict())
    else:
        models.load_weights(backbone, name, weights)
