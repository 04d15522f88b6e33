"""The commands of a model: teach, predict, evaluate, forget, undo, rename, merge, summary."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from efcil.data.cache import SUFFIXES
from efcil.data.dataset import format_list
from efcil.data.folder import is_hidden
from efcil.errors import ConfigError, DataError, ModelError
from efcil.files import atomic_write_text, exclusive_lock
from efcil.product.classifier import REJECTED, IncrementalClassifier
from efcil.product.confusion_page import evaluation_page
from efcil.product.evidence import ENOUGH
from efcil.product.inputs import Images, map_labeled_images, read_images
from efcil.product.model_directory import check_replaceable, exists, fingerprint, save_lock
from efcil.product.progress import Progress


@contextlib.contextmanager
def change_lock(directory: Path) -> Iterator[Callable[[IncrementalClassifier], None]]:
    """Lock a model while it is changed; refuse a second process.

    Yield the function that saves the model. It refuses if a process without this lock (a service that serves the same
    directory) has changed the model in the meantime.
    """
    path = directory.absolute().parent / f".{directory.name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = exclusive_lock(path)
    except BlockingIOError:
        raise ModelError(f"{directory} is being changed by another process; wait for it") from None
    except OSError as error:
        raise ModelError(f"{directory} cannot be written: {error.strerror}") from None
    with lock:
        check_replaceable(directory)
        before = fingerprint(directory)

        def save(model: IncrementalClassifier) -> None:
            with save_lock(directory):
                if fingerprint(directory) != before:
                    what = "was changed by another process in the meantime; nothing was saved, try again"
                    raise ModelError(f"{directory} {what}")
                model.save(directory)

        yield save


def load_model(directory: Path, device: str, *, progress: bool = False) -> IncrementalClassifier:
    """Load a model."""
    if not exists(directory):
        raise ModelError(f"{directory}: no model; make one with `efcil teach {directory} FOLDER`")
    return IncrementalClassifier.load(directory, device=device, progress=progress)


def teach(
    directory: Path,
    folder: Path,
    new_model_options: Mapping[str, Any],
    *,
    epochs: int | None,
    budget: float | None,
    device: str,
    skip_bad: bool,
    quiet: bool,
) -> str:
    """Train a model on the classes of a folder; create it with `new_model_options` if it does not exist."""
    began = time.monotonic()
    with change_lock(directory) as save:
        if exists(directory):
            if new_model_options:
                flags = ("set" if name == "options" else name.replace("_", "-") for name in new_model_options)
                names = ", ".join(f"--{flag}" for flag in flags)
                raise ConfigError(f"{directory} exists, and {names} can only be chosen for a new model; leave it out")
            model = load_model(directory, device, progress=not quiet)
        else:
            model = IncrementalClassifier(**new_model_options, device=device, progress=not quiet)
        events: list[Progress] = []
        model.learn(folder, epochs=epochs, budget=budget, skip_bad=skip_bad, callbacks=[events.append])
        save(model)
    count = len(model.classes_)
    return (
        f"{events[-1].message} in {time.monotonic() - began:.0f} s; "
        f"{directory} knows {count} class{'es' * (count != 1)} now{_outlook(model)}"
    )


def _outlook(model: IncrementalClassifier) -> str:
    """Return lines about the estimated accuracy, and classes for which it is low or unknown."""
    rows = model.summary()["classes"]
    told = [row for row in rows if row["expected"] is not None]
    words = []
    if told:
        words.append(f"expected accuracy: {np.mean([row['expected'] for row in told]):.0f} %")
        if lost := [row["name"] for row in told if row["expected"] < 150 / len(rows)]:
            words.append(f"close to chance level: {format_list(lost)}; check that these pictures have the right class")
    if model.frozen and (few := [row["name"] for row in rows if row["images"] < ENOUGH]):
        words.append(f"fewer than {ENOUGH} pictures, too few to estimate accuracy: {format_list(few)}")
    return "".join(f"\n{one}" for one in words)


def image_files(paths: Sequence[Path]) -> list[Path]:
    """Return the image files, including those in folders."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(_images_below(path))
            if not inside:
                raise DataError(f"{path}: no images in it; give images or folders of images")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise DataError(f"{path}: no such file; give images or folders of images")
    return found


def _images_below(folder: Path) -> Iterator[Path]:
    """Yield the images below a folder; links are followed as in training, hidden files are skipped."""
    seen: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # a link to a parent folder would never end
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not is_hidden(name)]
        for name in files:
            path = Path(place, name)
            if path.suffix.lower() in SUFFIXES and not is_hidden(name) and path.is_file():
                yield path


