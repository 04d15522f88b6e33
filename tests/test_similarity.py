"""Orders by similarity: groups that are known are found, and runs take them by name."""

import hashlib
import itertools
import json

import numpy as np
import pytest
import torch
import yaml

import efcil
from efcil.data import glyphs
from efcil.data.dataset import DataSet, ImageSet
from efcil.errors import ConfigError
from efcil.similarity import class_similarity, grouped_order, similarity_order
from efcil.tasks import TaskStream, class_order, order_of
from messages import raises


def within(similarity, order, sizes):
    """The sum of the similarities of classes that share a task."""
    tasks = np.split(order, np.cumsum(sizes)[:-1])
    return sum(similarity[a, b] for task in tasks for a, b in itertools.combinations(task.tolist(), 2))


def kin(families, seed=0, noise=0.3):
    """Similarities of classes of the same family, high, and of others, low."""
    draw = np.random.default_rng(seed)
    same = families[:, None] == families[None]
    found = same + noise * draw.uniform(-1, 1, same.shape)
    return (found + found.T) / 2


@pytest.mark.parametrize("seed", range(4))
def test_families_share_a_task_or_none(seed):
    families = np.random.default_rng(seed).permutation(np.repeat(np.arange(5), 4))
    hard = grouped_order(kin(families, seed), (4,) * 5, alike=True)
    assert sorted(hard.tolist()) == list(range(20))
    assert all(len({*task}) == 1 for task in families[hard].reshape(5, 4))
    easy = grouped_order(kin(families, seed), (5,) * 4, alike=False)
    assert all(len({*task}) == 5 for task in families[easy].reshape(4, 5))


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (5, 1, 2), (1, 7), (3, 3, 2)])
@pytest.mark.parametrize("alike", [True, False])
def test_no_swap_of_two_classes_is_better(sizes, alike):
    """Whatever the similarities and the sizes of the tasks; classes of a task are in order of their labels."""
    for seed in range(5):
        similarity = kin(np.zeros(8), seed, noise=1.0)
        order = grouped_order(similarity, sizes, alike)
        found = within(similarity, order, sizes)
        for one, other in itertools.combinations(range(8), 2):
            swapped = order.copy()
            swapped[[one, other]] = swapped[[other, one]]
            change = within(similarity, swapped, sizes) - found
            assert change <= 1e-9 if alike else change >= -1e-9
        for task in np.split(order, np.cumsum(sizes)[:-1]):
            assert task.tolist() == sorted(task.tolist())


def patterned():
    """Six classes of three patterns, each in two shades: stripes, checks, disks."""
    place = np.arange(32)
    down, across = np.meshgrid(place, place, indexing="ij")
    round_ = (down - 16) ** 2 + (across - 16) ** 2 < 100
    patterns = [across // 4 % 2, (down // 8 + across // 8) % 2, round_]
    draw = np.random.default_rng(0)
    images, labels = [], []
    for label, pattern in enumerate([patterns[i] for i in (0, 1, 2, 0, 1, 2)]):
        for _ in range(3):
            shade = 120 + 30 * (label // 3) + draw.integers(0, 10)
            images.append(np.broadcast_to(pattern * shade + 40, (3, 32, 32)))
            labels.append(label)
    return ImageSet(np.stack(images).astype(np.uint8), np.array(labels))


def test_classes_that_look_alike_are_found_in_the_training_images():
    train = patterned()
    similarity = class_similarity(train, 6)
    np.testing.assert_allclose(np.diag(similarity), 1, rtol=1e-6)
    np.testing.assert_allclose(similarity, similarity.T)
    assert similarity_order("hard", train, (2, 2, 2)).tolist() == [0, 3, 1, 4, 2, 5]
    easy = similarity_order("easy", train, (3, 3))
    assert [sorted(c % 3 for c in task) for task in easy.reshape(2, 3)] == [[0, 1, 2]] * 2
    state = torch.get_rng_state()
    assert np.array_equal(similarity_order("easy", train, (3, 3)), easy)
    assert torch.equal(torch.get_rng_state(), state)


def test_grey_and_letterboxed_images_have_similarities():
    grey = ImageSet(np.ascontiguousarray(patterned().images[:, :1, :8, :8]), patterned().labels)
    assert np.isfinite(class_similarity(grey, 6)).all()
    padded = np.zeros((len(grey), 3, 32, 49), np.uint8)
    padded[..., :32] = patterned().images
    padded[:, 0, 1, -1] = 0
    padded[:, 0, :2, -1] = 0, 32  # the header: 32 wide, upright
    np.testing.assert_allclose(class_similarity(ImageSet(padded, grey.labels), 6), class_similarity(patterned(), 6))


def test_test_images_have_no_part_in_it():
    train = patterned()
    names = tuple("abcdef")
    for images in (train.images, 255 - train.images):
        data = DataSet("patterns", names, train, ImageSet(images, train.labels), (0.5,) * 3, (0.5,) * 3)
        assert order_of("hard", data, (2, 2, 2)).tolist() == [0, 3, 1, 4, 2, 5]
        assert order_of(1993, data, (2, 2, 2)).tolist() == class_order(1993, names).tolist()


def test_tasks_of_one_class_have_no_such_order():
    with raises(ConfigError, "hard"):
        similarity_order("hard", patterned(), (1,) * 6)


def test_runs_and_streams_take_the_names(tmp_path):
    small = {"data.classes": 4, "data.size": 8, "data.train_per_class": 8, "data.test_per_class": 4}
    results = efcil.compare(
        ["lwf-ncm"], "glyphs", orders=["hard", "easy"], tasks=2, epochs=1, options=small, out=tmp_path, progress=False
    )
    summaries = [json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.rglob("summary.json")]
    assert sorted(summary["order"] for summary in summaries) == ["easy", "hard"]
    (config,) = (tmp_path / "order-hard").rglob("config.yaml")
    run = yaml.safe_load(config.read_text(encoding="utf-8"))["run"]
    data = glyphs.load(classes=4, size=8, train_per_class=8, test_per_class=4, seed=0)
    stream = TaskStream.from_dataset(data, tasks=2, order="hard")
    assert (run["order"], stream.order_name) == ("hard", "hard")
    assert run["class_order"] == hashlib.sha256(stream.order.tobytes()).hexdigest()[:16]
    assert [results["lwf-ncm", order].orders for order in ("hard", "easy")] == [("hard",), ("easy",)]
