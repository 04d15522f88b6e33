"""`efcil demo photos`: teach ten kinds of clothing in three rounds on photographs, and show how well it went."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import numpy.typing as npt

from efcil.data.folder import scan
from efcil.files import atomic_write_text
from efcil.product.classifier import IncrementalClassifier
from efcil.product.confusion_page import STYLE, matrix_table

ROUNDS = (4, 3, 3)  # classes of each round
PHOTOS = 80  # of a class, at most
MODEL, PAGE = "model", "photos.html"  # names in the output directory


@dataclass(frozen=True)
class Round:
    """What was taught in a round, and how many photos of all classes so far were named rightly afterwards."""

    classes: tuple[str, ...]
    photos: int
    seconds: float
    right: int
    tested: int

    @property
    def accuracy(self) -> float:
        """Share of the test photos, in percent."""
        return 100 * self.right / self.tested


def photo_demo(
    photos: Path, out: Path, say: Callable[[str], None], model: IncrementalClassifier | None = None
) -> list[Round]:
    """Teach the classes of `photos` (train/, test/) in rounds; write the model and a page to `out`.

    Photos of earlier rounds are not read again but to test.
    """
    tree = scan(photos)
    model = model or IncrementalClassifier(progress=False)
    names = tree.class_names
    last = np.cumsum(_sizes(len(names)))
    rounds: list[Round] = []
    truth, answers = np.zeros(0, np.str_), np.zeros(0, np.str_)
    for begin, end in zip((0, *last[:-1]), last, strict=True):
        lesson = [(file, label) for label in range(begin, end) for file in _files(photos, tree.files, label, "train")]
        start = time.perf_counter()
        model.learn([file for file, _ in lesson], [names[label] for _, label in lesson])
        seconds = time.perf_counter() - start
        asked = [(file, label) for label in range(end) for file in _files(photos, tree.files, label, "test")]
        truth, answers = np.array([names[label] for _, label in asked]), model.predict([file for file, _ in asked])
        rounds.append(Round(names[begin:end], len(lesson), seconds, int((truth == answers).sum()), len(asked)))
        say(_line(len(rounds), rounds[-1], end))
    model.save(out / MODEL)
    atomic_write_text(out / PAGE, page(rounds, names, truth, answers))
    return rounds


def _sizes(classes: int) -> list[int]:
    """Return the classes of each round: those of `ROUNDS` where there are ten, otherwise about as many in each."""
    if classes == sum(ROUNDS):
        return list(ROUNDS)
    return [len(part) for part in np.array_split(np.arange(classes), min(len(ROUNDS), classes))]


def _files(root: Path, files: Sequence[object], label: int, side: str) -> list[Path]:
    own = [root / file.name for file in files if (file.label, file.side) == (label, side)]  # type: ignore[attr-defined]
    return own[:PHOTOS] if side == "train" else own


def _line(number: int, done: Round, known: int) -> str:
    return (
        f"round {number}: learned {', '.join(done.classes)} from {done.photos} photos in {done.seconds:.0f} s; "
        f"of {done.tested} test photos of all {known} classes {done.right} are right ({done.accuracy:.1f} %)"
    )


# --- the page ---------------------------------------------------------------------------------------------------------


def page(
    rounds: Sequence[Round], names: Sequence[str], truth: npt.NDArray[np.str_], answers: npt.NDArray[np.str_]
) -> str:
    """Return the page: accuracy after each round, and the confusion matrix after the last."""
    lines = "".join(
        f"<tr><td>{number}</td><td class=t>{escape(', '.join(one.classes))}</td><td>{one.photos}</td>"
        f"<td>{one.seconds:.0f}</td><td>{one.right} of {one.tested}</td><td>{one.accuracy:.1f} %</td></tr>"
        for number, one in enumerate(rounds, 1)
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Clothing in three rounds</title><style>{STYLE}</style></head><body>
<h1>Clothing in {len(rounds)} rounds</h1>
<p>In each round new kinds of clothing were learned; the photos of earlier rounds were not needed any more. After each
round the model was tested on photos, which it never saw, of all kinds so far.</p>
<table><thead><tr><th>Round</th><th>Learned</th><th>Photos</th><th>Seconds</th><th>Right, of all kinds so far</th>
<th>Accuracy</th></tr></thead><tbody>{lines}</tbody></table>
<h2>Confusion matrix</h2>
<p>After the last round. Rows: true class. Columns: predicted class.</p>
{matrix_table(names, truth, answers)}
<h2>Go on</h2>
<p>Ask it about a photo, or teach it a class of your own: <code>efcil predict {MODEL} photo.jpg</code>,
<code>efcil teach {MODEL} FOLDER</code>, <code>efcil serve {MODEL}</code>.</p>
</body></html>
"""
