"""Write requirements/run.txt and dev.txt: what the set-up installs, with versions and the hashes of all their files.

make lock                      what is locked keeps its version where it can
make lock LOCK=--upgrade       the newest version of everything

`run.txt` has the package's own dependencies (`make demo`), `dev.txt` those and what tests and checks need. Both hold
for every system and Python that the project supports (uv resolves for all at once), so a wheel for another platform is
checked as well. Torch is the exception: its build differs from machine to machine (CPU, CUDA and ROCm have other
indexes), so constraints.txt pins its version alone; what every build of it needs is locked here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN, DEV = Path("requirements/run.txt"), Path("requirements/dev.txt")  # seen from ROOT
HEADER = "# Made by `make lock` (tools/lock.py) from pyproject.toml; consumed by `make {}`. Not to be edited.\n"
STAGGER = "torch"  # pinned in constraints.txt
BUILD = "editables"  # what hatchling needs besides to install the project in place, without an isolated build


def wanted(project: Path, torch_needs: list[str], *extras: str) -> list[str]:
    """Return the requirements of the package, of the extras, of its build and of every build of torch."""
    tree = tomllib.loads(project.read_text(encoding="utf-8"))
    optional = tree["project"]["optional-dependencies"]
    named = [*tree["project"]["dependencies"], *(text for extra in extras for text in optional[extra])]
    everywhere = [text for text in torch_needs if "extra ==" not in text and "platform_" not in text]
    found = [*named, *tree["build-system"]["requires"], BUILD, *everywhere]
    return [text for text in found if not text.startswith(STAGGER)]


def resolve(lines: list[str], target: Path, constraints: list[Path], upgrade: bool) -> str:
    """Return the text of a lock file; the versions in `target` are kept unless `upgrade`."""
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    options = ["--universal", "--python-version", oldest.lstrip(">="), "--generate-hashes", "--no-annotate"]
    options.append("--no-strip-extras")  # pip wants what is asked for with an extra pinned with it
    options += [part for path in constraints for part in ("--constraints", str(path))]
    options += ["--upgrade"] if upgrade else []
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", *options]
    subprocess.run(
        [*command, "--output-file", str(target), "-"], input="\n".join(lines), text=True, cwd=ROOT, check=True
    )
    return (ROOT / target).read_text(encoding="utf-8")


def main() -> int:
    """Resolve and write both files; return uv's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="the newest version of everything")
    upgrade = parser.parse_args().upgrade
    torch_needs = metadata.requires(STAGGER) or []
    # The larger set is resolved first, and the smaller one within it, so that no version is in both with two numbers.
    for target, extras, constraints, user in ((DEV, ["dev"], [], "test"), (RUN, [], [DEV], "demo")):
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
