"""Exemplar-free class-incremental learning: models that learn new classes while the old images are gone."""

__version__ = "0.1.0"
