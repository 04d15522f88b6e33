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
from efcil.accel.machine import Machine
from efcil.data.dataset import listed
from efcil.errors import DataError, EfcilError, ModelError, OptionError, nearest
from efcil.files import StrPath
from efcil.learners import LEARNERS, Learner
from efcil.methods import registered
from efcil.product import model_directory
from efcil.product.calibration import Optimism
from efcil.product.inputs import CHANNELS, Images, read_lesson, read_pictures
from efcil.product.names import check_names
from efcil.product.progress import Callback, Progress, telling
from efcil.product.settings import TEACHABLE, Settings, resolve
from efcil.product.state import ClassRecord, State
from efcil.product.teaching import Learned, Lesson, calibrated, label_of, pixels_of, teach
from efcil.tensor_files import digest, on_cpu
from efcil.training.extraction import extract
from efcil.training.image_batches import Pixels
from efcil.training.trainer import EpochReport
from efcil.trajectory import Trajectory

NONE_OF_THESE = ""
SIMILAR = 10  # pairs of classes that a summary names
_PREFIXES = ("", "backbone.", "student.backbone.", "learner.student.backbone.")  # of weights in a file


@dataclass(frozen=True, eq=False)
class _Now:
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

    def __init__(self, now: _Now, pixels: Pixels, crop: int | None):
        super().__init__()
        self.backbone, self.logits, self.temperature, self.crop = now.backbone, now.logits, now.state.temperature, crop
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

    Of each new class with at least 5 pictures the share `held_out`, at most 20, is not trained on: `recall` in the
    class table is measured there. Then these pictures enter the statistics as well. With `held_out=0` all are trained
    on, and rounds equal the tasks of `efcil run`. DPCR+ alone differs: a model draws features of old classes from
    their statistics, which can be forgotten and merged, a run from means that its learner keeps.

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
        held_out: float = 0.1,
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
        self._settings = resolve(method, backbone, width, size, seed, held_out, options)
        self._machine = Machine.choose(device, precision, compile=False)
        self.epochs, self.budget, self.progress = epochs, budget, progress
        if frozen and weights is None:
            raise OptionError("frozen=True needs weights=...: a backbone that never learned is of no use; or freeze()")
        if frozen and not self._rests_well:
            raise OptionError(f"frozen=True: {method} is nothing but its trained head; take dpcr")
        learner = self._new_learner()
        if weights is not None:
            _load_backbone(learner, self._settings, weights)
        state = State(
            classes=(),
            weights=_weights(learner),
            statistics={},
            temperature=1.0,
            optimism=Optimism(),
            trainings=int(weights is not None),
            teachings=0,
            frozen=frozen,
            previous=None,
        )
        self._now = self._served(state, self._trajectory(state, learner))

    # --- parts --------------------------------------------------------------------------------------------------------

    def _new_learner(self) -> Learner:
        kind = LEARNERS[self._settings.method.learner]
        return kind(self._settings.training, CHANNELS, self._machine, self._settings.seed)

    def _opened(self, state: State) -> Learner:
        """A learner with the weights of a state, to be taught."""
        if not state.weights:
            raise ModelError(f"there are no weights for {self._settings.training.backbone}")
        learner = self._new_learner()
        beside = {k: v for k, v in learner.state(teacher=False).items() if not k.startswith("student.")}
        student = {f"student.{k}": v.to(self._machine.device) for k, v in state.weights.items()}
        try:
            learner.load_state(beside | student)
        except (RuntimeError, KeyError) as error:
            why = " ".join(str(error).split())[:200]
            raise ModelError(f"the weights do not fit {self._settings.training.backbone}: {why}") from None
        return learner

    def _trajectory(self, state: State, learner: Learner | None = None) -> Trajectory:
        """A trajectory with the statistics of a state, to be taught or changed."""
        method = self._settings.method
        trajectory = Trajectory(
            learner or self._opened(state), {method.name: (method, self._settings.options)}, freezes=True
        )
        if state.classes:  # copied: what is computed may be computed in place
            trajectory.load_state_dict({k: v.to(self._machine.device, copy=True) for k, v in state.statistics.items()})
        return trajectory

    def _served(self, state: State, trajectory: Trajectory | None = None) -> _Now:
        trajectory = trajectory or self._trajectory(state)
        learner = trajectory.learner
        assert learner is not None
        backbone = learner.feature_extractor(learner.backbone)
        trajectory.learner = None  # it has learned: what trained it would only take memory
        return _Now(state, backbone.requires_grad_(False).eval(), trajectory)

    @property
    def _rests_well(self) -> bool:
        """Whether the method can learn while the backbone rests: all but a trained head can."""
        return self._settings.method.classifier.needs != "learner"

    @property
    def method(self) -> str:
        """Name of the method."""
        return self._settings.method.name

    @property
    def size(self) -> int:
        """Side of the square that pictures are brought to."""
        return self._settings.size

    @property
    def dim(self) -> int:
        """Number of features."""
        return int(self._now.backbone.dim)  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._machine.device

    @property
    def frozen(self) -> bool:
        """Whether the backbone rests for good."""
        return self._now.state.frozen

    @property
    def classes_(self) -> npt.NDArray[np.str_]:
        """Class names in the order in which they were learned; columns of `predict_proba`."""
        return np.array(self._now.state.names, dtype=np.str_)

    def __repr__(self) -> str:
        return f"IncrementalClassifier({self.method}, {len(self._now.state.classes)} classes)"

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
        with telling(callbacks, self.progress) as tell:

            def reading(done: int, total: int) -> None:
                tell(Progress("reading", done, total, f"reading pictures: {done} of {total}"))

            images, names = read_lesson(data, labels, self.size, skip_bad=skip_bad, told=reading)
            reading(len(images), len(images))
            self._now = self._taught(images, names, epochs, None if budget is None else begin + budget, tell)
            count = len(dict.fromkeys(names))
            tell(Progress("learned", 1, 1, f"learned {count} class{'es' * (count != 1)} from {len(names)} pictures"))
        return self

    def _taught(
        self, images: Images, names: list[str], epochs: int | None, deadline: float | None, tell: Callback
    ) -> _Now:
        state = self._now.state
        taught = list(dict.fromkeys(names))
        check_names(taught, state.names)
        table = {name: place for place, name in enumerate(state.names)}
        again = [name for name in taught if name in table]
        new = [name for name in taught if name not in table]
        if again:
            self._check_supports("update", f"add pictures to a class that it knows ({listed(again)})")
        table |= {name: len(state.classes) + place for place, name in enumerate(new)}
        positions = torch.tensor([table[name] for name in names])
        lesson = Lesson(
            images, positions, len(state.classes), len(new), state.teachings, state.trainings, self._settings.held_out
        )
        trajectory = self._trajectory(state)
        learner = trajectory.learner
        assert learner is not None
        at_rest = state.frozen or not learner.stages(state.trainings)
        rests = at_rest or (self._rests_well and (not new or len(taught) == 1))
        if rests and not at_rest and self._settings.method.reads_first_backbone:
            raise ModelError(
                f"{self.method} learns its backbone in the first teaching only, and one class teaches it nothing; "
                "begin with two classes or more, or give weights"
            )

        def after_epoch(report: EpochReport) -> None:
            words = f"epoch {report.epoch + 1} of {report.epochs}, loss {report.loss:.3f}"
            tell(Progress("training", report.epoch + 1, report.epochs, words, report.loss))

        def solving() -> None:
            tell(Progress("solving", 0, 1, "moving statistics, solving the classifier"))

        learned = teach(
            lesson,
            trajectory,
            rests=rests,
            imprints=rests and not at_rest,
            frozen=state.frozen,
            optimism=state.optimism,
            epochs=epochs,
            deadline=deadline,
            after_epoch=after_epoch,
            solving=solving,
        )
        after = state.changed(
            classes=_table(state, names, new, learned),
            weights=state.weights if at_rest or not new else _weights(learner),
            statistics=on_cpu(trajectory.state_dict()),
            temperature=learned.temperature,
            optimism=learned.optimism,
            trainings=state.trainings + (not rests),
            teachings=state.teachings + 1,
        )
        return self._served(after.after(state), trajectory)

    def freeze(self) -> IncrementalClassifier:
        """Let the backbone rest for good: from now on a teaching is one pass and one solve."""
        if not self._rests_well:
            raise ModelError(f"{self.method} is nothing but its trained head and cannot learn at rest; take dpcr")
        if not self._now.state.trainings:
            raise ModelError("the backbone has not learned yet: teach it two classes or more first, or give weights")
        self._now = replace(self._now, state=self._now.state.changed(frozen=True))
        return self

    # --- answering ----------------------------------------------------------------------------------------------------

    def predict(self, images: Any, *, unknown: float | None = None) -> npt.NDArray[np.str_]:
        """Name the class of each picture; below the confidence `unknown` (0 to 1) the name is "": none of these."""
        if unknown is not None and not 0 <= unknown <= 1:
            raise OptionError(f"unknown is {unknown}; wanted a confidence from 0 to 1")
        now = self._ready()
        probabilities = self._probabilities(now, images)
        names = np.array([*now.state.names, NONE_OF_THESE], dtype=np.str_)
        best = probabilities.argmax(1)
        if unknown is not None:
            best[probabilities.max(1, initial=0.0) < unknown] = len(names) - 1
        return names[best]

    def predict_proba(self, images: Any) -> npt.NDArray[np.float64]:
        """Return the probability of each class, (n, classes), columns as `classes_`; rows sum to one."""
        return self._probabilities(self._ready(), images)

    def _probabilities(self, now: _Now, images: Any) -> npt.NDArray[np.float64]:
        features = self._features(now, read_pictures(images, self.size))
        with torch.no_grad():
            scores = now.logits(features).double()
        found: npt.NDArray[np.float64] = torch.softmax(scores / now.state.temperature, 1).cpu().numpy()
        return found

    def embed(self, images: Any) -> npt.NDArray[np.float32]:
        """Return the features of pictures, (n, dim)."""
        found: npt.NDArray[np.float32] = self._features(self._now, read_pictures(images, self.size)).cpu().numpy()
        return found

    def _features(self, now: _Now, images: Images) -> Tensor:
        if len(images) == 0:
            return torch.zeros(0, self.dim, device=self.device)
        return extract(now.backbone, pixels_of(images, self._machine), self._machine, self._settings.training.crop)

    def score(self, data: Any, labels: Any = None, *, skip_bad: bool = False) -> float:
        """Return the share of pictures (0 to 1) that are named rightly; of a data set or folder with test/, its test.

        A class that the model does not know is an error: no answer could be right.
        """
        now = self._ready()
        images, names = read_lesson(data, labels, self.size, "test", skip_bad=skip_bad)
        unknown = sorted(set(names) - set(now.state.names))
        if unknown:
            raise DataError(f"the model does not know {listed(unknown)}; teach it, or leave these pictures out")
        answers = np.array(now.state.names)[self._probabilities(now, images).argmax(1)]
        return float((answers == np.array(names)).mean())

    def network(self) -> Network:
        """Return the whole model as one module, for export: uint8 (n, 3, size, size) -> probabilities float32."""
        now = self._ready()
        pixels = pixels_of(np.zeros((1, CHANNELS, self.size, self.size), np.uint8), self._machine)
        crop = self._settings.training.crop
        return Network(now, pixels, crop).eval()

    def _ready(self) -> _Now:
        now = self._now
        if not now.state.classes:
            raise ModelError("the model knows no class yet; teach it with learn")
        return now

    # --- changing what is known ---------------------------------------------------------------------------------------

    def forget(self, names: str | Iterable[str]) -> IncrementalClassifier:
        """Drop classes: statistics, row of the auxiliary head, what `undo` could bring back; then solve again.

        The weights of the backbone stay as they are, and they have seen these classes.
        """
        state = self._ready().state
        gone = self._known([names] if isinstance(names, str) else names)
        kept = [place for place, name in enumerate(state.names) if name not in gone]
        if kept:
            self._check_supports("forget", "take a class out again")
        trajectory = self._trajectory(state)
        learner = trajectory.learner
        assert learner is not None
        positions = torch.tensor(kept, dtype=torch.int64, device=self.device)
        head: Any = learner.head
        head.keep(positions[positions < len(head.weight)])
        if kept:
            trajectory.retain(positions)
        after = state.changed(
            classes=tuple(state.classes[place] for place in kept),
            weights=_weights(learner),
            statistics=on_cpu(trajectory.state_dict()) if kept else {},
            temperature=self._recalibrated(trajectory, state) if kept else 1.0,
            previous=None,
        )
        self._now = self._served(after, trajectory if kept else self._trajectory(after, learner))
        return self

    def undo(self) -> IncrementalClassifier:
        """Go back to the state before the last teaching (or merge); one step, also after `load`."""
        before = self._now.state.previous
        if before is None:
            raise ModelError("there is nothing to undo: no teaching yet, one undone already, or a class was forgotten")
        self._now = self._served(before)
        return self

    def rename(self, mapping: Mapping[str, str]) -> IncrementalClassifier:
        """Give classes other names, {old: new}."""
        state = self._ready().state
        self._known(mapping)
        names = [mapping.get(name, name) for name in state.names]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise DataError(f"two classes would be called {listed(doubled)}; every class needs a name of its own")
        check_names(names)

        def renamed(one: State) -> tuple[ClassRecord, ...]:
            return tuple(replace(record, name=mapping.get(record.name, record.name)) for record in one.classes)

        previous = state.previous and state.previous.changed(classes=renamed(state.previous))
        self._now = replace(self._now, state=state.changed(classes=renamed(state), previous=previous))
        return self

    def merge(self, other: IncrementalClassifier) -> IncrementalClassifier:
        """Add what another model knows; both must have the same frozen backbone, method and options.

        Statistics add: the result is the model that was taught on the pictures of both.
        """
        mine, theirs = self._ready().state, other._ready().state
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
        after = mine.changed(
            classes=table,
            statistics=on_cpu(trajectory.state_dict()),
            temperature=self._recalibrated(trajectory, mine),
            teachings=mine.teachings + theirs.teachings,
        )
        self._now = self._served(after.after(mine))
        return self

    def _check_mergeable(self, other: IncrementalClassifier) -> None:
        self._check_supports("merge", "merge models")
        if not (self.frozen and other.frozen):
            raise ModelError(
                "both models must have a frozen backbone to be merged: statistics of backbones that learn apart do not "
                "add; make them with frozen=True and the same weights, or freeze() one model and teach two copies"
            )
        mine, theirs = self._settings.document(), other._settings.document()
        for key in ("method", "options", "size"):
            if mine[key] != theirs[key]:
                raise ModelError(
                    f"the models differ in {key}: {mine[key]} and {theirs[key]}; only equals can be merged"
                )
        if self._fingerprint() != other._fingerprint():
            raise ModelError("the models have different backbones; merge models made with the same weights")

    def _fingerprint(self) -> str:
        return digest(_backbone_only(self._now.state.weights))

    def _known(self, names: Iterable[str]) -> set[str]:
        wanted = list(names)
        for name in wanted:
            if name not in self._now.state.names:
                raise DataError(f"the model does not know {name!r}: {nearest(str(name), self._now.state.names)}")
        return set(wanted)

    def _check_supports(self, capability: str, what: str) -> None:
        """Refuse what the method does not declare, naming those that do."""
        if capability not in self._settings.method.supports:
            able = [m.name for m in registered().values() if capability in m.supports and m.learner in TEACHABLE]
            raise ModelError(f"{self.method} cannot {what}; methods that can: {', '.join(able)}")

    def _recalibrated(self, trajectory: Trajectory, state: State) -> float:
        return calibrated(trajectory, state.optimism, self._settings.seed) or state.temperature

    # --- telling ------------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return what the model is and knows, as plain values."""
        now = self._now
        size = sum(t.numel() * t.element_size() for t in (*now.state.weights.values(), *now.state.statistics.values()))
        return {
            "format": model_directory.FORMAT,
            "method": self.method,
            "backbone": self._settings.training.backbone,
            "frozen": now.state.frozen,
            "size": self.size,
            "dim": self.dim,
            "classes": [dict(vars(record)) for record in now.state.classes],
            "teachings": now.state.teachings,
            "bytes": size,
            "similar": _similar(now),
        }

    # --- keeping ------------------------------------------------------------------------------------------------------

    def save(self, directory: StrPath) -> None:
        """Write the model; a model that is there already is replaced at once, or stays if anything goes wrong."""
        model_directory.save(directory, self._settings, self._now.state)

    @classmethod
    def load(
        cls, directory: StrPath, *, device: str = "auto", precision: str = "auto", progress: bool = True
    ) -> IncrementalClassifier:
        """Read a model that `save` wrote, on this or another machine."""
        settings, state = model_directory.load(directory)
        model = cls.__new__(cls)
        model._settings, model._machine = settings, Machine.choose(device, precision, compile=False)
        model.epochs, model.budget, model.progress = None, None, progress
        try:
            model._now = model._served(state)
            if state.classes:
                found = tuple(model._now.logits(torch.zeros(1, model.dim, device=model.device)).shape)
                if found != (1, len(state.classes)):
                    raise ModelError(f"{found[-1]} classes in the classifier, {len(state.classes)} in the table")
                places = list(range(len(state.classes)))
                for track in model._now.trajectory.tracks.values():
                    if track.stats is None or track.stats.classes.tolist() != places:
                        raise ModelError(f"the statistics are not of the {len(places)} classes in the table")
        except (KeyError, RuntimeError, EfcilError, TypeError, ValueError, IndexError, AttributeError) as error:
            what = f"weights or statistics do not fit its {model_directory.CARD}"
            raise ModelError(f"{directory}: {what}: {error}") from None
        return model


