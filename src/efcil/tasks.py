"""Split a data set into a sequence of tasks by class order and increments.

Labels in a task are positions in the class order (0 is the first class learned), which are also the columns of score
matrices. A task holds only training data and releases them when it is closed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from efcil.config import whole_number
from efcil.data.dataset import DataSet, ImageSet, format_list
from efcil.errors import ConfigError, DataError, as_keywords

if TYPE_CHECKING:
    from typing import Unpack

    from efcil.data.sources import SourceOptions

Order = npt.NDArray[np.int64]
ClassOrder = str | int | os.PathLike[str] | Sequence[str | int] | npt.NDArray[Any]
"""A class order as it can be given: "identity", "hard", "easy", a seed, a file, or the classes by name or label."""

BY_SIMILARITY = ("hard", "easy")
"""Class orders that depend on the training images and the sizes of the tasks (`efcil.similarity`)."""


def class_order(order: ClassOrder, class_names: Sequence[str]) -> Order:
    """Return the label of the first, second, ... class to be learned.

    `order` is "identity", a seed (`np.random.seed(s); np.random.permutation(C)`, as the field has always done it),
    a list of class names or labels, or a file with one of them per line.

    >>> class_order(1993, [str(i) for i in range(100)])[:5].tolist()
    [68, 56, 78, 8, 23]
    >>> class_order(["dog", "cat"], ["cat", "dog"]).tolist()
    [1, 0]
    """
    classes = len(class_names)
    if isinstance(order, np.ndarray) or (isinstance(order, Sequence) and not isinstance(order, str)):
        return _listed_order([str(entry) for entry in order], class_names, "class order", "entries")
    text = os.fspath(order) if isinstance(order, os.PathLike) else str(order)
    if text == "identity":
        return np.arange(classes)
    if text.isascii() and text.isdigit():
        if len(text) > 10 or int(text) >= 2**32:
            raise ConfigError(f"class order {text[:20]}: a seed must be below {2**32}")
        return np.random.RandomState(int(text)).permutation(classes).astype(np.int64)
    path = Path(text)
    if not os.path.isfile(path):  # `Path.is_file` raises an OSError for a name that is too long
        known = ", ".join(f"'{name}'" for name in ("identity", *BY_SIMILARITY))
        raise ConfigError(f"class order '{text[:200]}' is neither {known}, a seed, nor a file that exists")
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"class order {path} cannot be read: {why}") from None
    return _listed_order([line for line in lines if line], class_names, f"class order {path}", "lines")


def order_of(order: ClassOrder, data: DataSet, sizes: Sequence[int]) -> Order:
    """Return the class order of a data set that is split into tasks of these sizes; see `class_order`.

    "hard" has similar classes in the same task, "easy" in different tasks, by the training images.
    """
    if isinstance(order, str) and order in BY_SIMILARITY:
        from efcil.similarity import similarity_order  # imports torch

        return similarity_order(order, data.train, sizes)
    return class_order(order, data.class_names)


def _listed_order(entries: Sequence[str], class_names: Sequence[str], what: str, unit: str) -> Order:
    """Return the labels of classes that are listed by name or label, each once."""
    classes = len(class_names)
    position = {name: index for index, name in enumerate(class_names)}
    labels: list[int] = []
    for entry in entries:
        number = entry.isascii() and entry.isdigit() and len(entry) < 10
        label = position.get(entry, int(entry) if number else -1)
        if not 0 <= label < classes:
            raise ConfigError(f"{what}: '{entry[:60]}' is not one of the {classes} classes")
        labels.append(label)
    if sorted(labels) != list(range(classes)):
        found = f"{len(set(labels))} different classes in {len(labels)} {unit}"
        missing = [name for label, name in enumerate(class_names) if label not in set(labels)]
        why = f"; missing: {format_list(missing)}" if missing else ""
        raise ConfigError(f"{what}: {found}, need each of {classes} once{why}")
    return np.array(labels, dtype=np.int64)


Split = tuple[int | None, int | None, int | list[int] | None]


def whole_split(tasks: Any, init_cls: Any, increment: Any) -> Split:
    """Return how classes are split, with Python's ints for those of other libraries; refuse what is no whole number.

    >>> whole_split(None, 4, (np.int64(3), 3))
    (None, 4, [3, 3])
    """
    if isinstance(increment, Sequence | np.ndarray) and not isinstance(increment, str):
        increment = [whole_number("increment", size) for size in increment]
    elif increment is not None:
        increment = whole_number("increment", increment)
    tasks = None if tasks is None else whole_number("tasks", tasks)
    return tasks, None if init_cls is None else whole_number("init_cls", init_cls), increment


def task_sizes(
    classes: int,
    tasks: int | None = None,
    init_cls: int | None = None,
    increment: int | Sequence[int] | None = None,
    allow_uneven: bool = False,
) -> tuple[int, ...]:
    """Return the number of classes in each task.

    Give either `tasks`, which must divide the number of classes unless `allow_uneven`, or `increment` (an int or a
    list) and optionally `init_cls` (default: the increment); then the last task may be smaller.

    >>> task_sizes(100, tasks=10) == (10,) * 10
    True
    >>> task_sizes(100, init_cls=50, increment=20)
    (50, 20, 20, 10)
    >>> task_sizes(10, tasks=3, allow_uneven=True)
    (4, 3, 3)
    """
    tasks, init_cls, increment = whole_split(tasks, init_cls, increment)
    if (tasks is None) == (init_cls is None and increment is None):
        raise ConfigError("give either --tasks, or --init-cls and --increment")
    if tasks is not None:
        if not 1 <= tasks <= classes:
            raise ConfigError(f"--tasks {tasks}: must be between 1 and the {classes} classes")
        if classes % tasks and not allow_uneven:
            divisors = [t for t in range(1, classes + 1) if classes % t == 0]
            close = sorted(sorted(divisors, key=lambda t: abs(t - tasks))[:3])
            raise ConfigError(
                f"--tasks {tasks} does not divide the {classes} classes; use {', '.join(map(str, close))}, "
                "--allow-uneven, or --init-cls and --increment"
            )
        return tuple(classes // tasks + (index < classes % tasks) for index in range(tasks))
    if isinstance(increment, int) or increment is None:
        step = classes if increment is None else increment
        first = step if init_cls is None else init_cls
        if first < 1 or step < 1:
            raise ConfigError(f"--init-cls {first} --increment {step}: both must be at least 1")
        if first > classes:
            raise ConfigError(f"--init-cls {first}: there are only {classes} classes")
        rest = classes - first
        return (first,) + (step,) * (rest // step) + ((rest % step,) if rest % step else ())
    sizes = ((init_cls,) if init_cls is not None else ()) + tuple(increment)
    if min(sizes, default=0) < 1:
        raise ConfigError(f"--increment {','.join(map(str, increment))}: every task needs at least one class")
    total = sum(sizes)
    if total > classes:
        raise ConfigError(
            f"the increments {', '.join(map(str, sizes))} sum to {total}, but there are only {classes} classes"
        )
    return sizes + ((classes - total,) if total < classes else ())


@dataclass(frozen=True)
class ImageMoments:
    """Name of a data set, and mean and standard deviation of each channel of its training images in [0, 1]."""

    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Task:
    """Training data of one task, inaccessible after `close()`."""

    def __init__(
        self, index: int, first_class: int, classes: int, images: ImageSet, moments: ImageMoments | None = None
    ):
        self.index = index
        self.moments = moments  # of the data set that the images are from, where it is known
        self.first_class = first_class
        self.seen = first_class + classes  # number of classes after this task
        self._images: ImageSet | None = images
        self._size = len(images)

    def __len__(self) -> int:
        return self._size

    @property
    def classes(self) -> range:
        """Positions in the class order of the new classes of this task."""
        return range(self.first_class, self.seen)

    @property
    def images(self) -> npt.NDArray[np.uint8]:
        """Images (n, channels, height, width)."""
        return self._open().images

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Positions in the class order, (n,)."""
        return self._open().labels

    def _open(self) -> ImageSet:
        if self._images is None:
            raise DataError(f"task {self.index + 1} is closed; its images are no longer available")
        return self._images

    def close(self) -> None:
        """Release the images, as exemplar-free learning requires."""
        self._images = None


