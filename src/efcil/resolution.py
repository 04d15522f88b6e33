"""Resolution of options: validated options of a learner and of the methods that share it.

Values come, in ascending precedence, from defaults of the options, plug-ins, the preset, derived values (such as the
stem for the image size) and the user. All errors are reported together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from efcil.config import Options, Values, build, keys, parse_overrides
from efcil.errors import ConfigError, nearest
from efcil.learners import LEARNERS
from efcil.learners.base import TrainingOptions
from efcil.methods import FROZEN, METHODS, Method, find, plugin_presets
from efcil.models import check_name, is_resnet

PresetSection = Callable[[str], Values]
"""Values of a preset by section: `training`, a learner or a method."""


@dataclass(frozen=True)
class RequestedMethod:
    """Method with its own settings."""

    method: Method
    settings: Values = field(default_factory=dict)


@dataclass(frozen=True)
class ResolvedOptions:
    """Validated options of a trajectory."""

    learner: str
    training: TrainingOptions
    methods: dict[str, tuple[Method, Options]]  # label -> (method, options)


def parse_label(label: str | Method) -> tuple[str, RequestedMethod]:
    """Parse a method label with settings; return the label with the registered spelling of the method.

    A `Method` is labeled by its name.

    >>> label, requested = parse_label("DPCR:rank_rule=numerical:ridge=100")
    >>> label, requested.settings
    ('dpcr:rank_rule=numerical:ridge=100', {'rank_rule': 'numerical', 'ridge': 100})
    """
    if isinstance(label, Method):
        given = {key: value for key, value in label.settings.items() if key != "epochs"}  # which are no option
        return label.name, RequestedMethod(label, given)
    name, *settings = label.split(":")
    method = find(name)
    return ":".join([method.name, *settings]), RequestedMethod(method, parse_overrides(settings))


def resolve(
    methods: Mapping[str, RequestedMethod],
    preset: PresetSection,
    overrides: Values,
    derived: Values | None = None,
    elsewhere: Collection[str] = (),
) -> ResolvedOptions:
    """Combine preset, derived values and user settings into validated options.

    Args:
        methods: methods by label, which share one learner. preset: preset values by section. overrides: settings of the
        training, and of every method that has the option. derived: training values derived from the request, which
        override the preset. elsewhere: keys that the caller resolves itself, for suggestions.
    """
    learner = _common_learner(methods)
    _check_keys(methods, learner, overrides, elsewhere)
    errors: list[str] = []
    training: TrainingOptions | None = None
    with collected(errors):
        training = _training_options(methods, learner, preset, overrides, derived or {})
    found: dict[str, tuple[Method, Options]] = {}
    for label, requested in methods.items():
        with collected(errors):
            found[label] = requested.method, _method_options(label, requested, preset, overrides)
    for label, (_, options) in found.items():
        with collected(errors, f"{label}: "):
            if training is not None:
                options.check_training(training)
    if training is None or errors:
        raise ConfigError("; ".join(errors))
    return ResolvedOptions(learner, training, found)


@contextmanager
def collected(errors: list[str], prefix: str = "") -> Iterator[None]:
    """Collect a ConfigError in a list, to report several together."""
    try:
        yield
    except ConfigError as error:
        errors.append(f"{prefix}{error}")


def _common_learner(methods: Mapping[str, RequestedMethod]) -> str:
    """Return the learner shared by all methods; raise ConfigError if there are several."""
    learners = list(dict.fromkeys(requested.method.learner for requested in methods.values()))
    if set(learners) == {"lwf", "first-task"}:  # frozen methods use the first backbone of an LwF trajectory
        return "lwf"
    if len(learners) > 1:
        groups = "; ".join(
            f"{learner}: {', '.join(label for label, r in methods.items() if r.method.learner == learner)}"
            for learner in learners
        )
        raise ConfigError(
            f"methods on different backbones cannot share a trajectory ({groups}); compare them separately"
        )
    if not learners:
        raise ConfigError("no method was named; give one or more, as `efcil methods` lists them")
    return learners[0]


# --- keys -------------------------------------------------------------------------------------------------------------


def _check_keys(
    methods: Mapping[str, RequestedMethod], learner: str, overrides: Values, elsewhere: Collection[str]
) -> None:
    """Raise ConfigError for unknown, fixed or conflicting settings."""
    training = set(keys(LEARNERS[learner].options_type))
    known = training.union(elsewhere, *(keys(requested.method.options) for requested in methods.values()))
    named = ", ".join(dict.fromkeys(requested.method.name for requested in methods.values()))
    problems = [_unknown_option(key, named, known) for key in overrides if key not in known]
    for label, requested in methods.items():
        method, own_keys = requested.method, set(keys(requested.method.options))
        for key in {**requested.settings, **{k: v for k, v in overrides.items() if k in own_keys}}:
            if key in method.overrides:
                problems.append(f"{method.name} fixes {key}={method.overrides[key]}; use dpcr to change it")
            elif key in own_keys:
                continue
            elif key not in training:
                problems.append(_unknown_option(key, method.name, training | own_keys))
            elif any(requested.settings[key] != other.settings.get(key) for other in methods.values()):
                problems.append(
                    f"{label}: {key} applies to the whole trajectory; run it separately or use --set {key}=..."
                )
            elif key in overrides:
                problems.append(f"{label}: {key} is also set by --set; give it once")
    if problems:
        raise ConfigError("; ".join(dict.fromkeys(problems)))


def _unknown_option(key: str, methods: str, known: Collection[str]) -> str:
    """Describe an unknown option: the methods that have it, or the nearest known option."""
    others = [
        m.name
        for m in METHODS.values()
        if key in (*keys(m.options), *keys(LEARNERS[m.learner].options_type)) and key not in m.overrides
    ]
    if others:
        return f"{key} is not an option of {methods}, only of {', '.join(others)}"
    return f"{key} is not an option of {methods}: {nearest(key, known)}"


# --- values -----------------------------------------------------------------------------------------------------------


def _training_options(
    methods: Mapping[str, RequestedMethod], learner: str, preset: PresetSection, overrides: Values, derived: Values
) -> TrainingOptions:
    """Build the options of the learner."""
    model = LEARNERS[learner].options_type
    values: Values = {}
    for requested in methods.values():
        values |= plugin_presets(requested.method)
    values |= {} if LEARNERS[learner].starts_pretrained else preset("training")
    values |= preset(learner)  # learners may have a section
    if learner not in ("lwf", *FROZEN):  # or share the section of their method
        for requested in methods.values():
            values |= preset(preset_method(requested.method, "learner").preset_key)
    chosen = {**derived, **overrides}
    for requested in methods.values():
        chosen |= requested.settings
    usual = values.get("backbone", model.model_fields["backbone"].default)
    if chosen.get("backbone", usual) != usual:
        values.pop("width", None)  # the preset's width belongs to the preset's backbone
        if not is_resnet(chosen["backbone"]):
            values = {key: value for key, value in values.items() if key not in model.RESNET_ONLY}
        if (
            str(chosen["backbone"]).partition(".")[0] != str(usual).partition(".")[0]
        ):  # other weights of it see the same
            values = {key: value for key, value in values.items() if not key.startswith("input.")}
    known = keys(model)
    options = build(model, {key: value for key, value in {**values, **chosen}.items() if key in known}, learner)
    check_name(options.backbone)
    return options


def _method_options(label: str, requested: RequestedMethod, preset: PresetSection, overrides: Values) -> Options:
    """Build the options of a method."""
    method = requested.method
    # What a preset says of a method is for the features that it trains, not for those of pretrained weights.
    with_preset = not LEARNERS[method.learner].starts_pretrained or preset(method.learner)
    values = {**(_method_preset(method, preset) if with_preset else plugin_presets(method))}
    values |= {**overrides, **method.overrides, **requested.settings}
    known = keys(method.options)
    return build(method.options, {key: value for key, value in values.items() if key in known}, label)


def _method_preset(method: Method, preset: PresetSection) -> Values:
    """Return the preset values of a method, including those of its shift and classifier."""
    found = plugin_presets(method)
    if method.preset_key in METHODS.own:
        return found | preset(method.preset_key)
    for kind, part in (("shift", method.shift), ("classifier", method.classifier)):
        like = preset_method(method, kind)
        values = preset(like.preset_key) | like.overrides
        found |= {k: v for k, v in values.items() if part is not None and k in part.options_type.model_fields}
    return found


def preset_method(method: Method, kind: str) -> Method:
    """Return the method whose preset values apply: itself, or the first built-in one with the same shift or
    classifier."""
    own, part = METHODS.own, getattr(method, kind)
    return own.get(method.preset_key) or next((like for like in own.values() if getattr(like, kind) == part), method)
