"""Clothing of ten kinds (A. Grigorev and others, 2020, CC0): 3,068 + 372 photographs that people took of their own.

    <root>/train/<kind>/*.jpg, <root>/test/<kind>/*.jpg       as in its repository; validation/ is not used

It is downloaded as the archive of one commit of its repository. Servers pack such an archive anew, so its files are
checked together instead (`efcil.data.fetch.tree_digest`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from efcil.data import folder
from efcil.data.dataset import DataSet
from efcil.data.fetch import Remote
from efcil.data.layout import find_folder
from efcil.files import StrPath

NAME = "clothing"
COMMIT = "11961516512414bf9f6c150a832cfd21b54a6b54"
FOLDER = f"clothing-dataset-small-{COMMIT}"
REMOTE = Remote(
    url=f"https://codeload.github.com/alexeygrigorev/clothing-dataset-small/tar.gz/{COMMIT}",
    name=f"{FOLDER}.tar.gz",
    checksum="tree:44ccec38059c6882f74f9b39e8823294a1c18f76cfdb10aebc474ea302081632",
    size=106_028_783,
    unpack=FOLDER,
)


def load(directory: StrPath, *, test_share: float = 0.2, seed: int = 0, size: int = 256, **options: Any) -> DataSet:
    """Load the folder that was downloaded to `directory`, or that folder itself; options as of any folder of images."""
    root = find_folder(NAME, directory, f"{FOLDER}, or train/ and test/", [FOLDER], lambda f: (f / "train").is_dir())
    return folder.load(Path(root), size=size, test_share=test_share, seed=seed, **options)
