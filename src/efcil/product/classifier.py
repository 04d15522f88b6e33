"""`IncrementalClassifier`: a model that learns new classes again and again, without the pictures of the old ones."""

from __future__ import annotations

import datetime
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize

from efcil import models
from efcil.accel.backend import Backend
from efcil.data.dataset import format_list
from efcil.errors import ConfigError, DataError, EfcilError, ModelError, nearest
from efcil.files import StrPath
from efcil.learners import LEARNERS, Learner
from efcil.methods import METHODS
from efcil.product import model_directory
from efcil.product.calibration import CalibrationOffset
from efcil.product.inputs import CHANNELS, Images, read_images, read_labeled_images
from efcil.product.model_config import TEACHABLE, ModelConfig, resolve
from efcil.product.names import check_names
from efcil.product.progress import Callback, Progress, progress_callbacks
from efcil.product.state import ClassRecord, State
from efcil.product.teaching import UpdateBatch, UpdatePlan, UpdateResult, calibrate, label_of, pixels_of, teach
from efcil.tensor_files import digest, to_cpu
from efcil.training.callbacks import Callback as TrainingCallback
from efcil.training.callbacks import EpochReport
from efcil.training.extraction import extract
from efcil.training.image_batches import ImageBatches
from efcil.training.state import TrainState
from efcil.trajectory import Trajectory

REJECTED = ""
SIMILAR = 10  # pairs of classes that a summary names
_PREFIXES = ("", "backbone.", "student.backbone.", "learner.student.backbone.")  # of weights in a file


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """A state and the modules that answer for it. It is replaced as a whole, never changed."""

    state: State
    backbone: nn.Module  # what extracts features
    trajectory: Trajectory

    def logits(self, features: Tensor) -> Tensor:
        """Score features for every class."""
        return self.trajectory.logits(label_of(self.trajectory), features)


class Network(nn.Module):
    """uint8 images (n, 3, size, size) -> probabilities (n, classes), float32: a whole model as one module."""

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
        """Normalise, embed, score, turn into probabilities."""
        if self.crop is not None:
            margin = (images.shape[-1] - self.crop) // 2
            images = images[:, :, margin : margin + self.crop, margin : margin + self.crop]
        features = self.backbone(images.float() * self.scale - self.offset)
        return torch.softmax(self.logits(features) / self.temperature, 1).float()


