"""Files from strangers: every reader takes damaged and hostile ones with an error of its own (tools/fuzz.py), shortly.

The findings of longer runs are here one by one, each as the file that showed it.
"""

import importlib.util
import io
import json
import pickle
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file

from efcil.cli.config_file import merged
from efcil.config import load_yaml, nested, parse_overrides
from efcil.data import cifar100
from efcil.errors import CheckpointError, ConfigError, DataError, ModelError, RunError
from efcil.experiment.specification import ExperimentSpec, resolve
from efcil.product import IncrementalClassifier
from efcil.report import load_summaries
from efcil.reproduce.snapshots import Snapshot
from efcil.serve.archive import entries_of, open_archive
from efcil.serve.limits import Limits
from efcil.tasks import class_order
from efcil.tensor_files import load_tensors, save_tensors
from messages import raises

ROOT = Path(__file__).resolve().parents[2]


def load_tool():
    spec = importlib.util.spec_from_file_location("fuzz", ROOT / "tools" / "fuzz.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tool = load_tool()
FAST = {"config": 8, "settings": 15, "pycil": 8, "cifar100": 10, "images": 8, "cache": 10, "report": 6}
FAST |= {"snapshot": 15, "upload": 15, "archive": 15, "download": 10, "weights": 8}
TRAINED = {"checkpoint": 4, "run": 3, "model": 8}  # those that something must be trained for


def fuzzed(name, examples, home):
    fuzzer = tool.Fuzzer(tool.TARGETS[name], home)
    # Files hold times and commits, so a seed damages other places on another day: some more where it did no harm.
    for number in range(1, 6):

        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @seed(number)
        @given(st.data())
        def step(data):
            fuzzer.once(data)

        step()
        if fuzzer.refused:
            return
    pytest.fail("nothing was damaged enough")


def test_every_reader_is_among_them():
    assert {*FAST, *TRAINED} == set(tool.TARGETS)


@pytest.mark.parametrize("name", FAST)
def test_damaged_files_are_refused_or_read(name, tmp_path):
    fuzzed(name, FAST[name], tmp_path)


@pytest.mark.parametrize("name", TRAINED)
def test_damaged_files_of_what_was_trained(name, tmp_path):
    fuzzed(name, TRAINED[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAST, *TRAINED])
def test_damaged_files_for_longer(name):
    """The same seeds everywhere: new ones are for `tools/fuzz.py`, whose findings become tests."""
    found = tool.fuzz(name, 120.0, 10_000, rounds=8)
    assert found["findings"] == {}
    assert found["executions"] > 0


def test_an_archive_whose_second_name_is_no_text():
    """A zip names a file twice. Found by fuzzing: the one before the data need not be text where it says it is."""
    picture, file = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(picture, "PNG")
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("a/\N{LATIN SMALL LETTER U WITH DIAERESIS}.png", "a/2.png", "b/3.png"):
            archive.writestr(name, picture.getvalue())
    damaged = bytearray(file.getvalue())
    assert damaged[30:32] == b"a/", "the first name, after a header of thirty bytes"
    damaged[30] = 0xFF
    with open_archive(io.BytesIO(damaged), Limits()) as archive:
        (broken, _), *others = [(entry, entry.label) for entry in entries_of(archive, Limits())[0]]
        with raises(DataError):
            broken.read(10_000)
        assert [entry.read(10_000) for entry, _ in others] == [picture.getvalue()] * 2


# -- the tool sees what it is there to see -----------------------------------------------------------------------------


def watched(tmp_path, read):
    with tool.guarded(tmp_path):
        read()


@pytest.mark.parametrize(
    "what",
    [
        "__import__('os').system('true')",
        "__import__('subprocess').run(['true'])",
        "open('/tmp/efcil-outside', 'a').close()",
        "__import__('os').rename('CANARY', '../CANARY2')",
    ],
)
def test_what_a_file_starts_or_writes_is_seen(tmp_path, what):
    (tmp_path / "case").mkdir()
    outside = what.replace("/tmp/", f"{tmp_path}/")
    with pytest.raises((tool.Finding, FileNotFoundError), match="no file may ask for|CANARY"):
        watched(tmp_path / "case", lambda: eval(outside))


def test_what_a_file_leaves_is_seen(tmp_path):
    with pytest.raises(tool.Finding, match="ran what stood in the file"):
        watched(tmp_path, lambda: (tmp_path / "CANARY").write_text(""))


def test_memory_and_time_are_limited(tmp_path, monkeypatch):
    with pytest.raises(MemoryError):
        watched(tmp_path, lambda: bytearray(tool.MEMORY + (1 << 28)))
    monkeypatch.setattr(tool, "DEADLINE", 0.2)

    def endless():
        while True:
            pass

    with pytest.raises(tool.Finding, match="took more than"):
        watched(tmp_path, endless)


# -- what was found ----------------------------------------------------------------------------------------------------

BILLIONS = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{two}: &{two} [{','.join([f'*{one}'] * 10)}]\n" for one, two in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [BILLIONS, "a: &a [*a]", "a: 2001-99-99", "a: !!int ''", "[" * 1000, "!!python/name:os.system", "a: " + "9" * 5000],
)
def test_yaml_that_is_hostile(tmp_path, text):
    """Aliases that stand for billions of values or for themselves, months that do not exist, numbers without end."""
    with pytest.raises(Exception) as error:
        load_yaml(text)
    assert type(error.value).__module__.startswith("yaml")
    (tmp_path / "c.yaml").write_text(text)
    with raises(ConfigError, f"--config {tmp_path / 'c.yaml'}"):
        merged(tmp_path / "c.yaml", {"overrides": []}, set())


def test_settings_that_are_no_yaml_are_words():
    assert parse_overrides(["a=2001-99-99", "b=[", "c=!!int ''"]) == {"a": "2001-99-99", "b": "[", "c": "!!int ''"}
    with raises(ConfigError, "ridge='2001-99-99'"):
        resolve(ExperimentSpec(("dpcr",), "digits", overrides=("ridge=2001-99-99",)))


def test_a_value_cannot_have_parts():
    with raises(ConfigError, "later.lr", "later"):
        nested({"later": 3, "later.lr": 0.1})


def test_an_error_does_not_print_the_whole_value():
    with pytest.raises(ConfigError) as error:
        resolve(ExperimentSpec(("dpcr",), "digits", overrides=(f"ridge={'x' * 10_000}",)))
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"run": {"methods": 3}}', ("c.json",)),
        ('{"run": {"methods": {"a": {"method": "dpcr"}}}}', ("c.json",)),
        ("[" * 5000, ("c.json", "JSON")),
        ('{"out": "a\\u0000b"}', (r"out='a\x00b'",)),
    ],
)
def test_json_that_is_hostile(tmp_path, text, named):
    (tmp_path / "c.json").write_text(text)
    with raises(ConfigError, *named):
        merged(tmp_path / "c.json", {"overrides": [], "out": None}, set())


