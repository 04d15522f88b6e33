"""What shifts and classifiers share: options that are given by name or as one validated object."""

from __future__ import annotations

from typing import Any, ClassVar

from efcil.config import Options, build


class Component:
    """A part of a method with options of its own: `DualProjection()`, `Ridge(ridge=200)`."""

    options_type: ClassVar[type[Options]] = Options

    def __init__(self, options: Options | None = None, **values: Any):
        """Take `options` as they are (a method's own model has more), or validate `values`."""
        self.options: Any = build(self.options_type, values, type(self).__name__) if options is None else options

    def own_options(self) -> Options:
        """Return the component's own options alone, whatever else the object that was given has."""
        fields = self.options_type.model_fields
        return self.options_type.model_construct(**{name: getattr(self.options, name) for name in fields})
