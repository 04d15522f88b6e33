"""Fuzz every reader with damaged and malicious files: no crash, hang, excessive memory, code execution or file access.

A target creates valid files, hypothesis damages one of them (bits, lengths, JSON and YAML values, safetensors headers,
lines, pickles and tags that execute code), and the target reads them. The outcome must be a result or an EfcilError,
within time and memory limits, without new processes, connections or files outside.

    python tools/fuzz.py --seconds 300 checkpoint config --out results/reliability/fuzz.json
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from corruptions import VALUES, changed, places

DEADLINE = 10.0  # processor seconds per file
MEMORY = 1 << 30  # bytes beyond current use


class Finding(AssertionError):
    """A reader violated a limit."""


# -- limits ------------------------------------------------------------------------------------------------------------

_FORBIDDEN = {
    *(
        "os.system",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.startfile",
        "subprocess.Popen",
        "pty.spawn",
    ),
    *("socket.connect", "socket.bind", "urllib.Request", "ftplib.connect", "smtplib.connect", "webbrowser.open"),
    *(
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.mkdir",
        "os.link",
        "os.symlink",
        "os.chmod",
        "os.chown",
        "shutil.rmtree",
    ),
}
_watched: list[Path] = []  # folder that a reader may write to; empty: not watched
_seen: list[str] = []


def _audit(event: str, given: tuple[Any, ...]) -> None:
    if not _watched:
        return
    if event == "open":
        path, _, flags = given
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        if writes and isinstance(path, str | bytes) and not _inside(os.fsdecode(path)):
            _seen.append(f"writes {os.fsdecode(path)}")
    elif event in _FORBIDDEN:
        first = given[0] if given else ""
        changes = event.startswith(("os.", "shutil.")) and event not in ("os.system", "os.exec", "os.posix_spawn")
        if changes and isinstance(first, str | bytes | os.PathLike) and _inside(os.fsdecode(first)):
            return
        if event == "os.chmod" and isinstance(first, int):
            return  # of a file that is open: to write one elsewhere is seen where it is opened
        _seen.append(f"{event} {first}")


def _inside(path: str) -> bool:
    path = os.path.abspath(path)
    allowed = (os.fspath(_watched[0]) + os.sep, "/dev/null", "/dev/shm/")
    return path.startswith(allowed) or path == os.fspath(_watched[0]) or path.endswith(".pyc") or "__pycache__" in path


@cache
def _hooked() -> bool:
    sys.addaudithook(_audit)  # audit hooks cannot be removed
    return True


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Limit time and memory, and detect started processes and written files."""
    _hooked()

    def ring(number: int, frame: Any) -> None:
        raise Finding(f"took more than {DEADLINE} seconds")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, DEADLINE)
    began, here = time.process_time(), os.getcwd()
    with open("/proc/self/statm", "rb") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    os.chdir(folder)  # where a payload would leave its mark
    _seen.clear()
    _watched.append(folder)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, hard))
        yield
    finally:
        _watched.clear()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        os.chdir(here)
        took = time.process_time() - began
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
    if _seen:
        raise Finding(f"did what no file may ask for: {_seen[0]}")
    if took > DEADLINE:
        raise Finding(f"took {took:.0f} seconds")
    if (folder / "CANARY").exists():
        raise Finding("ran what stood in the file")


# -- the readers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """Reader with functions to create, damage and read its files."""

    name: str
    make: Callable[[Path], None]
    read: Callable[[Path], object]
    files: tuple[str, ...]  # patterns
    seal: Callable[[Path, str], None] | None = None  # recomputes checksums, as an attacker would


TARGETS: dict[str, Target] = {}


def target(
    name: str, *files: str, make: Callable[[Path], None], seal: Callable[[Path, str], None] | None = None
) -> Any:
    """Register a reader."""

    def registered(read: Callable[[Path], object]) -> Callable[[Path], object]:
        TARGETS[name] = Target(name, make, read, files, seal)
        return read

    return registered


@cache
def _shared_options() -> dict[str, Any]:
    from efcil.cli.experiments import defaults, run

    return defaults(run)


