"""Methods and data sets of other packages, found through their entry points when a name is looked up."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar, cast

from efcil.errors import ConfigError

T = TypeVar("T")


@cache
def plugins(group: str, kind: Any) -> dict[str, Any]:
    """Load every entry point of a group: each must be an object of `kind` with a `name`.

    A plugin that cannot be loaded is an error that names its package; silence would look like a misspelt name.
    """
    found: dict[str, Any] = {}
    for point in sorted(entry_points(group=group), key=lambda p: p.name):
        package = point.dist.name if point.dist is not None else "unknown package"
        try:
            plugin = point.load()
        except Exception as error:
            raise ConfigError(f"{package}: entry point {point.value} of {group} cannot be loaded: {error}") from error
        if not isinstance(plugin, kind):
            wanted, got = kind.__name__, type(plugin).__name__
            raise ConfigError(f"{package}: entry point {point.value} of {group} must be a {wanted}, got {got}")
        found[plugin.name] = plugin
    return found


def registry(group: str, kind: type[T], own: dict[str, T]) -> dict[str, T]:
    """Return our own entries and those of other packages; ours keep their names."""
    others: dict[str, T] = plugins(group, cast(Any, kind))
    return {**others, **own}
