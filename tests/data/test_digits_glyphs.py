"""The two built-in data sets: the same everywhere, sound, and not trivial."""

from __future__ import annotations

import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from efcil.data import digits, glyphs
from efcil.errors import ConfigError, DataError
from messages import raises


def test_digits_are_the_scans_of_scikit_learn_in_a_stratified_split():
    from sklearn.datasets import load_digits

    data, raw = digits.load(), load_digits()
    assert (data.channels, data.size, data.class_names) == (1, 8, tuple("0123456789"))
    assert len(data.train) + len(data.test) == len(raw.target) == 1797
    for label in range(10):
        share = (data.test.labels == label).sum() / (raw.target == label).sum()
        assert 0.19 < share <= 0.2
    # every scan is in exactly one part, with its own label, and 16 became 255
    both = np.concatenate([data.train.images, data.test.images])
    assert (both.min(), both.max()) == (0, 255)
    labels = np.concatenate([data.train.labels, data.test.labels])
    got = sorted((int(y), *np.rint(x.ravel() / 255 * 16).astype(int)) for x, y in zip(both, labels, strict=True))
    assert got == sorted((int(y), *x.astype(int)) for x, y in zip(raw.data, raw.target, strict=True))


def test_digits_split_ignores_the_global_generator():
    np.random.seed(1)  # noqa: NPY002
    first = digits.load()
    np.random.seed(2)  # noqa: NPY002
    second = digits.load()
    np.testing.assert_array_equal(first.train.images, second.train.images)
    np.testing.assert_array_equal(first.test.labels, second.test.labels)


@pytest.mark.parametrize(
    "data", [digits.load(), glyphs.load(4, 16, 5, 2)], ids=lambda data: data.name if hasattr(data, "name") else ""
)
def test_mean_and_deviation_are_those_of_the_training_part(data):
    pixels = data.train.images / 255
    np.testing.assert_allclose(data.mean, pixels.mean((0, 2, 3)), rtol=1e-9)
    np.testing.assert_allclose(data.std, pixels.std((0, 2, 3)), rtol=1e-9)


