"""Methods from Python: made of names, classes or instances of their parts, and taught task by task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from torch import nn

from efcil.accel.backend import Backend
from efcil.classifiers import CLASSIFIERS
from efcil.classifiers.base import Classifier
from efcil.components import Component
from efcil.config import default_preset, preset_names, preset_values, whole_number
from efcil.data.dataset import COLORS, in_color
from efcil.errors import ConfigError, DataError
from efcil.learners import LEARNERS, Learner
from efcil.methods import FROZEN, METHODS
from efcil.methods import Method as Description
from efcil.protocol import Evaluator
from efcil.resolution import RequestedMethod, resolve
from efcil.shift import SHIFTS
from efcil.shift.base import Shift
from efcil.tasks import Task, TaskStream
from efcil.training.image_batches import ImageBatches
from efcil.training.image_store import to_device
from efcil.training.state import TaskData
from efcil.training.trainer import Trainer
from efcil.trajectory import Trajectory

__all__ = [
    "PASS",
    "AdaptFirst",
    "Finetune",
    "FirstTask",
    "Joint",
    "LearnerConfig",
    "LwF",
    "Method",
    "Pretrained",
    "PseudoReplay",
]

Backbone = str | nn.Module | Callable[[int], nn.Module]
SMALL_IMAGES = 40  # pixels up to which a ResNet's first layer keeps the size


class LearnerConfig:
    """How the backbone learns: the name of a learner, its backbone, and options of its training.

    `backbone` is a name ("resnet18", "timm/..."), an `nn.Module` that maps images (n, channels, height, width) to
    features (n, dim), which is copied, or a function of the number of channels that makes one. `epochs` is the number
    of epochs per task; other options have their keys, with `_` or `.`: `first={"lr": 0.1}`, `batch_size=64`.

    >>> LearnerConfig("lwf", backbone="resnet10", epochs=5, batch_size=64)
    LearnerConfig('lwf', backbone=resnet10, epochs=5, batch_size=64)
    """

    name: ClassVar[str] = ""

    def __init__(self, name: str, backbone: Backbone | None = None, epochs: int | None = None, **options: Any):
        self.learner = LEARNERS.canonical(name)
        LEARNERS.find(self.learner)
        self.epochs = None if epochs is None else whole_number("epochs", epochs, 1)
        self.settings = {} if backbone is None else {"backbone": backbone}
        for key, value in options.items():
            nested = {f"{key}.{inner}": v for inner, v in value.items()} if isinstance(value, Mapping) else {key: value}
            self.settings |= nested

    def __repr__(self) -> str:
        given = self.settings | ({} if self.epochs is None else {"epochs": self.epochs})
        order = sorted(given, key=lambda key: (key != "backbone", key != "epochs"))
        words = [f"{key}={_shown(given[key])}" for key in order]
        first = [repr(self.learner)] if type(self) is LearnerConfig else []
        return f"{type(self).__name__}({', '.join([*first, *words])})"


class _Named(LearnerConfig):
    def __init__(self, backbone: Backbone | None = None, epochs: int | None = None, **options: Any):
        super().__init__(self.name, backbone, epochs, **options)


class LwF(_Named):
    """Learning without forgetting: cross-entropy on new classes, distillation of the old ones.

    >>> LwF(backbone="resnet10", distill_weight=5)
    LwF(backbone=resnet10, distill_weight=5)
    """

    name = "lwf"


class Finetune(_Named):
    """Cross-entropy on the new classes alone: the lower bound.

    >>> Finetune(backbone="resnet10", epochs=5)
    Finetune(backbone=resnet10, epochs=5)
    """

    name = "finetune"


class Joint(_Named):
    """Training on all images so far: the upper bound.

    >>> Joint(epochs=20, first={"lr": 0.05})
    Joint(epochs=20, first.lr=0.05)
    """

    name = "joint"


class FirstTask(_Named):
    """Training on the first task, then a frozen backbone.

    >>> Method(learner=FirstTask(epochs=5), classifier="ncm")
    Method('first-task+none+ncm')
    """

    name = "first-task"


class Pretrained(_Named):
    """A pretrained backbone, frozen from the start.

    >>> Method(learner=Pretrained(backbone="efficientnet-lite0"), classifier="slda")
    Method('pretrained+none+slda', backbone=efficientnet-lite0)
    """

    name = "pretrained"


class AdaptFirst(_Named):
    """A pretrained backbone, fine-tuned on the first task, then frozen.

    >>> AdaptFirst(epochs=5, first={"lr": 0.0005})
    AdaptFirst(epochs=5, first.lr=0.0005)
    """

    name = "adapt-first"


class PseudoReplay(_Named):
    """DPCR+'s learner: LwF with pseudo-images of old classes and feature distillation.

    >>> Method(learner=PseudoReplay(epochs=5), shift="dual-projection", classifier="ridge-gaussian")
    Method('pseudo-replay+dual-projection+ridge-gaussian')
    """

    name = "pseudo-replay"


class PASS(_Named):
    """Prototype augmentation and self-supervision.

    >>> PASS(backbone="resnet18", batch_size=64)
    PASS(backbone=resnet18, batch_size=64)
    """

    name = "pass"


class Method(Description):
    """A method: how the backbone learns, how class statistics follow it, and how they become scores.

    `learner` is a name or a `LearnerConfig` such as `LwF(backbone=net)`; `shift` and `classifier` are names, classes or
    instances with options. Without parts, `name` is that of a known method. For plug-ins, the other fields describe the
    method in tables and presets (`efcil.register_method`).

    Give methods to `efcil.compare`, or teach one task by task: `learn` begins with an untrained backbone.

    >>> from efcil import DualProjection, Ridge, TaskStream
    >>> stream = TaskStream.from_dataset("digits", tasks=5, order=1993)
    >>> method = Method(learner=LwF(epochs=1), shift=DualProjection(), classifier=Ridge(ridge=200))
    >>> method
    Method('lwf+dual-projection+ridge', ridge=200.0)
    >>> accuracies = [method.learn(task).evaluate(stream) for task in stream]
    >>> [len(row) for row in accuracies], method.accuracy_matrix.shape
    ([1, 2, 3, 4, 5], (5, 5))
    """

    def __init__(
        self,
        name: str = "",
        learner: str | LearnerConfig = "",
        shift: str | type[Shift] | Shift | None = None,
        classifier: str | type[Classifier] | Classifier | None = None,
        title: str = "",
        paper: str = "",
        memory_formula: str = "-",
        exemplars: bool = False,
        preset_key: str = "",
        defaults: Mapping[str, Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
        heads: Mapping[str, type[Classifier]] | None = None,
        paper_head: str = "",
        preset: str = "",
        presets: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        given = dict(settings or {})
        if isinstance(learner, LearnerConfig):
            given |= learner.settings | ({} if learner.epochs is None else {"epochs": learner.epochs})
            learner = learner.learner
        shift_type, classifier_type = _part(SHIFTS, shift, given), _part(CLASSIFIERS, classifier, given)
        known: Description | None = None
        if not learner and classifier_type is None:
            known = METHODS.find(METHODS.canonical(name))
        elif classifier_type is None or not learner:
            missing = "classifier" if classifier_type is None else "learner"
            raise ConfigError(
                f"method {name or 'without a name'}: {missing} is missing; give its name, class or instance"
            )
        if known is not None:
            fields = {key: getattr(known, key) for key in known.__dataclass_fields__}
            super().__init__(**fields | {"settings": given})
            return
        learner = LEARNERS.canonical(learner)
        parts = ("none" if shift_type is None else _name_of(SHIFTS, shift_type), _name_of(CLASSIFIERS, classifier_type))
        assert classifier_type is not None
        super().__init__(
            name or "+".join([learner, *parts]),
            learner,
            shift_type,
            classifier_type,
            title,
            paper,
            memory_formula,
            exemplars,
            preset_key,
            dict(defaults or {}),
            dict(overrides or {}),
            dict(heads or {}),
            paper_head,
            preset,
            dict(presets or {}),
            given,
        )

    def __repr__(self) -> str:
        settings = "".join(f", {key}={_shown(value)}" for key, value in self.settings.items() if key != "epochs")
        return f"Method({self.name!r}{settings})"

    # --- task by task -------------------------------------------------------------------------------------------------

    def learn(self, task: Task, device: str = "auto", seed: int = 0) -> Method:
        """Learn the next task of a stream; return the method. `device` and `seed` count for the first one."""
        if task.index == 0:
            self._set_session(_Session(self, task, device, seed))
        self._session().learn(task)
        return self

    def evaluate(self, stream: TaskStream) -> npt.NDArray[np.float64]:
        """Return the accuracy on the test images of each task so far, in percent."""
        return self._session().evaluate(stream)

    @property
    def accuracy_matrix(self) -> npt.NDArray[np.float64]:
        """Accuracies of all calls of `evaluate` in percent, row t after task t; NaN where nothing was measured."""
        return self._session().matrix()

    @property
    def trajectory(self) -> Trajectory:
        """State between tasks, that is backbone, class statistics and classifier."""
        return self._session().trajectory

    def _session(self) -> _Session:
        session: _Session | None = self.__dict__.get("_state")
        if session is None:
            raise ConfigError(f"method {self.name} has learned nothing; begin with learn(stream[0])")
        return session

    def _set_session(self, session: _Session) -> None:
        self.__dict__["_state"] = session  # a description is frozen; what it has learned is not part of it


class _Session:
    """What a method has learned."""

    def __init__(self, method: Description, task: Task, device: str, seed: int):
        moments = _moments(task)
        channels, size = task.images.shape[1:3]
        settings = {key: value for key, value in method.settings.items() if key != "epochs"}
        names = preset_names(moments.name)
        preset = method.preset if method.preset in names else default_preset(moments.name) or ""

        def section(name: str) -> dict[str, Any]:
            return preset_values(preset, moments.name, name) if preset else preset_values("model", "defaults", name)

        derived = {} if preset else {"stem": "cifar" if size <= SMALL_IMAGES else "imagenet"}
        resolved = resolve({method.name: RequestedMethod(method, settings)}, section, {}, derived)
        options = resolved.training.with_epochs(method.settings.get("epochs"))
        self.wanted = options.preprocessing()
        channels = channels if self.wanted is None else COLORS
        self.backend = Backend.choose(device)
        self.learner: Learner = LEARNERS[resolved.learner](options, channels, self.backend, seed, size)
        self.learner.load_weights()
        self.trajectory = Trajectory(self.learner, resolved.methods, freezes=resolved.learner in FROZEN)
        default = method.default_head(resolved.methods[method.name][1])
        self.label = f"{method.name}/{default}" if method.heads else method.name
        self.tasks_done, self._rows = 0, dict[int, npt.NDArray[np.float64]]()
        self._evaluator: tuple[TaskStream, Evaluator] | None = None

    def learn(self, task: Task) -> None:
        if task.index != self.tasks_done:
            raise ConfigError(f"task {task.index + 1} comes after task {self.tasks_done}: learn them in their order")
        moments, backend, known, wanted = _moments(task), self.backend, task.images, self.wanted
        if wanted is None:
            images = ImageBatches(to_device(known, backend.device), moments.mean, moments.std, backend)
        else:
            resize = None if known.shape[-1] == wanted.size else wanted
            stored = to_device(in_color(known), backend.device)
            images = ImageBatches(stored, wanted.mean, wanted.std, backend, resize=resize)
        data = TaskData(task, images, backend.tensor(task.labels), self.learner.transform(task.images.shape[-1]))
        self.trajectory.learn_task(data, lambda: Trainer(self.learner).fit(data))
        self.tasks_done += 1

    def evaluate(self, stream: TaskStream) -> npt.NDArray[np.float64]:
        if stream.dataset is None:
            raise DataError("the stream has no test images; make it with TaskStream.from_dataset(train, test)")
        if self._evaluator is None or self._evaluator[0] is not stream:
            data = stream.dataset if self.wanted is None else stream.dataset.prepared(self.wanted)
            self._evaluator = (stream, Evaluator(data, stream, self.backend))
        last = self.tasks_done - 1
        correct, _ = self._evaluator[1].measure(last, self.trajectory)[self.label]
        totals = np.array(self._evaluator[1].totals()[: self.tasks_done])
        self._rows[last] = 100 * np.array(correct) / totals
        return self._rows[last]

    def matrix(self) -> npt.NDArray[np.float64]:
        found = np.full((self.tasks_done, self.tasks_done), np.nan)
        for task, row in self._rows.items():
            found[task, : task + 1] = row
        return found


def _moments(task: Task) -> Any:
    if task.moments is None:
        raise DataError(
            "the task does not know its data set; make the stream with TaskStream.from_dataset(train, test)"
        )
    return task.moments


def _part(known: Mapping[str, Any], part: Any, settings: dict[str, Any]) -> Any:
    """Return the class of a part that is given by name, as a class or as an instance, and note its options."""
    if isinstance(part, str):
        return known.find(known.canonical(part))  # type: ignore[attr-defined]
    if isinstance(part, Component):
        for key in part.options.model_fields_set:
            settings[key] = getattr(part.options, key)
        return type(part)
    return part


def _name_of(known: Mapping[str, Any], part: Any) -> str:
    return next((name for name, own in known.items() if own is part), part.__name__)


def _shown(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else getattr(value, "__name__", None) or (type(value).__name__ if isinstance(value, nn.Module) else repr(value))
    )
