"""Registry of methods, each a combination of learner, shift and classifier."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from types import SimpleNamespace
from typing import Any, Literal

from pydantic import Field, create_model, model_validator

from efcil.classifiers import CLASSIFIERS
from efcil.classifiers.base import Classifier
from efcil.classifiers.cross_validated_ridge import CrossValidatedRidge, RandomProjection
from efcil.classifiers.dual_stream import DualStreamRidge
from efcil.classifiers.exemplar_means import ExemplarMeans
from efcil.classifiers.gaussian import RidgeAndGaussian
from efcil.classifiers.learner_head import BoostedHead, CompressedHead, LearnerHead, UnrotatedHead
from efcil.classifiers.mahalanobis import Mahalanobis
from efcil.classifiers.nearest_mean import NearestMean
from efcil.classifiers.random_features import RandomFeatureRidge
from efcil.classifiers.ridge import Ridge
from efcil.classifiers.shared_covariance import SharedCovariance
from efcil.config import Options, Values, check_presets, keys
from efcil.core.gram_storage import GRAMS, SHARED, StorageSpec
from efcil.errors import ConfigError, nearest
from efcil.learners import LEARNERS, Learner
from efcil.plugins import Registry
from efcil.shift import SHIFTS
from efcil.shift.adc import AdversarialDrift
from efcil.shift.base import Shift
from efcil.shift.dual_projection import DualProjection, TaskShift
from efcil.shift.ldc import LearnedMap
from efcil.shift.sdc import KernelDrift

__all__ = ["METHODS", "Method", "find", "measured", "on_learner", "register_method", "register_presets"]

FROZEN = ("first-task", "pretrained", "adapt-first")  # learners that freeze the backbone after the first task or before
MOVABLE = ("lwf", "first-task")  # learners whose methods run on a pretrained backbone, too, frozen


class StorageOptions(Options):
    """Storage of class Grams."""

    gram_storage: Literal["gram", "factors", "mean"] = "gram"
    """Storage of class Grams; factors are smaller for classes of fewer than dim / 2 images."""
    gram_rank: int | None = Field(default=None, ge=1)
    """Largest rank of a factor; below the Gram's own it is an approximation."""
    gram_tolerance: float | None = Field(default=None, gt=0, lt=1)
    """Instead of a rank: share of a Gram's trace that may be left out."""

    @model_validator(mode="after")
    def _storage_is_sound(self) -> StorageOptions:
        try:
            StorageSpec(self.gram_storage, self.gram_rank, self.gram_tolerance)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self