def test_importing_loads_neither_scikit_learn_nor_matplotlib_nor_pyplot():
    code = (
        "import sys; import efcil.data.digits, efcil.data.glyphs as g; "
        "assert 'sklearn' not in sys.modules and 'matplotlib' not in sys.modules; "
        "g.load(2, 8, 1, 1); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_glyphs_have_the_shape_asked_for():
    data = glyphs.load(classes=7, size=24, train_per_class=3, test_per_class=2, seed=5)
    assert data.train.images.shape == (21, 3, 24, 24)
    assert data.test.images.shape == (14, 3, 24, 24)
    assert np.bincount(data.train.labels).tolist() == [3] * 7
    assert np.bincount(data.test.labels).tolist() == [2] * 7
    assert data.train.images.flags.c_contiguous
    assert data.class_names[:2] == ("DIGIT ZERO", "DIGIT ONE")


def test_an_image_depends_on_seed_part_class_and_index_only():
    small = glyphs.load(3, 16, 4, 2, seed=1)
    large = glyphs.load(6, 16, 9, 5, seed=1)
    np.testing.assert_array_equal(
        small.train.images.reshape(3, 4, 3, 16, 16), large.train.images.reshape(6, 9, 3, 16, 16)[:3, :4]
    )
    np.testing.assert_array_equal(
        small.test.images.reshape(3, 2, 3, 16, 16), large.test.images.reshape(6, 5, 3, 16, 16)[:3, :2]
    )
    other = glyphs.load(3, 16, 4, 2, seed=2)
    images = np.concatenate([part.images for data in (small, other) for part in (data.train, data.test)])
    assert len(np.unique(images.reshape(len(images), -1), axis=0)) == len(images)


def test_more_classes_than_characters_names_the_most():
    most = len(glyphs.characters())
    assert most >= 300
    with raises(DataError, most + 1, most):
        glyphs.load(most + 1)
    names = glyphs.load(most, size=8, train_per_class=1, test_per_class=1).class_names
    assert len(set(names)) == most


@pytest.mark.parametrize(
    "wrong", [{"classes": 1}, {"size": 7}, {"train_per_class": 0}, {"test_per_class": 0}, {"seed": -1}]
)
def test_impossible_arguments_are_named(wrong):
    with raises(ConfigError, *wrong, *wrong.values()):
        glyphs.load(**wrong)


def test_a_missing_font_is_reported_with_its_remedy(tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.setattr(matplotlib, "get_data_path", lambda: str(tmp_path))
    glyphs._coverage.cache_clear()
    with raises(DataError, tmp_path / "fonts" / "ttf" / "DejaVuSans.ttf", "matplotlib"):
        glyphs.load(2, 8, 1, 1)
    glyphs._coverage.cache_clear()


def _shape(mask: Image.Image) -> np.ndarray:
    """A character brought to one size and slightly blurred, as a unit vector: what is left when size and place vary."""
    frame = Image.new("L", (32, 32))
    frame.paste(mask, ((32 - mask.width) // 2, (32 - mask.height) // 2))
    vector = np.asarray(frame.filter(ImageFilter.GaussianBlur(0.8)), np.float32).ravel()
    return vector / np.linalg.norm(vector)


def test_no_two_classes_look_alike_in_any_two_fonts():
    known = glyphs.characters()
    assert len(set(known)) == len(known)
    vectors, owners = [], []
    for index, character in enumerate(known):
        masks = glyphs._masks(character, 32)
        assert len(masks) >= 6, unicodedata.name(character)
        vectors += [_shape(mask) for mask in masks]
        owners += [index] * len(masks)
    bank, owner = np.stack(vectors), np.array(owners)
    for index, character in enumerate(known):
        own = owner == index
        likeness = (bank[own] @ bank.T).max(0)
        likeness[own] = 0
        assert likeness.max() < 0.975, (character, known[owner[likeness.argmax()]])
    # the measure does see lookalikes
    for pair in ("cC", "oO", "A" + chr(0x410), "p" + chr(0x440)):
        first, second = (np.stack([_shape(mask) for mask in glyphs._masks(character, 32)]) for character in pair)
        assert (first @ second.T).max() > 0.975, pair


def test_characters_stand_out_from_their_ground():
    data = glyphs.load(40, 32, 8, 1)
    grey = np.tensordot(data.train.images / 255, [0.299, 0.587, 0.114], axes=(1, 0))
    spread = np.percentile(grey, 98, axis=(1, 2)) - np.percentile(grey, 2, axis=(1, 2))
    assert (spread > 0.2).all()


def test_the_problem_is_learnable_but_not_from_single_pixels():
    """Colors tell nothing and a linear rule on pixels little; the outline of the character tells much."""
    data = glyphs.load(10, 16, 60, 20)

    def outline(images):
        grey = images.mean(1) / 255
        step_x, step_y = np.diff(grey, axis=2)[:, 1:], np.diff(grey, axis=1)[:, :, 1:]
        edges = np.stack([step_x**2, step_y**2, step_x * step_y], 1)  # whatever is lighter, ink or ground
        edges = edges / edges.mean((1, 2, 3), keepdims=True)
        blurred = sum(np.roll(edges, (i, j), (2, 3)) for i in (-1, 0, 1) for j in (-1, 0, 1))
        return np.sqrt(np.abs(blurred)).reshape(len(images), -1) * np.sign(blurred).reshape(len(images), -1)

    def ridge_accuracy(features):
        x, test = features(data.train.images), features(data.test.images)
        center, scale = x.mean(0), x.std() + 1e-9
        x, test = (x - center) / scale, (test - center) / scale
        weight = np.linalg.solve(x.T @ x + 300 * np.eye(x.shape[1]), x.T @ np.eye(10)[data.train.labels])
        return ((test @ weight).argmax(1) == data.test.labels).mean()

    pixels = ridge_accuracy(lambda images: images.reshape(len(images), -1) / 255)
    edges = ridge_accuracy(outline)
    assert pixels < 0.3
    assert edges > 0.5


def test_fonts_are_found_where_matplotlib_keeps_them():
    for name in (*glyphs._FONTS, *glyphs._ASCII_FONTS):
        assert Path(glyphs._font_file(name)).is_file()