def _check_effort(epochs: int | None, budget: float | None) -> None:
    if epochs is not None and budget is not None:
        raise OptionError(f"epochs={epochs} and budget={budget}: give one of them")
    if epochs is not None and epochs < 1:
        raise OptionError(f"epochs is {epochs}; wanted one or more")
    if budget is not None and not budget > 0:
        raise OptionError(f"budget is {budget} seconds; wanted more than zero")


def _weights(learner: Learner) -> dict[str, Tensor]:
    return on_cpu(learner.student.state_dict())


def _backbone_only(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if name.startswith("backbone.")}


def _table(state: State, names: list[str], new: list[str], learned: Learned) -> tuple[ClassRecord, ...]:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    count = Counter(names)
    old = (replace(record, images=record.images + count[record.name]) for record in state.classes)
    first = len(state.classes)
    fresh = (ClassRecord(name, count[name], today, learned.recall.get(first + place)) for place, name in enumerate(new))
    return (*old, *fresh)


def _similar(now: _Now) -> list[list[Any]]:
    """The pairs of classes whose means (or rows of the head) point most alike."""
    rows = now.trajectory.parts[label_of(now.trajectory)].classifier.prototypes if now.state.classes else None
    if rows is None or len(now.state.classes) < 2:
        return []
    unit = normalize(rows.detach().double(), dim=1)
    cosines = (unit @ unit.T).cpu()
    one, other = torch.triu_indices(len(unit), len(unit), 1)
    order = cosines[one, other].argsort(descending=True)[:SIMILAR].tolist()
    names = now.state.names
    return [[names[one[i]], names[other[i]], round(float(cosines[one[i], other[i]]), 4)] for i in order]


def _load_backbone(learner: Learner, settings: Settings, weights: StrPath) -> None:
    """Give the student's backbone weights from a file, or those that timm fetches."""
    name, backbone = settings.training.backbone, learner.student.backbone
    if os.fspath(weights) == "pretrained":
        if not models.is_timm(name):
            raise OptionError(f"weights='pretrained' is for timm/NAME, not {name}; give a safetensors file")
        source = models.build_timm(name, channels=CHANNELS, seed=settings.seed, pretrained=True)
        backbone.load_state_dict(source.state_dict())
        return
    path = Path(weights)
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise OptionError(f"weights: {path}: no such file; give a safetensors file with a backbone's weights") from None
    except (SafetensorError, OSError) as error:
        raise OptionError(f"weights: {path} is no safetensors file: {error}") from None
    wanted = backbone.state_dict()
    for prefix in _PREFIXES:
        own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        if all(name in own and own[name].shape == tensor.shape for name, tensor in wanted.items()):
            backbone.load_state_dict({name: own[name] for name in wanted})
            return
    raise OptionError(
        f"weights: {path} does not fit {name} (width {settings.training.width}, stem {settings.training.stem}): "
        "give the backbone, width and size that the weights were learned with"
    )