@dataclass(frozen=True)
class Method:
    """Description of a method: learner, shift, classifier and their default options."""

    name: str
    learner: str
    shift: type[Shift] | None
    classifier: type[Classifier]
    title: str = ""
    paper: str = ""  # citation
    memory_formula: str = "-"  # numbers stored per class; d: feature dimension
    exemplars: bool = False  # whether it stores old images
    preset_key: str = ""  # method whose preset values are used, if not its own
    defaults: Values = field(default_factory=dict)  # replace defaults of the components
    overrides: Values = field(default_factory=dict)  # fixed options, for ablations
    heads: Mapping[str, type[Classifier]] = field(
        default_factory=dict
    )  # several classifiers by name; the first is the default
    paper_head: str = ""  # head reported in the DPCR paper, if not the first
    preset: str = ""  # default preset, if not the data set's first
    presets: Values = field(default_factory=dict)  # of a plug-in: values for options missing in the preset
    settings: Values = field(default_factory=dict)  # options that were given with its parts, in Python

    def __hash__(self) -> int:
        return hash(self.name)

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", self.title or self.name)
        object.__setattr__(self, "preset_key", self.preset_key or self.name)
        self._check()

    def check(self) -> None:
        """Raise ConfigError if the learner or preset options do not exist or the parts do not fit together."""
        learner = LEARNERS.find(self.learner, f" of method {self.name}")
        for head in self.classifiers.values():
            self._check_reads(learner, head)
        check_presets(self, [*keys(learner.options_type), *keys(self.options)], f"method '{self.name}'")

    def _check_reads(self, learner: type[Learner], head: type[Classifier]) -> None:
        if not head.reads(learner):
            wanted = ", ".join(name for name, kind in LEARNERS.items() if head.reads(kind))
            raise ConfigError(
                f"method {self.name}: {_name(CLASSIFIERS, head)} does not support the learner {self.learner}; "
                f"use {wanted}"
            )

    def _check(self) -> None:
        """Raise ConfigError if the parts do not fit together."""
        shift, classifier = self.shift, self.classifier
        named = f"method {self.name}: "
        if self.learner in FROZEN and shift is not None:
            raise ConfigError(
                f"{named}{self.learner} freezes the backbone, so {_name(SHIFTS, shift)} has no effect; use shift none"
            )
        for head in self.classifiers.values():
            learner = LEARNERS.peek(self.learner)  # None for a plug-in that is not loaded yet; see `check`
            if learner is not None:
                self._check_reads(learner, head)
        if classifier.needs in ("features", "learner") and shift is not None:
            raise ConfigError(
                f"{named}{_name(CLASSIFIERS, classifier)} has no class statistics for "
                f"{_name(SHIFTS, shift)} to update; use shift none"
            )
        if classifier.needs == "features" and self.learner not in FROZEN:
            raise ConfigError(
                f"{named}{_name(CLASSIFIERS, classifier)} needs a frozen backbone, but "
                f"{self.learner} trains it in every task; use {FROZEN[0]}"
            )
        needs_grams = classifier.needs in ("gram", "shared")
        maps = classifier().feature_maps if shift is not None and (needs_grams or shift.moves == "gram") else ()
        if any(feature_map is not None and not feature_map.is_linear for feature_map in maps):
            raise ConfigError(
                f"{named}{_name(CLASSIFIERS, classifier)} uses a nonlinear feature map, but "
                f"{_name(SHIFTS, shift)} is a linear shift; use shift none"
            )
        if needs_grams and shift is not None and shift.moves == "mean":
            wanted = "Grams" if classifier.needs == "gram" else "scatter"
            raise ConfigError(
                f"{named}{_name(CLASSIFIERS, classifier)} needs the {wanted} of old classes, but "
                f"{_name(SHIFTS, shift)} updates only means; use dual-projection or ldc"
            )

    # --- options ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def keeps_gram(self) -> bool:
        """Whether class Grams are stored."""
        return self.classifier.needs == "gram" or (self.shift is not None and self.shift.needs_gram)

    @functools.cached_property
    def options(self) -> type[Options]:
        """Options of shift, classifier and storage as one model."""
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
            usual = Field(default=next(iter(self.heads)), description="Classifier whose accuracy is the method's.")
            fields["head"] = (Literal[tuple(self.heads)], usual)
        return create_model(f"Options of {self.name}", __base__=tuple(bases) or Options, **fields)

    def storage(self, options: Any) -> StorageSpec:
        """Return the storage form of class statistics."""
        if not self.keeps_gram:
            return SHARED if self.classifier.needs == "shared" else GRAMS
        return StorageSpec(options.gram_storage, options.gram_rank, options.gram_tolerance)

    # --- classifiers --------------------------------------------------------------------------------------------------

    @property
    def reads_first_backbone(self) -> bool:
        """Whether it uses the backbone after the first task."""
        return self.learner == "first-task"

    @property
    def classifiers(self) -> Mapping[str, type[Classifier]]:
        """Classifiers by name; a single classifier has the empty name."""
        return self.heads or {"": self.classifier}

    @property
    def published(self) -> str:
        """Name of the classifier reported in the DPCR paper."""
        return self.paper_head or next(iter(self.classifiers))

    def default_head(self, options: Any) -> str:
        """Return the classifier that defines the method's accuracy: the option `head`, else the first."""
        return str(getattr(options, "head", next(iter(self.classifiers))))

    @property
    def supports(self) -> frozenset[str]:
        """Operations of a saved model beyond learning new classes: update, forget, merge."""
        return self.classifier.supports if not self.heads else frozenset()

    @property
    def parts(self) -> tuple[str, str, str]:
        """Names of learner, shift and classifier, for tables."""
        heads = ", ".join(dict.fromkeys(_name(CLASSIFIERS, head) for head in self.classifiers.values()))
        return self.learner, "none" if self.shift is None else _name(SHIFTS, self.shift), heads


def _name(registry: Mapping[str, Any], part: Any) -> str:
    return next((name for name, value in registry.items() if value is part), part.__name__)


_LWF = "Li and Hoiem, TPAMI 2018"
_DPCR = "He et al., ICML 2025"
_GRAM = "d(d+1)/2 + d"  # Gram and mean; nd + d with factors of n < d/2 images; without count and classifier weights


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
        Method("simplecil", "pretrained", None, NearestMean, "SimpleCIL", "Zhou et al., IJCV 2024", "d"),
        Method(
            "slda",
            "pretrained",
            None,
            SharedCovariance,
            "SLDA",
            "Hayes and Kanan, CVPR Workshops 2020",
            "d, and d(d+1)/2 for all",
        ),
        Method(
            "ridge",
            "pretrained",
            None,
            CrossValidatedRidge,
            "Ridge, cross-validated",
            "Golub et al., Technometrics 1979",
            "d, and d(d+1)/2 for all",
        ),
        Method(
            "ranpac",
            "pretrained",
            None,
            RandomProjection,
            "RanPAC",
            "McDonnell et al., NeurIPS 2023",
            "b, and b(b+1)/2 for all",
        ),
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
    """Register a method by its name, like the entry points `efcil.methods`.

    >>> from efcil.classifiers.ridge import Ridge
    >>> from efcil.shift.ldc import LearnedMap
    >>> register_method(Method("ldc-ridge", learner="lwf", shift=LearnedMap, classifier=Ridge)).name
    'ldc-ridge'
    >>> "ldc-ridge" in METHODS  # so that `efcil run ldc-ridge digits` works
    True
    >>> METHODS.reset()
    """
    METHODS.register(method.name, method)
    return method


