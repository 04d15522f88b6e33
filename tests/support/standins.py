"""Small copies of the official sets, in their layouts, drawn with `glyphs`: the real loaders read them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from efcil.data import glyphs

# Not in their sorted order, so that a loader that does not sort is noticed.
WNIDS = ("n02000004", "n01000001", "n02000002", "n01000003")
BIRDS = ("001.Black_footed_Albatross", "002.Laysan_Albatross", "003.Sooty_Albatross", "010.Red_winged_Blackbird")

Written = dict[str, list[Path]]  # class -> its files


@cache
def _draw_images(classes: int, train: int, test: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    data = glyphs.load(classes=classes, size=size, train_per_class=train, test_per_class=test)
    return tuple(p.images.reshape(classes, -1, 3, size, size).transpose(0, 1, 3, 4, 2) for p in (data.train, data.test))


def _save(pixels: np.ndarray, path: Path, grey: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.ascontiguousarray(pixels))
    (image.convert("L") if grey else image).save(path, "JPEG", quality=90)
    return path


def tiny_imagenet(
    root: Path, *, val: str = "official", names: tuple[str, ...] = WNIDS, train: int = 6, test: int = 2, size: int = 24
) -> tuple[Written, Written]:
    """tiny-imagenet-200/ in `root`; val is "official", "folders" (val/<wnid>/) or "images" (val/<wnid>/images/)."""
    root = root / "tiny-imagenet-200"
    pixels = _draw_images(len(names), train, test, size)
    learned: Written = {}
    tested: Written = {}
    annotations = []
    for c, wnid in enumerate(names):
        place = root / "train" / wnid
        files = [place / "images" / f"{wnid}_{i}.JPEG" for i in range(train)]
        learned[wnid] = [_save(pixels[0][c, i], path, grey=i == 0) for i, path in enumerate(files)]
        (place / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t9\t9\n")
        tested[wnid] = []
        for i in range(test):
            name = f"val_{i * len(names) + c}.JPEG"
            inner = {"official": f"images/{name}", "folders": f"{wnid}/{name}", "images": f"{wnid}/images/{name}"}[val]
            tested[wnid].append(_save(pixels[1][c, i], root / "val" / inner))
            annotations.append(f"{name}\t{wnid}\t0\t0\t9\t9\n")
    if val == "official":
        (root / "val" / "val_annotations.txt").write_text("".join(annotations))
    _save(pixels[1][0, 0], root / "test" / "images" / "test_0.JPEG")
    (root / "wnids.txt").write_text("".join(f"{name}\n" for name in names))
    (root / "words.txt").write_text("".join(f"{name}\tsome thing\n" for name in names))
    return learned, tested


def class_folders(
    root: Path,
    *,
    parts: tuple[str, str] = ("train", "val"),
    names: tuple[str, ...] = WNIDS,
    train: int = 6,
    test: int = 2,
) -> tuple[Written, Written]:
    """Two parts with the same class folders, as of ImageNet; oblong pictures, since real ones are not square."""
    pixels = _draw_images(len(names), train, test, 24)
    written: list[Written] = [{}, {}]
    for part, images, found in zip(parts, pixels, written, strict=True):
        for c, name in enumerate(names):
            files = [root / part / name / f"{name}_{i}.JPEG" for i in range(images.shape[1])]
            found[name] = [_save(np.tile(images[c, i], (1, 2, 1)), path) for i, path in enumerate(files)]
    return written[0], written[1]


def cub200(root: Path, *, names: tuple[str, ...] = BIRDS, train: int = 6, test: int = 2) -> tuple[Written, Written]:
    """CUB_200_2011/ in `root`, with its four lists."""
    root = root / "CUB_200_2011"
    pixels = _draw_images(len(names), train, test, 24)
    written: list[Written] = [{name: [] for name in names} for _ in range(2)]
    rows = []
    for c, name in enumerate(names):
        for side, (images, found) in enumerate(zip(pixels, written, strict=True)):
            for i in range(images.shape[1]):
                path = f"{name}/{name[4:]}_{side}{i}.jpg"
                found[name].append(_save(images[c, i], root / "images" / path))
                rows.append((path, c + 1, 1 - side))
    for place, file in enumerate(("images.txt", "image_class_labels.txt", "train_test_split.txt")):
        (root / file).write_text("".join(f"{number} {row[place]}\n" for number, row in enumerate(rows, 1)))
    (root / "classes.txt").write_text("".join(f"{c} {name}\n" for c, name in enumerate(names, 1)))
    return written[0], written[1]
