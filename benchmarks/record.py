"""Benchmark records: command, commit, machine and raw numbers.

`tools/results_tables.py --add FILE --name NAME` stores them in results/benchmarks.jsonl and generates the tables of
docs/dev/performance.md and docs/serve.md.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from efcil.experiment.specification import commit
from efcil.files import write_json

PRIVATE = ("--out", "--machine", "--about")  # options that do not affect measurements


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the common options of records."""
    parser.add_argument("--out", type=Path, help="JSON file of the record")
    parser.add_argument("--machine", default="CPU", help="description of the machine, for the record")


def write_record(options: argparse.Namespace, script: str, arguments: Sequence[str], **raw: Any) -> None:
    """Write a record if --out is given."""
    if options.out is not None:
        command = shlex.join(["python", f"benchmarks/{Path(script).name}", *_public(arguments)])
        document = {"command": command, "commit": commit(), "raw": {"device": options.machine, **raw}}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.out, document)


def _public(arguments: Sequence[str]) -> Iterator[str]:
    """Remove options and directories of the local machine.

    >>> list(_public(["/data/birds", "--seeds", "0", "1", "--out", "x.json", "--machine=a Xeon"]))
    ['birds', '--seeds', '0', '1']
    """
    words = iter(arguments)
    for word in words:
        if word in PRIVATE:
            next(words, None)
        elif word.partition("=")[0] not in PRIVATE:
            yield Path(word).name if word.startswith("/") else word
