"""Registries of built-in parts, parts registered with `efcil.register_*`, and lazily loaded entry points.

Each registry maps names to methods, learners, shifts, classifiers, backbones or data sets. Built-in names cannot be
replaced. A broken plug-in raises an error that names its package; ignoring it would look like a misspelled name.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, NamedTuple, TypeVar

from efcil.errors import ConfigError, nearest

T = TypeVar("T")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")  # names occur in labels, settings and directories
COMBINED_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")

_lock = threading.RLock()  # shared: loading a plug-in may access other registries


class _Plugin(NamedTuple):
    value: Any
    origin: str  # package or module


class Registry(Mapping[str, T]):
    """Mapping from names to parts of one kind; built-in parts are found without loading plug-ins."""

    def __init__(
        self,
        noun: str,
        group: str,
        own: Mapping[str, T],
        accepts: Callable[[Any], bool],
        wanted: str,
        *,
        check: Callable[[str, Any], None] = lambda name, value: None,
        has_name: bool = False,
    ):
        """`accepts` tests the kind of a plug-in, described by `wanted`; `check` raises ConfigError for other faults.

        With `has_name` the name of a plug-in is its attribute `name`, else that of its entry point.
        """
        self.noun, self.group, self.own = noun, group, dict(own)
        self._accepts, self._wanted, self._check, self._has_name = accepts, wanted, check, has_name
        self._pattern = COMBINED_NAME if has_name else NAME
        self._registered: dict[str, _Plugin] = {}
        self._loaded: dict[str, _Plugin] | None = None  # entry points

    def __getitem__(self, name: str) -> T:
        return self.own[name] if name in self.own else self._plugins()[name].value

    def __iter__(self) -> Iterator[str]:
        return iter({**self.own, **self._plugins()})

    def __len__(self) -> int:
        return len({**self.own, **self._plugins()})

    def find(self, name: str, context: str = "") -> T:
        """Return the part with this name, or raise ConfigError with the nearest name."""
        if name not in self:
            raise ConfigError(f"unknown {self.noun} '{name}'{context}: {nearest(name, self)}")
        return self[name]

    def canonical(self, name: str) -> str:
        """Return a name as it is registered, whatever its case; the name itself where there is none such."""
        for known in (self.own, self):  # ours are found without loading plug-ins
            if name in known:
                return name
            alike = [key for key in known if key.casefold() == name.casefold()]
            if len(alike) == 1:
                return alike[0]
        return name

    def peek(self, name: str) -> T | None:
        """Return the part with this name without loading entry points, else None."""
        parts = {**self.own, **{key: plugin.value for key, plugin in self._registered.items()}}
        return parts.get(name)

    def register(self, name: str, value: T) -> None:
        """Register a plug-in; a module that runs again replaces its earlier registration."""
        origin = f"module {_caller()}"
        self._examine(name, value, f"{origin}: {self.noun} '{name}'")
        if self._is_own(name):
            raise ConfigError(f"{origin}: {self.noun} '{name}' is efcil's own: register it under another name")
        if name in self._registered and self._registered[name].origin == origin:
            del self._registered[name]
        self._add(self._registered, name, _Plugin(value, origin))
        try:
            self._plugins()
            self._check(name, value)
        except ConfigError:
            self._registered.pop(name, None)
            raise

    def reset(self) -> None:
        """Clear registrations and reload entry points on next access."""
        self._registered, self._loaded = {}, None

    def _plugins(self) -> dict[str, _Plugin]:
        with _lock:
            if self._loaded is None:
                self._loaded = {}  # plug-ins may access this registry while they are loaded
                try:
                    self._loaded = self._load()
                except BaseException:
                    self._loaded = None
                    raise
            merged = dict(self._loaded)
            for name, plugin in self._registered.items():
                self._add(merged, name, plugin)
            return merged

    def _load(self) -> dict[str, _Plugin]:
        plugins: dict[str, _Plugin] = {}
        for point in sorted(entry_points(group=self.group), key=lambda p: (p.name, p.value)):
            package = point.dist.name if point.dist is not None else "unknown package"
            named = f"{package}: entry point {point.value} of {self.group}"
            try:
                value = point.load()
            except (Exception, SystemExit) as error:
                remedy = "install what it needs" if isinstance(error, ModuleNotFoundError) else "update it"
                why = f"cannot be loaded: {one_line(error)}; {remedy} or uninstall {package}"
                raise ConfigError(f"{named} {why}") from error
            self._examine(point.name, value, named)
            name = value.name if self._has_name else point.name
            if not self._is_own(name):
                self._add(plugins, name, _Plugin(value, package))
        for name, plugin in plugins.items():
            try:
                self._check(name, plugin.value)
            except ConfigError as error:
                raise ConfigError(f"{plugin.origin}: {error}") from None
        return plugins

    def _is_own(self, name: str) -> bool:
        return name.casefold() in {own.casefold() for own in self.own}

    def _examine(self, name: str, value: Any, named: str) -> None:
        if not self._accepts(value):
            got = value.__name__ if isinstance(value, type) else type(value).__name__
            raise ConfigError(f"{named} must be {self._wanted}, got {got}")
        if not self._pattern.fullmatch(value.name if self._has_name else name):
            raise ConfigError(f"{named}: invalid name; use letters, digits, '-', '_' and '.'")

    def _add(self, plugins: dict[str, _Plugin], name: str, plugin: _Plugin) -> None:
        other = plugins.setdefault(name, plugin)
        if other.value is not plugin.value:
            raise ConfigError(
                f"{self.noun} '{name}' is defined by {other.origin} and {plugin.origin}; rename or uninstall one"
            )


def subclass_of(base: type) -> Callable[[Any], bool]:
    """Return a predicate for concrete subclasses of `base`."""
    return lambda value: isinstance(value, type) and issubclass(value, base) and not _abstract(value)


def one_line(error: BaseException) -> str:
    """Format an exception on one line.

    >>> one_line(ValueError("no\\nluck"))
    'ValueError: no luck'
    """
    return " ".join(f"{type(error).__name__}: {error}".split())


def _abstract(kind: type) -> bool:
    return bool(getattr(kind, "__abstractmethods__", None))


def _caller() -> str:
    """Return the name of the calling module outside efcil."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "efcil":
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))