class IncrementalClassifier:
    """A classifier that is taught class after class. It keeps statistics, never a picture nor the name of one.

    A teaching is one task of the method (DPCR unless told otherwise): the backbone learns the classes of the call
    while the old ones are distilled, the statistics of old classes follow it, and the classifier is solved again. A
    call with no new class, or with one class only (there is nothing to tell apart), leaves the backbone at rest and
    adds statistics. `frozen=True` (with `weights`), or `freeze()`, leaves it at rest for good: then a teaching is one
    pass and one solve, and models can be merged.

    Of each new class with at least 5 pictures the share `val_fraction`, at most 20, is not trained on: `recall` in the
    class table is measured there. Then these pictures enter the statistics as well. With `val_fraction=0` all are
    trained on, and rounds equal the tasks of `efcil run`.

    `predict_proba` is calibrated without old pictures: see `efcil.product.calibration`.

    What `forget` does not erase: the backbone has seen the class, and its weights may be shaped by it. To be sure of
    that too, teach a new model without the class.
    """

    def __init__(
        self,
        method: str = "dpcr",
        *,
        backbone: str = "resnet10",
        width: int | None = None,
        size: int = 64,
        weights: StrPath | None = None,
        frozen: bool = False,
        epochs: int | None = None,
        budget: float | None = None,
        val_fraction: float = 0.1,
        options: Mapping[str, Any] | None = None,
        device: str = "auto",
        precision: str = "auto",
        seed: int = 0,
        progress: bool = True,
    ):
        """Make a model that knows nothing yet.

        `weights`: a safetensors file with a backbone's weights (of a model, of a run's checkpoint, or the plain state),
        or "pretrained" for those that timm fetches. `options`: dotted keys of training and method, as `--set` takes.
        `epochs` or `budget` (seconds) for each teaching; either can be given to `learn` instead.
        """
        _check_effort(epochs, budget)
        self._config = resolve(method, backbone, width, size, seed, val_fraction, options)
        self._backend = Backend.choose(device, precision, compile=False)
        self.epochs, self.budget, self.progress = epochs, budget, progress
        if frozen and weights is None:
            raise ConfigError("frozen=True needs weights=...: a backbone that never learned is of no use; or freeze()")
        if frozen and not self._can_update_frozen:
            raise ConfigError(f"frozen=True: {method} is nothing but its trained head; take dpcr")
        learner = self._new_learner()
        if weights is not None:
            _load_backbone(learner, self._config, weights)
        state = State(
            classes=(),
            weights=_weights(learner),
            statistics={},
            temperature=1.0,
            calibration_offset=CalibrationOffset(),
            backbone_updates=int(weights is not None),
            updates=0,
            frozen=frozen,
            previous=None,
        )
        self._snapshot = self._for_serving(state, self._trajectory(state, learner))

    # --- parts --------------------------------------------------------------------------------------------------------

    def _new_learner(self) -> Learner:
        kind = LEARNERS[self._config.method.learner]
        return kind(self._config.training, CHANNELS, self._backend, self._config.seed, self._config.size)

    def _for_training(self, state: State) -> Learner:
        """A learner with the weights of a state, to be taught."""
        if not state.weights:
            raise ModelError(f"there are no weights for {self._config.training.backbone}")
        learner = self._new_learner()
        beside = {k: v for k, v in learner.state(teacher=False).items() if not k.startswith("student.")}
        student = {f"student.{k}": v.to(self._backend.device) for k, v in state.weights.items()}
        try:
            learner.load_state(beside | student)
        except (RuntimeError, KeyError) as error:
            why = " ".join(str(error).split())[:200]
            raise ModelError(f"the weights do not fit {self._config.training.backbone}: {why}") from None
        return learner

    def _trajectory(self, state: State, learner: Learner | None = None) -> Trajectory:
        """A trajectory with the statistics of a state, to be taught or changed."""
        method = self._config.method
        trajectory = Trajectory(
            learner or self._for_training(state), {method.name: (method, self._config.options)}, freezes=True
        )
        if state.classes:  # copied: what is computed may be computed in place
            trajectory.load_state_dict({k: v.to(self._backend.device, copy=True) for k, v in state.statistics.items()})
        return trajectory

    def _for_serving(self, state: State, trajectory: Trajectory | None = None) -> _Snapshot:
        trajectory = trajectory or self._trajectory(state)
        learner = trajectory.learner
        assert learner is not None
        backbone = learner.feature_extractor(learner.backbone)
        trajectory.learner = None  # it has learned: what trained it would only take memory
        return _Snapshot(state, backbone.requires_grad_(False).eval(), trajectory)

    @property
    def _can_update_frozen(self) -> bool:
        """Whether the method can learn while the backbone rests: all but a trained head can."""
        return self._config.method.classifier.needs != "learner"

    @property
    def method(self) -> str:
        """Name of the method."""
        return self._config.method.name

    @property
    def size(self) -> int:
        """Side of the square that pictures are brought to."""
        return self._config.size

    @property
    def dim(self) -> int:
        """Number of features."""
        return int(self._snapshot.backbone.num_features)  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._backend.device

    @property
    def frozen(self) -> bool:
        """Whether the backbone rests for good."""
        return self._snapshot.state.frozen

    @property
    def classes_(self) -> npt.NDArray[np.str_]:
        """Class names in the order in which they were learned; columns of `predict_proba`."""
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
        """Learn new classes, and more about old ones.

        `data`: a folder of class folders, a data set, or pictures (paths, bytes, Pillow images, arrays, tensors) with
        `labels`. `epochs`, or `budget` in seconds for the whole call. Each of `callbacks` is called with a `Progress`.
        Ctrl-C, an exception in a callback or any error leaves the model exactly as it was.
        """
        begin = time.monotonic()
        if epochs is None and budget is None:
            epochs, budget = self.epochs, self.budget
        _check_effort(epochs, budget)
        with progress_callbacks(callbacks, self.progress) as tell:

            def reading(done: int, total: int) -> None:
                tell(Progress("reading", done, total, f"reading pictures: {done} of {total}"))

            images, names = read_labeled_images(data, labels, self.size, skip_bad=skip_bad, on_progress=reading)
            reading(len(images), len(images))
            self._snapshot = self._updated(images, names, epochs, None if budget is None else begin + budget, tell)
            count = len(dict.fromkeys(names))
            tell(Progress("learned", 1, 1, f"learned {count} class{'es' * (count != 1)} from {len(names)} pictures"))
        return self

    def _updated(
        self, images: Images, names: list[str], epochs: int | None, deadline: float | None, tell: Callback
    ) -> _Snapshot:
        state = self._snapshot.state
        taught = list(dict.fromkeys(names))
        check_names(taught, state.names)
        table = {name: place for place, name in enumerate(state.names)}
        again = [name for name in taught if name in table]
        new = [name for name in taught if name not in table]
        if again:
            self._check_supports("update", f"add pictures to a class that it knows ({format_list(again)})")
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
        )
        trajectory = self._trajectory(state)
        learner = trajectory.learner
        assert learner is not None
        is_frozen = state.frozen or not learner.stages(state.backbone_updates)
        freeze_backbone = is_frozen or (self._can_update_frozen and (not new or len(taught) == 1))
        if freeze_backbone and not is_frozen and self._config.method.reads_first_backbone:
            raise ModelError(
                f"{self.method} learns its backbone in the first teaching only, and one class teaches it nothing; "
                "begin with two classes or more, or give weights"
            )

        plan = UpdatePlan(
            freeze_backbone=freeze_backbone,
            imprint=freeze_backbone and not is_frozen,
            frozen=state.frozen,
            calibration_offset=state.calibration_offset,
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
            backbone_updates=state.backbone_updates + (not freeze_backbone),
            updates=state.updates + 1,
        )
        return self._for_serving(after.with_previous(state), trajectory)

    def freeze(self) -> IncrementalClassifier:
        """Let the backbone rest for good: from now on a teaching is one pass and one solve."""
        if not self._can_update_frozen:
            raise ModelError(f"{self.method} is nothing but its trained head and cannot learn at rest; take dpcr")
        if not self._snapshot.state.backbone_updates:
            raise ModelError("the backbone has not learned yet: teach it two classes or more first, or give weights")
        self._snapshot = replace(self._snapshot, state=self._snapshot.state.updated(frozen=True))
        return self

    # --- answering ----------------------------------------------------------------------------------------------------

    def predict(self, images: Any, *, reject_below: float | None = None) -> npt.NDArray[np.str_]:
        """Name the class of each picture; "" (none of these) where the confidence is below `reject_below` (0 to 1)."""
        if reject_below is not None and not 0 <= reject_below <= 1:
            raise ConfigError(f"reject_below is {reject_below}; wanted a confidence from 0 to 1")
        snapshot = self._require_classes()
        probabilities = self._probabilities(snapshot, images)
        names = np.array([*snapshot.state.names, REJECTED], dtype=np.str_)
        best = probabilities.argmax(1)
        if reject_below is not None:
            best[probabilities.max(1, initial=0.0) < reject_below] = len(names) - 1
        return names[best]

    def predict_proba(self, images: Any) -> npt.NDArray[np.float64]:
        """Return the probability of each class, (n, classes), columns as `classes_`; rows sum to one."""
        return self._probabilities(self._require_classes(), images)

    def _probabilities(self, snapshot: _Snapshot, images: Any) -> npt.NDArray[np.float64]:
        features = self._features(snapshot, read_images(images, self.size))
        with torch.no_grad():
            scores = snapshot.logits(features).double()
        found: npt.NDArray[np.float64] = torch.softmax(scores / snapshot.state.temperature, 1).cpu().numpy()
        return found

    def embed(self, images: Any) -> npt.NDArray[np.float32]:
        """Return the features of pictures, (n, dim)."""
        found: npt.NDArray[np.float32] = self._features(self._snapshot, read_images(images, self.size)).cpu().numpy()
        return found

    def _features(self, snapshot: _Snapshot, images: Images) -> Tensor:
        if len(images) == 0:
            return torch.zeros(0, self.dim, device=self.device)
        return extract(snapshot.backbone, pixels_of(images, self._backend), self._backend, self._config.training.crop)

    def score(self, data: Any, labels: Any = None, *, skip_bad: bool = False) -> float:
        """Return the share of pictures (0 to 1) that are named rightly; of a data set or folder with test/, its test.

        A class that the model does not know is an error: no answer could be right.
        """
        snapshot = self._require_classes()
        images, names = read_labeled_images(data, labels, self.size, "test", skip_bad=skip_bad)
        strange = sorted(set(names) - set(snapshot.state.names))
        if strange:
            raise DataError(f"the model does not know {format_list(strange)}; teach it, or leave these pictures out")
        answers = np.array(snapshot.state.names)[self._probabilities(snapshot, images).argmax(1)]
        return float((answers == np.array(names)).mean())

    def network(self) -> Network:
        """Return the whole model as one module, for export: uint8 (n, 3, size, size) -> probabilities float32."""
        snapshot = self._require_classes()
        pixels = pixels_of(np.zeros((1, CHANNELS, self.size, self.size), np.uint8), self._backend)
        crop = self._config.training.crop
        return Network(snapshot, pixels, crop).eval()

    def _require_classes(self) -> _Snapshot:
        snapshot = self._snapshot
        if not snapshot.state.classes:
            raise ModelError("the model knows no class yet; teach it with learn")
        return snapshot

    # --- changing what is known ---------------------------------------------------------------------------------------

    def forget(self, names: str | Iterable[str]) -> IncrementalClassifier:
        """Drop classes: statistics, row of the auxiliary head, what `undo` could bring back; then solve again.

        The weights of the backbone stay as they are, and they have seen these classes.
        """
        state = self._require_classes().state
        gone = self._check_known([names] if isinstance(names, str) else names)
        kept = [place for place, name in enumerate(state.names) if name not in gone]
        if kept:
            self._check_supports("forget", "take a class out again")
        trajectory = self._trajectory(state)
        learner = trajectory.learner
        assert learner is not None
        positions = torch.tensor(kept, dtype=torch.int64, device=self.device)
        head: Any = learner.head
        head.select_classes(positions[positions < len(head.weight)])
        if kept:
            trajectory.retain(positions)
        after = state.updated(
            classes=tuple(state.classes[place] for place in kept),
            weights=_weights(learner),
            statistics=to_cpu(trajectory.state_dict()) if kept else {},
            temperature=self._recalibrate(trajectory, state) if kept else 1.0,
            previous=None,
        )
        self._snapshot = self._for_serving(after, trajectory if kept else self._trajectory(after, learner))
        return self

    def undo(self) -> IncrementalClassifier:
        """Go back to the state before the last teaching (or merge); one step, also after `load`."""
        before = self._snapshot.state.previous
        if before is None:
            raise ModelError("there is nothing to undo: no teaching yet, one undone already, or a class was forgotten")
        self._snapshot = self._for_serving(before)
        return self

    def rename(self, mapping: Mapping[str, str]) -> IncrementalClassifier:
        """Give classes other names, {old: new}."""
        state = self._require_classes().state
        self._check_known(mapping)
        names = [mapping.get(name, name) for name in state.names]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise DataError(f"two classes would be called {format_list(doubled)}; every class needs a name of its own")
        check_names(names)

        def renamed(one: State) -> tuple[ClassRecord, ...]:
            return tuple(replace(record, name=mapping.get(record.name, record.name)) for record in one.classes)

        previous = state.previous and state.previous.updated(classes=renamed(state.previous))
        self._snapshot = replace(self._snapshot, state=state.updated(classes=renamed(state), previous=previous))
        return self

    def merge(self, other: IncrementalClassifier) -> IncrementalClassifier:
        """Add what another model knows; both must have the same frozen backbone, method and options.

        Statistics add: the result is the model that was taught on the pictures of both.
        """
        mine, theirs = self._require_classes().state, other._require_classes().state
        self._check_mergeable(other)
        check_names(theirs.names, mine.names)
        place = {name: index for index, name in enumerate(mine.names)}
        new = [record for record in theirs.classes if record.name not in place]
        place |= {record.name: len(mine.classes) + index for index, record in enumerate(new)}
        positions = torch.tensor([place[name] for name in theirs.names], device=self.device)
        trajectory = self._trajectory(mine)
        trajectory.merge(other._trajectory(theirs), positions)
        more = {record.name: record.images for record in theirs.classes}
        table = tuple(replace(r, images=r.images + more.get(r.name, 0)) for r in mine.classes) + tuple(new)
        after = mine.updated(
            classes=table,
            statistics=to_cpu(trajectory.state_dict()),
            temperature=self._recalibrate(trajectory, mine),
            updates=mine.updates + theirs.updates,
        )
        self._snapshot = self._for_serving(after.with_previous(mine))
        return self

    def _check_mergeable(self, other: IncrementalClassifier) -> None:
        self._check_supports("merge", "merge models")
        if not (self.frozen and other.frozen):
            raise ModelError(
                "both models must have a frozen backbone to be merged: statistics of backbones that learn apart do not "
                "add; make them with frozen=True and the same weights, or freeze() one model and teach two copies"
            )
        mine, theirs = self._config.to_dict(), other._config.to_dict()
        for key in ("method", "options", "size"):
            if mine[key] != theirs[key]:
                raise ModelError(
                    f"the models differ in {key}: {mine[key]} and {theirs[key]}; only equals can be merged"
                )
        if self._fingerprint() != other._fingerprint():
            raise ModelError("the models have different backbones; merge models made with the same weights")

    def _fingerprint(self) -> str:
        return digest(_backbone_only(self._snapshot.state.weights))

    def _check_known(self, names: Iterable[str]) -> set[str]:
        wanted = list(names)
        for name in wanted:
            if name not in self._snapshot.state.names:
                raise DataError(f"the model does not know {name!r}: {nearest(str(name), self._snapshot.state.names)}")
        return set(wanted)

    def _check_supports(self, capability: str, what: str) -> None:
        """Refuse what the method does not declare, naming those that do."""
        if capability not in self._config.method.supports:
            able = [m.name for m in METHODS.values() if capability in m.supports and m.learner in TEACHABLE]
            raise ModelError(f"{self.method} cannot {what}; methods that can: {', '.join(able)}")

    def _recalibrate(self, trajectory: Trajectory, state: State) -> float:
        return calibrate(trajectory, state.calibration_offset, self._config.seed) or state.temperature

    # --- telling ------------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return what the model is and knows, as plain values."""
        snapshot = self._snapshot
        size = sum(
            t.numel() * t.element_size()
            for t in (*snapshot.state.weights.values(), *snapshot.state.statistics.values())
        )
        return {
            "format": model_directory.FORMAT,
            "method": self.method,
            "backbone": self._config.training.backbone,
            "frozen": snapshot.state.frozen,
            "size": self.size,
            "dim": self.dim,
            "classes": [dict(vars(record)) for record in snapshot.state.classes],
            "updates": snapshot.state.updates,
            "bytes": size,
            "similar": _similar(snapshot),
        }

    # --- keeping ------------------------------------------------------------------------------------------------------

    def save(self, directory: StrPath) -> None:
        """Write the model; a model that is there already is replaced at once, or stays if anything goes wrong."""
        model_directory.save(directory, self._config, self._snapshot.state)

    @classmethod
    def load(
        cls, directory: StrPath, *, device: str = "auto", precision: str = "auto", progress: bool = True
    ) -> IncrementalClassifier:
        """Read a model that `save` wrote, on this or another machine."""
        config, state = model_directory.load(directory)
        model = cls.__new__(cls)
        model._config, model._backend = config, Backend.choose(device, precision, compile=False)
        model.epochs, model.budget, model.progress = None, None, progress
        try:
            model._snapshot = model._for_serving(state)
            if state.classes:
                found = tuple(model._snapshot.logits(torch.zeros(1, model.dim, device=model.device)).shape)
                if found != (1, len(state.classes)):
                    raise ModelError(f"{found[-1]} classes in the classifier, {len(state.classes)} in the table")
                places = list(range(len(state.classes)))
                for track in model._snapshot.trajectory.tracks.values():
                    if track.stats is None or track.stats.classes.tolist() != places:
                        raise ModelError(f"the statistics are not of the {len(places)} classes in the table")
        except (KeyError, RuntimeError, EfcilError, TypeError, ValueError, IndexError, AttributeError) as error:
            what = f"weights or statistics do not fit its {model_directory.CARD}"
            raise ModelError(f"{directory}: {what}: {error}") from None
        return model


