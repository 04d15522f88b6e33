"""The methods: a learner, a shift and a classifier each, one entry per method, and the registry."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from types import SimpleNamespace
from typing import Any, Literal

from pydantic import Field, create_model, model_validator

from efcil.classifiers import CLASSIFIERS
from efcil.classifiers.base import Classifier
from efcil.classifiers.dual_stream import DualStreamRidge
from efcil.classifiers.exemplar_means import ExemplarMeans
from efcil.classifiers.gaussian import RidgeAndGaussian
from efcil.classifiers.learner_head import BoostedHead, CompressedHead, LearnerHead, UnrotatedHead
from efcil.classifiers.mahalanobis import Mahalanobis
from efcil.classifiers.nearest_mean import NearestMean
from efcil.classifiers.random_features import RandomFeatureRidge
from efcil.classifiers.ridge import Ridge
from efcil.config import Options, Values, check_presets, keys
from efcil.core.gram_storage import GRAMS, Form, StorageSpec
from efcil.errors import ConfigError, nearest
from efcil.learners import LEARNERS, Learner
from efcil.plugins import Registry
from efcil.shift import SHIFTS
from efcil.shift.adc import AdversarialDrift
from efcil.shift.base import Shift
from efcil.shift.dual_projection import DualProjection, TaskShift
from efcil.shift.ldc import LearnedMap
from efcil.shift.sdc import KernelDrift

__all__ = ["METHODS", "Method", "find", "measured", "register_method", "register_presets"]

FROZEN = ("first-task",)  # learners whose backbone does not learn after the first task


class StorageOptions(Options):
    """How the Grams of old classes are stored."""

    gram_storage: Form = "gram"  # "factors": classes of fewer than dim / 2 images take less
    gram_rank: int | None = Field(default=None, ge=1)  # rows of a factor at most; exact no longer
    gram_tolerance: float | None = Field(default=None, gt=0, lt=1)  # or: share of a Gram's trace that may be left out

    @model_validator(mode="after")
    def _storage_is_sound(self) -> StorageOptions:
        try:
            StorageSpec(self.gram_storage, self.gram_rank, self.gram_tolerance)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self


@dataclass(frozen=True)
class Method:
    """A description: how the backbone learns, how statistics follow it, how they become scores."""

    name: str
    learner: str
    shift: type[Shift] | None
    classifier: type[Classifier]
    title: str = ""
    paper: str = ""  # citation
    memory_formula: str = "-"  # numbers kept per class, d the dimension of features
    exemplars: bool = False  # whether old images are kept
    preset_key: str = ""  # the method whose preset values apply, where it is not the method itself
    defaults: Values = field(default_factory=dict)  # where the components' own do not fit
    overrides: Values = field(default_factory=dict)  # what makes an ablation an ablation
    heads: Mapping[str, type[Classifier]] = field(
        default_factory=dict
    )  # where it has several classifiers; first: its own
    paper_head: str = ""  # the one whose numbers the DPCR paper prints, where it is not the first
    preset: str = ""  # the preset that it has where no other is given; else the data set's first
    presets: Values = field(default_factory=dict)  # of a plug-in: values where the preset in use gives none

    def __hash__(self) -> int:
        return hash(self.name)

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", self.title or self.name)
        object.__setattr__(self, "preset_key", self.preset_key or self.name)
        self._check()

    def check(self) -> None:
        """Refuse a combination that cannot work, with a learner or presets that do not exist."""
        learner = LEARNERS.find(self.learner, f" of method {self.name}")
        for head in self.classifiers.values():
            self._check_reads(learner, head)
        check_presets(self, [*keys(learner.options_type), *keys(self.options)], f"method '{self.name}'")

    def _check_reads(self, learner: type[Learner], head: type[Classifier]) -> None:
        if not head.reads(learner):
            wanted = ", ".join(name for name, kind in LEARNERS.items() if head.reads(kind))
            raise ConfigError(
                f"method {self.name}: {_name(CLASSIFIERS, head)} cannot read the learner {self.learner}; take {wanted}"
            )

    def _check(self) -> None:
        """Refuse a combination that cannot work, naming its parts and the remedy."""
        shift, classifier = self.shift, self.classifier
        named = f"method {self.name}: "
        if self.learner in FROZEN and shift is not None:
            raise ConfigError(
                f"{named}{self.learner} freezes the backbone, so {_name(SHIFTS, shift)} has nothing to "
                "follow; take none"
            )
        for head in self.classifiers.values():
            learner = LEARNERS.peek(self.learner)  # a plug-in's may be unknown yet; `check` looks again
            if learner is not None:
                self._check_reads(learner, head)
        if classifier.needs in ("features", "learner") and shift is not None:
            raise ConfigError(
                f"{named}{_name(CLASSIFIERS, classifier)} keeps no class statistics that "
                f"{_name(SHIFTS, shift)} could move; take none"
            )
        if classifier.needs == "features" and self.learner not in FROZEN:
            raise ConfigError(
                f"{named}{_name(CLASSIFIERS, classifier)} sums over features of a frozen backbone, and "
                f"{self.learner} keeps training it; take {FROZEN[0]}"
            )
        if shift is not None and shift.moves == "mean" and classifier.needs == "gram":
            raise ConfigError(
                f"{named}{_name(CLASSIFIERS, classifier)} needs the Grams of old classes, and "
                f"{_name(SHIFTS, shift)} moves means only; take dual-projection or ldc"
            )
        maps = classifier().feature_maps if shift is not None and shift.moves == "gram" else ()
        if any(feature_map is not None and not feature_map.is_linear for feature_map in maps):
            raise ConfigError(
                f"{named}{_name(CLASSIFIERS, classifier)} reads statistics behind a map that is not linear, and "
                f"{_name(SHIFTS, shift)} is linear in the features; take none"
            )

    # --- options ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def keeps_gram(self) -> bool:
        """Whether the Grams of classes are kept."""
        return self.classifier.needs == "gram" or (self.shift is not None and self.shift.needs_gram)

    @functools.cached_property
    def options(self) -> type[Options]:
        """The options of shift, classifier and storage as one model."""
        parts: list[type[Options]] = [] if self.shift is None else [self.shift.options_type]
        parts += [head.options_type for head in self.classifiers.values()]
        parts += [StorageOptions] if self.keeps_gram else []
        bases = [part for part in dict.fromkeys(parts) if part is not Options]
        bases = [part for part in bases if not any(other is not part and issubclass(other, part) for other in bases)]
        fields: dict[str, Any] = {}
        for name, value in self.defaults.items():
            kind = next(base.model_fields[name] for base in bases if name in base.model_fields)
            kind = copy.copy(kind)
            kind.default = value
            fields[name] = (kind.annotation, kind)
        if self.heads:
            fields["head"] = (Literal[tuple(self.heads)], next(iter(self.heads)))
        return create_model(f"Options of {self.name}", __base__=tuple(bases) or Options, **fields)

    def storage(self, options: Any) -> StorageSpec:
        """In which form classes are stored."""
        if not self.keeps_gram:
            return GRAMS
        return StorageSpec(options.gram_storage, options.gram_rank, options.gram_tolerance)

    # --- classifiers --------------------------------------------------------------------------------------------------

    @property
    def reads_first_backbone(self) -> bool:
        """Whether it uses the backbone as it was after the first task."""
        return self.learner in FROZEN

    @property
    def classifiers(self) -> Mapping[str, type[Classifier]]:
        """All its classifiers by name; the only one has none."""
        return self.heads or {"": self.classifier}

    @property
    def published(self) -> str:
        """Name of the classifier whose numbers the DPCR paper prints."""
        return self.paper_head or next(iter(self.classifiers))

    def default_head(self, options: Any) -> str:
        """Name of the classifier whose accuracy is the method's: the option `head`, else the first."""
        return str(getattr(options, "head", next(iter(self.classifiers))))

    @property
    def supports(self) -> frozenset[str]:
        """What a model that is kept can do beside learning new classes: update, forget, merge."""
        return self.classifier.supports if not self.heads else frozenset()

    @property
    def parts(self) -> tuple[str, str, str]:
        """The names of learner, shift and classifier, for tables."""
        heads = ", ".join(dict.fromkeys(_name(CLASSIFIERS, head) for head in self.classifiers.values()))
        return self.learner, "none" if self.shift is None else _name(SHIFTS, self.shift), heads