@dataclass(frozen=True)
class TaskStream(Sequence[Task]):
    """A data set's training part as tasks, in a class order.

    `dataset` is the whole of it, with the test images that methods are evaluated on; no task leads to them.
    `order_name` is what the class order is called in summaries.

    >>> stream = TaskStream.from_dataset("digits", tasks=5, order=1993)
    >>> [len(task.labels) for task in stream]
    [287, 289, 290, 286, 290]
    >>> [task.seen for task in stream[-2:]]  # classes after each task
    [8, 10]
    """

    train: ImageSet
    order: Order  # (classes,) label at each position
    sizes: tuple[int, ...]
    dataset: DataSet | None = None
    order_name: str = "given"

    @classmethod
    def from_dataset(
        cls,
        train: Any,
        test: Any = None,
        *,
        tasks: int | None = None,
        init_cls: int | None = None,
        increment: int | Sequence[int] | None = None,
        allow_uneven: bool = False,
        order: ClassOrder = "identity",
        **source: Unpack[SourceOptions],
    ) -> TaskStream:
        """Make a stream of a torch `Dataset`, arrays, a folder, a name and more (`efcil.data.sources.as_dataset`).

        Images are converted once. `order` is "identity", a seed, "hard" or "easy" (`efcil.similarity`), a list of class
        names or labels, or a file. The split is given as on the command line: a number of `tasks` (5 by
        default), or `init_cls` classes in the first task and `increment` in each later one. `source` has name, size,
        class_names, directory, options and progress.

        >>> images = np.random.default_rng(0).integers(0, 256, (8, 6, 6, 3), dtype=np.uint8)
        >>> labels = ["ant", "bee", "cat", "dog"] * 2
        >>> order = ["dog", "cat", "bee", "ant"]
        >>> stream = TaskStream.from_dataset((images, labels), (images, labels), tasks=2, order=order)
        >>> stream
        TaskStream(arrays: 4 classes in 2 tasks of 2, 8 training and 8 test images of 3 x 6 x 6)
        >>> [stream.class_names[c] for c in stream[0].classes], len(stream[0])
        (['dog', 'cat'], 4)
        """
        from efcil.data.sources import as_dataset  # imports torch

        data = as_dataset(train, test, **source)
        split = None if (init_cls, increment) != (None, None) else 5
        tasks = split if tasks is None else tasks
        try:
            sizes = task_sizes(len(data.class_names), tasks, init_cls, increment, allow_uneven)
        except ConfigError as error:
            raise ConfigError(as_keywords(str(error))) from None
        name = str(order) if isinstance(order, str | int | os.PathLike) else "given"
        return cls(data.train, order_of(order, data, sizes), sizes, data, name)

    def on(self, dataset: DataSet) -> TaskStream:
        """Return the same tasks on the same images in another form."""
        return replace(self, train=dataset.train, dataset=dataset)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in the order in which they are learned; their labels where no names are known."""
        return tuple(self.dataset.class_names[label] if self.dataset else str(label) for label in self.order)

    def __repr__(self) -> str:
        sizes = f"of {self.sizes[0]}" if len(set(self.sizes)) == 1 else f"of {', '.join(map(str, self.sizes))}"
        name = f"{self.dataset.name}: " if self.dataset else ""
        test = f" and {len(self.dataset.test):,} test" if self.dataset else ""
        shape = " x ".join(map(str, self.train.images.shape[1:]))
        tasks = f"{len(self)} task{'s' * (len(self) > 1)}"
        return (
            f"TaskStream({name}{len(self.order)} classes in {tasks} {sizes}, "
            f"{len(self.train):,} training{test} images of {shape})"
        )

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def ends(self) -> list[int]:
        """Number of classes after each task."""
        return np.cumsum(self.sizes).tolist()

    def positions(self, labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Map labels of the data set to positions in the class order."""
        return np.argsort(self.order)[labels]

    def task_of_class(self) -> npt.NDArray[np.int64]:
        """Return the task of each position in the class order."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def _task(self, index: int, first_class: int) -> Task:
        begin, end = self.ends[index] - self.sizes[index], self.ends[index]
        labels = self.positions(self.train.labels)
        rows = np.flatnonzero((labels >= first_class) & (labels < end))
        data = self.dataset
        moments = None if data is None else ImageMoments(data.name, data.mean, data.std)
        return Task(index, begin, end - begin, ImageSet(self.train.images[rows], labels[rows]), moments)

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        index %= len(self)
        return self._task(index, self.ends[index] - self.sizes[index])

    def __iter__(self) -> Iterator[Task]:
        return (self[index] for index in range(len(self)))

    def upto(self, index: int) -> Task:
        """Return the union of all tasks up to `index`, for the joint upper bound only."""
        return self._task(index, 0)
