"""ImageNet-100: a hundred classes of ImageNet-1k, in the same layout; papers use different subsets.

`class_list` selects the subset: "folders" uses the existing class folders; a name refers to a list in class_lists/,
which cites its source; anything else is a text file with a class folder name (wnid) per line. The DPCR paper cites
PODNet, whose list is `first-100`; its code uses the existing folders.

Labels follow the sorted wnids, as in torchvision's ImageFolder, for any order of the list; the class order "1993"
permutes these.
"""

from __future__ import annotations

import hashlib
import re
from importlib import resources

from efcil.data.cache import Progress, Tree, load_decoded
from efcil.data.dataset import DataSet, Official
from efcil.data.imagenet1k import OFFICIAL as IMAGENET1K
from efcil.data.imagenet1k import class_folders, parts, tree_of
from efcil.data.layout import read_errors
from efcil.errors import ConfigError
from efcil.files import StrPath, read_text

NAME = "imagenet100"
OFFICIAL = Official(100, None, 5_000, test_each=50)  # at most 1,300 training images per class
FOLDERS = "folders"
_LIST_LIMIT = 1 << 20  # bytes of a file of classes


def load(
    directory: StrPath,
    *,
    size: int = 256,
    class_list: str = FOLDERS,
    skip_bad: bool = False,
    lazy: bool | None = None,
    keep_aspect: bool | None = None,
    progress: Progress | None = None,
) -> DataSet:
    """Load a hundred classes from a folder with train/ and val/, which may contain all 1,000 classes."""
    tree = scan(directory, class_list=class_list)
    return load_decoded(tree, NAME, size=size, skip_bad=skip_bad, lazy=lazy, keep_aspect=keep_aspect, progress=progress)


def scan(directory: StrPath, *, class_list: str = FOLDERS) -> Tree:
    """Find the images and their labels."""
    wanted = None if class_list == FOLDERS else read_list(class_list)
    with read_errors(NAME):
        root = parts(NAME, directory)
        available = class_folders(root)
        if wanted is not None:
            of_file = hashlib.sha256(" ".join(wanted).encode()).hexdigest()[:8]
            key = f"{NAME}-{class_list if class_list in bundled_lists() else of_file}"
            return tree_of(NAME, root, wanted, key, OFFICIAL)
        if len(available) >= IMAGENET1K.classes:
            raise ConfigError(
                f"{NAME}: {root} has all {len(available):,} classes; select a hundred with --set data.class_list=LIST "
                f"({', '.join(bundled_lists())}, or a file), or run imagenet1k"
            )
        tree = tree_of(NAME, root, available, f"{NAME}-{FOLDERS}", OFFICIAL)
    same = [name for name in bundled_lists() if read_list(name) == available]
    which = f"those of the list '{same[0]}'" if same else f"none of the known lists ({', '.join(bundled_lists())})"
    tree.notes.append(f"the {len(available)} class folders are {which}")
    return tree


def bundled_lists() -> list[str]:
    """Return the names of the bundled class lists."""
    files = resources.files("efcil.data").joinpath("class_lists").iterdir()
    return sorted(file.name.removesuffix(".txt") for file in files if file.name.endswith(".txt"))


def read_list(which: str) -> list[str]:
    """Return the sorted classes of a bundled list or a text file.

    >>> len(read_list("seed-1993")), read_list("first-100")[:2]
    (100, ['n01440764', 'n01443537'])
    """
    if which in bundled_lists():
        text = resources.files("efcil.data").joinpath("class_lists", f"{which}.txt").read_text(encoding="utf-8")
    else:
        try:
            text = read_text(which, _LIST_LIMIT)
        except (OSError, UnicodeDecodeError) as error:
            why = (error.strerror or error) if isinstance(error, OSError) else "not a text file"
            known = ", ".join((FOLDERS, *bundled_lists()))
            raise ConfigError(f"class_list={which}: neither one of {known} nor a file ({why})") from None
    names = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    names = [
        wnid[0] if (wnid := re.match(r"n\d{8}\b", name)) else name for name in names
    ]  # ignore words after the wnid
    if not names:
        raise ConfigError(f"class_list={which}: the list is empty; write one class folder name per line")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"class_list={which}: '{twice[0]}' is listed more than once; list each class once")
    return sorted(names)
