"""Write notebooks/*.py as .ipynb files, for Jupyter or to be uploaded to Colab; needs jupytext (extra `dev`).

python tools/notebooks.py             into build/notebooks, without outputs
python tools/notebooks.py --execute   run them, and keep what they print
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "notebooks").glob("*.py"))
TIMEOUT = 900  # seconds per cell


def read(path: Path) -> Any:
    """Return a notebook from its text."""
    import jupytext

    return jupytext.read(path)


def execute(notebook: Any, folder: Path) -> Any:
    """Run a notebook in a folder; its outputs are added."""
    from nbclient import NotebookClient

    return NotebookClient(
        notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()


def main(arguments: list[str] | None = None) -> int:
    """Write them; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--execute", action="store_true", help="run them, and keep what they print")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "notebooks", help="directory of the files")
    options = parser.parse_args(arguments)
    try:
        import jupytext
    except ModuleNotFoundError:
        print("notebooks: jupytext is not installed; pip install 'efcil[dev]', or run make setup", file=sys.stderr)
        return 2
    repository = tomllib.loads((ROOT / "release.toml").read_text(encoding="utf-8"))["repository"]
    options.out.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        notebook = read(source)
        if options.execute:
            with tempfile.TemporaryDirectory() as folder:
                execute(notebook, Path(folder))
        target = options.out / f"{source.stem}.ipynb"
        jupytext.write(notebook, target)
        print(f"wrote {target}")
    print("upload them to Colab" + ("" if repository else "; release.toml names no repository to open them from yet"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
