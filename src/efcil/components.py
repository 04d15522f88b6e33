"""Base class of shifts and classifiers, configured by keyword or by a validated options object."""

from __future__ import annotations

from typing import Any, ClassVar

from efcil.config import Options, build


class Component:
    """Part of a method with its own options: `DualProjection()`, `Ridge(ridge=200)`."""

    options_type: ClassVar[type[Options]] = Options

    def __init__(self, options: Options | None = None, **values: Any):
        """Use `options`, which may have further fields, or validate `values`."""
        self.options: Any = build(self.options_type, values, type(self).__name__) if options is None else options

    def own_options(self) -> Options:
        """Return only the options that this component declares."""
        fields = self.options_type.model_fields
        return self.options_type.model_construct(**{name: getattr(self.options, name) for name in fields})
