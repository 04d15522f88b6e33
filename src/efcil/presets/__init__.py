"""Presets: data files, each value with its source."""
