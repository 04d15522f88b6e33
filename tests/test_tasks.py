"""Class orders, increments and the stream of tasks."""

import numpy as np
import pytest

from efcil.data.dataset import DataSet, ImageSet
from efcil.errors import ConfigError, DataError
from efcil.tasks import TaskStream, class_order, task_sizes
from messages import raises

NAMES = [f"class{i}" for i in range(6)]


def image_set(counts):
    """One image per entry; its pixels hold its label, so that a mix-up shows."""
    labels = np.repeat(np.arange(len(counts)), counts)
    rng = np.random.default_rng(0)
    labels = rng.permutation(labels)
    images = np.broadcast_to(labels[:, None, None, None], (len(labels), 1, 2, 2)).astype(np.uint8)
    return ImageSet(np.ascontiguousarray(images), labels.astype(np.int64))


def test_order_is_numpys_seeded_permutation():
    state = np.random.RandomState(1992)
    assert class_order(1992, [str(i) for i in range(200)]).tolist() == state.permutation(200).tolist()
    assert class_order("1993", [str(i) for i in range(100)])[:5].tolist() == [68, 56, 78, 8, 23]
    assert class_order("identity", NAMES).tolist() == list(range(6))


def test_order_from_file_of_names_or_labels(tmp_path):
    path = tmp_path / "order.txt"
    path.write_text("class5\n4\n\nclass3\nclass2\n1\n0\n")
    assert class_order(str(path), NAMES).tolist() == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("text", "named"),
    [("class9\n", ("'class9'", 6)), ("0\n0\n1\n2\n3\n4\n", (5, 6))],
)
def test_bad_order_file(tmp_path, text, named):
    path = tmp_path / "order.txt"
    path.write_text(text)
    with raises(ConfigError, path, *named):
        class_order(str(path), NAMES)


def test_unknown_order():
    with raises(ConfigError, "'nowhere'", "'identity'"):
        class_order("nowhere", NAMES)
    for name in ("order.txt " + "9" * 5000, "a/" * 3000, "order\0.txt"):  # before: an OSError of the system
        with raises(ConfigError, "'identity'") as caught:
            class_order(name, NAMES)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"tasks": 5}, (20,) * 5),
        ({"tasks": 3, "allow_uneven": True}, (34, 33, 33)),
        ({"init_cls": 50, "increment": 10}, (50, 10, 10, 10, 10, 10)),
        ({"init_cls": 10, "increment": 40}, (10, 40, 40, 10)),
        ({"increment": 30}, (30, 30, 30, 10)),
        ({"init_cls": 40, "increment": [30, 20]}, (40, 30, 20, 10)),
        ({"increment": [99, 1]}, (99, 1)),
        ({"init_cls": 100}, (100,)),
    ],
)
def test_sizes(options, sizes):
    assert task_sizes(100, **options) == sizes


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tasks": 7}, ("--tasks 7", 100, 4, 5, 10, "--allow-uneven", "--init-cls")),
        ({"tasks": 0}, ("--tasks 0", 1, 100)),
        ({"tasks": 101}, ("--tasks 101", 1, 100)),
        ({}, ("--tasks", "--init-cls", "--increment")),
        ({"tasks": 5, "increment": 5}, ("--tasks", "--init-cls", "--increment")),
        ({"init_cls": 101, "increment": 1}, ("--init-cls 101", 100)),
        ({"init_cls": 0, "increment": 5}, ("--init-cls 0", "--increment 5")),
        ({"increment": [50, 0]}, ("--increment 50,0",)),
        ({"increment": [50, 51]}, (50, 51, 101, 100)),
    ],
)
def test_impossible_sizes(options, named):
    with raises(ConfigError, *named):
        task_sizes(100, **options)


def test_stream_remaps_labels_and_keeps_uneven_counts():
    train = image_set([3, 1, 4, 1, 5, 9])
    order = np.array([4, 2, 0, 5, 1, 3])
    stream = TaskStream(train, order, (2, 3, 1))
    assert len(stream) == 3
    assert stream.ends == [2, 5, 6]
    seen = []
    for task in stream:
        assert np.array_equal(task.images[:, 0, 0, 0], order[task.labels]), "an image went to another class"
        assert sorted(set(task.labels.tolist())) == list(task.classes)
        seen.append(len(task))
    assert seen == [5 + 4, 3 + 9 + 1, 1]
    assert stream.task_of_class().tolist() == [0, 0, 1, 1, 1, 2]
    assert stream.upto(1).seen == 5
    assert len(stream.upto(1)) == 22
    assert list(stream.upto(1).classes) == [2, 3, 4]
    with pytest.raises(IndexError):
        stream[3]
    assert [task.index for task in stream[1:]] == [1, 2]
    assert stream[-1].index == 2


def test_closed_task_gives_nothing():
    task = TaskStream(image_set([2, 2]), np.array([0, 1]), (1, 1))[0]
    task.close()
    assert len(task) == 2
    for name in ("images", "labels"):
        with raises(DataError, "task 1"):
            getattr(task, name)


def test_task_has_no_test_data():
    data = DataSet("tiny", ("a", "b"), image_set([2, 2]), image_set([1, 1]), (0.5,), (0.5,))
    task = TaskStream(data.train, np.array([0, 1]), (1, 1))[0]
    reachable = [value for value in vars(task).values() if isinstance(value, ImageSet)]
    assert len(reachable) == 1
    assert not np.shares_memory(reachable[0].images, data.test.images)
    assert not hasattr(TaskStream, "test")


def test_data_set_refuses_empty_class_and_wrong_shapes():
    full, hollow = image_set([2, 2]), image_set([2])
    with raises(DataError, "tiny", "b"):
        DataSet("tiny", ("a", "b"), full, hollow, (0.5,), (0.5,))
    with raises(DataError, "tiny", "b"):
        DataSet("tiny", ("a", "b"), hollow, full, (0.5,), (0.5,))
    with raises(DataError, 1):
        DataSet("tiny", ("a",), full, hollow, (0.5,), (0.5,))
    with raises(DataError, 4, 3):
        ImageSet(full.images, full.labels[:3])
    with raises(DataError, "uint8", "float32", (4, 1, 2, 2)):
        ImageSet(full.images.astype(np.float32), full.labels)


def test_fingerprint_tells_data_apart():
    def data(names=("a", "b"), first_pixel=0, swapped=False):
        part = image_set([2, 2])
        images = part.images.copy()
        images[0, 0, 0, 0] = first_pixel
        labels = 1 - part.labels if swapped else part.labels
        return DataSet("tiny", names, ImageSet(images, labels), part, (0.5,), (0.5,)).fingerprint()

    assert data() == data()
    assert len({data(), data(names=("a", "c")), data(first_pixel=9), data(swapped=True)}) == 4