def predict(
    directory: Path,
    paths: Sequence[Path],
    *,
    top: int,
    device: str,
    reject: tuple[float | None, float | None] = (None, None),
) -> list[dict[str, Any]]:
    """Classify images: file, label (None: none of these), confidence and the `top` best classes of each.

    `reject`: the confidence and the typicality below which an image is none of these.
    """
    for option, value in zip(("--reject-below", "--reject-strange"), reject, strict=True):
        if value is not None and not 0 <= value <= 1:
            raise ConfigError(f"{option} {value}: must be a number between 0 and 1")
    model = load_model(directory, device)
    files = image_files(paths)
    names = model.classes_
    answers = []
    for begin in range(0, len(files), 256):  # a million images need not fit into memory
        part = files[begin : begin + 256]
        sure, typical = model.scored(read_images(part, model.preprocessing), typicality=reject[1] is not None)
        for row, file in enumerate(part):
            order = np.argsort(-sure[row], kind="stable")[:top]
            confidence = round(float(sure[row, order[0]]), 6)
            best = [{"label": str(names[i]), "confidence": round(float(sure[row, i]), 6)} for i in order]
            rejected = reject[0] is not None and confidence < reject[0]
            if typical is not None and reject[1] is not None:
                rejected = rejected or bool(typical[row] < reject[1])
            label = None if rejected else best[0]["label"]
            answers.append({"file": str(file), "label": label, "confidence": confidence, "top": best})
    return answers


def to_csv(answers: Sequence[Mapping[str, Any]]) -> str:
    """Return predictions as CSV: file, label, confidence."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file", "label", "confidence"])
    writer.writerows([a["file"], a["label"] or REJECTED, a["confidence"]] for a in answers)
    return text.getvalue()


def evaluate(
    directory: Path, folder: Path, *, device: str, skip_bad: bool, skip_unknown: bool = False, html: Path | None = None
) -> dict[str, Any]:
    """Return accuracy and recall of each class on the images of a folder, in percent, and what was confused.

    `counts`: correct and all images of each class. `confused`: class, predicted class, number of images. `wrong`: file,
    class, answer and confidence of each misclassified image, the most confident first. `html`: a page to write, with
    the confusion matrix and the misclassified images.
    """
    model = load_model(directory, device)

    def scored(images: Images) -> Tensor:
        return torch.from_numpy(model.predict_proba(images))

    every, names, files = map_labeled_images(folder, None, model.preprocessing, scored, "test", skip_bad=skip_bad)
    assert files is not None
    known = set(model.classes_.tolist())
    strange = sorted(set(names) - known)
    if strange and not skip_unknown:
        raise DataError(
            f"the model does not know {format_list(strange)}; teach it, leave these images out, or pass --skip-unknown"
        )
    kept = [row for row, name in enumerate(names) if name in known]
    if not kept:
        raise DataError(f"{folder}: the model knows none of its classes ({format_list(strange)}); teach them")
    truth, sure = np.array(names)[kept], every[kept].numpy()
    answers = model.classes_[sure.argmax(1)]
    right = answers == truth
    classes = sorted(set(truth.tolist()))
    counts = {name: [int(right[truth == name].sum()), int((truth == name).sum())] for name in classes}
    wrong = [
        {"file": files[kept[row]], "class": str(truth[row]), "answer": str(answers[row])}
        | {"confidence": round(float(sure[row].max()), 4)}
        for row in np.flatnonzero(~right).tolist()
    ]
    wrong.sort(key=lambda one: -float(str(one["confidence"])))
    pairs = Counter((one["class"], one["answer"]) for one in wrong)
    found = {
        "images": len(truth),
        "accuracy": round(100 * float(right.mean()), 2),
        "recall": {name: round(100 * good / total, 2) for name, (good, total) in counts.items()},
        "counts": counts,
        "confused": [[name, answer, count] for (name, answer), count in pairs.most_common()],
        "wrong": wrong,
        "skipped": {name: names.count(name) for name in strange},
    }
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(html, evaluation_page(directory.name, found))
    return found


def change(directory: Path, device: str, action: str, *arguments: Any, **options: Any) -> IncrementalClassifier:
    """Load a model, call `forget`, `undo`, `rename` or `merge`, and save it."""
    with change_lock(directory) as save:
        model = load_model(directory, device)
        getattr(model, action)(*arguments, **options)
        save(model)
    return model


def summary_text(found: Mapping[str, Any]) -> str:
    """Return a summary as text."""
    frozen = " (frozen)" if found["frozen"] else ""
    lines = [
        f"{found['method']}, {found['backbone']}{frozen}, images of {found['size']} pixels, {found['dim']} features, "
        f"{found['updates']} updates, {found['bytes'] / 1e6:.1f} MB"
    ]
    width = max([5, *(len(c["name"]) for c in found["classes"])])
    if found["classes"]:
        lines.append(f"{'class':{width}}  images  learned     expected  when learned")
    for c in found["classes"]:
        recall = "-" if c["recall"] is None else f"{round(c['recall'] * c['checked'] / 100)} of {c['checked']}"
        expected = "-" if c["expected"] is None else f"{c['expected']:.0f} %"
        lines.append(f"{c['name']:{width}}  {c['images']:>6}  {c['learned']}  {expected:>8}  {recall:>12}")
    if found["confused"]:
        pairs = ", ".join(f"{share:.0f} % of {a} as {b}" for a, b, share in found["confused"][:3])
        lines.append(f"estimated confusions: {pairs}")
    if found["similar"]:
        pairs = ", ".join(f"{a} and {b} ({cosine:.2f})" for a, b, cosine in found["similar"][:3])
        lines.append(f"most similar: {pairs}")
    return "\n".join(lines)


def to_json(value: Any) -> str:
    """Return JSON."""
    return json.dumps(value, ensure_ascii=False, indent=1)
