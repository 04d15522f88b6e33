"""Show a picture NAME.png as NAME-dark.png in dark mode, where there is such a file beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.transforms import SphinxTransform


class DarkPictures(SphinxTransform):
    """Put the dark form of a picture behind it; furo shows one of them."""

    default_priority = 400  # before the pictures are collected

    def apply(self, **_: Any) -> None:
        """Change the page."""
        for image in list(self.document.findall(nodes.image)):
            path = Path(image["uri"])
            dark = path.with_name(f"{path.stem}-dark{path.suffix}")
            if (Path(self.env.doc2path(self.env.docname)).parent / dark).is_file():
                other = image.deepcopy()
                other["uri"] = dark.as_posix()
                image["classes"].append("only-light")
                other["classes"].append("only-dark")
                image.parent.insert(image.parent.index(image) + 1, other)


def setup(app: Any) -> dict[str, bool]:
    """Register the transform with Sphinx."""
    app.add_transform(DarkPictures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