def find(name: str) -> Method:
    """Return a method by name or as a free combination `learner+shift+classifier`.

    Names are read without regard to case.

    >>> find("lwf+LDC+ridge").shift.__name__
    'LearnedMap'
    """
    list(METHODS)  # load all plug-ins, so that a broken one is reported
    name = METHODS.canonical(name)
    if name not in METHODS and name.count("+") == 2:
        learner, shift, classifier = name.split("+")
        learner, classifier = LEARNERS.canonical(learner), CLASSIFIERS.canonical(classifier)
        if learner in LEARNERS or classifier in CLASSIFIERS:
            return combined(learner, SHIFTS.canonical(shift), classifier)
    return METHODS.find(name)


def combined(learner: str, shift: str, classifier: str) -> Method:
    """Build a method from the names of its parts."""
    name = f"{learner}+{shift}+{classifier}"
    LEARNERS.find(learner, f" in {name}")
    method = Method(name, learner, SHIFTS.find(shift, f" in {name}"), CLASSIFIERS.find(classifier, f" in {name}"))
    method.check()
    return method


def on_learner(method: Method, learner: str) -> Method:
    """Return the method on another learner; behind a frozen backbone its shift is the identity and is left out.

    >>> on_learner(find("dpcr"), "pretrained").parts
    ('pretrained', 'none', 'ridge')
    """
    if method.learner == learner:
        return method
    LEARNERS.find(learner, f" for {method.name}")
    overrides = method.overrides
    if learner in FROZEN and method.shift is not None:
        kept = [part.options_type.model_fields for part in method.classifiers.values()]
        overrides = {key: value for key, value in overrides.items() if any(key in part for part in kept)}
    shift, defaults = method.shift, method.defaults
    if learner in FROZEN:  # no Gram is transformed, so factors of classes of few images are exact and smaller
        shift, defaults = None, {"gram_storage": "factors"} if method.classifier.needs == "gram" else {}
    if LEARNERS[learner].starts_pretrained:
        defaults = {**defaults, **method.classifier.pretrained_defaults}
    moved = replace(method, learner=learner, shift=shift, overrides=overrides, defaults=defaults)
    moved.check()
    return moved


# --- preset values of plug-ins ----------------------------------------------------------------------------------------

_PRESETS: dict[str, Values] = {}


def register_presets(presets: Mapping[str, Values]) -> None:
    """Register preset values for plug-in methods or parts by name; the active preset takes precedence.

    Registered classes may define an attribute `presets` instead.

    >>> from efcil.classifiers.ridge import Ridge
    >>> register_method(Method("rrcr-weak", learner="lwf", shift=None, classifier=Ridge)).name
    'rrcr-weak'
    >>> register_presets({"rrcr-weak": {"ridge": 20.0}})
    >>> METHODS.reset()
    """
    registries: tuple[Registry[Any], ...] = (METHODS, LEARNERS, SHIFTS, CLASSIFIERS)
    for name, values in presets.items():
        known = [registry[name] for registry in registries if name in registry]
        if any(name in registry.own for registry in registries):
            raise ConfigError(f"presets of '{name}': presets of built-in parts cannot be replaced; use --set")
        if not known:
            names = [key for registry in registries for key in registry if key not in registry.own]
            raise ConfigError(f"presets of '{name}': no such method or part; {nearest(name, names)}")
        options = [key for part in known for key in _option_keys(part)]
        check_presets(SimpleNamespace(presets=values), options, f"'{name}'")
    _PRESETS.update({name: dict(values) for name, values in presets.items()})


def _option_keys(part: Any) -> list[str]:
    if isinstance(part, Method):
        return [*keys(part.options), *keys(LEARNERS[part.learner].options_type)]
    return keys(part.options_type)


def plugin_presets(method: Method) -> Values:
    """Return plug-in preset values for a method: those of its parts, overridden by its own."""
    parts: dict[str, Any] = {method.learner: LEARNERS[method.learner]}
    if method.shift is not None:
        parts[_name(SHIFTS, method.shift)] = method.shift
    parts |= {_name(CLASSIFIERS, head): head for head in method.classifiers.values()}
    values: Values = {}
    for name, part in [*parts.items(), (method.name, method)]:
        values |= {**getattr(part, "presets", {}), **_PRESETS.get(name, {})}
    return values


def measured() -> dict[str, dict[str, list[float] | None]]:
    """Return published and measured A_f and A_avg on CIFAR-100, T = 10, by method."""
    text = resources.files("efcil.presets").joinpath("measured.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, list[float] | None]] = json.loads(text)
    return found
