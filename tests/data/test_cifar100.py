"""CIFAR-100 from small files of the official formats, as Python 2 and Python 3 write them, whole and broken."""

from __future__ import annotations

import io
import pickle
import random
import struct
import tracemalloc

import numpy as np
import pytest

from efcil.data import cifar100
from efcil.data.dataset import Official
from efcil.errors import DataError
from messages import assert_names, raises

NAMES = ["apple", "baby", "worm"]


def python2_string(raw: bytes) -> bytes:
    return b"U" + bytes([len(raw)]) + raw if len(raw) < 256 else b"T" + struct.pack("<i", len(raw)) + raw


def python2_array(array: np.ndarray, module: bytes = b"numpy.core.multiarray") -> bytes:
    """A two-dimensional uint8 array as Python 2 pickled it, opcode by opcode."""
    shape = b"".join(b"J" + struct.pack("<i", side) for side in array.shape)
    dtype = b"cnumpy\ndtype\n" + python2_string(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + python2_string(b"|") + b"NNN" + 2 * b"J\xff\xff\xff\xff" + b"K\x00tb"
    made = b"c" + module + b"\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + python2_string(b"b") + b"\x87R"
    return made + b"(K\x01" + shape + b"\x86" + dtype + b"\x89" + python2_string(array.tobytes()) + b"tb"


def python2_dict(**values: bytes) -> bytes:
    items = b"".join(python2_string(key.encode()) + value for key, value in values.items())
    return b"\x80\x02}(" + items + b"u."


def python2_list(items: list[bytes]) -> bytes:
    return b"](" + b"".join(items) + b"e"


def test_lengths_that_a_pickle_claims_take_no_memory(tmp_path):
    """Before: 13 bytes of `meta` took 6.4 GB. Every opcode with a length, and what the library does with it."""
    rng = random.Random(29)
    folder = write_python2(tmp_path / "cifar-100-python")
    forms = [(b"\x96", "<Q"), (b"\x8e", "<Q"), (b"\x8d", "<Q"), (b"\x95", "<Q"), (b"B", "<I"), (b"X", "<I")]
    forms += [(b"T", "<i"), (b"\x8b", "<i"), (b"r", "<I"), (b"j", "<I")]
    tracemalloc.start()
    try:
        for number in range(3 * len(forms)):
            opcode, form = forms[number % len(forms)]
            claim = opcode + struct.pack(form, rng.randrange(2**28, 2**30))
            (folder / "meta").write_bytes(b"\x80\x05" + claim + rng.randbytes(3) + b".")
            with pytest.raises(DataError):
                cifar100.load(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()


def make_images(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 3072), dtype=np.uint8), np.arange(count) % len(NAMES)


TRAIN, TEST = make_images(0, 9), make_images(1, 6)


def write_python2(folder, module=b"numpy.core.multiarray"):
    folder.mkdir(parents=True)
    for name, (data, labels) in {"train": TRAIN, "test": TEST}.items():
        content = python2_dict(
            batch_label=python2_string(name.encode()),
            data=python2_array(data, module),
            fine_labels=python2_list([b"K" + bytes([label]) for label in labels]),
            filenames=python2_list([python2_string(b"caf\xe9.png")]),  # not UTF-8, nor ASCII
        )
        (folder / name).write_bytes(content)
    meta = python2_dict(fine_label_names=python2_list([python2_string(name.encode()) for name in NAMES]))
    (folder / "meta").write_bytes(meta)
    return folder


def write_python3(folder, protocol, labels_as=list, key=str):
    folder.mkdir(parents=True, exist_ok=True)
    for name, (data, labels) in {"train": TRAIN, "test": TEST}.items():
        content = {"data": data, "fine_labels": labels_as(labels), "batch_label": b"part"}
        (folder / name).write_bytes(pickle.dumps({key(k): v for k, v in content.items()}, protocol))
    (folder / "meta").write_bytes(pickle.dumps({key("fine_label_names"): NAMES}, protocol))
    return folder


def write_binary(folder):
    folder.mkdir(parents=True)
    for name, (data, labels) in {"train": TRAIN, "test": TEST}.items():
        records = np.concatenate([np.full((len(data), 1), 7), labels[:, None], data], 1).astype(np.uint8)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    (folder / "fine_label_names.txt").write_text("\n".join(NAMES) + "\n\n")
    return folder


def check(data):
    assert data.class_names == tuple(NAMES)
    for part, (pixels, labels) in ((data.train, TRAIN), (data.test, TEST)):
        np.testing.assert_array_equal(part.images, pixels.reshape(-1, 3, 32, 32))
        np.testing.assert_array_equal(part.labels, labels)
        assert part.images.flags.c_contiguous
        assert part.images.flags.writeable  # torch.from_numpy warns otherwise
        assert part.labels.dtype == np.int64
    assert data.mean == (0.5071, 0.4867, 0.4408)
    assert data.std == (0.2675, 0.2565, 0.2761)


@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_files_of_python_2(tmp_path, module):
    folder = write_python2(tmp_path / "cifar-100-python", module)
    check(cifar100.load(tmp_path))
    check(cifar100.load(str(folder)))


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("labels_as", [list, np.ndarray.tolist, np.array], ids=["scalars", "ints", "array"])
def test_files_of_python_3(tmp_path, protocol, labels_as):
    write_python3(tmp_path / "cifar-100-python", protocol, labels_as)
    check(cifar100.load(tmp_path))


def test_keys_of_bytes_fortran_order_and_big_endian_labels(tmp_path):
    def big_endian(labels):
        return labels.astype(">i4")

    folder = write_python3(tmp_path / "cifar-100-python", 4, big_endian, key=str.encode)
    content = {b"data": np.asfortranarray(TRAIN[0]), b"fine_labels": big_endian(TRAIN[1])}
    (folder / "train").write_bytes(pickle.dumps(content, 2))
    check(cifar100.load(tmp_path))


def test_binary_edition(tmp_path):
    folder = write_binary(tmp_path / "cifar-100-binary")
    check(cifar100.load(tmp_path))
    check(cifar100.load(folder))


def test_a_copy_that_is_not_the_official_one_is_noted(tmp_path, monkeypatch):
    folder = write_python2(tmp_path / "cifar-100-python")
    notes = cifar100.load(tmp_path).notes
    assert notes[0] == f"{folder}: train, test, meta differ from the official files (md5), but can be read"
    assert notes[1:] == (
        f"{folder}: 9 train images, the official set has 50,000",
        f"{folder}: 6 test images, the official set has 10,000",
    )
    official = {name: f"md5:{cifar100._md5(folder / name)}" for name in ("train", "test", "meta")}
    for name, checksum in official.items():
        monkeypatch.setitem(cifar100.REMOTE.files, name, checksum)
    monkeypatch.setattr(cifar100, "OFFICIAL", Official(3, 9, 6))
    assert cifar100.load(tmp_path).notes == ()


class Malice:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_names_a_function_is_refused_and_not_run(tmp_path, protocol):
    folder = write_python2(tmp_path / "cifar-100-python")
    victim = tmp_path / "victim"
    content = {"data": Malice(exec, f"open({str(victim)!r}, 'w').close()"), "fine_labels": [0]}
    (folder / "train").write_bytes(pickle.dumps(content, protocol))
    pickle.loads((folder / "train").read_bytes())
    assert victim.exists()
    victim.unlink()
    with raises(DataError, "exec", folder / "train", remedy(tmp_path)):
        cifar100.load(tmp_path)
    assert not victim.exists()


@pytest.mark.parametrize(
    "name",
    [
        b"os\nsystem",
        b"posix\nsystem",
        b"builtins\ngetattr",
        b"__builtin__\neval",
        b"numpy\nload",
        b"numpy\nndarray.tofile",
        b"numpy.core.multiarray\nfromfile",
        b"numpy._core.multiarray.x\n_reconstruct",
        b"_codecs\nlookup",
        b"efcil.data.cifar100\n_Array",
    ],
)
def test_names_beyond_arrays_are_refused(tmp_path, name):
    folder = write_python2(tmp_path / "cifar-100-python")
    (folder / "meta").write_bytes(b"\x80\x02c" + name + b"\n.")
    with raises(DataError, name.decode().replace("\n", "."), folder / "meta", remedy(tmp_path)):
        cifar100.load(tmp_path)


@pytest.mark.parametrize(
    "body",
    [
        b"cnumpy\nndarray\n}U\x04fillK\x01sb.",  # set an attribute of the class
        b"cnumpy.core.multiarray\n_reconstruct\nN}U\x08__code__K\x01s\x86b.",  # or of the function
        b"cnumpy\ndtype\nU\x01O\x85R.",
        b"c_codecs\nencode\nU\x01aU\x05rot13\x86R.",
        b"Ux.",  # an opcode that runs out of bytes
        b"",
        b"}.",
        b"K\x01.",
    ],
)
def test_odd_pickles_are_one_line_and_change_nothing(tmp_path, body):
    folder = write_python2(tmp_path / "cifar-100-python")
    (folder / "meta").write_bytes(b"\x80\x02" + body)
    with pytest.raises(DataError) as caught:
        cifar100.load(tmp_path)
    assert str(folder / "meta") in str(caught.value)
    assert "\n" not in str(caught.value)
    good = write_python2(tmp_path / "again" / "cifar-100-python")
    check(cifar100.load(good))


def test_object_arrays_are_refused(tmp_path):
    folder = write_python3(tmp_path / "cifar-100-python", 2)
    (folder / "train").write_bytes(pickle.dumps({"data": np.array([None, 1]), "fine_labels": [0]}, 2))
    with raises(DataError, folder / "train", "238 bytes", remedy(tmp_path)):
        cifar100.load(tmp_path)


def remedy(folder) -> str:
    return f"run `efcil data fetch cifar100 --data {folder}`"


@pytest.mark.parametrize("inside", ["", "cifar-100-python"])
def test_missing_directory(tmp_path, inside):
    with pytest.raises(DataError) as caught:
        cifar100.load(tmp_path / "no" / inside)
    assert str(tmp_path / "no" / inside) in str(caught.value)
    assert remedy(tmp_path / "no") in str(caught.value)


def test_empty_directory_and_a_file_in_its_place(tmp_path):
    with pytest.raises(DataError) as caught:
        cifar100.load(tmp_path)
    assert_names(str(caught.value), "cifar-100-python", "cifar-100-binary", tmp_path, remedy(tmp_path))
    (tmp_path / "file").touch()
    with raises(DataError, tmp_path / "file", remedy(tmp_path / "file")):
        cifar100.load(tmp_path / "file")


def test_half_downloaded_and_not_unpacked(tmp_path):
    archive = tmp_path / "cifar-100-python.tar.gz"
    archive.touch()
    with pytest.raises(DataError) as caught:
        cifar100.load(tmp_path)
    assert_names(str(caught.value), archive, remedy(tmp_path))
    archive.with_name(archive.name + ".part").write_bytes(b"x" * 1234)
    with raises(DataError, "1,234", "169,001,437", remedy(tmp_path)):
        cifar100.load(tmp_path)


@pytest.mark.parametrize("name", ["train", "test", "meta"])
def test_a_missing_file_is_named(tmp_path, name):
    folder = write_python2(tmp_path / "cifar-100-python")
    (folder / name).unlink()
    for directory in (tmp_path, folder):
        with raises(DataError, folder, name, remedy(tmp_path)):
            cifar100.load(directory)


@pytest.mark.parametrize("name", ["train", "test", "meta"])
def test_a_truncated_file_is_named(tmp_path, name):
    folder = write_python2(tmp_path / "cifar-100-python")
    raw = (folder / name).read_bytes()
    for length in (0, 1, 20, len(raw) // 2, len(raw) - 1):
        (folder / name).write_bytes(raw[:length])
        with raises(DataError, folder / name, remedy(tmp_path)) as caught:
            cifar100.load(tmp_path)
        assert str(folder / name) in str(caught.value)
        assert remedy(tmp_path) in str(caught.value)


def test_loose_files_are_not_to_be_removed_with_their_folder(tmp_path):
    folder = write_python2(tmp_path / "mine")
    check(cifar100.load(folder))
    (folder / "train").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        cifar100.load(folder)
    assert "remove" not in str(caught.value)
    assert remedy(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"data": TRAIN[0], "fine_labels": [0, 1, 2]}, (9, 3)),
        ({"data": TRAIN[0][:, 1:], "fine_labels": [0] * 9}, ("uint8", (9, 3071), 3072)),
        ({"data": TRAIN[0].astype(np.int16), "fine_labels": [0] * 9}, ("int16", "uint8")),
        ({"data": TRAIN[0], "fine_labels": [0] * 8 + [3]}, ("label 3", "3 class")),
        ({"data": TRAIN[0], "fine_labels": [0] * 8 + [-1]}, ("-1", 3)),
        ({"data": TRAIN[0], "fine_labels": [0.5] * 9}, ("train",)),
        ({"data": TRAIN[0], "fine_labels": [[1]] + [0] * 8}, ("train",)),
        ({"data": TRAIN[0]}, ("'fine_labels'",)),
        ({"fine_labels": [0]}, ("'data'",)),
        ({"data": TRAIN[0], "fine_labels": [0] * 9}, ("baby", "worm")),
    ],
)
def test_inconsistent_content_is_reported(tmp_path, content, named):
    folder = write_python3(tmp_path / "cifar-100-python", 2)
    (folder / "train").write_bytes(pickle.dumps(content, 2))
    with raises(DataError, *named):
        cifar100.load(tmp_path)


