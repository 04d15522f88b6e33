"""Check that imports inside efcil point one way: a module may import only from layers at or below its own."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

# From the ground up, in the direction in which the data flow. Modules of one line may import each other.
LAYERS = (
    ("errors",),
    ("files", "config", "presets", "plugins", "randomness"),
    ("components",),
    ("core",),
    ("data",),
    ("tasks",),
    ("models", "training", "accel", "tensor_files", "losses"),
    ("estimators",),
    ("learners",),
    ("features",),
    ("shift", "classifiers"),
    ("methods",),
    ("trajectory",),
    ("protocol",),
    ("product",),
    ("report",),
    ("experiment",),
    ("reproduce",),
    ("serve",),
    ("cli",),
    ("__main__",),
)
ALONE = ("reference",)  # the paper, literally: nothing builds on it, and it builds on nothing of efcil
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imported(path: Path) -> set[str]:
    """Return the parts of efcil that a file imports, lazily imported ones included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{a.name}" for a in node.names} if node.module == "efcil" else {node.module}
    parts = {name.split(".")[1] for name in found if name.startswith("efcil.")}
    return parts - {"__version__"}


def problems(root: Path) -> list[str]:
    """Return a line for each import that points up, and for each part that no layer names."""
    lines = []
    for path in sorted(root.rglob("*.py")):
        part = path.relative_to(root).parts[0].removesuffix(".py")
        others = imported(path) - {part}
        lines += [f"{path}: imports efcil.{other}, which only tests may" for other in sorted(others & {*ALONE})]
        if part in ALONE:
            lines += [f"{path}: imports efcil.{other}; {part} stands alone" for other in sorted(others)]
        if part == "__init__" or part in ALONE:
            continue
        if part not in LEVEL:
            lines.append(f"{path}: efcil.{part} has no layer; add it to LAYERS")
            continue
        for other in sorted(others - {*ALONE}):
            if LEVEL.get(other, len(LAYERS)) > LEVEL[part]:
                lines.append(f"{path}: efcil.{part} imports efcil.{other}, which stands above it")
    return lines


if __name__ == "__main__":
    found = problems(Path(__file__).resolve().parent.parent / "src" / "efcil")
    print("\n".join(found) or "imports point one way")
    sys.exit(bool(found))
