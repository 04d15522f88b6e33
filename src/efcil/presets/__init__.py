"""Preset files; each value has its source."""
