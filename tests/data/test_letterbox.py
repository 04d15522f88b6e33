"""Whole photographs: what a frame keeps, what crops of it show, and who gets frames and who squares."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import standins
from efcil.data import FolderOptions, cub200, folder, letterbox, load
from efcil.data.augment import CenterCrop, RandomResizedCrop
from efcil.data.decode import read_image
from efcil.errors import ConfigError
from messages import assert_names, raises

SIZE = 32


def photograph(width, height, seed=0):
    """Coarse noise, enlarged: something to resize without rounding deciding everything."""
    draw = np.random.default_rng(seed)
    small = draw.integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BILINEAR)


def shrunk(image):
    """torchvision's Resize(SIZE), for images of at most 3:2."""
    width, height = image.size
    short = min(width, height)
    return image.resize((int(SIZE * width / short), int(SIZE * height / short)), Image.Resampling.BILINEAR)


def pixels(image):
    return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())


SHAPES = [(90, 64), (64, 90), (64, 64), (96, 64), (64, 96), (65, 64)]
PICTURES = [photograph(*shape, seed=i) for i, shape in enumerate(SHAPES)]
FRAMES = torch.from_numpy(np.stack([read_image(p, SIZE, keep_aspect=True) for p in PICTURES]))


def test_a_frame_keeps_the_whole_picture_its_width_and_how_it_lies():
    assert FRAMES.shape == (len(SHAPES), 3, SIZE, SIZE * 3 // 2 + 1)
    assert letterbox.is_letterboxed(FRAMES)
    assert not letterbox.is_letterboxed(torch.zeros(1, 3, SIZE, SIZE))
    widths, is_portrait = letterbox.read_header(FRAMES)
    assert is_portrait.tolist() == [False, True, False, False, True, False]
    for picture, stored, width, lies in zip(PICTURES, FRAMES, widths.tolist(), is_portrait.tolist(), strict=True):
        wanted = pixels(shrunk(picture))
        kept = stored[:, :, :width]
        far = ((kept.transpose(1, 2) if lies else kept).int() - wanted.int()).abs()
        assert far.max() <= 1  # down before across, or across before down
        assert not stored[:, :, width:-1].any()


def test_longer_than_three_by_two_loses_its_ends():
    picture = Image.new("RGB", (300, 100), (0, 0, 200))
    picture.paste((200, 0, 0), (75, 0, 225, 100))  # the middle, 3:2
    stored = torch.from_numpy(read_image(picture, SIZE, keep_aspect=True))[None]
    assert letterbox.read_header(stored)[0].tolist() == [48]
    assert (stored[0, 0, :, 1:47] == 200).all()
    endless = read_image(Image.new("RGB", (1, 5000), (9, 9, 9)), SIZE, keep_aspect=True)
    assert (endless[:, :, :48] == 9).all()


def test_wide_frames_have_two_bytes_of_width():
    stored = torch.from_numpy(read_image(photograph(340, 256), 256, keep_aspect=True))[None]
    assert letterbox.read_header(stored)[0].tolist() == [340]
    assert stored.shape == (1, 3, 256, 385)


def test_a_random_crop_of_a_frame_is_that_of_the_upright_picture():
    """Boxes are drawn for the picture as it stands: the reference turns each one by hand and crops with Pillow."""
    transform = RandomResizedCrop(24)
    many = FRAMES.repeat_interleave(40, 0)
    drawn = transform.draw(len(many), torch.Generator().manual_seed(0))
    ours = transform.apply(many, drawn)
    widths, is_portrait = letterbox.read_header(many)
    seen = {}
    for i, (result, width, lies) in enumerate(zip(ours, widths.tolist(), is_portrait.tolist(), strict=True)):
        upright = many[i, :, :, :width]
        one = {name: value[i : i + 1] for name, value in drawn.items()}
        if lies:
            upright = upright.transpose(1, 2)
            one["place"] = one["place"].flip(1)  # the same place in the picture that lies
        box = [int(edge) for edge in transform.boxes(one, *upright.shape[1:])]
        top, left, tall, wide = box
        standing = Image.fromarray(upright.permute(1, 2, 0).contiguous().numpy())
        wanted = standing.crop((left, top, left + wide, top + tall)).resize((24, 24), Image.Resampling.BILINEAR)
        far = (result.int() - pixels(wanted).int()).abs()
        assert far.max() <= 2  # a picture that lies is resized down before across
        assert far.float().mean() < 0.3
        seen.setdefault(i // 40, []).append((left, left + wide, top, top + tall))
    lefts, rights, _, _ = zip(*seen[0], strict=True)
    assert min(lefts) < 6 < 39 < max(rights)  # 45 wide: the square in the middle would be 6 to 38
    _, _, tops, bottoms = zip(*seen[1], strict=True)
    assert min(tops) < 6 < 39 < max(bottoms)


def test_shapes_of_crops_are_those_of_upright_pictures():
    """Log-uniform in 3:4 to 4:3, also for pictures that were laid down."""
    transform = RandomResizedCrop(8, scale=(0.1, 0.1), ratio=(0.5, 0.5))
    flat = FRAMES[[1]].clone()
    flat[0, :, :, :-1] = torch.arange(48, dtype=torch.uint8)[None, None, :] * 5  # down the upright picture
    cut = transform.apply(flat, transform.draw(1, torch.Generator().manual_seed(1)))[0, 0].int()
    assert (cut == cut[:, :1]).all()
    per_row = (cut[-1, 0] - cut[0, 0]).item() / 5 / 7 * 8
    area = 0.1 * 32 * 45
    assert per_row == pytest.approx((area / 0.5) ** 0.5, rel=0.1)  # twice as tall as wide


def test_the_center_of_a_frame_is_that_of_resize_and_center_crop():
    found = CenterCrop(24).apply(FRAMES, {})
    for picture, result in zip(PICTURES, found, strict=True):
        small = shrunk(picture)
        left, top = round((small.width - 24) / 2), round((small.height - 24) / 2)
        wanted = pixels(small.crop((left, top, left + 24, top + 24)))
        assert (result.int() - wanted.int()).abs().max() <= 1
    with raises(ConfigError, 40, "32 x 49"):
        CenterCrop(40).apply(FRAMES, {})


def test_decoding_processes_do_without_torch():
    code = "import sys, efcil.data.workers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.fixture
def tree(tmp_path):
    """Two classes of lying and standing pictures."""
    for side, count in (("train", 3), ("test", 2)):
        for label in ("a", "b"):
            (tmp_path / "tree" / side / label).mkdir(parents=True)
            for i in range(count):
                shape = (45, 32) if i % 2 else (32, 45)
                photograph(*shape, seed=i).save(tmp_path / "tree" / side / label / f"{i}.png")
    return tmp_path / "tree"


def test_frames_and_squares_lie_beside_each_other_in_the_cache(tree, tmp_path):
    cache = tmp_path / "cache"
    whole = folder.load(tree, size=16, keep_aspect=True, cache=cache)
    squares = folder.load(tree, size=16, cache=cache)
    assert whole.train.images.shape == (6, 3, 16, 25)
    assert squares.train.images.shape == (6, 3, 16, 16)
    assert sorted(path.suffix for path in cache.rglob("*px*")) == [".json", ".json", ".npy", ".npy"]
    again = folder.load(tree, size=16, keep_aspect=True, cache=cache)
    np.testing.assert_array_equal(again.train.images, whole.train.images)


def test_frames_are_streamed_as_they_are_cached(tree, tmp_path):
    kept = folder.load(tree, size=16, keep_aspect=True, cache=tmp_path / "cache")
    streamed = folder.load(tree, size=16, keep_aspect=True, lazy=True, cache=tmp_path / "other")
    np.testing.assert_array_equal(np.asarray(streamed.test.images), kept.test.images)


BASE = ["backbone=resnet10", "width=2", "first.epochs=1", "later.epochs=1", "first.milestones=[]", "batch_size=4"]
BASE += ["later.milestones=[]", "data.short_side=24", "crop=16"]


@pytest.fixture
def run(tmp_path, efcil, monkeypatch):
    """Two tasks on a stand-in of CUB-200; returns the exit code, what was said, and whether the pictures were whole."""
    monkeypatch.setenv("EFCIL_CACHE", str(tmp_path / "cache"))
    standins.cub200(tmp_path / "birds")
    seen = []
    load = cub200.load
    monkeypatch.setattr(cub200, "load", lambda *a, **k: seen.append(k["keep_aspect"]) or load(*a, **k))

    def call(method, *settings):
        out = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        where = ["--data", tmp_path / "birds", "--tasks", "2", "--device", "cpu", "--out", out]
        code, _, said = efcil("run", method, "cub200", *where, *(f"--set={s}" for s in (*BASE, *settings)))
        if code == 0:
            summary = json.loads((out / "summary.json").read_text())
            assert summary["tasks_done"] == 2
            assert summary["data"]["short_side"] == 24  # what a table compares
            assert (summary["data"]["train_short_side"] is not None) == any(
                "data.train_short_side" in one for one in settings
            )
        return code, said, seen.pop() if seen else None

    return call


@pytest.mark.parametrize(
    ("method", "settings", "whole"),
    [
        ("dpcr", (), True),
        ("dpcr", ("data.keep_aspect=false",), False),
        ("dpcr", ("data.lazy=true",), True),
        ("dpcr", ("augment=none",), False),
        ("adc", (), True),
        ("icarl", ("memory=8",), True),
        ("dpcr-plus", ("pseudo_ratio=1",), False),
        ("dpcr-plus", ("pseudo_ratio=0",), True),
        ("dpcr", ("data.train_short_side=30",), True),
        ("adc", ("data.train_short_side=30", "data.lazy=true"), True),
        ("podnet", ("memory=8", "data.train_short_side=30", "data.keep_aspect=false"), False),
    ],
    ids=str,
)
def test_whole_pictures_wherever_training_draws_boxes(run, method, settings, whole):
    code, said, seen = run(method, *settings)
    assert code == 0, said
    assert seen is whole


@pytest.mark.parametrize(
    ("method", "setting", "named"),
    [
        ("dpcr", "augment=crop-flip", "augment=crop-flip"),
        ("dpcr", "crop=null", "crop"),
        ("dpcr-plus", "pseudo_ratio=1", "pseudo"),
    ],
)
def test_whole_pictures_are_refused_where_something_needs_squares(run, method, setting, named):
    code, said, seen = run(method, setting, "data.keep_aspect=true")
    assert code == 2
    assert_names(said, "data.keep_aspect=true", named)
    assert seen is None


def test_pictures_stored_larger_are_looked_at_as_resized_ones():
    """`data.train_short_side`: Resize(32), CenterCrop(24) of what is stored at 48, lying, standing or square."""
    larger = [photograph(96, 64), photograph(64, 96), photograph(90, 64), photograph(64, 64)]
    frames = torch.from_numpy(np.stack([read_image(p, 48, keep_aspect=True) for p in larger]))
    squares = torch.from_numpy(np.stack([read_image(p, 48) for p in larger]))
    widths, is_portrait = letterbox.read_header(frames)
    for stored in (frames, squares):
        found = CenterCrop(24, 32).apply(stored, {})
        assert found.shape == (4, 3, 24, 24)
        for i, result in enumerate(found):
            kept = stored[i, :, :, : widths[i]] if stored is frames else stored[i]
            kept = kept.transpose(1, 2) if stored is frames and is_portrait[i] else kept
            whole = Image.fromarray(kept.permute(1, 2, 0).contiguous().numpy())
            small = shrunk(whole)
            left, top = round((small.width - 24) / 2), round((small.height - 24) / 2)
            wanted = pixels(small.crop((left, top, left + 24, top + 24)))
            assert (result.int() - wanted.int()).abs().max() <= 2  # a picture that lies is resized down before across
    assert torch.equal(CenterCrop(24, 48).apply(frames, {}), CenterCrop(24).apply(frames, {}))
    with raises(ConfigError, 40, "48 x 73"):
        CenterCrop(40, 32).apply(frames, {})


def test_stored_is_the_side_of_what_is_kept_and_size_of_what_is_seen(tree, tmp_path, monkeypatch):
    monkeypatch.setenv("EFCIL_CACHE", str(tmp_path / "cache"))
    larger = load("folder", tree, FolderOptions(short_side=16, train_short_side=24, keep_aspect=True))
    assert larger.train.images.shape == (6, 3, 24, 37)
    assert larger.short == 16
    assert load("folder", tree, FolderOptions(short_side=16, train_short_side=16, keep_aspect=True)).short is None
    assert load("folder", tree, FolderOptions(short_side=16)).short is None
    with raises(ConfigError, "data.train_short_side=12", "data.short_side=16"):
        load("folder", tree, FolderOptions(short_side=16, train_short_side=12))


@pytest.mark.parametrize("setting", ["augment=crop-flip", "crop=null"])
def test_stored_is_refused_where_nothing_is_cropped_at_random(run, setting):
    code, said, seen = run("dpcr", setting, "data.train_short_side=30")
    assert code == 2
    assert_names(said, "data.train_short_side")
    assert seen is None


def test_centers_are_cut_at_the_size_that_is_seen_wherever_features_are_taken(run, monkeypatch):
    """Of a task's own images and of test images; ADC's too, which change pixels."""
    seen = []

    class Counting(CenterCrop):
        def apply(self, images, parameters):
            seen.append((images.shape[2], self.size, self.short))
            return super().apply(images, parameters)

    monkeypatch.setattr("efcil.training.image_batches.CenterCrop", Counting)
    code, said, _ = run("adc", "data.train_short_side=30")
    assert code == 0, said
    assert set(seen) == {(30, 16, 24)}
    by_whom = len(seen)
    seen.clear()
    run("dpcr", "data.train_short_side=30")
    assert set(seen) == {(30, 16, 24)}
    assert len(seen) < by_whom