class _ReportProgress(TrainingCallback):
    """Reports a teaching as `Progress`."""

    def __init__(self, report: Callback):
        self.report = report

    def on_epoch_end(self, report: EpochReport, state: TrainState) -> None:
        words = f"epoch {report.epoch + 1} of {report.epochs}, loss {report.loss:.3f}"
        self.report(Progress("training", report.epoch + 1, report.epochs, words, report.loss))

    def on_training_end(self, task: int) -> None:
        self.report(Progress("solving", 0, 1, "moving statistics, solving the classifier"))


def _check_effort(epochs: int | None, budget: float | None) -> None:
    if epochs is not None and budget is not None:
        raise ConfigError(f"epochs={epochs} and budget={budget}: give one of them")
    if epochs is not None and epochs < 1:
        raise ConfigError(f"epochs is {epochs}; wanted one or more")
    if budget is not None and not budget > 0:
        raise ConfigError(f"budget is {budget} seconds; wanted more than zero")


def _weights(learner: Learner) -> dict[str, Tensor]:
    return to_cpu(learner.student.state_dict())


def _backbone_only(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if name.startswith("backbone.")}


def _table(state: State, names: list[str], new: list[str], learned: UpdateResult) -> tuple[ClassRecord, ...]:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    count = Counter(names)
    old = (replace(record, images=record.images + count[record.name]) for record in state.classes)
    first = len(state.classes)
    fresh = (ClassRecord(name, count[name], today, learned.recall.get(first + place)) for place, name in enumerate(new))
    return (*old, *fresh)