def _options_from(path: Path) -> None:
    from efcil.cli.config_file import merged
    from efcil.data.digits import load
    from efcil.experiment.specification import ExperimentSpec, resolve
    from efcil.tasks import class_order

    found = merged(path, _shared_options(), set())
    names = ("tasks", "init_cls", "seed", "preset", "allow_uneven", "order")
    given = {name: found[name] for name in names}
    from efcil.cli.experiments import parse_increment

    request = ExperimentSpec(
        (found["method"],),
        found["dataset"],
        increment=parse_increment(found["increment"]),
        overrides=tuple(found["overrides"]),
        **given,
    )
    experiment = resolve(request)
    if experiment.dataset == "digits":
        class_order(experiment.order, load().class_names)
        experiment.sizes(10)


def _make_config(folder: Path) -> None:
    from efcil.experiment.specification import ExperimentSpec, resolve

    values = "method: dpcr\ndataset: digits\ntasks: 5\norder: order.txt\nseed: 3\n"
    values += "set:\n  ridge: 200\n  later.milestones: [4, 9]\n"
    (folder / "config.yaml").write_text(values)
    run = {"run": resolve(ExperimentSpec(("dpcr",), "digits")).fingerprint()}
    (folder / "run.yaml").write_text(json.dumps(run, indent=1))  # which is YAML too
    tree = {"method": "icarl", "dataset": "digits", "increment": [2, 2, 6], "set": {"memory": 40, "first.lr": 0.1}}
    (folder / "config.json").write_text(json.dumps(tree))
    (folder / "order.txt").write_text("\n".join("3 1 4 0 5 9 2 6 8 7".split()))


@target("config", "*.yaml", "*.json", "order.txt", make=_make_config)
def read_config(folder: Path) -> None:
    """Read option files, the configuration of a run, and class orders."""
    errors = []
    for path in sorted(folder.glob("*.*")):
        if path.suffix in (".yaml", ".json"):
            try:
                _options_from(path)
            except Exception as error:  # read all files, even after an error
                errors.append(error)
    for error in sorted(errors, key=lambda e: _ours(e)):
        raise error


def _make_settings(folder: Path) -> None:
    (folder / "set.txt").write_text(
        "ridge=200\nfirst.milestones=[60, 120]\nshift_ridge=1e-9\nbackbone=resnet18\nwidth=4\n"
    )


@target("settings", "set.txt", make=_make_settings)
def read_settings(folder: Path) -> None:
    """Parse --set values and method labels."""
    from efcil.experiment.specification import ExperimentSpec, resolve

    given = (folder / "set.txt").read_bytes().decode("utf-8", "surrogateescape").split("\n")
    resolve(ExperimentSpec(("dpcr",), "digits", overrides=tuple(text for text in given if text)))


def _make_pycil(folder: Path) -> None:
    for path in (Path(__file__).resolve().parent.parent / "tests" / "cli" / "pycil").glob("*.json"):
        shutil.copy(path, folder)


@target("pycil", "*.json", make=_make_pycil)
def read_pycil(folder: Path) -> None:
    """Read PyCIL files."""
    read_config(folder)


# A run: its checkpoints, configuration, log and summary, all through `--resume`.


def _run(folder: Path) -> Any:
    from efcil.accel.backend import Backend
    from efcil.experiment.reporters import NullReporter
    from efcil.experiment.run import Run, RunOptions
    from efcil.experiment.specification import ExperimentSpec, resolve

    small = (
        "width=2",
        "first.epochs=1",
        "first.milestones=[]",
        "later.epochs=1",
        "later.milestones=[]",
        "batch_size=512",
    )
    experiment = resolve(ExperimentSpec(("dpcr", "lwf"), "digits", tasks=2, overrides=small))
    options = RunOptions(command="fuzz", compare=True)
    return Run(experiment, folder / "run", Backend.choose("cpu"), NullReporter(), options)


def _make_run(folder: Path) -> None:
    from efcil.training.trainer import TrainingInterrupted

    run = _run(folder)
    run.execute(False)
    place = folder / "run" / "trajectory" / "checkpoints"
    (place / "task-02.safetensors").unlink()
    again = _run(folder)
    again.stop.set()
    with contextlib.suppress(TrainingInterrupted):
        again.execute(True)


def _resume(folder: Path) -> None:
    from efcil.training.trainer import TrainingInterrupted

    run = _run(folder)
    run.stop.set()  # after the first step, when everything has been read
    with contextlib.suppress(TrainingInterrupted):
        run.execute(True)


