"""A model from the command line alone: teach, predict, evaluate, forget, undo, rename, merge, summary, export."""

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageOps
from typer.testing import CliRunner

from efcil import IncrementalClassifier
from efcil.cli import app
from efcil.data import digits
from efcil.errors import DataError
from efcil.product.commands import change_lock
from efcil.product.export import MOST, export_onnx
from messages import assert_names

pytestmark = pytest.mark.timeout(900)  # the first test waits for a process that loads torch
SMALL = ["--size", "16", "--width", "8", "--epochs", "6"]


def write(root, labels, part, count):
    for label in labels:
        (root / f"class {label}").mkdir(parents=True, exist_ok=True)
        for i, image in enumerate(part.images[part.labels == label][:count]):
            Image.fromarray(image[0]).resize((16, 16)).save(root / f"class {label}" / f"{i}.png")


@pytest.fixture(scope="module")
def lessons(tmp_path_factory):
    """Six handwritten digits as folders: two for each of three lessons, and all of them to test on."""
    home = tmp_path_factory.mktemp("lessons")
    data = digits.load()
    for number in range(3):
        write(home / f"lesson{number}", [2 * number, 2 * number + 1], data.train, 30)
    write(home / "test", range(6), data.test, 8)
    return home


@pytest.fixture(scope="module")
def taught(lessons):
    """A model taught in three lessons, the second one by a process of its own."""
    model = lessons / "model"
    for number in range(3):
        first = SMALL if number == 0 else SMALL[4:]
        arguments = ["teach", str(model), str(lessons / f"lesson{number}"), *first]
        if number == 1:
            command, environment = [sys.executable, "-m", "efcil"], {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, check=False)
            assert done.returncode == 0, done.stderr
            said = done.stdout
        else:
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, result.output
            said = result.stdout
        assert "learned 2 classes from 60 pictures" in said
        assert f"knows {2 * number + 2} classes now" in said
    return model


