"""Features are computed once, whoever asks; what is damaged, gone or does not fit is computed again, in one line."""

import errno
import os

import numpy as np
import pytest
import torch
from torch import nn

from efcil.accel.backend import Backend
from efcil.data.dataset import DataSet, ImageSet
from efcil.experiment.api import compare
from efcil.tensor_files import save_tensors
from efcil.training import feature_cache
from efcil.training.extraction import extract
from efcil.training.feature_cache import FeatureCache
from efcil.training.image_batches import ImageBatches
from efcil.training.image_store import on_demand

SIDE = 8
MOMENTS = ((0.5, 0.4, 0.3), (0.2, 0.2, 0.3))


class Network(nn.Module):
    """Counts the images that it sees."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(3 * SIDE * SIDE, 5)
        self.seen = 0

    def forward(self, images):
        self.seen += len(images)
        return self.layer(images.flatten(1))


@pytest.fixture
def notes():
    return []


@pytest.fixture
def backend(notes):
    return Backend(torch.device("cpu"), note=notes.append)


@pytest.fixture
def pictures():
    return np.random.default_rng(0).integers(0, 256, (20, 3, SIDE, SIDE), dtype=np.uint8)


def batches(backend, pictures, moments=MOMENTS):
    return ImageBatches(torch.from_numpy(pictures), *moments, backend)


def files(folder):
    return sorted(folder.rglob("*.safetensors"))


def test_features_are_those_of_the_network_and_computed_once(tmp_path, backend, pictures, notes):
    first, later, other = Network(), Network(), np.random.default_rng(1).permutation(20)
    wanted = extract(Network(), batches(backend, pictures), backend)
    assert torch.equal(FeatureCache(first, backend, None, tmp_path).features(batches(backend, pictures)), wanted)
    again = FeatureCache(later, backend, None, tmp_path)
    assert torch.equal(again.features(batches(backend, pictures[other])), wanted[other])
    lazy = ImageBatches(on_demand(pictures[3:9], backend.device), *MOMENTS, backend)
    assert torch.equal(again.features(lazy), wanted[3:9])
    assert (first.seen, later.seen, notes) == (20, 0, [])


def test_an_image_that_is_there_twice_is_computed_once(tmp_path, backend, pictures):
    network = Network()
    doubled = np.concatenate([pictures[:3], pictures[:3], pictures[2:4]])
    found = FeatureCache(network, backend, None, tmp_path).features(batches(backend, doubled))
    assert network.seen == 4
    assert torch.equal(found[:3], found[3:6])


@pytest.mark.parametrize("change", ["weights", "mean", "std", "crop", "pixel", "precision"])
def test_whatever_features_depend_on_is_in_the_key(tmp_path, backend, pictures, change, notes):
    FeatureCache(Network(), backend, None, tmp_path).features(batches(backend, pictures))
    network = Network(seed=int(change == "weights"))
    if change == "precision":
        backend = Backend(torch.device("cpu"), "bf16", note=notes.append)
    moments = {"mean": ((0.5, 0.4, 0.2), MOMENTS[1]), "std": (MOMENTS[0], (0.2, 0.3, 0.3))}.get(change, MOMENTS)
    crop = SIDE if change == "crop" else None
    if change == "pixel":
        pictures[:, 2, 7, 7] ^= 1
    FeatureCache(network, backend, crop, tmp_path).features(batches(backend, pictures, moments))
    assert network.seen == 20


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "another kind"])
def test_what_is_damaged_is_computed_again(tmp_path, backend, pictures, damage, notes):
    wanted = FeatureCache(Network(), backend, None, tmp_path).features(batches(backend, pictures))
    (file,) = files(tmp_path)
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    if damage == "another kind":
        save_tensors(file, {"features": torch.ones(2)}, {})
    else:
        file.write_bytes({"truncated": content[: len(content) // 2], "flipped": content, "empty": b""}[damage])
    network = Network()
    found = FeatureCache(network, backend, None, tmp_path).features(batches(backend, pictures))
    assert torch.equal(found, wanted)
    assert network.seen == 20
    assert len(notes) == 1
    assert "computed again" in notes[0]
    assert "\n" not in notes[0]
    last = Network()
    FeatureCache(last, backend, None, tmp_path).features(batches(backend, pictures))
    assert last.seen == 0


def test_a_full_disk_is_said_once_and_changes_nothing(tmp_path, backend, pictures, notes, monkeypatch):
    def full(path, tensors, meta):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(feature_cache, "save_tensors", full)
    network = Network()
    cache = FeatureCache(network, backend, None, tmp_path)
    wanted = extract(Network(), batches(backend, pictures), backend)
    for _ in range(2):
        assert torch.equal(cache.features(batches(backend, pictures)), wanted)
    assert torch.equal(
        cache.features(batches(backend, ~pictures[:4])), extract(network, batches(backend, ~pictures[:4]), backend)
    )
    assert len(notes) == 1
    for word in ("No space left", "EFCIL_CACHE", str(tmp_path)):
        assert word in notes[0]
    assert not files(tmp_path)


def test_a_place_that_cannot_be_written_is_said_once(tmp_path, backend, pictures, notes):
    (tmp_path / "features").write_text("a file")
    found = FeatureCache(Network(), backend, None, tmp_path).features(batches(backend, pictures))
    assert found.shape == (20, 5)
    assert len(notes) == 1


def test_the_cache_stays_within_its_limit_and_keeps_what_was_used_last(tmp_path, backend, pictures, monkeypatch):
    FeatureCache(Network(1), backend, None, tmp_path).features(batches(backend, pictures))
    size = files(tmp_path)[0].stat().st_size
    monkeypatch.setattr(feature_cache, "LIMIT", int(2.5 * size))
    for step, seed in enumerate((2, 1, 3)):  # the first one is used again before the third comes
        FeatureCache(Network(seed), backend, None, tmp_path).features(batches(backend, pictures))
        assert sum(file.stat().st_size for file in files(tmp_path)) <= 2.5 * size
        used = max(files(tmp_path), key=lambda file: file.stat().st_mtime_ns)
        os.utime(used, ns=(0, 10**18 + step * 10**9))  # clocks of file systems are coarse
    seen = []
    for seed in (1, 3, 2):
        network = Network(seed)
        FeatureCache(network, backend, None, tmp_path).features(batches(backend, pictures))
        seen.append(network.seen)
    assert seen == [0, 0, 20]


def test_what_was_computed_before_an_interruption_is_kept(tmp_path, backend, pictures, monkeypatch):
    monkeypatch.setattr(feature_cache, "PART", 8)
    monkeypatch.setattr(feature_cache, "CHUNK_BYTES", 4 * 3 * SIDE * SIDE)

    def stop(done, total):
        if done >= 14:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FeatureCache(Network(), backend, None, tmp_path).features(batches(backend, pictures), stop)
    network, steps = Network(), []
    cache = FeatureCache(network, backend, None, tmp_path)
    cache.features(batches(backend, pictures), lambda done, total: steps.append((done, total)))
    assert network.seen == 20 - 16
    assert steps == [(4, 20), (8, 20), (12, 20), (16, 20), (20, 20)]


def test_a_second_comparison_runs_no_image_through_the_network(tmp_path, monkeypatch):
    monkeypatch.setenv("EFCIL_CACHE", str(tmp_path))
    draw = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 12)
    pictures = np.clip(40 * labels[:, None, None, None] + draw.integers(0, 99, (48, 3, SIDE, SIDE)), 0, 255)
    images = pictures.astype(np.uint8)
    data = DataSet(
        "blots", tuple("abcd"), ImageSet(images[::2], labels[::2]), ImageSet(images[1::2], labels[1::2]), *MOMENTS
    )
    seen = []

    class Counting(Network):
        def forward(self, images):
            if len(images) > 2:  # a module is tried on two images
                seen.append(len(images))
            return super().forward(images)

    def run(order):
        options = {"backbone": Counting()}
        methods = ["slda", "simplecil", "dpcr"]
        return compare(
            methods,
            (data.train, data.test),
            orders=[order],
            tasks=2,
            options=options,
            learner="pretrained",
            progress=False,
        )

    first = run("identity")
    assert sum(seen) == 48
    second = run(7)
    assert sum(seen) == 48
    assert first["slda"].final_accuracy > 40
    assert second["slda"].final_accuracy == pytest.approx(first["slda"].final_accuracy)