def _name(known: Mapping[str, Any], part: Any) -> str:
    return next((name for name, own in known.items() if own is part), part.__name__)


_LWF = "Li and Hoiem, TPAMI 2018"
_DPCR = "He et al., ICML 2025"
_GRAM = "d(d+1)/2 + d"  # Gram and mean, as factors of n < d/2 images nd + d; count and classifier's column come on top


def _ablation(name: str, title: str, shift: type[Shift] | None, **overrides: object) -> Method:
    return Method(
        name, "lwf", shift, Ridge, title, f"{_DPCR}, after Table 4", _GRAM, preset_key="dpcr", overrides=dict(overrides)
    )


OWN = {
    method.name: method
    for method in (
        Method("dpcr", "lwf", DualProjection, Ridge, "DPCR", _DPCR, _GRAM),
        Method(
            "dpcr-plus",
            "pseudo-replay",
            DualProjection,
            RidgeAndGaussian,
            "DPCR+",
            "ours, docs/dpcr-plus.md",
            "d(d+1)/2 + d + 1",
            defaults={"shift_view": "pseudo", "shift_ridge_rel": "auto"},
            preset="tuned",
        ),
        Method("dp-ncm", "lwf", DualProjection, NearestMean, "DP-NCM", f"{_DPCR}, Table 5", _GRAM),
        Method("ldc", "lwf", LearnedMap, NearestMean, "LDC", "Gomez-Villa et al., ECCV 2024", "d"),
        Method("adc", "lwf", AdversarialDrift, NearestMean, "ADC", "Goswami et al., CVPR 2024", "d"),
        Method("sdc", "lwf", KernelDrift, NearestMean, "SDC", "Yu et al., CVPR 2020", "d"),
        Method("lwf-ncm", "lwf", None, NearestMean, "LwF-NCM", _LWF, "d"),
        Method(
            "acil",
            "first-task",
            None,
            RandomFeatureRidge,
            "ACIL",
            "Zhuang et al., NeurIPS 2022",
            "2b, and b(b+1)/2 for all",
        ),
        Method(
            "ds-al", "first-task", None, DualStreamRidge, "DS-AL", "Zhuang et al., AAAI 2024", "4b, and b(b+1) for all"
        ),
        Method("fecam", "first-task", None, Mahalanobis, "FeCAM", "Goswami et al., NeurIPS 2023", "d(d+1)/2 + 2d"),
        Method("pass", "pass", None, UnrotatedHead, "PASS", "Zhu et al., CVPR 2021", "5d + 4"),
        Method(
            "icarl",
            "icarl",
            None,
            ExemplarMeans,
            "iCaRL",
            "Rebuffi et al., CVPR 2017",
            "d + 1, and the exemplars",
            exemplars=True,
            heads={"nme": ExemplarMeans, "cnn": LearnerHead},
        ),
        Method(
            "podnet",
            "podnet",
            None,
            LearnerHead,
            "PODNet",
            "Douillard et al., ECCV 2020",
            "10d, and the exemplars",
            exemplars=True,
            heads={"cnn": LearnerHead, "nme": ExemplarMeans},
        ),
        Method(
            "foster",
            "foster",
            None,
            CompressedHead,
            "FOSTER",
            "Wang et al., ECCV 2022",
            "d + 1, and the exemplars",
            exemplars=True,
            heads={"compressed": CompressedHead, "boosted": BoostedHead},
            paper_head="boosted",
        ),
        Method("lwf", "lwf", None, LearnerHead, "LwF (own head)", _LWF, "d"),
        _ablation("rrcr", "RRCR", None, normalize=False),
        _ablation("rrcr+tssp", "RRCR + TSSP", TaskShift, rank_rule="none", normalize=False),
        _ablation("rrcr+tssp+cn", "RRCR + TSSP + CN", TaskShift, rank_rule="none", normalize=True),
        _ablation("rrcr+tssp+cip", "RRCR + TSSP + CIP", DualProjection, normalize=False),
        _ablation("rrcr+tssp+cip+cn", "RRCR + TSSP + CIP + CN", DualProjection, normalize=True),
        Method("finetune", "finetune", None, LearnerHead, "Finetuning (lower bound)", "-", "d"),
        Method("joint", "joint", None, LearnerHead, "Joint training (upper bound)", "-", "all data", exemplars=True),
    )
}


