"""The lifecycle of a method: train the learner on a task, shift class statistics, fit the classifiers.

A track holds the statistics of all classes so far for one feature map and one shift. Methods with the same feature map
and shift share a track. The `Trajectory` owns all tracks; experiments, saved models, the service and plug-ins all learn
through it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from efcil.classifiers.base import Classifier
from efcil.core.class_stats import ClassStats
from efcil.core.feature_maps import FeatureMap, simplified
from efcil.core.gram_storage import MEANS, StorageSpec
from efcil.errors import ConfigError
from efcil.features import TaskFeatures
from efcil.freezing import estimate
from efcil.learners.base import Learner
from efcil.methods import Method
from efcil.shift.base import Shift
from efcil.training.state import TaskData

Resolved = Mapping[str, tuple[Method, Any]]
"""Methods and their validated options, by label."""


class TrackKey(NamedTuple):
    """Identity of a track."""

    first_backbone: bool  # use the backbone after the first task though the learner trains on
    feature_map: FeatureMap | None
    shift: Hashable
    storage: StorageSpec


@dataclass
class Track:
    """Statistics of all classes so far and the shift that updates them."""

    shift: Shift | None
    storage: StorageSpec
    stats: ClassStats | None = None


@dataclass
class Part:
    """One classifier of a method and the tracks it is fitted to."""

    method: Method
    classifier: Classifier
    tracks: tuple[TrackKey, ...]
    first_backbone: bool


class Trajectory:
    """A learner and the methods evaluated on it; owns all state between tasks.

    Without a learner it processes saved features.
    """

    def __init__(self, learner: Learner | None, methods: Resolved, freezes: bool = False):
        """Open the tracks; `freezes`: the learner is frozen after the first task, so there is one backbone only."""
        self.learner = learner
        self.tracks: dict[TrackKey, Track] = {}
        self.parts: dict[str, Part] = {}
        for label, (method, options) in methods.items():
            first = method.reads_first_backbone and not freezes
            shift = None if method.shift is None else method.shift(options)
            for head, kind in method.classifiers.items():
                classifier = kind(options)
                keys = tuple(self._track(first, method, shift, classifier, options))
                self.parts[f"{label}/{head}" if head else label] = Part(method, classifier, keys, first)
        self._learner_track = self._track_for_learner() if learner is not None and learner.needs_stats else None

    def _track_for_learner(self) -> TrackKey:
        """Get or create the track that the learner samples from: that of the first method, without a feature map.

        Methods on one trajectory share its backbone, so the first one decides for all of them.
        """
        for part in self.parts.values():
            for key in part.tracks:
                unmapped = key._replace(feature_map=None)
                self.tracks.setdefault(unmapped, Track(self.tracks[key].shift, key.storage)).storage = key.storage
                return unmapped
        raise ConfigError(
            "the learner needs class statistics, but no method has any; "
            "use a classifier with statistics, such as ridge or ncm"
        )

    def _track(
        self, first: bool, method: Method, shift: Shift | None, classifier: Classifier, options: Any
    ) -> Iterator[TrackKey]:
        """Get or create the tracks of a classifier, with Grams if a classifier or the shift needs them."""
        if classifier.needs in ("features", "learner"):
            return
        for feature_map, needs in zip(classifier.feature_maps, classifier.track_needs, strict=True):
            feature_map = feature_map if shift is None or shift.feature_map is None else shift.feature_map
            if shift is not None and shift.moves == "gram" and feature_map is not None and not feature_map.is_linear:
                raise ConfigError(
                    f"{method.name}: {feature_map} is nonlinear, but {type(shift).__name__} is a linear shift; "
                    "use shift none"
                )
            if self.learner is not None:
                feature_map = simplified(feature_map, self.learner.feature_layout)
            storage = method.storage(options)
            key = TrackKey(first, feature_map, None if shift is None else shift.key, storage)
            with_grams = needs in ("gram", "shared") or (shift is not None and shift.needs_gram)
            track = self.tracks.setdefault(key, Track(shift, MEANS))
            track.storage = storage if with_grams else track.storage
            yield key

    # --- learning -----------------------------------------------------------------------------------------------------

    @property
    def uses_first_backbone(self) -> bool:
        """Whether a method uses the backbone after the first task."""
        return any(part.first_backbone for part in self.parts.values())

    def learn_task(
        self,
        data: TaskData,
        fit: Callable[[], None] | None,
        on_training_end: Callable[[], None] = lambda: None,
        on_features: Callable[[TaskFeatures], None] = lambda features: None,
    ) -> TaskFeatures:
        """Learn one task; `fit` trains the learner, None leaves the backbone unchanged.

        `on_features` is called with the features before statistics and classifiers are updated.
        """
        learner = self.learner
        assert learner is not None, "saved features have no backbone to train"
        if fit is not None:
            if self._learner_track is not None:
                learner.old_stats = self.tracks[self._learner_track].stats
            fit()
        if data.task.index == 0 and self.uses_first_backbone:
            learner.keep_first()
        on_training_end()
        features = TaskFeatures(data.task.index, data.labels, learner.seed, learner, data.images, data.transform)
        features.backbone_unchanged = fit is None or learner.frozen
        with learner.backend.prevent_capture():
            if learner.can_freeze and not features.backbone_unchanged and not self._is_worth_moving(features):
                learner.freeze()
                features = features.before()
            on_features(features)
            self.update(features)
        return features

    def update(self, features: TaskFeatures, preview: bool = False) -> None:
        """Shift the tracks, add the task's classes and fit the classifiers; a preview does not call the learner."""
        first = features.with_first_backbone() if self.uses_first_backbone else features
        shifted: dict[TrackKey, ClassStats | None] = {}
        for key, track in self.tracks.items():
            task = (first if key.first_backbone else features).mapped(key.feature_map)
            old = track.stats
            if old is not None and track.shift is not None and not features.backbone_unchanged:
                old = track.shift(old, task)
            shifted[key] = old
            track.stats = _merged(old, task.stats(storage=track.storage), track.storage)
        if self.learner is not None and not preview:
            self.learner.after_task(features)
        for part in self.parts.values():
            view = first if part.first_backbone else features
            if part.classifier.needs == "features":
                part.classifier.fit_features(view)
            elif part.classifier.needs == "learner":
                part.classifier.fit_learner(features)
            else:
                part.classifier.fit(*(self._fitted_to(key, part.classifier, view, shifted[key]) for key in part.tracks))

    def _is_worth_moving(self, features: TaskFeatures) -> bool:
        """Whether the first method, for which the learner decides, should keep the backbone that the task trained."""
        learner = self.learner
        assert learner is not None
        old = learner.num_old_classes
        label = next((label for label, part in self.parts.items() if part.tracks and not part.first_backbone), None)
        if not old or label is None or int(features.labels.min()) < old:
            return True  # the first task, or one that has old classes, too
        worth = estimate(self, label, features, old)
        return worth is not None and worth.move > worth.stay

    def _fitted_to(
        self, key: TrackKey, classifier: Classifier, features: TaskFeatures, shifted: ClassStats | None
    ) -> ClassStats:
        track = self.tracks[key]
        if classifier.stats_view == "clean":
            assert track.stats is not None
            return track.stats
        new = features.mapped(key.feature_map).stats(classifier.stats_view, track.storage)
        return _merged(shifted, new, track.storage)

    def preview(self, features: TaskFeatures) -> Trajectory:
        """Return a copy of this trajectory updated with these features."""
        other = copy.copy(self)
        other.tracks = {key: replace(track) for key, track in self.tracks.items()}
        other.parts = {
            label: replace(part, classifier=copy.deepcopy(part.classifier)) for label, part in self.parts.items()
        }
        other.update(features, preview=True)
        return other

    def only(self, label: str) -> Trajectory:
        """Return this trajectory with one classifier, to preview it alone."""
        other = copy.copy(self)
        other.parts = {label: self.parts[label]}
        other.tracks = {key: track for key, track in self.tracks.items() if key in self.parts[label].tracks}
        return other

    def logits(self, label: str, features: Tensor) -> Tensor:
        """Return scores (n, classes) of features (n, dim) from the backbone of the method."""
        return self.parts[label].classifier.logits(features)

    def mapped_logits(self, label: str, features: Tensor) -> Tensor:
        """Score features drawn from the statistics `stats(label)`: they are behind its feature map already."""
        return self.parts[label].classifier.mapped_logits(features)

    def stats(self, label: str) -> ClassStats | None:
        """Return the statistics that a method's classifier is fitted to, None where it keeps no Grams."""
        keys = self.parts[label].tracks
        return self.tracks[keys[0]].stats if keys and self.tracks[keys[0]].storage != MEANS else None

    # --- changing the classes -----------------------------------------------------------------------------------------

    def retain(self, positions: Tensor) -> None:
        """Keep only the classes at these positions (k,), relabeled 0 to k - 1."""
        self._change(lambda key, stats: stats.select(positions).relabel(range(len(positions))))
        for part in self.parts.values():
            if part.classifier.needs == "learner":
                part.classifier.retain(positions)

    def merge(self, other: Trajectory, positions: Tensor) -> None:
        """Merge the statistics of another trajectory with the same frozen backbone; `positions` are its classes
        here."""

        def merged(key: TrackKey, stats: ClassStats) -> ClassStats:
            theirs = other.tracks[key].stats
            assert theirs is not None
            return stats.merge(theirs.relabel(positions), self.tracks[key].storage)

        self._change(merged)

    def _change(self, change: Callable[[TrackKey, ClassStats], ClassStats]) -> None:
        for key, track in self.tracks.items():
            if track.stats is not None:
                track.stats = change(key, track.stats)
        for part in self.parts.values():
            if part.tracks:
                part.classifier.fit(*self._stats_of(part))

    def _stats_of(self, part: Part) -> list[ClassStats]:
        tracks = [self.tracks[key].stats for key in part.tracks]
        return [stats for stats in tracks if stats is not None]

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of tracks and classifiers, without that of the learner."""
        state: dict[str, Tensor] = {}
        for number, track in enumerate(self.tracks.values()):
            if track.stats is not None:
                state |= {f"tracks.{number}.{name}": tensor for name, tensor in track.stats.state().items()}
        for label, part in self.parts.items():
            classifier_state = part.classifier.state_dict()
            state |= {f"classifiers/{label}/{name}": tensor for name, tensor in classifier_state.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor], fit: bool = True) -> None:
        """Restore tracks and classifiers; with `fit` unset, only those that no later `fit` to statistics replaces."""
        for number, track in enumerate(self.tracks.values()):
            track.stats = ClassStats.from_state(_strip_prefix(state, f"tracks.{number}."))
        for label, part in self.parts.items():
            if fit or not part.tracks:
                part.classifier.load_state_dict(_strip_prefix(state, f"classifiers/{label}/"), *self._stats_of(part))


def _merged(old: ClassStats | None, new: ClassStats, storage: StorageSpec) -> ClassStats:
    return new if old is None else old.merge(new, storage)


def _strip_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
