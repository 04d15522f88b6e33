"""Pictures that are there more than once."""

import io

import numpy as np
import pytest
from PIL import Image, ImageDraw

from efcil.data import duplicates
from efcil.data.decode import read_image
from efcil.data.duplicates import find_duplicates


def draw(seed, size=(160, 120)):
    """Draw some shapes on a colored ground."""
    noise = np.random.default_rng(seed)
    image = Image.new("RGB", size, tuple(noise.integers(0, 256, 3).tolist()))
    pen = ImageDraw.Draw(image)
    for _ in range(6):
        x, y, r = noise.integers(0, 120, 3).tolist()
        pen.ellipse((x, y, x + r // 2 + 9, y + r // 2 + 9), fill=tuple(noise.integers(0, 256, 3).tolist()))
    return image


def pixels(*images, size=64):
    return np.stack([read_image(image, size) for image in images])


def saved(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, **options)
    return buffer.getvalue()


def test_a_copy_that_was_resized_and_compressed_is_found_and_others_are_not():
    originals = [draw(seed) for seed in range(30)]
    small = saved(originals[3].resize((96, 72)), format="JPEG", quality=50)
    again = saved(originals[7], format="PNG")
    assert find_duplicates(pixels(*originals)) == []
    assert find_duplicates(pixels(*originals, small, again, again)) == [[3, 30], [7, 31, 32]]


def test_a_mirrored_picture_is_another_one():
    image = draw(1)
    assert find_duplicates(pixels(image, image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))) == []


def test_pictures_without_content_must_be_equal():
    flat = [Image.new("RGB", (20, 20), (value, value, value)) for value in (10, 11, 10, 200)]
    assert find_duplicates(pixels(*flat)) == [[0, 2]]


@pytest.mark.parametrize("shape", [(0, 3, 8, 8), (1, 3, 8, 8), (3, 1, 1, 1), (3, 3, 5, 40)])
def test_any_shape(shape):
    noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    assert find_duplicates(noise) == []
    twice = np.concatenate([noise, noise])
    assert find_duplicates(twice) == [[row, row + len(noise)] for row in range(len(noise))]


def test_groups_do_not_depend_on_the_parts_that_are_compared_at_a_time(monkeypatch):
    images = pixels(*(draw(seed % 11) for seed in range(25)), *(draw(seed).resize((120, 90)) for seed in range(4)))
    whole = find_duplicates(images)
    assert [len(group) for group in whole] == [4, 4, 4, 3, 2, 2, 2, 2, 2, 2, 2]
    monkeypatch.setattr(duplicates, "_ROWS", 4)
    assert find_duplicates(images) == whole