def _similar(snapshot: _Snapshot) -> list[list[Any]]:
    """The pairs of classes whose means (or rows of the head) point most alike."""
    rows = (
        snapshot.trajectory.parts[label_of(snapshot.trajectory)].classifier.prototypes
        if snapshot.state.classes
        else None
    )
    if rows is None or len(snapshot.state.classes) < 2:
        return []
    unit = normalize(rows.detach().double(), dim=1)
    cosines = (unit @ unit.T).cpu()
    one, other = torch.triu_indices(len(unit), len(unit), 1)
    order = cosines[one, other].argsort(descending=True)[:SIMILAR].tolist()
    names = snapshot.state.names
    return [[names[one[i]], names[other[i]], round(float(cosines[one[i], other[i]]), 4)] for i in order]


def _load_backbone(learner: Learner, config: ModelConfig, weights: StrPath) -> None:
    """Give the student's backbone weights from a file, or those that timm fetches."""
    name, backbone = config.training.backbone, learner.student.backbone
    if os.fspath(weights) == "pretrained":
        if not models.is_timm(name):
            raise ConfigError(f"weights='pretrained' is for timm/NAME, not {name}; give a safetensors file")
        source = models.build_timm(name, channels=CHANNELS, seed=config.seed, pretrained=True)
        backbone.load_state_dict(source.state_dict())
        return
    path = Path(weights)
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise ConfigError(f"weights: {path}: no such file; give a safetensors file with a backbone's weights") from None
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"weights: {path} is no safetensors file: {error}") from None
    wanted = backbone.state_dict()
    for prefix in _PREFIXES:
        own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        if all(name in own and own[name].shape == tensor.shape for name, tensor in wanted.items()):
            backbone.load_state_dict({name: own[name] for name in wanted})
            return
    raise ConfigError(
        f"weights: {path} does not fit {name} (width {config.training.width}, stem {config.training.stem}): "
        "give the backbone, width and size that the weights were learned with"
    )
