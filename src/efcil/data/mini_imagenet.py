"""mini-ImageNet: 100 classes of ImageNet, 500 + 100 images of 84 x 84 each.

    train/<wnid>/*.jpg, val/<wnid>/*.jpg

Vinyals et al., "Matching Networks for One Shot Learning", NeurIPS 2016, chose classes and images. For class-incremental
learning the 600 images of each class are split into 500 for training and 100 for testing. Here it stands in for
ImageNet-100, of which there are several and which needs 300 times the disk. Labels follow the sorted wnids.
"""

from __future__ import annotations

from efcil.data.cache import Tree, loader
from efcil.data.dataset import Official
from efcil.data.imagenet1k import class_folders, parts, tree_of
from efcil.data.layout import read_errors
from efcil.files import StrPath

NAME = "mini-imagenet"
OFFICIAL = Official(100, 50_000, 10_000, train_each=500, test_each=100)


def scan(directory: StrPath) -> Tree:
    """Find the images and their labels."""
    with read_errors(NAME):
        root = parts(NAME, directory)
        return tree_of(NAME, root, class_folders(root), NAME, OFFICIAL)


load = loader(NAME, scan, 84)
