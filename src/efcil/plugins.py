"""What has a name: ours, what `efcil.register_*` added, and entry points of other packages, loaded when looked up.

Each registry is a mapping from names to methods, learners, shifts, classifiers, backbones or data sets. Ours keep their
names. A plug-in that cannot be used is an error that names its package; silence would look like a misspelled name.
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
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")  # names are parts of labels, settings and directories
COMBINED_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")

_lock = threading.RLock()  # one for all: plug-ins of one group may look up another


class _Plugin(NamedTuple):
    value: Any
    origin: str  # package or module


class Registry(Mapping[str, T]):
    """Names of one kind of thing. Our own are found without loading what other packages bring."""

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
        """`accepts` tells what is of the right kind, `wanted` in words; `check` raises a ConfigError for other faults.

        With `has_name` a plug-in's name is its attribute `name`, else that of its entry point.
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
        """Return what has a name, or say which name is nearest."""
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
        """Return what has a name as far as that is known before entry points are loaded."""
        known = {**self.own, **{key: plugin.value for key, plugin in self._registered.items()}}
        return known.get(name)

    def register(self, name: str, value: T) -> None:
        """Add a plug-in; a module that runs again replaces what it registered before."""
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
        """Forget what was registered, and load entry points anew."""
        self._registered, self._loaded = {}, None

    def _plugins(self) -> dict[str, _Plugin]:
        with _lock:
            if self._loaded is None:
                self._loaded = {}  # for what plug-ins look up while they are loaded
                try:
                    self._loaded = self._load()
                except BaseException:
                    self._loaded = None
                    raise
            found = dict(self._loaded)
            for name, plugin in self._registered.items():
                self._add(found, name, plugin)
            return found

    def _load(self) -> dict[str, _Plugin]:
        found: dict[str, _Plugin] = {}
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
                self._add(found, name, _Plugin(value, package))
        for name, plugin in found.items():
            try:
                self._check(name, plugin.value)
            except ConfigError as error:
                raise ConfigError(f"{plugin.origin}: {error}") from None
        return found

    def _is_own(self, name: str) -> bool:
        return name.casefold() in {own.casefold() for own in self.own}

    def _examine(self, name: str, value: Any, named: str) -> None:
        if not self._accepts(value):
            got = value.__name__ if isinstance(value, type) else type(value).__name__
            raise ConfigError(f"{named} must be {self._wanted}, got {got}")
        if not self._pattern.fullmatch(value.name if self._has_name else name):
            raise ConfigError(f"{named}: a name must be of letters, digits, '-', '_' and '.'")

    def _add(self, found: dict[str, _Plugin], name: str, plugin: _Plugin) -> None:
        other = found.setdefault(name, plugin)
        if other.value is not plugin.value:
            raise ConfigError(
                f"{self.noun} '{name}' comes from {other.origin} and from {plugin.origin}: rename or uninstall one"
            )


def subclass_of(base: type) -> Callable[[Any], bool]:
    """Return a test for subclasses that can be made: nothing abstract is left in them."""
    return lambda value: isinstance(value, type) and issubclass(value, base) and not _abstract(value)


def one_line(error: BaseException) -> str:
    """Return an error of another package as one line.

    >>> one_line(ValueError("no\\nluck"))
    'ValueError: no luck'
    """
    return " ".join(f"{type(error).__name__}: {error}".split())


def _abstract(kind: type) -> bool:
    return bool(getattr(kind, "__abstractmethods__", None))


def _caller() -> str:
    """Return the name of the module that called into efcil."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "efcil":
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))
