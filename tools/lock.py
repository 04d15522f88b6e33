"""Write requirements/run.txt, dev.txt and docs.txt with pinned versions and hashes of all files.

make lock                      keep locked versions if possible
make lock LOCK=--upgrade       upgrade everything

`run.txt` has the dependencies of the package (`make demo`), `dev.txt` also those of tests and checks, `docs.txt` those
of the site. All are universal: uv resolves for all supported systems and Python versions. Torch is the exception: CPU,
CUDA and ROCm builds come from different indexes, so constraints.txt pins only its version; the common dependencies of
its builds are locked here.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN, DEV, DOCS = (Path(f"requirements/{name}.txt") for name in ("run", "dev", "docs"))  # relative to ROOT
HEADER = "# Made by `make lock` (tools/lock.py) from pyproject.toml; consumed by `make {}`. Not to be edited.\n"
TORCH = "torch"  # pinned in constraints.txt
NO_TORCH = f"{TORCH} ; sys_platform == 'none'\n"  # what other packages need of it is in no lock: it is installed before
BUILD = "editables"  # needed by hatchling for an editable install without build isolation


def wanted(project: Path, torch_needs: list[str], *extras: str) -> list[str]:
    """Return the requirements of the package, its extras, its build and all builds of torch."""
    tree = tomllib.loads(project.read_text(encoding="utf-8"))
    optional = tree["project"]["optional-dependencies"]
    named = [*tree["project"]["dependencies"], *(text for extra in extras for text in optional[extra])]
    everywhere = [text for text in torch_needs if "extra ==" not in text and "platform_" not in text]
    found = [*named, *tree["build-system"]["requires"], BUILD, *everywhere]
    return [text for text in found if re.match(r"[\w.-]+", text)[0] != TORCH]  # type: ignore[index]


def resolve(lines: list[str], target: Path, constraints: list[Path], upgrade: bool) -> str:
    """Return the contents of a lock file, keeping versions of `target` unless `upgrade`."""
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    options = ["--universal", "--python-version", oldest.lstrip(">="), "--generate-hashes", "--no-annotate"]
    options.append("--no-strip-extras")  # pip requires the extra in the pin
    options += ["--no-emit-package", TORCH]
    options += [part for path in constraints for part in ("--constraints", str(path))]
    options += ["--upgrade"] if upgrade else []
    with tempfile.TemporaryDirectory() as folder:
        override = Path(folder) / "override.txt"
        override.write_text(NO_TORCH, encoding="utf-8")
        options += ["--override", str(override)]
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", *options]
        subprocess.run(
            [*command, "--output-file", str(target), "-"], input="\n".join(lines), text=True, cwd=ROOT, check=True
        )
    return (ROOT / target).read_text(encoding="utf-8")


def main() -> int:
    """Resolve and write all files; return uv's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="upgrade everything to the newest version")
    upgrade = parser.parse_args().upgrade
    torch_needs = metadata.requires(TORCH) or []
    # Resolve the larger set first and constrain the others by it, for consistent versions.
    files = ((DEV, ["dev"], [], "test"), (RUN, [], [DEV], "demo"), (DOCS, ["docs"], [DEV], "docs"))
    for target, extras, constraints, user in files:
        print("resolving", target)
        lines = wanted(ROOT / "pyproject.toml", torch_needs, *extras)
        try:
            found = resolve(lines, target, [Path("constraints.txt"), *constraints], upgrade)
        except subprocess.CalledProcessError as error:
            return error.returncode
        (ROOT / target).write_text(HEADER.format(user) + found, encoding="utf-8")
        print(f"{target}: {found.count('==')} versions, {found.count('--hash=')} hashes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