@pytest.mark.parametrize("text", ["²", "9" * 5000, "\0"])
def test_class_orders_that_are_hostile(tmp_path, text):
    with raises(ConfigError, "class order"):
        class_order(text, ["a", "b"])
    (tmp_path / "order").write_text(text)
    with raises(ConfigError, tmp_path / "order", 2):
        class_order(str(tmp_path / "order"), ["a", "b"])


def test_a_class_order_that_is_no_text(tmp_path):
    (tmp_path / "order").write_bytes(b"\xff\xfe\x00")
    with raises(ConfigError, tmp_path / "order"):
        class_order(str(tmp_path / "order"), ["a", "b"])


PAIRS = b"K\x01K\x01\x86q\x00" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(60))


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02}r\xff\xff\xff\x3f.",  # a place in the table that 8 GiB would be made for
        b"\x80\x02}" + PAIRS + b"K\x01s.",  # a key that takes for ever to hash
        b"\x80\x02}(" + PAIRS + b"K\x01u.",
        b"\x80\x02(" + PAIRS + b"K\x01d.",
        b"\x80\x04(" + PAIRS + b"\x91.",
        b"\x80\x02}(U\x10fine_label_names](" + PAIRS + b"eu.",  # a name that takes for ever to print
    ],
)
def test_pickles_that_stand_for_more_than_there_is_room_for(tmp_path, content):
    place = tmp_path / "cifar-100-python"
    place.mkdir()
    for name in ("train", "test"):
        (place / name).write_bytes(pickle.dumps({"data": [], "fine_labels": []}, 2))
    (place / "meta").write_bytes(content)
    with tool.guarded(tmp_path), raises(DataError, place / "meta"):
        cifar100.load(tmp_path)


def test_labels_that_are_lists_of_lists(tmp_path):
    place = tmp_path / "cifar-100-python"
    place.mkdir()
    labels = [0]
    for _ in range(40):
        labels = [labels, labels]
    (place / "meta").write_bytes(pickle.dumps({"fine_label_names": ["a"]}, 2))
    for name in ("train", "test"):
        (place / name).write_bytes(pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "fine_labels": labels}))
    with tool.guarded(tmp_path), raises(DataError, place / "train"):
        cifar100.load(tmp_path)


