"""Draw the figures of the site and the README, each for light and dark pages, into docs/images.

    python docs/figures/make.py            draw those whose data have changed
    python docs/figures/make.py --all      draw all of them
    python docs/figures/make.py --check    exit 1 and name the figures whose data have changed

Each picture carries the data that it shows, as a text field of the PNG: a test compares them with results/.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from PIL import Image
from PIL.PngImagePlugin import PngInfo

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import concepts  # noqa: E402
import plots  # noqa: E402
from colors import Colors  # noqa: E402

IMAGES = HERE.parent / "images"
FIELD = "Data"  # of the PNG
FIGURES: dict[str, tuple[Callable[[], Any], Callable[[Any, Colors], Any]]] = {
    "curves": (plots.curves, plots.draw_curves),
    "ablation": (plots.ablation, plots.draw_ablation),
    "shift": (concepts.shift, concepts.draw_shift),
    "dpcr": (concepts.nothing, concepts.draw_dpcr),
    "methods": (concepts.methods, concepts.draw_methods),
    "dpcr-plus": (concepts.nothing, concepts.draw_dpcr_plus),
    "lifecycle": (concepts.nothing, concepts.draw_lifecycle),
}


def files(name: str) -> dict[bool, Path]:
    """Return the pictures of a figure: for light (False) and dark pages."""
    return {False: IMAGES / f"{name}.png", True: IMAGES / f"{name}-dark.png"}


def shown(path: Path) -> Any:
    """Return the data that a picture carries; None if there is no such picture."""
    if not path.is_file():
        return None
    with Image.open(path) as image:
        return json.loads(image.text.get(FIELD, "null"))


def current(name: str) -> Any:
    """Return the data that a figure has to show, as a picture carries them."""
    return json.loads(json.dumps(FIGURES[name][0]()))


def outdated() -> list[str]:
    """Return the names of the figures whose pictures show other data."""
    return [name for name in FIGURES if any(shown(path) != current(name) for path in files(name).values())]


def draw(name: str) -> None:
    """Draw both pictures of a figure."""
    data = current(name)
    for dark, path in files(name).items():
        colors = Colors(dark)
        with mpl.rc_context(colors.settings):
            figure = FIGURES[name][1](data, colors)
            figure.savefig(path, dpi=200)
            plt.close(figure)
        facts = PngInfo()
        facts.add_text(FIELD, json.dumps(data))
        with Image.open(path) as image:  # 256 colors are enough, and take a third of the bytes
            image.convert("RGB").quantize(dither=Image.Dither.NONE).save(path, optimize=True, pnginfo=facts)


def main() -> int:
    """Draw or check; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="draw figures whose data have not changed, too")
    parser.add_argument("--check", action="store_true", help="draw nothing; exit 1 if data have changed")
    options = parser.parse_args()
    names = list(FIGURES) if options.all else outdated()
    if options.check:
        print("\n".join(f"{name}: run python docs/figures/make.py" for name in names) or "figures are up to date")
        return int(bool(names))
    for name in names:
        draw(name)
        print(f"drew {name}")
    return 0


if __name__ == "__main__":
    mpl.use("agg")
    sys.exit(main())
