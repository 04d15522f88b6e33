"""Golden results: digests of weights, class statistics, classifiers, logits and accuracy matrices of every method.

    python tools/goldens.py            compare with tests/tools/goldens.json
    python tools/goldens.py --write    regenerate it (only in a commit that explains why numbers change)
    python tools/goldens.py --only dpcr-plus --only teach-dpcr

Each case runs in a separate CPU process with one thread and a fixed instruction set; runs are repeated with a kill in
the second task and a resume. On the CPU and torch version recorded in the file, results are compared bit by bit;
elsewhere accuracy matrices, and logits up to 1e-5. Code that depends on internals is in `tools/goldens_adapter.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "tools" / "goldens.json"
HELD_DOWN = {  # must be set before torch is imported
    "OMP_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
    "EFCIL_COMMIT": "golden",
}
KILL_AT = (1, 2)  # task and epoch, from 0; for a backbone trained in the first task only:
KILL_IN_FIRST = (0, 2)
LOGIT_TOLERANCE = 1e-5

_LWF = ["dpcr", "dp-ncm", "ldc", "adc", "sdc", "lwf-ncm", "acil", "ds-al", "fecam", "lwf"]
_LWF += ["rrcr", "rrcr+tssp", "rrcr+tssp+cn", "rrcr+tssp+cip", "rrcr+tssp+cip+cn"]
_FACTORS = "dpcr:gram_storage=factors:gram_rank=8"
_STEPS = {"first.epochs": 4, "first.milestones": "[3]", "later.epochs": 4, "later.milestones": "[3]"}
_COSINE = {"first.epochs": 4, "later.epochs": 4}
_TRAJECTORIES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "lwf": ([*_LWF, _FACTORS], _STEPS),
    "acil": (["acil", "ds-al", "fecam"], _STEPS),
    "dpcr-plus": (["dpcr-plus", "dpcr-plus:gaussian=0"], _STEPS),
    "dpcr-plus-tuned": (
        ["dpcr-plus"],
        {
            **_STEPS,
            "pseudo_ratio": 0.0,
            "pseudo_ratio_shift": 2.0,
            "intermediate_stages": 2,
            "flip_tta": "true",
            "feature_distill_weight": 3.0,
            "gram_storage": "factors",
            "gram_rank": 16,
        },
    ),
    "finetune": (["finetune"], _STEPS),
    "joint": (["joint"], _STEPS),
    "pass": (["pass"], _STEPS),
    "icarl": (["icarl"], {**_STEPS, "memory": 60}),
    "podnet": (["podnet"], {**_COSINE, "memory": 60, "balance.epochs": 2}),
    "foster": (["foster"], {**_COSINE, "memory": 60, "compression.epochs": 3}),
}
_PROBLEMS: dict[str, dict[str, Any]] = {
    "digits": {"dataset": "digits", "tasks": 4, "set": {}},
    "glyphs": {
        "dataset": "glyphs",
        "tasks": 3,
        "set": {"data.classes": 9, "data.size": 12, "data.train_per_class": 40, "data.test_per_class": 10},
    },
}
_TAUGHT = ("dpcr", "dp-ncm", "lwf-ncm", "ldc", "adc", "sdc", "acil", "ds-al", "fecam", "lwf")


def cases() -> dict[str, dict[str, Any]]:
    """Return all cases by name."""
    found: dict[str, dict[str, Any]] = {}
    for name, (methods, settings) in _TRAJECTORIES.items():
        for problem, given in _PROBLEMS.items():
            own = {"width": 4, **given["set"], **settings}
            order = "1993" if problem == "digits" else "identity"
            split = {"allow_uneven": True} if problem == "digits" else {}
            found[f"{name}-{problem}"] = {
                **given,
                **split,
                "kind": "run",
                "methods": methods,
                "set": own,
                "order": order,
            }
    for name in _TAUGHT:
        options = {"buffer": 100} if name in ("acil", "ds-al") else {}
        found[f"teach-{name}"] = {"kind": "teach", "method": name, "options": options}
    return found


def machine() -> dict[str, str]:
    """Return the CPU and versions that bits depend on."""
    from importlib.metadata import version

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    cpu = ", ".join(named[key] for key in ("model name", "cpu family", "model") if key in named)
    return {"torch": version("torch"), "numpy": version("numpy"), "cpu": cpu}


def _child(name: str, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, __file__, "--child", name, "--out", str(out), *more]
    return subprocess.run(command, env={**os.environ, **HELD_DOWN}, capture_output=True, text=True, check=False)


def _meaning(name: str, out: Path, *more: str) -> dict[str, Any]:
    done = _child(name, out, *more)
    if done.returncode != 0:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads((out / "meaning.json").read_text())
    return found


def measured(name: str, case: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Run a case; return its results and the differences after a kill and resume."""
    with tempfile.TemporaryDirectory(prefix="efcil-golden-") as place:
        whole = _meaning(name, Path(place) / "whole")
        if case["kind"] == "teach":
            return whole, []
        del whole["went_on"]
        if _child(name, Path(place) / "cut", "--kill").returncode != -9:
            return whole, [f"{name}: was over before the kill"]
        again = _meaning(name, Path(place) / "cut", "--resume")
        if not again.pop("went_on"):
            return whole, [f"{name}: did not go on where it was killed"]
        return whole, [f"{name}, killed and resumed: {text}" for text in differences(whole, again, bits=True)]


