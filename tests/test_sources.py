"""Data sets of every source: the same pixels and labels whatever holds them, and one line for what cannot be used."""

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from efcil.data import digits
from efcil.data.sources import as_dataset
from efcil.errors import ConfigError, DataError
from efcil.tasks import TaskStream
from messages import raises

PIXELS = np.random.default_rng(0).integers(0, 256, (24, 6, 6, 3), dtype=np.uint8)  # (n, h, w, c)
LABELS = np.arange(24) % 4
NAMES = ["ant", "bee", "cat", "dog"]
STORED = PIXELS.transpose(0, 3, 1, 2)


class Items(Dataset):
    """A data set of one's own: `image` makes each of the pixels what it holds."""

    def __init__(self, image, labels=LABELS):
        self.image, self.labels, self.reads = image, labels, 0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, place):
        self.reads += 1
        return self.image(PIXELS[place]), self.labels[place]


class Torchvision(Dataset):
    """As torchvision's CIFAR: arrays behind a transform."""

    classes = NAMES

    def __init__(self, transform=lambda image: image, labels=LABELS):
        self.data, self.targets, self.transform, self.reads = PIXELS, labels.tolist(), transform, 0

    def __len__(self):
        return len(self.data)

    def __getitem__(self, place):
        self.reads += 1
        return self.transform(Image.fromarray(self.data[place])), self.targets[place]


class Feature:
    """Of a column of `Table`."""

    def __init__(self, names=None):
        self.names = names


class Table:
    """As a Hugging Face data set: columns, some of them of other things."""

    def __init__(self, image="img", label="fine_label"):
        self.features = {image: Feature(), "coarse_label": Feature(["all"]), label: Feature(NAMES)}
        self.image, self.label = image, label

    @property
    def column_names(self):
        return list(self.features)

    def select_columns(self, columns):
        assert set(columns) == {self.image, self.label}
        return self

    def __len__(self):
        return len(PIXELS)

    def __getitem__(self, place):
        return {self.image: Image.fromarray(PIXELS[place]), self.label: int(LABELS[place])}


def as_tensor(pixels):
    """What torchvision's ToTensor makes of an image."""
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1) / 255


def arrays(images=PIXELS, labels=LABELS):
    return images, labels


class Row(dict):
    """An item with names."""


SOURCES = {
    "arrays": arrays(),
    "channels first": arrays(np.ascontiguousarray(STORED)),
    "floating point": arrays(PIXELS / 255),
    "tensors": (torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255, torch.from_numpy(LABELS)),
    "pictures": ([Image.fromarray(p) for p in PIXELS], LABELS.tolist()),
    "tensor data set": TensorDataset(torch.from_numpy(STORED), torch.from_numpy(LABELS)),
    "items of pictures": Items(Image.fromarray),
    "items of arrays": Items(lambda pixels: pixels),
    "items of tensors": Items(as_tensor),
    "torchvision": Torchvision(),
    "torchvision to tensors": Torchvision(as_tensor),
    "hugging face": Table(),
    "subset": Subset(Torchvision(), range(24)),
    "concatenated": ConcatDataset([Subset(Torchvision(), range(10)), Subset(Torchvision(), range(10, 24))]),
    "list": [(Image.fromarray(p), int(label)) for p, label in zip(PIXELS, LABELS, strict=True)],
    "mappings": [{"image": p, "label": int(label)} for p, label in zip(PIXELS, LABELS, strict=True)],
}
NAMED = ("torchvision", "torchvision to tensors", "hugging face", "subset", "concatenated")


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_gives_the_same_pixels_and_labels(kind):
    data = as_dataset(SOURCES[kind], arrays())
    assert data.train.images.dtype == np.uint8
    assert np.array_equal(data.train.images, STORED)
    assert np.array_equal(data.train.labels, LABELS)
    assert data.class_names == (tuple(NAMES) if kind in NAMED else ("0", "1", "2", "3"))
    other = as_dataset(arrays(), SOURCES[kind])
    assert np.array_equal(other.test.images, STORED)
    assert np.array_equal(other.test.labels, LABELS)
    np.testing.assert_allclose(data.mean, STORED.mean((0, 2, 3)) / 255)
    np.testing.assert_allclose(data.std, STORED.std((0, 2, 3)) / 255)