def test_binary_edition_cut_short_or_with_a_wrong_label(tmp_path):
    folder = write_binary(tmp_path / "cifar-100-binary")
    raw = (folder / "train.bin").read_bytes()
    for length in (0, len(raw) - 1):
        (folder / "train.bin").write_bytes(raw[:length])
        with raises(DataError, folder / "train.bin", f"{length:,} bytes", remedy(tmp_path)) as caught:
            cifar100.load(tmp_path)
        assert remedy(tmp_path) in str(caught.value)
    (folder / "train.bin").write_bytes(b"\x00\x09" + raw[2:])
    with raises(DataError, folder / "train.bin", 9, 3):
        cifar100.load(tmp_path)


def test_a_path_with_a_blank_is_quoted_in_the_command(tmp_path):
    with raises(DataError, f"--data '{tmp_path / 'my data'}'"):
        cifar100.load(tmp_path / "my data")


def test_remote_is_the_official_archive():
    remote = cifar100.REMOTE
    assert remote.url == "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"
    assert (remote.checksum, remote.size) == ("md5:eb9058c3a382ffc7106e4002c42a8d85", 169_001_437)


def test_stand_ins_read_what_numpy_itself_writes_today():
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    for protocol in range(6):
        read = cifar100._ArraysOnly(io.BytesIO(pickle.dumps(array, protocol)), encoding="bytes").load()
        np.testing.assert_array_equal(read.value, array)
