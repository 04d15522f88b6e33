"""Write requirements/dev.txt: all that the set-up installs, with its version and the hashes of all of its files.

    make lock

It holds for every system and every Python that the project supports (uv resolves for all of them at once), so a wheel
for another platform is checked as well. Torch is the exception: its build differs from machine to machine (CPU, CUDA
and ROCm have other indexes), so constraints.txt pins its version alone; what every build of it needs is locked here.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "dev.txt"
HEADER = "# Made by `make lock` (tools/lock.py) from pyproject.toml; consumed by `make setup`. Not to be edited.\n"
APART = "torch"  # pinned in constraints.txt
BUILD = "editables"  # what hatchling needs besides to install the project in place, without an isolated build


def wanted(project: Path, torch_needs: list[str]) -> list[str]:
    """Return the requirements of the package, its extra `dev`, its build and of every build of torch."""
    tree = tomllib.loads(project.read_text(encoding="utf-8"))
    named = [*tree["project"]["dependencies"], *tree["project"]["optional-dependencies"]["dev"]]
    everywhere = [text for text in torch_needs if "extra ==" not in text and "platform_" not in text]
    found = [*named, *tree["build-system"]["requires"], BUILD, *everywhere]
    return [text for text in found if not text.startswith(APART)]


def main() -> int:
    """Resolve and write; return uv's exit code."""
    lines = wanted(ROOT / "pyproject.toml", metadata.requires(APART) or [])
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    options = ["--universal", "--python-version", oldest.lstrip(">="), "--generate-hashes", "--no-annotate"]
    options.append("--no-strip-extras")  # pip wants what is asked for with an extra pinned with it
    options += ["--constraints", "constraints.txt"]
    done = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", *options, "-"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return done.returncode
    LOCK.parent.mkdir(exist_ok=True)
    LOCK.write_text(HEADER + done.stdout, encoding="utf-8")
    print(f"{LOCK.relative_to(ROOT)}: {done.stdout.count('==')} versions, {done.stdout.count('--hash=')} hashes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