@pytest.fixture
def model(taught, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(taught, tmp_path / "model")


def test_taught_in_rounds_it_knows_all_classes(efcil, taught, lessons):
    code, out, err = efcil("evaluate", taught, lessons / "test")
    assert code == 0, err
    assert "% of 48 images" in out
    found = json.loads(efcil("evaluate", taught, lessons / "test", "--json")[1])
    assert found["images"] == 48
    assert len(found["recall"]) == 6
    assert found["accuracy"] > 50, "chance is 17"
    assert found["accuracy"] == pytest.approx(np.mean(list(found["recall"].values())), abs=0.02)
    model = IncrementalClassifier.load(taught, progress=False)
    assert 100 * model.score(lessons / "test") == pytest.approx(found["accuracy"], abs=0.01)


def test_wrong_pictures_are_named_and_shown(efcil, taught, lessons, tmp_path):
    """Pictures of a 0 among those of a 1: each is named with what it was taken for, and is on the page."""
    shutil.copytree(lessons / "test" / "class 1", tmp_path / "test" / "class 1")
    for i in range(3):
        shutil.copy(lessons / "test" / "class 0" / f"{i}.png", tmp_path / "test" / "class 1" / f"zero {i}.png")
    code, out, err = efcil("evaluate", taught, tmp_path / "test", "--html", tmp_path / "pages" / "a.html")
    assert code == 0, err
    found = json.loads(efcil("evaluate", taught, tmp_path / "test", "--json")[1])
    answers = IncrementalClassifier.load(taught, progress=False).predict([one["file"] for one in found["wrong"]])
    assert [one["answer"] for one in found["wrong"]] == answers.tolist()
    sure = [one["confidence"] for one in found["wrong"]]
    assert sure == sorted(sure, reverse=True)
    assert len(sure) == 11 - found["counts"]["class 1"][0] >= 2
    page = (tmp_path / "pages" / "a.html").read_text(encoding="utf-8")
    assert page.count("<img ") == len(sure)
    assert f">{found['counts']['class 1'][0]}</td>" in page, "the diagonal of the matrix"
    for one in found["wrong"]:
        assert f"wrong: {one['file']}: {one['answer']} " in out
        assert f'alt="{one["file"].rpartition(os.sep)[2]}"' in page


def test_a_test_picture_may_be_in_two_classes(efcil, taught, lessons, tmp_path):
    shutil.copytree(lessons / "test", tmp_path / "test")
    shutil.copytree(tmp_path / "test" / "class 1", tmp_path / "test" / "unknown")
    code, out, err = efcil("evaluate", taught, tmp_path / "test", "--skip-unknown")
    assert (code, "48 images" in out, "are in two classes" in err) == (0, True, True), err


def test_options_of_a_new_model_are_refused_by_name_for_one_that_exists(efcil, model, lessons):
    more = ("--width", 4, "--val-fraction", 0.1, "--set", "later.epochs=1")
    code, _, err = efcil("teach", model, lessons / "test", *more)
    assert code == 2
    assert_names(err, model, "--width", "--val-fraction", "--set")


def test_answers_as_lines_json_and_csv(efcil, taught, lessons):
    folder = lessons / "test" / "class 3"
    one = folder / "0.png"
    code, out, err = efcil("predict", taught, one, "--top", 3)
    assert code == 0, err
    assert out.startswith(f"{one}: class ")
    assert out.count("%") == 3
    answers = json.loads(efcil("predict", taught, folder, "--json", "--top", 6)[1])
    assert [a["file"] for a in answers] == sorted(str(p) for p in folder.iterdir())
    probabilities = IncrementalClassifier.load(taught, progress=False).predict_proba([a["file"] for a in answers])
    for answer, row in zip(answers, probabilities, strict=True):
        assert answer["confidence"] == pytest.approx(row.max(), abs=1e-5)
        assert sum(t["confidence"] for t in answer["top"]) == pytest.approx(1, abs=1e-4)
        assert answer["label"] == answer["top"][0]["label"]
    rows = list(csv.DictReader(io.StringIO(efcil("predict", taught, folder, "--csv")[1])))
    assert [r["label"] for r in rows] == [a["label"] for a in answers]


def test_pictures_are_found_as_when_teaching(efcil, taught, lessons, tmp_path):
    """Through links, once each, and nothing that is hidden."""
    place = tmp_path / "album"
    (place / ".trash").mkdir(parents=True)
    shutil.copy(lessons / "test" / "class 3" / "0.png", place / ".trash")
    shutil.copy(lessons / "test" / "class 3" / "1.png", place / ".1.png")
    (place / "there").symlink_to(lessons / "test" / "class 3", target_is_directory=True)
    (place / "round").symlink_to(place, target_is_directory=True)
    code, out, err = efcil("predict", taught, place, "--json")
    assert code == 0, err
    assert [a["file"] for a in json.loads(out)] == [str(place / "there" / f"{i}.png") for i in range(8)]


def test_none_of_these_below_a_confidence(efcil, taught, lessons):
    one = lessons / "test" / "class 0" / "0.png"
    out = efcil("predict", taught, one, "--reject-below", "1")[1]
    (answer,) = json.loads(efcil("predict", taught, one, "--reject-below", "1", "--json")[1])
    assert answer["label"] is None
    best = answer["top"][0]
    assert out == f"{one}: none of these; else {best['label']} {100 * best['confidence']:.0f} %\n"
    assert "none of these" not in efcil("predict", taught, one, "--reject-below", "0")[1]


def test_summary(efcil, taught):
    code, out, err = efcil("summary", taught)
    assert code == 0, err
    assert "dpcr, resnet10, images of 16 pixels" in out
    assert "class 5" in out
    assert "most similar" in out
    found = json.loads(efcil("summary", taught, "--json")[1])
    assert [c["images"] for c in found["classes"]] == [30] * 6


def test_forget_rename_and_undo(efcil, model, lessons):
    assert efcil("forget", model, "class 0")[0] == 0
    assert efcil("undo", model)[0] == 0
    code, out, err = efcil("forget", model, "class 1", "class 4", "--for-good")
    assert code == 0, err
    assert "removed class 1, class 4; 4 classes left" in out
    assert IncrementalClassifier.load(model, progress=False).classes_.tolist() == [f"class {c}" for c in (0, 2, 3, 5)]
    assert efcil("rename", model, "class 2", "deux")[0] == 0
    labels = {a["label"] for a in json.loads(efcil("predict", model, lessons / "test" / "class 1", "--json")[1])}
    assert labels <= {"class 0", "deux", "class 3", "class 5"}
    assert efcil("undo", model)[0] != 0  # what was forgotten does not come back
    assert efcil("teach", model, lessons / "lesson2", "--epochs", 1)[0] == 0
    assert "class 4" in IncrementalClassifier.load(model, progress=False).classes_
    assert efcil("undo", model)[0] == 0
    assert "class 4" not in IncrementalClassifier.load(model, progress=False).classes_


def test_merge_equals_one_model_taught_on_both(efcil, taught, lessons, tmp_path):
    """Two models with one frozen backbone, each taught one lesson, against one taught both."""
    weights = ["--method", "dpcr", "--weights", taught / "weights.safetensors", "--frozen", *SMALL[:4]]
    for name, numbers in (("a", [0]), ("b", [1]), ("both", [0, 1])):
        for i, number in enumerate(numbers):
            code, _, err = efcil("teach", tmp_path / name, lessons / f"lesson{number}", *(weights if i == 0 else []))
            assert code == 0, err
    code, out, err = efcil("merge", tmp_path / "a", tmp_path / "b")
    assert code == 0, err
    assert "knows 4 classes now" in out
    files = sorted((lessons / "test").rglob("*.png"))
    models = (IncrementalClassifier.load(tmp_path / name, progress=False) for name in ("a", "both"))
    merged, both = (one.predict_proba(files) for one in models)
    assert np.abs(merged - both).max() < 1e-6


def test_onnx_says_the_same(efcil, taught, lessons, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    code, out, err = efcil("export", taught, "--onnx", tmp_path / "model.onnx")
    assert code == 0, err
    assert "model.onnx" in out
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"], "one file"
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (given,) = session.get_inputs()
    assert (given.name, given.type, given.shape[1:]) == ("images", "tensor(uint8)", [3, 16, 16])
    facts = session.get_modelmeta().custom_metadata_map
    model = IncrementalClassifier.load(taught, progress=False)
    assert json.loads(facts["class_names"]) == model.classes_.tolist()
    assert "Apache License" in facts["notice"]
    files = sorted((lessons / "test").rglob("*.png"))
    images = np.stack([np.asarray(Image.open(f).convert("RGB")).transpose(2, 0, 1) for f in files])
    expected = model.predict_proba(files)
    for batch in (images, images[:1], images[:7]):
        (found,) = session.run(None, {"images": batch})
        assert np.abs(found - expected[: len(batch)]).max() < 1e-4


def as_described(path, facts):
    """Read a picture with nothing but Pillow and what the metadata say."""
    said = json.loads(facts["preprocessing"])
    assert (said["color"], said["resize"], said["orientation"]) == ("RGB", "the central square", "as EXIF says")
    image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    side = min(image.size) * said["crop"]
    left, top = ((length - side) / 2 for length in image.size)
    box, how = (left, top, left + side, top + side), Image.Resampling[said["interpolation"].upper()]
    square = image.resize((said["size"],) * 2, how, box=box)
    return np.asarray(square).transpose(2, 0, 1)


def test_int8_is_smaller_and_says_nearly_the_same(efcil, taught, lessons, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    sizes, answers, files = {}, {}, sorted((lessons / "test").rglob("*.png"))
    for name, more in (("fp32", []), ("int8", ["--int8", lessons / "test"])):
        path = tmp_path / f"{name}.onnx"
        code, out, err = efcil("export", taught, "--onnx", path, *more)
        assert code == 0, err
        session = onnxruntime.InferenceSession(path)
        facts = session.get_modelmeta().custom_metadata_map
        (found,) = session.run(None, {"images": np.stack([as_described(file, facts) for file in files])})
        sizes[name], answers[name] = path.stat().st_size, found.argmax(1)
    assert sizes["int8"] < 0.5 * sizes["fp32"]
    assert (answers["int8"] == answers["fp32"]).mean() >= 0.8  # a network of 8 channels and 16 pixels has little room
    agreement, compared = float(facts["agreement"]), int(facts["compared"])
    assert compared == len(files) // 2
    assert agreement >= 0.8
    assert f"int8, {sizes['fp32'] / 1e6:.1f} MB in fp32; same class as fp32 for {agreement:.1%} of {compared}" in out
    names = np.array(json.loads(facts["class_names"]))
    truth = np.array([file.parent.name for file in files])[1::2]
    for key, kind in (("accuracy", "int8"), ("accuracy_fp32", "fp32")):
        assert float(facts[key]) == pytest.approx((names[answers[kind][1::2]] == truth).mean(), abs=1e-4)
    assert int(facts["labeled"]) == compared
    assert f"accuracy on {compared} of them {float(facts['accuracy']):.1%}" in out


def test_int8_states_no_accuracy_for_pictures_of_unknown_classes(taught, lessons, tmp_path):
    pytest.importorskip("onnxruntime")
    model, files = IncrementalClassifier.load(taught, device="cpu"), sorted((lessons / "test").rglob("*.png"))
    found = export_onnx(model, tmp_path / "m.onnx", files, ["?"] * len(files))
    assert found.agreement is not None
    assert (found.labeled, found.accuracy) == (0, None)
    with pytest.raises(DataError, match="labels"):
        export_onnx(model, tmp_path / "m.onnx", files, ["?"])


def test_int8_needs_pictures(efcil, taught, lessons, tmp_path):
    code, _, err = efcil(
        "export", taught, "--onnx", tmp_path / "m.onnx", "--int8", lessons / "test" / "class 0" / "1.png"
    )
    assert code == 2
    assert_names(err, "int8", 8, 1)
    assert not (tmp_path / "m.onnx").exists()


def test_an_export_needs_a_file_name(efcil, taught, tmp_path):
    code, _, err = efcil("export", taught, "--onnx", tmp_path)
    assert code == 2
    assert_names(err, str(tmp_path), "is a directory", "model.onnx")


def test_int8_reads_some_of_many_pictures(monkeypatch, taught, tmp_path):
    """A folder may have more than memory holds; those that are read are spread over all."""

    def read(pictures, _):
        raise DataError(" ".join(map(str, pictures)))

    monkeypatch.setattr("efcil.product.export.read_images", read)
    model = IncrementalClassifier.load(taught, device="cpu")
    with pytest.raises(DataError) as caught:
        export_onnx(model, tmp_path / "m.onnx", [*range(10_000)])
    read_at = [int(place) for place in str(caught.value).split()]
    assert len(read_at) == MOST
    assert (read_at[0], read_at[-1]) == (0, 9_999)
    assert max(np.diff(read_at)) <= 21


@pytest.mark.slow
def test_the_default_model_is_exported_with_its_preprocessing(tmp_path):
    """Oblong JPEGs, one of them turned by EXIF: answers are those of `predict`; int8 agrees and is a third as large."""
    onnxruntime = pytest.importorskip("onnxruntime")
    source = np.random.default_rng(0)
    files, names = [], []
    for number in range(48):
        ground, ink = source.integers(120, 256, 3), source.integers(0, 100, 3)
        image = Image.new("RGB", (150, 110), tuple(map(int, ground)))
        x, y = (int(v) for v in source.integers(20, 50, 2))
        kind = ("ellipse", "rectangle", "line")[number % 3]
        getattr(ImageDraw.Draw(image), kind)((x, y, x + 60, y + 40), fill=tuple(map(int, ink)))
        exif = image.getexif()
        exif[274] = 6 if number % 4 == 0 else 1
        files.append(tmp_path / f"{number}.jpg")
        image.save(files[-1], exif=exif)
        names.append(kind)
    model = IncrementalClassifier(progress=False).learn(files[:24], names[:24])
    plain = export_onnx(model, tmp_path / "plain.onnx")
    small = export_onnx(model, tmp_path / "small.onnx", files)
    session = onnxruntime.InferenceSession(plain.path)
    facts = session.get_modelmeta().custom_metadata_map
    (found,) = session.run(None, {"images": np.stack([as_described(file, facts) for file in files])})
    assert np.abs(found - model.predict_proba(files)).max() < 0.02  # Pillow decodes a JPEG for its size here
    assert (found.argmax(1) == model.predict_proba(files).argmax(1)).mean() > 0.97
    assert small.size < 0.4 * plain.size
    assert small.compared == 24
    assert small.agreement >= 0.9


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["predict", "nowhere", "a.png"], ["nowhere", "`efcil teach nowhere FOLDER`"]),
        (["summary", "."], ["efcil teach"]),
        (["predict", "MODEL", "nothing.png"], ["nothing.png"]),
        (["predict", "MODEL", "EMPTY"], ["empty"]),
        (["predict", "MODEL", "MODEL/model.json"], ["model.json"]),
        (["predict", "MODEL", "EMPTY", "--reject-below", "2"], ["--reject-below 2.0", 0, 1]),
        (["teach", "MODEL", "LESSON", "--method", "lwf-ncm"], ["--method"]),
        (["teach", "MODEL", "EMPTY"], ["empty"]),
        (["teach", "MODEL", "nothing"], ["nothing"]),
        (["teach", "new", "LESSON", "--method", "icarl"], ["icarl", "dpcr"]),
        (["teach", "MODEL", "LESSON", "--epochs", "1", "--budget", "3"], ["epochs=1", "budget=3.0"]),
        (["forget", "MODEL", "class 9"], ["'class 9'"]),
        (["rename", "MODEL", "class 1", "class 2"], ["class 2"]),
        (["merge", "MODEL", "MODEL"], ["frozen"]),
        (["evaluate", "MODEL", "STRANGE"], ["class 0"]),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(efcil, model, lessons, tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    if "STRANGE" in arguments:
        assert efcil("forget", model, "class 0")[0] == 0
    places = {"MODEL": model, "EMPTY": tmp_path / "empty", "LESSON": lessons / "lesson0", "STRANGE": lessons / "test"}
    before = {p: p.read_bytes() for p in model.rglob("*") if p.is_file()}
    given = [places.get(a, str(model / "model.json") if a == "MODEL/model.json" else a) for a in arguments]
    code, _, err = efcil(*given)
    assert code == 2
    assert_names(err, *named)
    assert err.count("\n") == 1
    assert {p: p.read_bytes() for p in model.rglob("*") if p.is_file()} == before


def test_two_processes_do_not_change_one_model(efcil, model, lessons):
    with change_lock(model):
        code, _, err = efcil("forget", model, "class 1")
    assert code == 2
    assert_names(err, model)
    assert efcil("forget", model, "class 1")[0] == 0


def test_ctrl_c_while_teaching_leaves_the_model(model, lessons):
    """In a process of its own, in the middle of a teaching of two new classes that would last for hours."""
    IncrementalClassifier.load(model, progress=False).forget(["class 0", "class 1"]).save(model)
    before = {p: p.read_bytes() for p in model.rglob("*") if p.is_file()}
    arguments = [sys.executable, "-m", "efcil", "teach", str(model), str(lessons / "lesson0"), "--epochs", "1000000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "200"}
    ours, theirs = os.openpty()  # on a terminal the bar tells when it is at work
    shown = b""

    def more():
        try:
            return os.read(ours, 4096)
        except OSError:  # how Linux tells that nobody has the other end open any more
            return b""

    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment) as process:
        try:
            os.close(theirs)
            while re.search(rb"epoch \d+ of 1000000", shown) is None:
                part = more()
                assert part, shown
                shown += part
            process.send_signal(signal.SIGINT)
            while part := more():
                shown += part
            out = process.stdout.read()
            process.wait()
        finally:
            process.kill()  # it would go on for hours
            os.close(ours)
    # Python ends by the signal itself where it fell into code made by `exec`; a shell says 130 to both.
    assert process.returncode in (130, -signal.SIGINT), shown
    assert b"Traceback" not in shown
    assert "knows" not in out
    assert {p: p.read_bytes() for p in model.rglob("*") if p.is_file()} == before
    assert sorted(p.name for p in model.parent.iterdir()) == [".model.lock", "model"], "nothing half-written stays"


def test_what_a_service_changed_meanwhile_is_not_overwritten(efcil, model, lessons, monkeypatch):
    """A service that serves the directory swaps a new model in while the command is still at work."""
    learn = IncrementalClassifier.learn

    def slowly(self, *arguments, **options):
        IncrementalClassifier.load(model, progress=False).rename({"class 1": "one"}).save(model)
        return learn(self, *arguments, **options)

    monkeypatch.setattr(IncrementalClassifier, "learn", slowly)
    code, _, err = efcil("teach", model, lessons / "lesson0", "--epochs", 1)
    assert code == 2
    assert_names(err, model)
    assert "one" in IncrementalClassifier.load(model, progress=False).classes_
