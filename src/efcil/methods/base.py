"""What a method is: a learner, and a readout that turns what the backbone sees into scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from efcil.config import Options, Values
from efcil.core.class_stats import ClassStats
from efcil.features import TaskFeatures

State = Mapping[str, Tensor | ClassStats]


class Readout(Protocol):
    """Everything of a method but its backbone: what it keeps of a task, and how it scores features."""

    def learn(self, task: TaskFeatures) -> None:
        """Take up a task that the backbone has just learned."""

    def scores(self, features: Tensor) -> Tensor:
        """Score features (n, dim) for every class seen, (n, classes)."""

    def state(self) -> State:
        """Return all that must survive the task; statistics that methods share are written once."""

    def load_state(self, state: Any) -> None:
        """Take up what `state` returned."""


class Editable(Readout, Protocol):
    """What a readout may offer beside: a model that is kept for long asks for it, and does without where it is missing.

    A task may hold old classes where `adds` is true.
    """

    adds: bool

    def keep(self, positions: Tensor) -> None:
        """Keep the classes at these positions (k,) only; they become 0 .. k - 1."""

    def absorb(self, other: Any, positions: Tensor) -> None:
        """Add what another readout of this kind learned with the same backbone; its classes are at `positions` here."""


class ReadoutFactory(Protocol):
    """A readout's class, called with its options."""

    def __call__(self, options: Any) -> Readout:
        """Make a readout that has learned nothing yet."""


@dataclass(frozen=True)
class Method:
    """A registered method: its parts in words, for tables, and in code."""

    name: str
    title: str
    paper: str  # citation
    learner: str
    shift: str
    head: str
    readout: ReadoutFactory
    options: type[Options] = Options
    memory: str = "-"  # numbers kept per class, d the dimension of features
    exemplars: bool = False  # whether old images are kept
    preset_section: str = ""  # the method whose preset values apply, where it is not the method itself
    fixed: Values = field(default_factory=dict)  # what makes an ablation an ablation
    heads: Mapping[str, ReadoutFactory] = field(
        default_factory=dict
    )  # where it has several classifiers; first: its own
    paper_head: str = ""  # the one whose numbers the DPCR paper prints, where it is not the first
    preset: str = ""  # the preset that it has where it is not told another; else the data set's first

    @property
    def frozen(self) -> bool:
        """Whether it reads the backbone as it was after the first task."""
        return self.learner == "frozen"

    @property
    def classifiers(self) -> Mapping[str, ReadoutFactory]:
        """All its classifiers by name; the only one has none."""
        return self.heads or {"": self.readout}

    @property
    def published(self) -> str:
        """Name of the classifier whose numbers the DPCR paper prints."""
        return self.paper_head or next(iter(self.classifiers))

    def main(self, options: Any) -> str:
        """Name of the classifier whose accuracy is the method's: the option `head`, else the first."""
        return str(getattr(options, "head", next(iter(self.classifiers))))

    @property
    def section(self) -> str:
        """Name of its section in the presets."""
        return self.preset_section or self.name