def test_a_generator_of_items_is_read_to_its_end():
    items = ((pixels, NAMES[label]) for pixels, label in zip(PIXELS, LABELS, strict=True))
    data = as_dataset(items, arrays(labels=[NAMES[label] for label in LABELS]))
    assert np.array_equal(data.train.images, STORED)
    assert data.class_names == tuple(NAMES)


def test_stored_arrays_are_taken_only_where_the_items_are_the_same():
    plain, flipped = Torchvision(), Torchvision(lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    assert np.array_equal(as_dataset(plain, arrays()).train.images, STORED)
    assert plain.reads < 10, "three items tell that the array will do"
    assert np.array_equal(as_dataset(flipped, arrays()).train.images, STORED[..., ::-1])
    relabeled = Torchvision()
    relabeled.__class__ = type("Relabeled", (Torchvision,), {"__getitem__": lambda self, i: (PIXELS[i], 3 - LABELS[i])})
    assert np.array_equal(as_dataset(relabeled, arrays()).train.labels, 3 - LABELS)


def test_a_mapping_has_both_parts():
    for key in ("test", "validation"):
        data = as_dataset({"train": Table(), key: Table()})
        assert (len(data.train), len(data.test)) == (24, 24)
    with raises(DataError, "test", "train", "unsupervised"):
        as_dataset({"train": Table(), "unsupervised": Table()})
    with raises(DataError, "test"):
        as_dataset({"train": Table(), "test": Table()}, Table())


def test_names_of_data_sets():
    data = as_dataset("digits")
    assert data.fingerprint() == digits.load().fingerprint()
    assert as_dataset("Digits").fingerprint() == data.fingerprint(), "as on the command line"
    assert as_dataset(data) is data
    glyphs = as_dataset(
        "glyphs", size=10, options={"classes": 3, "train_per_class": 2, "test_per_class": 1}, name="mine"
    )
    assert (glyphs.name, glyphs.size, len(glyphs.class_names)) == ("mine", 10, 3)
    for args, more, named in [
        (("digit",), {}, ("digit", "'digits'")),
        (("digits", "digits"), {}, ("digits", "test")),
        (("digits",), {"size": 4}, ("size=4", "digits")),
        (("glyphs",), {"options": {"clases": 3}}, ("glyphs", "'classes'")),
        (("cifar100",), {}, ("cifar100", "directory=...")),
        ((data, data), {}, ("digits", "test")),
        ((arrays(), arrays()), {"directory": "."}, ("directory", "tuple")),
        ((pandas.DataFrame({"label": [1]}),) * 2, {}, ("DataFrame", "(images, labels)")),
    ]:
        with raises((ConfigError, DataError), *named):
            as_dataset(*args, **more)


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """Two folders of class folders beside each other."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for part, share in (("teach", range(16)), ("check", range(16, 24))):
        for place in share:
            folder = tmp_path / "pictures" / part / NAMES[LABELS[place]]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(PIXELS[place]).save(folder / f"{place:02d}.png")
    return tmp_path / "pictures"


def test_folders(pictures):
    data = as_dataset(pictures / "teach", str(pictures / "check"), size=8)
    assert data.class_names == tuple(NAMES)
    assert (len(data.train), len(data.test), data.size) == (16, 8, 8)
    alone = as_dataset(pictures / "teach", size=8, name="insects")
    assert (alone.name, len(alone.train) + len(alone.test)) == ("insects", 16)
    with raises(DataError, pictures / "nothing"):
        as_dataset(pictures / "teach", pictures / "nothing")
    with raises(DataError, pictures):
        as_dataset(pictures, pictures / "check")
    with raises(DataError, "tuple"):
        as_dataset(pictures / "teach", arrays())
    with raises(DataError, "tuple"):
        as_dataset(arrays(), pictures / "teach")


def test_pictures_of_any_shape_become_squares_of_a_size():
    def odd(pixels):
        image = Image.fromarray(pixels)
        gray = int(pixels[0, 0, 0]) % 2 == 0
        return image.resize((9, 7)).convert("L") if gray else image

    data = as_dataset(Items(odd), arrays(), size=5)
    assert data.train.images.shape == data.test.images.shape == (24, 3, 5, 5)
    assert len({odd(p).mode for p in PIXELS}) == 2
    gray = as_dataset(Items(lambda pixels: Image.fromarray(pixels).convert("L")), arrays(PIXELS[..., 0]), size=6)
    assert gray.channels == 1
    mixed = as_dataset(arrays(), arrays(PIXELS[..., 0]), size=6)
    assert mixed.test.images.shape == (24, 3, 6, 6)


def test_classes_are_those_of_the_training_images():
    few = LABELS[LABELS != 1], LABELS != 1
    data = as_dataset(arrays(PIXELS[few[1]], few[0]), arrays(PIXELS[few[1]], few[0]), class_names=NAMES)
    assert data.class_names == ("ant", "cat", "dog")
    assert data.train.labels.max() == 2
    numbers = as_dataset(arrays(labels=LABELS * 10), arrays(labels=LABELS * 10))
    assert numbers.class_names == ("0", "10", "20", "30")
    texts = [f"c{label * 5}" for label in LABELS]
    assert as_dataset(arrays(labels=texts), arrays(labels=np.array(texts))).class_names == ("c0", "c5", "c10", "c15")


def test_labels_of_two_parts_are_matched_by_name():
    """Folders of classes may differ, and with them what a label means."""
    test = Torchvision(labels=3 - LABELS)
    test.classes = NAMES[::-1]
    data = as_dataset(Torchvision(), test)
    assert np.array_equal(data.test.labels, LABELS)


def different():
    return Items(lambda p: p + np.random.default_rng().integers(0, 9, p.shape, dtype=np.uint8))


@pytest.mark.parametrize(
    ("train", "test", "named"),
    [
        (arrays(labels=LABELS + 0.5), arrays(), ("training", "float64", "integers")),
        (Items(Image.fromarray, LABELS + 0.5), arrays(), ("training label 0", 0.5, "integers")),
        (arrays(labels=[None] * 24), arrays(), ("training label 0", "None", "integers")),
        (arrays(labels=[True] * 24), arrays(), ("training label 0", "True")),
        (arrays(labels=LABELS - 1), arrays(), ("training label 0", -1)),
        (arrays(labels=["a", *LABELS[1:]]), arrays(), (23, 1)),
        (arrays(labels=np.eye(4)[LABELS]), arrays(), ((24, 4),)),
        (arrays(labels=NAMES * 6), arrays(), ("training labels", "test labels")),
        (arrays(labels=LABELS[:3]), arrays(), (24, 3)),
        (arrays(), arrays(labels=LABELS + 1), ("test", 4)),
        (Torchvision(), arrays(labels=LABELS + 1), (4, "ant")),
        (arrays(PIXELS[:4]), arrays(PIXELS[:3], LABELS[:3]), ()),
        (arrays(PIXELS[:4], LABELS[:4]), arrays(PIXELS[:3], LABELS[:3]), ("class 3",)),
        (arrays(PIXELS[:0], LABELS[:0]), arrays(), ("training",)),
        (arrays(), Items(Image.fromarray, LABELS[:0]), ("test",)),
        (arrays(PIXELS / 127.5 - 1), arrays(), ("training", "float64", -1, 1, "0 to 1")),
        (arrays(), Items(lambda pixels: as_tensor(pixels) * 2), ("test image 0", "float32", "0 to 1")),
        (arrays(PIXELS.astype(np.int64)), arrays(), ("int64", "uint8")),
        (arrays(np.full(PIXELS.shape, np.nan)), arrays(), ("NaN",)),
        (arrays(PIXELS[:, :, :4]), arrays(), ("3 x 6 x 4", "size=4")),
        (arrays(PIXELS[..., :2]), arrays(), ((24, 6, 6, 2),)),
        (arrays(PIXELS[0]), arrays(), ()),
        (Items(lambda p: Image.fromarray(p).resize((int(p[0, 0, 0]) % 3 + 6,) * 2)), arrays(), ("size=",)),
        (Items(lambda p: p if p[0, 0, 0] % 2 else p[..., 0]), arrays(), ("3 x 6 x 6", "1 x 6 x 6", "size=6")),
        (arrays(), arrays(PIXELS[..., 0]), ("3 x 6 x 6", "1 x 6 x 6", "size=6")),
        (arrays(), arrays(PIXELS[:, :4, :4]), ("3 x 6 x 6", "3 x 4 x 4", "size=6")),
        (different(), arrays(), ("training image 0", "augment=...")),
        (DataLoader(Items(as_tensor)), arrays(), ("DataLoader", ".dataset")),
        (PIXELS, arrays(), ("ndarray", "(images, labels)")),
        (7, arrays(), ("int",)),
        (arrays(), None, ("test",)),
        ([PIXELS[0]] * 3, arrays(), ("training item 0", "ndarray", "(image, label)")),
        ([("a", 0), ("b", 1), ("c", 2)], arrays(), ("training image 0", "str")),
        (Table(image="foo"), arrays(), ("foo", "'image'")),
        (Table(label="foo"), arrays(), ("foo", "'label'")),
    ],
)
def test_what_cannot_be_learned_from_is_one_line(train, test, named):
    with raises(DataError, *named):
        as_dataset(train, test)


def test_class_names_of_ones_own_are_checked():
    assert as_dataset(arrays(), arrays(), class_names=NAMES).class_names == tuple(NAMES)
    with raises(DataError, 3, 3):
        as_dataset(arrays(), arrays(), class_names=NAMES[:3])
    with raises(DataError, "ant"):
        as_dataset(arrays(), arrays(), class_names=["ant", *NAMES[:3]])
    with raises(ConfigError, "size=0"):
        as_dataset(arrays(), arrays(), size=0)


def test_progress_is_reported_image_by_image():
    told = []
    as_dataset(Items(Image.fromarray), arrays(), progress=lambda done, total: told.append((done, total)))
    assert told == [(done, 24) for done in range(1, 25)]


# --- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_of_any_source():
    stream = TaskStream.from_dataset(Torchvision(), Table(), tasks=2, order=["dog", "ant", "cat", "bee"])
    assert stream.sizes == (2, 2)
    assert stream.class_names == ("dog", "ant", "cat", "bee")
    first = stream[0]
    assert np.array_equal(first.images, STORED[(LABELS == 3) | (LABELS == 0)])
    assert {stream.class_names[label] for label in first.labels} == {"ant", "dog"}
    assert stream.dataset is not None
    assert len(stream.dataset.test) == 24
    assert "torchvision: 4 classes in 2 tasks of 2, 24 training and 24 test images of 3 x 6 x 6" in repr(stream)


def test_splits_are_those_of_the_command_line():
    assert TaskStream.from_dataset("digits").sizes == (2,) * 5
    assert TaskStream.from_dataset("digits", init_cls=4, increment=3).sizes == (4, 3, 3)
    assert TaskStream.from_dataset("digits", increment=[5, 5]).sizes == (5, 5)
    assert TaskStream.from_dataset("digits", tasks=3, allow_uneven=True).sizes == (4, 3, 3)
    for options, named in [
        ({"tasks": 3}, ("tasks=3", "allow_uneven", "init_cls", "increment")),
        ({"tasks": 2, "increment": 5}, ("tasks", "init_cls")),
    ]:
        with raises(ConfigError, *named) as caught:
            TaskStream.from_dataset("digits", **options)
        assert "--" not in str(caught.value)


@pytest.mark.parametrize(
    "order", [[3, 1, 0, 2], np.array([3, 1, 0, 2]), ("dog", "bee", "ant", "cat"), ["dog", 1, "ant", 2]]
)
def test_an_order_may_be_listed(order):
    stream = TaskStream.from_dataset(Torchvision(), Torchvision(), tasks=4, order=order)
    assert stream.order.tolist() == [3, 1, 0, 2]


def test_seeds_are_those_of_the_command_line():
    stream = TaskStream.from_dataset("digits", order=1993)
    assert stream.order.tolist() == np.random.RandomState(1993).permutation(10).tolist()


@pytest.mark.parametrize(
    ("order", "named"),
    [
        ([0, 1, 2], (3, 4, "missing: dog")),
        ([0, 1, 2, 2], (3, 4, "missing: dog")),
        ([0, 1, 2, 3, 3], (4, 5)),
        ([0, 1, 2, 4], ("'4'", 4)),
        (["ant", "bee", "cat", "wasp"], ("'wasp'", 4)),
        ([], (0, 4)),
    ],
)
def test_an_order_that_is_none_is_one_line(order, named):
    with raises(ConfigError, "class order", *named):
        TaskStream.from_dataset(Torchvision(), Torchvision(), tasks=2, order=order)
