"""What a release still lacks: values of release.toml that are unset, and places that disagree about the version.

python tools/release.py     print each; exit 1 if there is any
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACEHOLDERS = ("repository", "documentation", "package_index", "contact")


def unset(root: Path = ROOT) -> list[str]:
    """Return the names of release.toml that have no value yet; raise ValueError for a name that is not known."""
    values = tomllib.loads((root / "release.toml").read_text(encoding="utf-8"))
    if wrong := sorted(set(values) ^ set(PLACEHOLDERS)):
        raise ValueError(f"release.toml: {', '.join(wrong)}: want exactly {', '.join(PLACEHOLDERS)}")
    return [name for name in PLACEHOLDERS if not values[name]]


def versions(root: Path = ROOT) -> dict[str, str]:
    """Return the version by the file that states it."""
    patterns = {
        "src/efcil/__init__.py": r'^__version__ = "([^"]+)"',
        "CITATION.cff": r"^version: (\S+)",
        "README.md": r"^  version = \{([^}]+)\}",
        "CHANGELOG.md": r"^## \[(\d[^]]*)\]",
    }
    found = {}
    for name, pattern in patterns.items():
        match = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        found[name] = match[1] if match else "none"
    return found


def main() -> int:
    """Print what is lacking; return the exit code."""
    lacking = [f"release.toml: {name} is unset" for name in unset()]
    stated = versions()
    if len(set(stated.values())) > 1:
        lacking.append("versions differ: " + ", ".join(f"{name} {version}" for name, version in stated.items()))
    print("\n".join(lacking) or "nothing is unset, and all versions agree")
    return int(bool(lacking))


if __name__ == "__main__":
    sys.exit(main())