def _seal_checkpoint(folder: Path, name: str) -> None:
    """Recompute the checksum of a readable checkpoint."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from efcil.tensor_files import digest

    with contextlib.suppress(Exception):
        with safe_open(folder / name, framework="pt") as file:
            text = (file.metadata() or {})["meta"]
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if random.Random(len(text)).random() < 0.9:
            with contextlib.suppress(ValueError):
                tree = json.loads(text)
                spots = places(tree)
                node, path = tree, random.Random(str(sorted(tensors))).choice(spots)
                for key in path[:-1]:
                    node = node[key]
                if path and int.from_bytes((folder / name).read_bytes()[-2:], "little") % 2:
                    node[path[-1]] = VALUES[len(spots) % len(VALUES)]
                text = json.dumps(tree)
        save_file(tensors, folder / name, metadata={"meta": text, "sha256": digest(tensors, text)})


@target("checkpoint", "run/trajectory/checkpoints/*.safetensors", make=_make_run, seal=_seal_checkpoint)
def read_checkpoint(folder: Path) -> None:
    """Read checkpoints of a run."""
    _resume(folder)


@target("run", "run/trajectory/config.yaml", "run/trajectory/metrics.jsonl", "run/*/summary.json", make=_make_run)
def read_run(folder: Path) -> None:
    """Read the other files of a run directory."""
    _resume(folder)


# A model, and weights for one.


def _make_model(folder: Path) -> None:
    import numpy as np

    from efcil.product import IncrementalClassifier

    rng = np.random.default_rng(0)
    model = IncrementalClassifier("dpcr", width=2, size=8, epochs=1, progress=False, device="cpu", val_fraction=0)
    for names in (["a", "b"], ["c", "d"]):
        pictures = rng.integers(0, 255, (8, 8, 8, 3)).astype(np.uint8)
        model.learn(pictures, [names[i % 2] for i in range(8)])
    model.save(folder / "model")


def _seal_model(folder: Path, name: str) -> None:
    path = folder / name
    card = path.parent / "model.json"
    if path.suffix == ".safetensors":
        tree = json.loads(card.read_bytes())
        tree["files"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        card.write_text(json.dumps(tree))


@target("model", "model/*.json", "model/*.safetensors", "model/previous/*", make=_make_model, seal=_seal_model)
def read_model(folder: Path) -> None:
    """Load a model directory, predict, summarize and undo."""
    import numpy as np

    from efcil.product import IncrementalClassifier

    model = IncrementalClassifier.load(folder / "model", progress=False, device="cpu")
    model.predict_proba(np.zeros((1, 8, 8, 3), np.uint8))
    model.summary()


def _make_weights(folder: Path) -> None:
    _make_model(folder)
    shutil.move(folder / "model" / "weights.safetensors", folder / "weights.safetensors")
    shutil.rmtree(folder / "model")


@target("weights", "weights.safetensors", make=_make_weights)
def read_weights(folder: Path) -> None:
    """Load a file with backbone weights."""
    from efcil.product import IncrementalClassifier

    IncrementalClassifier("dpcr", width=2, size=8, weights=folder / "weights.safetensors", progress=False, device="cpu")


# Data sets.


def _make_cifar(folder: Path) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    names = ["apple", "baby", "worm"]
    for place in ("cifar-100-python", "cifar-100-binary"):
        (folder / "in" / place / place).mkdir(parents=True)
    for part, count in (("train", 9), ("test", 6)):
        pixels, labels = rng.integers(0, 256, (count, 3072)).astype(np.uint8), np.arange(count) % 3
        content = {"data": pixels, "fine_labels": labels.tolist(), "filenames": ["x.png"] * count}
        (folder / "in/cifar-100-python/cifar-100-python" / part).write_bytes(pickle.dumps(content, 2))
        records = np.concatenate([np.zeros((count, 1), np.uint8), labels[:, None].astype(np.uint8), pixels], 1)
        (folder / f"in/cifar-100-binary/cifar-100-binary/{part}.bin").write_bytes(records.tobytes())
    (folder / "in/cifar-100-python/cifar-100-python/meta").write_bytes(pickle.dumps({"fine_label_names": names}, 2))
    (folder / "in/cifar-100-binary/cifar-100-binary/fine_label_names.txt").write_text("\n".join(names))


@target("cifar100", "in/*/*/*", make=_make_cifar)
def read_cifar(folder: Path) -> None:
    """Load CIFAR-100, python and binary versions."""
    from efcil.data import cifar100

    _each([lambda place=place: cifar100.load(place) for place in sorted((folder / "in").iterdir())])


def _each(calls: Sequence[Callable[[], object]]) -> None:
    """Call all functions; raise foreign errors first."""
    errors = []
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(error)
    for error in sorted(errors, key=_ours):
        raise error


def _make_sets(folder: Path) -> None:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)

    def picture(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (12, 10, 3)).astype(np.uint8)).save(path)

    wnids = ["n01440764", "n01443537"]
    tiny, net, birds = folder / "tiny", folder / "net", folder / "birds"
    for wnid in wnids:
        for i in range(2):
            picture(tiny / "train" / wnid / "images" / f"{wnid}_{i}.JPEG")
            picture(net / "train" / wnid / f"{i}.JPEG")
            picture(net / "val" / wnid / f"{i}.JPEG")
            picture(birds / "images" / f"00{wnids.index(wnid) + 1}.{wnid}" / f"{i}.jpg")
        picture(tiny / "val" / "images" / f"val_{wnid}.JPEG")
    (tiny / "wnids.txt").write_text("\n".join(wnids))
    (tiny / "val" / "val_annotations.txt").write_text("".join(f"val_{w}.JPEG\t{w}\t0\t0\t9\t9\n" for w in wnids))
    (net / "list.txt").write_text("# two of them\n" + "\n".join(f"{w} some words" for w in wnids))
    classes = [f"00{i + 1}.{wnid}" for i, wnid in enumerate(wnids)]
    rows = [(name, i, c + 1) for c, name in enumerate(classes) for i in range(2)]
    lists = {
        "images.txt": [f"{n} {name}/{i}.jpg" for n, (name, i, _) in enumerate(rows, 1)],
        "image_class_labels.txt": [f"{n} {c}" for n, (_, _, c) in enumerate(rows, 1)],
        "train_test_split.txt": [f"{n} {i}" for n, (_, i, _) in enumerate(rows, 1)],
        "classes.txt": [f"{c} {name}" for c, name in enumerate(classes, 1)],
    }
    for name, lines in lists.items():
        (birds / name).write_text("\n".join(lines))


@target("images", "*/*.txt", "*/val/*.txt", "tiny/*/*/*.JPEG", "birds/images/*/*.jpg", make=_make_sets)
def read_sets(folder: Path) -> None:
    """Load Tiny-ImageNet, ImageNet-100 with a class list, and CUB-200."""
    from efcil.data import cub200, imagenet100, tiny_imagenet
    from efcil.data.cache import load_decoded

    cache = folder / "cache"
    scans = [
        ("tiny-imagenet", lambda: tiny_imagenet.scan(folder / "tiny")),
        ("imagenet100", lambda: imagenet100.scan(folder / "net", class_list=str(folder / "net" / "list.txt"))),
        ("cub200", lambda: cub200.scan(folder / "birds")),
    ]
    _each([lambda n=n, s=s: load_decoded(s(), n, size=8, workers=1, cache=cache, lazy=False) for n, s in scans])


def _make_cache(folder: Path) -> None:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for label in ("a", "b"):
        (folder / "pictures" / label).mkdir(parents=True)
        for i in range(4):
            path = folder / "pictures" / label / f"{i}.png"
            Image.fromarray(rng.integers(0, 255, (9, 9, 3)).astype(np.uint8)).save(path)
            os.utime(path, (1e9, 1e9))
    read_cache(folder)


def read_cache(folder: Path) -> object:
    """Load the image cache, its index and the recorded split."""
    from efcil.data import folder as pictures

    # the key of the cache is the place of the pictures, and each case lies elsewhere: its files are given that name
    found = pictures.load(folder / "pictures", size=8, cache=folder / "cache", workers=1, lazy=False)
    return found.train.images.sum(), found.fingerprint()


def _read_cache(folder: Path) -> object:
    from efcil.data.cache import home
    from efcil.data.folder import scan

    (old,) = (folder / "cache").iterdir()
    os.rename(old, home(scan(folder / "pictures"), folder / "cache"))
    return read_cache(folder)


TARGETS["cache"] = Target("cache", _make_cache, _read_cache, ("cache/*/*",))


# Results, and what comes over the network.


def _make_report(folder: Path) -> None:
    from efcil.experiment.specification import ExperimentSpec, resolve

    _make_run(folder)
    experiment = resolve(ExperimentSpec(("dpcr",), "digits", tasks=2))
    (folder / "plan.json").write_text(json.dumps(experiment.fingerprint()))


@target("report", "run/*/summary.json", make=_make_report)
def read_report(folder: Path) -> None:
    """Load summaries for tables, reports and `efcil reproduce`."""
    from efcil.report import csv_table, html_page, latex_table, load_summaries, markdown_table
    from efcil.reproduce.result_index import ResultIndex, RunKey

    found = load_summaries(folder / "run")
    for make in (markdown_table, latex_table, csv_table, html_page):
        make(found)
    cell = RunKey("cifar100", 10, "identity", "pass")
    for path in (folder / "run").rglob("summary.json"):
        tree = json.loads(path.read_bytes())
        if isinstance(tree, dict):
            tree |= {"dataset": "cifar100", "tasks": 10, "order": "identity", "method": "pass", "status": "complete"}
            path.write_text(json.dumps(tree))
    ResultIndex().read([folder / "run"], [cell], ())


def _make_snapshot(folder: Path) -> None:
    import torch

    from efcil.core.class_stats import ClassStats
    from efcil.tensor_files import save_tensors

    x, labels = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    stats = {f"stats/dpcr/{k}": v for k, v in ClassStats.from_features(x, labels).state().items()}
    tensors = {"before": x, "after": x, "labels": labels, **stats}
    save_tensors(folder / "task-02.safetensors", tensors, {"task": 2, "class_names": ["a", "b", "c"]})


@target("snapshot", "*.safetensors", make=_make_snapshot, seal=_seal_checkpoint)
def read_snapshot(folder: Path) -> None:
    """Load snapshots for figures."""
    from efcil.reproduce.snapshots import Snapshot

    snapshot, _ = Snapshot.read(folder / "task-02.safetensors")
    snapshot.accuracy(snapshot.weight("dpcr", 1.0, True))


def _make_upload(folder: Path) -> None:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (14, 11, 3)).astype(np.uint8)
    for suffix in ("png", "jpg", "gif", "bmp", "tif", "webp", "ppm"):
        Image.fromarray(pixels).save(folder / f"picture.{suffix}")
    Image.fromarray(pixels[..., 0].astype(np.int32) * 300).save(folder / "deep.tif")
    Image.fromarray(pixels).convert("P").save(folder / "palette.png", transparency=3)
    Image.fromarray(pixels).save(folder / "frames.gif", save_all=True, append_images=[Image.fromarray(255 - pixels)])
    with zipfile.ZipFile(folder / "lesson.zip", "w") as archive:
        for label in ("a", "b"):
            for i in range(2):
                archive.write(folder / "picture.png", f"{label}/{i}.png")


@target("upload", "picture.*", "deep.tif", "palette.png", "frames.gif", make=_make_upload)
def read_upload(folder: Path) -> None:
    """Decode the images of a request."""
    from efcil.serve.images import decode_image
    from efcil.serve.limits import Limits

    _each(
        [
            lambda p=p: decode_image(p.read_bytes(), 8, Limits().pixels)
            for p in sorted(folder.glob("*.*"))
            if p.suffix != ".zip"
        ]
    )


@target("archive", "lesson.zip", make=_make_upload)
def read_archive(folder: Path) -> None:
    """Read an uploaded zip file."""
    from efcil.serve.images import decode_image
    from efcil.serve.limits import Limits
    from efcil.serve.uploads import from_archive

    def decode(data: bytes) -> Any:
        return decode_image(data, 8, Limits().pixels)

    with open(folder / "lesson.zip", "rb") as file:
        from_archive(file, decode, Limits(unpacked=2_000_000, teach_files=20), ["a"])


def _make_download(folder: Path) -> None:
    import tarfile

    (folder / "set").mkdir()
    (folder / "set" / "train").write_bytes(b"x" * 2000)
    for name, mode in (("plain.tar", "w"), ("packed.tar.gz", "w:gz")):
        with tarfile.open(folder / name, mode) as archive:
            archive.add(folder / "set", "set")
    shutil.rmtree(folder / "set")


@target("download", "*.tar", "*.gz", make=_make_download)
def read_download(folder: Path) -> None:
    """Unpack downloaded archives."""
    from efcil.data import fetch

    def unpack(path: Path) -> None:
        remote = fetch.Remote("http://x/y", path.name, "md5:" + "0" * 32, unpack="set")
        shutil.rmtree(fetch._unpack(remote, path, folder / "set"))

    _each([lambda p=p: unpack(p) for p in sorted(folder.glob("*.tar*"))])


# -- running -----------------------------------------------------------------------------------------------------------


def _ours(error: BaseException) -> bool:
    from efcil.errors import EfcilError

    return isinstance(error, EfcilError)


class Fuzzer:
    """Valid files of a target and damaged copies of them."""

    def __init__(self, chosen: Target, home: Path):
        self.target, self.sound, self.case = chosen, home / "sound", home / "case"
        self.sound.mkdir(parents=True)
        chosen.make(self.sound)
        found = {p for pattern in chosen.files for p in self.sound.glob(pattern) if p.is_file()}
        self.names = sorted(p.relative_to(self.sound).as_posix() for p in found)
        self.executions = self.refused = 0
        self._copy()
        with contextlib.chdir(self.case):
            chosen.read(self.case)  # checks valid files and imports modules

    def _copy(self) -> None:
        shutil.rmtree(self.case, ignore_errors=True)
        shutil.copytree(self.sound, self.case)

    def once(self, data: st.DataObject) -> None:
        """Damage one file and read it; raise Finding on a violation."""
        draw = data.draw
        name = draw(st.sampled_from(self.names))
        self._copy()
        path = self.case / name
        path.write_bytes(changed(draw, name, path.read_bytes()))
        if self.target.seal is not None and draw(st.integers(0, 3)):
            self.target.seal(self.case, name)
        self.executions += 1
        try:
            with guarded(self.case):
                self.target.read(self.case)
        except Exception as error:
            if not _ours(error):
                raise
            self.refused += 1
            told = str(error)
            if "\n" in told.strip() and len(told) > 20_000:
                raise Finding("the error message is unreadable") from error


def _where(error: BaseException) -> str:
    """Return the innermost location in efcil of an error."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f"{os.sep}efcil{os.sep}" in f.filename]
    at = f"{frames[-1].filename.rpartition(os.sep + 'efcil' + os.sep)[2]}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {at}"


