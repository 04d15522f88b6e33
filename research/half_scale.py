"""Tables of docs/dev/research-log.md, and a half-scale CIFAR-100 problem for preliminary experiments.

    python research/half_scale.py make CIFAR DIR         write class folders for `efcil run METHOD folder --data DIR`
    python research/half_scale.py add RUN --what "..."   store the summaries of a run, a comparison or an `efcil tune`
    python research/half_scale.py                        write the tables in docs/dev/research-log.md
    python research/half_scale.py --check                exit 1 when the page is not what the summaries give

The half-scale problem has every second class with its first 250 training images, the next 100 training images for
evaluation, and 16 x 16 pixels. Its results are only hints, as networks are narrow and trained for minutes. Results of
`efcil tune` on held-out training images of a full problem have a separate table. Neither uses test images; runs
evaluated on test images are refused.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from efcil.data import cifar100
from efcil.errors import RunError
from efcil.files import atomic_write_text, read_json_lines, write_json_lines
from efcil.report.load import TIMING, load_summaries
from efcil.report.tables import md as escaped
from efcil.report.tables import row as row_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "dev" / "research-log.md"
STORED = ROOT / "results" / "research.jsonl"
TABLES = ("held-out", "half-scale")
STEP, SIDE = 2, 16
PARTS = {"train": slice(0, 250), "test": slice(250, 350)}  # slices of the training images of each class
KEPT = ("method", "order", "seed", "A_f", "A_avg", "A_t", "old", "new", *TIMING, "commit", "command")


def make(source: Path, target: Path) -> None:
    """Write the problem as class folders."""
    data = cifar100.load(source)
    for label in range(0, len(data.class_names), STEP):
        rows = np.flatnonzero(data.train.labels == label)
        for part, which in PARTS.items():
            folder = target / part / data.class_names[label]
            folder.mkdir(parents=True, exist_ok=True)
            for number, row in enumerate(rows[which]):
                picture = Image.fromarray(np.ascontiguousarray(data.train.images[row].transpose(1, 2, 0)))
                picture.resize((SIDE, SIDE), Image.Resampling.BOX).save(folder / f"{number:03d}.png")


def table_of(dataset: str) -> str:
    """Return the table of a summary by its evaluation data."""
    if dataset.endswith("held out"):
        return "held-out"
    if dataset == "folder":
        return "half-scale"
    raise RunError(f"{dataset}: evaluated on test images, which must not be used for model selection; use `efcil tune`")


def add(run: Path, what: str, stored: Path = STORED) -> None:
    """Store the results of a run, replacing earlier ones with the same description and order."""
    given = [s for s in load_summaries([run]) if s["tasks_done"]]
    tables = {table_of(s["dataset"]) for s in given}
    if len(tables) != 1:
        raise RunError(f"{run}: {' and '.join(sorted(tables)) or 'no summary'}; wanted completed tasks of one table")
    name = tables.pop()
    found = [{"name": name, "what": what, **{key: s[key] for key in KEPT}} for s in given]
    for summary in found:
        summary["command"] = re.sub(r"(--data|--out|efcil reevaluate) \S+", r"\1 DIR", summary["command"])
        summary["command"] = re.sub(r"(efcil ensemble \S+)( [^-]\S*)+", r"\1 DIR ...", summary["command"])
    orders = {s["order"] for s in found}
    lines = read_json_lines(stored, error=RunError) if stored.exists() else []
    before = [s for s in lines if (s["name"], s.get("what")) != (name, what) or s["order"] not in orders]
    write_json_lines(stored, [*before, *found])


def table(summaries: Sequence[dict[str, Any]]) -> str:
    """Return the stored runs as a Markdown table."""
    head = ["What", "Method", "Order", "Tasks", "A_f", "A_avg", "Old", "New", "Seconds"]
    rows = [
        [s["what"], s["method"], s["order"], str(len(s["A_t"])), *(f"{s[key]:.2f}" for key in ("A_f", "A_avg"))]
        + [f"{s['old'][-1]:.2f}", f"{s['new'][-1]:.2f}", f"{s['seconds']:.0f}"]
        for s in summaries
    ]
    lines = [row_of(map(escaped, head)), row_of(["---"] * 3 + ["---:"] * 6), *(row_of(map(escaped, r)) for r in rows)]
    return "\n".join(lines)


def page(text: str, stored: Path = STORED) -> str:
    """Return the page with updated tables."""
    lines = read_json_lines(stored, error=RunError)
    for name in TABLES:
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n\n{table([s for s in lines if s['name'] == name])}\n\n{end}{after}"
    return text


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parts = parser.add_subparsers(dest="do")
    making = parts.add_parser("make")
    making.add_argument("source", type=Path)
    making.add_argument("target", type=Path)
    adding = parts.add_parser("add")
    adding.add_argument("run", type=Path)
    adding.add_argument("--what", required=True)
    given = parser.parse_args()
    if given.do == "make":
        make(given.source, given.target)
        return 0
    if given.do == "add":
        try:
            add(given.run, given.what)
        except RunError as error:
            parser.error(str(error))
    now = PAGE.read_text(encoding="utf-8")
    wanted = page(now)
    if given.check:
        return int(now != wanted)
    atomic_write_text(PAGE, wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