def test_a_list_of_birds_that_leads_elsewhere(tmp_path):
    tool.TARGETS["images"].make(tmp_path)
    path = tmp_path / "birds" / "images.txt"
    path.write_text(path.read_text().replace("001.n01440764/0.jpg", "../../net/train/n01440764/0.JPEG"))
    from efcil.data import cub200

    with raises(DataError, "../../net/train/n01440764/0.JPEG", "images/"):
        cub200.scan(tmp_path / "birds")


@pytest.mark.parametrize(
    "text", ["[" * 5000, '{"method": "a", "dataset": "b", "A_t": [%s]}' % ("9" * 5000), "\xff", "3"]
)
def test_summaries_that_are_hostile(tmp_path, text):
    (tmp_path / "summary.json").write_bytes(text.encode("latin1"))
    with raises(RunError, "summary.json"):
        load_summaries(tmp_path)


def test_numbers_too_large_to_be_numbers(tmp_path):
    summary = {"method": "a", "dataset": "b", "A_t": [50.0], "seconds": 10**400, "A_f": 50.0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert load_summaries(tmp_path)[0]["A_f"] == 50.0


@pytest.mark.parametrize("kept", [{"files": 1}, {"bad": 3}, {"files": None, "labels": 3}, []])
def test_an_index_of_the_cache_that_is_damaged(tmp_path, kept):
    """The pictures are decoded again."""
    tool.TARGETS["cache"].make(tmp_path)
    (index,) = tmp_path.glob("cache/*/*px*.json")
    sound = json.loads(index.read_text())
    index.write_text(json.dumps({**sound, **kept} if kept else kept))
    tool.read_cache(tmp_path)
    assert json.loads(index.read_text()) == sound


@pytest.mark.parametrize("names", [[3.5], "abc", ["9" * 5000], None])
def test_a_recorded_split_that_is_damaged(tmp_path, names):
    tool.TARGETS["cache"].make(tmp_path)
    (record,) = tmp_path.glob("cache/*/split-*.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "train": names}))
    with raises(DataError, record):
        tool.read_cache(tmp_path)


STATISTICS, WEIGHT = "statistics.safetensors", "classifiers/dpcr/weight"


def sealed(model, name, change):
    """Change a file of a model and make its checksum right again."""
    path = model / name
    if name == "model.json":
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    else:
        save_file(change(load_file(path)), path)
        tool._seal_model(model.parent, f"{model.name}/{name}")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.json", lambda card: {**card, "config": {**card["config"], "size": float("inf")}}),
        ("model.json", lambda card: {**card, "classes": card["classes"][:-1]}),
        ("model.json", lambda card: {**card, "classes": [*card["classes"], {**card["classes"][0], "name": "x"}]}),
        (STATISTICS, lambda t: {**t, WEIGHT: t[WEIGHT][:4].contiguous()}),
        (STATISTICS, lambda t: {**t, WEIGHT: t[WEIGHT][:, :3].contiguous()}),
        (STATISTICS, lambda t: {k: v if k == WEIGHT else v[:-1].contiguous() for k, v in t.items()}),
        (STATISTICS, lambda t: {**t, "tracks.0.classes": t["tracks.0.classes"] + 1}),
        (STATISTICS, lambda t: {k: v for k, v in t.items() if k != "tracks.0.moves"}),
        (STATISTICS, lambda t: {k: v for k, v in t.items() if k != WEIGHT}),
        (STATISTICS, lambda t: {k: v[..., :-1].contiguous() for k, v in t.items()}),
        ("weights.safetensors", lambda t: {k: v.flatten() for k, v in t.items()}),
        ("weights.safetensors", lambda t: {}),
    ],
)
def test_a_model_whose_parts_do_not_fit(tmp_path, name, change):
    """With right checksums: refused when it is loaded, not when it is asked."""
    tool.TARGETS["model"].make(tmp_path)
    sealed(tmp_path / "model", name, change)
    try:
        IncrementalClassifier.load(tmp_path / "model", progress=False, device="cpu")
    except ModelError:
        return
    pytest.fail("it was taken")


@pytest.mark.parametrize(
    "change",
    [{"labels": None}, {"after": torch.zeros(12, 3)}, {"after": torch.zeros(12, 4, 1)}, {"labels": torch.zeros(0)}, {}],
)
def test_a_snapshot_that_does_not_fit(tmp_path, change):
    tool.TARGETS["snapshot"].make(tmp_path)
    path = tmp_path / "task-02.safetensors"
    tensors, meta = load_tensors(path)
    kept = {name: tensor for name, tensor in {**tensors, **change}.items() if tensor is not None}
    save_tensors(path, kept, meta if change else {})
    with raises(CheckpointError, path):
        Snapshot.read(path)
