"""Write tests/fixtures/VERSION: a small model and a small run of the installed version, for tests of later versions.

python tools/make_fixtures.py             refuses if they exist: what a released version wrote stays as it is
python tools/make_fixtures.py --replace   for a version that is not released yet
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import efcil
from efcil.data import digits

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
SMALL = ["width=1", "first.epochs=2", "later.epochs=1", "first.milestones=[]", "later.milestones=[]"]
LEFT_OUT = ("report.html", ".lock", "*.png", "*.svg")


def write_model(folder: Path) -> None:
    """Teach a model two digits twice, and note what it says of some images."""
    train = digits.load().train
    model = efcil.IncrementalClassifier(
        "dpcr", backbone="resnet10", width=2, size=16, epochs=3, device="cpu", progress=False
    )
    for labels in ((0, 1), (2, 3)):
        rows = np.concatenate([np.flatnonzero(train.labels == label)[:30] for label in labels])
        model.learn(list(train.images[rows].transpose(0, 2, 3, 1)), [f"digit {train.labels[row]}" for row in rows])
    model.save(folder / "model")
    np.save(folder / "probabilities.npy", model.predict_proba(list(asked())))


def asked() -> np.ndarray:
    """Return the images that the fixture's model was asked about (n, height, width, 1)."""
    return digits.load().test.images[:20].transpose(0, 2, 3, 1)


def write_run(folder: Path) -> None:
    """Run DPCR on the digits in five tasks."""
    from efcil.cli import app

    command = ["run", "dpcr", "digits", "--tasks", "5", "--device", "cpu", "--out", "run", "--quiet"]
    here = Path.cwd()
    os.chdir(folder)  # the run's files name its command
    try:
        sys.argv = ["efcil", *command, *(part for setting in SMALL for part in ("--set", setting))]
        with contextlib.redirect_stdout(io.StringIO()):
            app(prog_name="efcil", standalone_mode=False)
    finally:
        os.chdir(here)


def main(arguments: list[str] | None = None) -> int:
    """Write both; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replace", action="store_true", help="replace those of this version")
    replace = parser.parse_args(arguments).replace
    target = FIXTURES / efcil.__version__
    if target.exists() and not replace:
        print(f"{target.relative_to(ROOT)} exists: a released version's files stay as they are", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_model(folder)
        write_run(folder)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns(*LEFT_OUT))
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"wrote {target.relative_to(ROOT)}, {size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
