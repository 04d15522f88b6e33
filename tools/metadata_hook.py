"""Metadata that depends on where efcil is published: project urls, and a README whose links lead somewhere.

Hatchling runs it for every build. While release.toml names no repository there are no urls, and the README stays as
it is.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r"(?P<before>\]\(|(?:src|srcset|href)=\")(?!https?:|#|mailto:)(?P<path>[^)\"\s]+)")


def absolute(text: str, repository: str) -> str:
    """Make the relative links and pictures of a page absolute.

    >>> absolute('[a](docs/a.md#b) <img src="docs/p.png"> [c](https://x.y) [d](#e)', "https://h/o/n")
    '[a](https://h/o/n/blob/main/docs/a.md#b) <img src="https://h/o/n/raw/main/docs/p.png"> [c](https://x.y) [d](#e)'
    """

    def place(found: re.Match[str]) -> str:
        kind = "raw" if found["path"].endswith((".png", ".svg")) else "blob"
        return f"{found['before']}{repository}/{kind}/main/{found['path']}"

    return RELATIVE.sub(place, text) if repository else text


def urls(places: dict[str, str]) -> dict[str, str]:
    """Return the project urls of the places that are known."""
    repository = places["repository"]
    known = {"Documentation": places["documentation"], "Source": repository}
    if repository:
        known |= {"Issues": f"{repository}/issues", "Changelog": f"{repository}/blob/main/CHANGELOG.md"}
    return {name: url for name, url in known.items() if url}


class CustomMetadataHook(MetadataHookInterface):
    """Fill in `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Change the metadata in place."""
        root = Path(self.root)
        places = tomllib.loads((root / "release.toml").read_text(encoding="utf-8"))
        text = absolute((root / "README.md").read_text(encoding="utf-8"), places["repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls(places)