def differences(old: Any, new: Any, bits: bool, path: str = "") -> list[str]:
    """List the differences; without `bits`, ignore digests and allow small numerical deviations."""
    if isinstance(old, dict) and isinstance(new, dict):
        if not bits and "digest" in old and "values" in old:
            old, new = {"values": old["values"]}, {"values": new.get("values")}
        found = []
        for key in sorted({*old, *new}):
            if key not in old or key not in new:
                found.append(f"{path}{key} is {'new' if key not in old else 'gone'}")
            else:
                found += differences(old[key], new[key], bits, f"{path}{key}: ")
        return found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        parts = [differences(one, other, bits, path) for one, other in zip(old, new, strict=True)]
        return list(dict.fromkeys(text for part in parts for text in part))
    if isinstance(old, float) and isinstance(new, float):
        same = old == new if bits else math.isclose(old, new, rel_tol=LOGIT_TOLERANCE, abs_tol=LOGIT_TOLERANCE)
        return [] if same else [f"{path}{old} and {new}"]
    if isinstance(old, str) and isinstance(new, str) and not bits and len(old) == len(new) == 24:
        return []
    return [] if old == new else [f"{path}{str(old)[:60]} and {str(new)[:60]}"]


def main() -> int:
    """Compare with or write the golden results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", action="append", default=[], help="cases with this name prefix")
    for name in ("--child", "--out"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--kill", "--resume"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        import goldens_adapter

        case, out = cases()[given.child], Path(given.out)
        out.mkdir(parents=True, exist_ok=True)
        kill_at = KILL_IN_FIRST if given.child.startswith("acil") else KILL_AT
        if case["kind"] == "teach":
            meaning = goldens_adapter.teach(case, out)
        else:
            meaning = goldens_adapter.run(case, out / "run", given.resume, kill_at if given.kill else None)
        (out / "meaning.json").write_text(json.dumps(meaning))
        return 0
    stored = json.loads(FILE.read_text()) if FILE.exists() else {"machine": {}, "cases": {}}
    here, wrong = machine(), []
    bits = stored["machine"] == here
    known = stored["cases"]
    for name, case in cases().items():
        if given.only and not name.startswith(tuple(given.only)):
            continue
        meaning, changed = measured(name, case)
        if given.write:
            known[name] = meaning
        elif name not in known:
            changed.append(f"{name}: not in {FILE.name}; write it with --write --only {name}")
        else:
            changed += [f"{name}: {text}" for text in differences(known[name], meaning, bits)]
        wrong += changed
        print(f"{name}: {'; '.join(changed[:3]) or 'written' * given.write or 'as stored'}", flush=True)
    if given.write:
        stored = {"machine": here, "cases": {name: known[name] for name in cases() if name in known}}
        FILE.write_text(json.dumps(stored, indent=1) + "\n")
    elif not bits:
        print(f"bits were not compared: stored on {stored['machine']}, here {here}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