def fuzz(name: str, seconds: float, begin: int, rounds: float = math.inf) -> dict[str, Any]:
    """Fuzz for some seconds or rounds; return counts and distinct findings.

    A round is a seed, so results of rounds are reproducible on any machine.
    """
    findings: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="efcil-fuzz-") as home:
        fuzzer = Fuzzer(TARGETS[name], Path(os.path.realpath(home)))
        until, number = time.monotonic() + seconds, begin
        while time.monotonic() < until and number < begin + rounds:
            number += 1

            @settings(
                max_examples=25,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @seed(number)
            @given(st.data())
            def step(data: st.DataObject) -> None:
                try:
                    fuzzer.once(data)
                except Exception as error:
                    key = _where(error)
                    if key not in findings:
                        findings[key] = f"{error}"[:300]
                        kept = Path(tempfile.gettempdir()) / f"efcil-finding-{name}-{len(findings)}"
                        shutil.rmtree(kept, ignore_errors=True)
                        shutil.copytree(fuzzer.case, kept)
                        print(f"{name}: {key}: {findings[key]} ({kept})", flush=True)
                        traceback.print_exc(limit=-6)

            step()
    found = {"executions": fuzzer.executions, "refused": fuzzer.refused, "findings": findings}
    return {"seconds": seconds, "first_seed": begin + 1, "last_seed": number, **found}


def main() -> None:
    """Fuzz some or all targets in turn, and add the results to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", choices=[*sorted(TARGETS), []], help="readers; default: all")
    parser.add_argument("--seconds", type=float, default=300.0, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    given = parser.parse_args()
    bad = False
    for name in given.targets or sorted(TARGETS):
        outcome = fuzz(name, given.seconds, given.seed)
        bad |= bool(outcome["findings"])
        found = len(outcome["findings"])
        print(f"{name}: {outcome['executions']} executions, {outcome['refused']} refused, {found} findings")
        if given.out:
            _add(given.out, name, outcome, given.seconds)
    sys.exit(bad)


def _add(path: Path, name: str, outcome: Mapping[str, Any], seconds: float) -> None:
    import fcntl

    from efcil.experiment.specification import commit
    from efcil.files import write_json

    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tree = json.loads(path.read_text()) if path.exists() else {"targets": {}}
        tree["command"], tree["machine"] = (
            f"python tools/fuzz.py --seconds {seconds:g} TARGET",
            os.environ.get("EFCIL_MACHINE", ""),
        )
        tree["targets"][name] = {**outcome, "commit": commit()}
        write_json(path, tree)
    path.with_suffix(".lock").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
