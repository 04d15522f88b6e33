"""Directories of runs: a new name that is free, and the command that a stored run was started with."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from efcil.errors import EfcilError, RunError
from efcil.files import read_json

RUNS = Path("runs")
RESUMABLE = ("run", "compare", "tune", "reproduce")
REPRODUCED = "runs"  # where `efcil reproduce` has its runs: runs/DATASET/T5/order-1993/GROUP/trajectory
WITH_RESUME = ("run", "compare")  # which have an option --resume; the others skip what is completed by themselves


def directory_stem(names: Sequence[str], options: Mapping[str, Any], orders: Sequence[str]) -> str:
    """Return a directory's name from a method or command, the data set, its split, order and seed.

    >>> directory_stem(["dpcr"], {"dataset": "digits", "tasks": 5, "seed": 0}, ["1993"])
    'dpcr-digits-5-1993'
    >>> directory_stem(["tune", "dpcr:ridge=2"], {"dataset": "digits", "init_cls": 4, "increment": "3"}, ["1", "2"])
    'tune-dpcr-ridge=2-digits-4+3'
    """
    split = [str(options[key]) for key in ("tasks", "init_cls", "increment") if options.get(key) is not None]
    parts = [*names, options["dataset"], "+".join(split) or "5"]
    if len(orders) == 1 and orders[0] != "identity":
        parts.append(Path(orders[0]).stem)
    if options.get("seed"):
        parts.append(f"seed{options['seed']}")
    return "-".join(parts).translate(str.maketrans(':/\\, "*?<>|', "-" * 11))


def new_directory(stem: str, homes: Mapping[str, Mapping[str, Any]], resume: bool) -> Path:
    """Return the first of runs/STEM, runs/STEM-2 ... that is free.

    `homes` are the directories below it that will hold a config.yaml, with the options of each. One that has exactly
    these options is taken with `resume`; without, it is passed over when it is complete and refused when it is not.
    """
    for number in itertools.count(1):
        place = RUNS / (stem if number == 1 else f"{stem}-{number}")
        if not place.exists() or not any(not name.startswith(".") for name in os.listdir(place)):
            return place
        if not _has_same_options(place, homes):
            continue
        if resume:
            return place
        if not _is_complete(place, homes):
            raise RunError(
                f"{place} holds an unfinished run with the same options: resume it with `{resume_command(place)}`, "
                "or choose another --out to start anew"
            )
    raise AssertionError  # count does not end


def resume_command(place: Path) -> str:
    """Return the command that resumes a run, as it can be typed."""
    return shlex.join(["efcil", "resume", str(place)])


def command_line(out: Path) -> str:
    """Return the command as it was typed, with its --out: `efcil resume` types it again."""
    words = [word for word in sys.argv[1:] if word != "--resume"]
    if not any(word == "--out" or word.startswith("--out=") for word in words):
        words += ["--out", str(out)]
    return shlex.join(["efcil", *words])


def _stored(config: Path) -> dict[str, Any] | None:
    """Return what a run wrote about itself, if that can be read."""
    import yaml

    from efcil.config import read_yaml

    try:
        tree = read_yaml(config)
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return None
    return tree if isinstance(tree, dict) and isinstance(tree.get("run"), dict) else None


def _has_same_options(place: Path, homes: Mapping[str, Mapping[str, Any]]) -> bool:
    found = {home: _stored(place / home / "config.yaml") for home in homes if (place / home / "config.yaml").exists()}
    for home, tree in found.items():
        there = {} if tree is None else tree["run"]
        here = json.loads(json.dumps(homes[home]))
        if {key: there.get(key) for key in here} != here or there.keys() - here.keys() - {"class_order", "fingerprint"}:
            return False
    return bool(found)


def _is_complete(place: Path, homes: Mapping[str, Mapping[str, Any]]) -> bool:
    for home in homes:
        out = place / home
        out = out.parent if out.name == "trajectory" else out
        summaries = [*out.glob("summary.json"), *out.glob("*/summary.json")]
        try:
            states = [read_json(path)["status"] for path in summaries]
        except (EfcilError, KeyError, TypeError):
            return False
        if not states or set(states) != {"complete"}:
            return False
    return True


def stored_command(directory: Path) -> tuple[list[str], Path, Path]:
    """Return the words of the command that made a directory, where it was started, and its whole output directory."""
    if not directory.is_dir():
        raise RunError(f"{directory}: no such directory; name one that `efcil run` or `efcil compare` has made")
    from efcil.experiment.run_directory import check_format

    missing = f"{directory}: no run in it (config.yaml is missing); name the directory given to --out"
    config = _nearest_config(directory, 3) or _nearest_config(directory / REPRODUCED, 5)
    if config is None:
        raise RunError(missing)
    check_format(config)  # options of another version's command may be unknown here
    command = str((_stored(config) or {}).get("command"))
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    if words[:1] != ["efcil"] or not set(words[1:2]) <= set(RESUMABLE) or len(words) < 2:
        raise RunError(
            f"{directory} was not made by efcil {', '.join(RESUMABLE)} but by {command!r}: repeat what made it"
        )
    words, out = _without_out(words[1:])
    place = config.resolve()
    for root in place.parents:  # whichever directory inside it was named, the whole is resumed
        if out is not None and out.parts and root.parts[-len(out.parts) :] == out.parts:
            if directory.resolve() in root.parents:  # a run somewhere below, not the one that was meant
                raise RunError(missing)
            return words, Path(*root.parts[: len(root.parts) - len(out.parts)]), root
    return words, Path.cwd(), directory.resolve()


def _nearest_config(directory: Path, depth: int) -> Path | None:
    """Return the config.yaml nearest to a directory, some levels below it at most: `/` would take minutes."""
    level = [directory]
    for _ in range(depth + 1):
        for place in level:
            if (place / "config.yaml").is_file():
                return place / "config.yaml"
        level = [below for place in level for below in _directories(place)]
    return None


def _directories(place: Path) -> list[Path]:
    try:
        with os.scandir(place) as entries:
            return sorted(place / entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _without_out(words: Sequence[str]) -> tuple[list[str], Path | None]:
    """Take --out from a command, and what only says how it reports."""
    rest, out, own = [], None, iter(words)
    for word in own:
        if word == "--out":
            out = Path(next(own, ""))
        elif word.startswith("--out="):
            out = Path(word.removeprefix("--out="))
        elif word not in ("--quiet", "--json"):
            rest.append(word)
    return rest, out
