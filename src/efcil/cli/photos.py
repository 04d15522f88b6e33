"""`efcil demo photos`: download, teach, show."""

from __future__ import annotations

from pathlib import Path

from efcil.errors import ConfigError


def demo_photos(out: Path, data: Path | None, quiet: bool) -> None:
    """Download the photos where they are not there yet, and teach them in rounds."""
    from efcil.data import remote
    from efcil.data.cache import cache_directory
    from efcil.data.fetch import fetch
    from efcil.experiment.reporters import choose_reporter
    from efcil.product.photo_demo import MODEL, PAGE, photo_demo

    if (out / MODEL).exists():
        raise ConfigError(f"{out / MODEL} is there already; remove it, or give another --out")
    reporter = choose_reporter(quiet)
    try:
        folder = fetch(
            remote("clothing"),
            cache_directory() / "photos" if data is None else data,
            progress=lambda done, total: reporter.progress("downloading photos", done, total),
        )
        if not quiet:
            print(f"photos are in {folder} (CC0); they are learned in three rounds")
        photo_demo(folder, out, say=lambda line: None if quiet else print(line, flush=True))
    finally:
        reporter.close()
    if not quiet:
        print(f"open {out / PAGE} in a browser; ask the model: efcil serve {out / MODEL}")
