"""Build the site into build/docs; every warning is an error. Used by `make docs`."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = {
    "sphinx": "sphinx",
    "myst_parser": "myst-parser",
    "furo": "furo",
    "sphinx_gallery": "sphinx-gallery",
    "sphinx_copybutton": "sphinx-copybutton",
    "latex2mathml": "latex2mathml",
}


def missing() -> list[str]:
    """Return the packages of the extra `docs` that are not installed."""
    return [package for module, package in NEEDED.items() if find_spec(module) is None]


def main(arguments: list[str] | None = None) -> int:
    """Build; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs", help="directory of the pages")
    out = parser.parse_args(arguments).out
    if found := missing():
        print(f"docs: {', '.join(found)} not installed; pip install 'efcil[docs]', or run make docs", file=sys.stderr)
        return 2
    from sphinx.cmd.build import main as build

    source = str(ROOT / "docs")
    return build(["-b", "html", "-W", "--keep-going", "-q", "-E", "-d", f"{out}.cache", source, str(out)])


if __name__ == "__main__":
    sys.exit(main())