METHODS: Registry[Method] = Registry(
    "method",
    "efcil.methods",
    OWN,
    lambda value: isinstance(value, Method),
    "a Method",
    check=lambda name, method: method.check(),
    has_name=True,
)


def register_method(method: Method) -> Method:
    """Let a method be found by its name, as the entry points `efcil.methods` do."""
    METHODS.register(method.name, method)
    return method


def find(name: str) -> Method:
    """Return the method of a name, or the free combination `learner+shift+classifier`, or say which is nearest.

    Names are read without regard to case.

    >>> find("lwf+LDC+ridge").shift.__name__
    'LearnedMap'
    """
    list(METHODS)  # a plug-in that cannot be used is reported, whichever method is asked for
    name = METHODS.canonical(name)
    if name not in METHODS and name.count("+") == 2:
        learner, shift, classifier = name.split("+")
        learner, classifier = LEARNERS.canonical(learner), CLASSIFIERS.canonical(classifier)
        if learner in LEARNERS or classifier in CLASSIFIERS:
            return combined(learner, SHIFTS.canonical(shift), classifier)
    return METHODS.find(name)


def combined(learner: str, shift: str, classifier: str) -> Method:
    """Return a free combination of parts by their names."""
    name = f"{learner}+{shift}+{classifier}"
    LEARNERS.find(learner, f" in {name}")
    method = Method(name, learner, SHIFTS.find(shift, f" in {name}"), CLASSIFIERS.find(classifier, f" in {name}"))
    method.check()
    return method


