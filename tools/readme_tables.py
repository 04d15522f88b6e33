"""What README.md says of results: a sentence and a table of about ten rows, written by `results_tables.py`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmark_tables import table
from paper_gaps import is_far, note_of

from efcil.report.groups import NONE
from efcil.report.tables import md as escaped

if TYPE_CHECKING:
    from results_tables import Row, Section

SPLIT = "cifar100, T = 10"
PAPERS_ORDERS = {"identity", "1992", "1993"}
TITLES = {  # label in the ledger -> name, exemplars
    "dpcr-plus (tuned)": ("**DPCR+** (ours)", "none"),
    "dpcr, orders 1, 2, 3": ("DPCR", "none"),
    "dpcr": ("DPCR", "none"),
    "adc": ("ADC", "none"),
    "ldc": ("LDC", "none"),
    "lwf-ncm": ("LwF + nearest class mean", "none"),
    "pass": ("PASS", "none"),
    "ds-al": ("DS-AL", "none"),
    "acil": ("ACIL", "none"),
    "fecam": ("FeCAM", "none"),
    "foster:memory=1000/boosted": ("FOSTER", "1,000 images"),
    "icarl:memory=1000/nme": ("iCaRL", "1,000 images"),
}
MARKS = ("¹", "²", "³", "⁴", "⁵", "⁶")
SHOTS, HEADS = 20, ("slda", "logistic")  # images per class; what is compared in results/frozen-features.jsonl
PHOTOS = {"flowers102": "flower species", "cars": "car models"}  # sets that had no part in choosing constants


def _row(sections: Iterable[Section], label: str) -> tuple[Section, Row] | None:
    found = next((section for section in sections if section.title == SPLIT), None)
    row = next((row for row in found.rows if row.label == label), None) if found is not None else None
    return None if found is None or row is None else (found, row)


def _mean(sections: Sequence[Section], label: str) -> float | None:
    found = _row(sections, label)
    value = found[1].value("A_f") if found else None
    return None if value is None else value.mean


def headline_text(sections: Sequence[Section]) -> str:
    """Return the sentence of the first screen; empty where its numbers are not measured."""
    ours, same = _mean(sections, "dpcr-plus (tuned)"), _mean(sections, "dpcr, orders 1, 2, 3")
    found = _row(sections, "dpcr")
    if ours is None or same is None or found is None:
        return ""
    section, row = found
    again = row.value("A_f")
    assert again is not None
    orders = "the paper's class orders"
    if set(row.orders) != PAPERS_ORDERS:
        orders = f"class order {', '.join(sorted(row.orders))}"
    return (
        f"**CIFAR-100 in ten tasks, no stored images: DPCR+ {ours:.1f} %** final accuracy; DPCR {same:.1f} % on the "
        f"same class orders.\nOn {orders} DPCR reaches {again.mean:.1f} %; the paper reports "
        f"{section.paper['dpcr']['A_f']:.1f} %."
    )


def photos_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return what the default model reaches on two sets that had no part in its choice; empty where not measured."""
    whole: dict[str, int] = {}
    for line in lines:
        whole[line["set"]] = max(line["classes"], whole.get(line["set"], 0))
    found = {
        (line["set"], line["head"]): f"{statistics.mean(line['accuracy']):.1f} %"
        for line in lines
        if line["part"] == "test" and line["shots"] == SHOTS and line["classes"] == whole[line["set"]]
    }
    if any((name, head) not in found for name in PHOTOS for head in HEADS):
        return ""
    ours, beside = HEADS
    reached = ",\n".join(f"{whole[name]} {words} **{found[name, ours]}**" for name, words in PHOTOS.items())
    others = " and ".join(found[name, beside] for name in PHOTOS)
    return (
        f"**Photographs, {SHOTS} per class, no training** (the default: a frozen pretrained backbone with SLDA): "
        f"{reached}; logistic regression, which needs the features of all images at once: {others}."
    )


def readme_text(sections: Sequence[Section]) -> str:
    """Return the table of the README with its notes."""
    lines, notes, devices = [], dict[str, str](), dict[str, None]()
    for label, (title, exemplars) in TITLES.items():
        found = _row(sections, label)
        if found is None:
            continue
        section, row = found
        entry = row.entries[0]
        numbers = None if entry.unusual or entry.kept_back else section.paper.get(entry.paper_key)
        final, average = row.value("A_f"), row.value("A_avg")
        assert final is not None
        assert average is not None
        difference = NONE if numbers is None else f"{final.mean - numbers['A_f']:+.1f}"
        if numbers is not None and is_far(final.mean - numbers["A_f"]):
            difference += " " + notes.setdefault(note_of(label), MARKS[len(notes)])
        published = NONE if numbers is None else f"{numbers['A_f']:.2f} / {numbers['A_avg']:.2f}"
        orders = ", ".join(sorted(row.orders))
        lines.append([title, exemplars, published, final.text(), average.text(), escaped(orders), difference])
        devices |= dict.fromkeys(f"{run.run.device}, {run.run.precision}" for run in row.entries)
    if not lines:
        return "Not measured yet."
    head = (
        "method | stored images | paper: A\\_f / A\\_avg | >ours: A\\_f | >ours: A\\_avg | class orders | >difference"
    )
    caption = (
        f"CIFAR-100, ten tasks, ResNet-18 from random weights, the paper's schedule ({'; '.join(devices)}).\n"
        "A\\_f: final accuracy, A\\_avg: mean over tasks, in percent, ± standard deviation over orders; difference:\n"
        "A\\_f minus the paper's. Compare numbers only within the same class orders."
    )
    foot = [f"{mark} {note}" for note, mark in notes.items()]
    return "\n".join([caption, "", *table(head, lines), "", "<br>".join(foot)]).rstrip()
