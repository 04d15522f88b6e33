"""Take the picture of the web UI while it is taught a class: docs/images/teach.png, for light and dark pages.

    python docs/figures/page.py

All pictures in it are drawn here; the model and its answers are those of a service that runs for the picture. Needs
Chromium with its driver, and the extra `dev`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "support"))

from browser.driving import Page, start  # noqa: E402
from efcil import IncrementalClassifier  # noqa: E402
from served import TOKEN, Served  # noqa: E402

SIZE = (1280, 800)
KNOWN = ("mug", "bottle", "leaf")
NEW = "house"


def drawing(kind: str, rng: Any, size: int = 120) -> Image.Image:
    """Return a simple drawing of a thing, at a random place, size and color."""
    image = Image.new("RGB", (size, size), tuple(int(v) for v in rng.integers(205, 250, 3)))
    draw = ImageDraw.Draw(image)
    color = tuple(int(v) for v in rng.integers(20, 170, 3))
    r = int(rng.integers(size // 4, size // 3))
    x, y = (int(v) for v in rng.integers(r + 10, size - r - 10, 2))
    if kind == "mug":
        draw.rounded_rectangle((x - r, y - r, x + r // 2, y + r), r // 5, fill=color)
        draw.ellipse((x + r // 4, y - r // 2, x + r, y + r // 2), outline=color, width=max(4, r // 6))
    elif kind == "bottle":
        draw.rounded_rectangle((x - r // 2, y - r // 4, x + r // 2, y + r), r // 4, fill=color)
        draw.rectangle((x - r // 6, y - r, x + r // 6, y), fill=color)
    elif kind == "leaf":
        draw.chord((x - r, y - r, x + r, y + r), 200, 20, fill=color)
        draw.chord((x - r, y - 2 * r + r // 3, x + r, y + r // 3), 20, 160, fill=color)
        draw.line((x - r, y + r // 3, x + r, y - r // 2), fill=(250, 250, 250), width=3)
    else:
        draw.rectangle((x - r * 3 // 4, y - r // 5, x + r * 3 // 4, y + r), fill=color)
        draw.polygon([(x - r, y - r // 5), (x, y - r), (x + r, y - r // 5)], fill=color)
        draw.rectangle((x - r // 6, y + r // 3, x + r // 6, y + r), fill=(250, 250, 250))
    return image


def taught(folder: Path, rng: Any) -> Path:
    """Make a model that knows the first classes."""
    names = [name for name in KNOWN for _ in range(60)]
    images = np.stack([np.array(drawing(name, rng)) for name in names])
    model = IncrementalClassifier("dpcr", size=48, width=16, epochs=12, progress=False, device="cpu").learn(
        images, names
    )
    model.save(folder / "things")
    return folder / "things"


def written(folder: Path, kind: str, count: int, rng: Any) -> list[Path]:
    """Write drawings of a thing to files."""
    paths = [folder / f"{kind}-{number}.png" for number in range(1, count + 1)]
    for path in paths:
        drawing(kind, rng).save(path)
    return paths


def main() -> None:
    """Serve a model, ask it, begin to teach it a class, and take the pictures."""
    rng = np.random.default_rng(5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = [path for kind in KNOWN[:2] for path in written(folder, kind, 1, rng)]
        lessons = written(folder, NEW, 20, rng)
        with Served(taught(folder, rng)) as served:
            driver = start(folder / "profile")
            try:
                for dark in (False, True):
                    page = Page(driver, str(served.http.base_url))
                    page.open(*SIZE, prefers_color_scheme="dark" if dark else "light")
                    page.js("sessionStorage.setItem('token', arguments[0])", TOKEN)
                    page.ask(*asked)
                    page.type("#name", NEW)
                    page.one("#teach-files").send_keys("\n".join(map(str, lessons)))
                    page.wait(lambda page=page: len(page.all("#pool li")) >= 8)
                    page.js("document.activeElement.blur(); window.scrollTo(0, 0)")
                    driver.save_screenshot(str(HERE.parent / "images" / f"teach{'-dark' * dark}.png"))
            finally:
                driver.quit()


if __name__ == "__main__":
    main()