# --- preset values of plug-ins ----------------------------------------------------------------------------------------

_PRESETS: dict[str, Values] = {}


def register_presets(presets: Mapping[str, Values]) -> None:
    """Give plug-ins preset values, by the name of a method or a part: used where the preset in use says nothing.

    What is registered may as well bring them in an attribute `presets`.
    """
    registries: tuple[Registry[Any], ...] = (METHODS, LEARNERS, SHIFTS, CLASSIFIERS)
    for name, values in presets.items():
        known = [registry[name] for registry in registries if name in registry]
        if any(name in registry.own for registry in registries):
            raise ConfigError(f"presets of '{name}': its values are efcil's own; give them with --set")
        if not known:
            names = [key for registry in registries for key in registry if key not in registry.own]
            raise ConfigError(f"presets of '{name}': nothing of that name is registered; {nearest(name, names)}")
        options = [key for part in known for key in _option_keys(part)]
        check_presets(SimpleNamespace(presets=values), options, f"'{name}'")
    _PRESETS.update({name: dict(values) for name, values in presets.items()})


def _option_keys(part: Any) -> list[str]:
    if isinstance(part, Method):
        return [*keys(part.options), *keys(LEARNERS[part.learner].options_type)]
    return keys(part.options_type)


def plugin_presets(method: Method) -> Values:
    """Return the preset values that plug-ins bring for a method: those of its parts, then its own."""
    parts: dict[str, Any] = {method.learner: LEARNERS[method.learner]}
    if method.shift is not None:
        parts[_name(SHIFTS, method.shift)] = method.shift
    parts |= {_name(CLASSIFIERS, head): head for head in method.classifiers.values()}
    values: Values = {}
    for name, part in [*parts.items(), (method.name, method)]:
        values |= {**getattr(part, "presets", {}), **_PRESETS.get(name, {})}
    return values


def measured() -> dict[str, dict[str, list[float] | None]]:
    """Return the paper's and our A_f and A_avg on CIFAR-100, T = 10, by method; written by the results' tool."""
    text = resources.files("efcil.presets").joinpath("measured.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, list[float] | None]] = json.loads(text)
    return found
