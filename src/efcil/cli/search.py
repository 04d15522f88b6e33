"""`efcil tune`: measure every combination of options in every class order, and write the best one."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from efcil import data as datasets
from efcil.cli.console import print_markdown
from efcil.cli.directories import directory_stem, new_directory, resume_command
from efcil.cli.experiments import make_run, resolve_options
from efcil.errors import ConfigError
from efcil.experiment.concurrent import execute_all
from efcil.experiment.reporters import Reporter, choose_reporter
from efcil.experiment.shared_terminal import reporters_of_runs
from efcil.experiment.specification import Experiment
from efcil.experiment.tuning import (
    TUNE_FILES,
    Trial,
    TrialResult,
    parse_grid,
    table,
    trial_results,
    trials,
    unused_order,
    write,
)
from efcil.files import check_results
from efcil.resolution import parse_label
from efcil.training.distributed import init_distributed


def search(options: Mapping[str, Any], grid: Sequence[str]) -> list[TrialResult]:
    """Run every trial that is missing in every class order; write and print the table."""
    method, dataset = parse_label(options["method"])[0], datasets.find(options["dataset"]).name
    orders = [order.strip() for order in options["orders"].split(",") if order.strip()]
    if not orders or len(set(orders)) < len(orders):
        raise ConfigError(f"--orders {options['orders']}: must be comma-separated class orders, each once")
    shared: dict[tuple[str, ...], list[Trial]] = {}
    for trial in trials(method, parse_grid(grid)):
        shared.setdefault(trial.training, []).append(trial)
    silent = options["quiet"] or options["json"]
    reporter = choose_reporter(options["quiet"], options["json"])
    for text in options.get("notes", ()):
        reporter.note(text)
    planned: dict[str, tuple[Experiment, list[Trial], str]] = {}  # by directory below --out
    for (training, members), order in itertools.product(shared.items(), orders):
        own = {**options, "order": order, "overrides": [*options["overrides"], *training]}
        place = f"{members[0].directory}/order-{Path(order).stem}"
        planned[place] = resolve_options([trial.label for trial in members], dataset, own), members, order
    homes = {f"{place}/trajectory": experiment.fingerprint() for place, (experiment, _, _) in planned.items()}
    out = options["out"] or new_directory(
        directory_stem(["tune", method], {**options, "dataset": dataset}, []), homes, resume=True
    )
    check_results(out, TUNE_FILES)  # before hours of training
    titles = [" ".join([f"order {order}", *members[0].training]) for _, members, order in planned.values()]
    with init_distributed() as world, closing(reporter):
        runs = []
        reporters = [Reporter()] * len(titles) if silent else reporters_of_runs(reporter, titles)
        for (place, (experiment, _, _)), of_run in zip(planned.items(), reporters, strict=True):
            runs.append(make_run(experiment, {**options, "out": out}, out / place, True, of_run, world))
        concurrent = options["concurrent_runs"] or runs[0].backend.concurrent_runs
        found = execute_all(runs, True, concurrent, f"resume with: {resume_command(out)}")
    summaries = {
        (trial, order): summary
        for (_, members, order), own in zip(planned.values(), found, strict=True)
        for trial, summary in zip(members, own, strict=True)
    }
    result = trial_results(summaries)
    experiment = runs[0].experiment
    title = f"{method} on {experiment.eval_split}, orders {', '.join(orders)}"
    best = {"method": method, "dataset": dataset, "preset": experiment.preset, **experiment.tasks}
    best |= {key: options[key] for key in ("learner", "backbone", "epochs") if options[key] is not None}
    best["set"] = options["overrides"]
    written = write(result, out, title, best)
    if not silent:
        print_markdown(table(result, title))
        print("written: " + ", ".join(str(path) for path in written.values()))
        data = [] if options["data"] is None else ["--data", str(options["data"])]
        command = ["efcil", "run", "--config", str(written["best.yaml"]), *data, "--order", unused_order(orders)]
        print(f"test it on an order that was not used for the selection: {shlex.join(command)}")
    return result
