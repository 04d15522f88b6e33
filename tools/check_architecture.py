"""Check the architecture of efcil on the syntax tree of its modules.

- Imports point one way: a module may import only from layers at or below its own.
- Only `efcil.accel` and `efcil doctor` name torch.cuda, CUDA graphs, torch's compiler or Triton.
- Functions, classes and modules stay small, but for `EXCEPTIONS`, each with its reason.
- Tests lie in folders named after those of efcil, or in `TEST_FOLDERS`; none imports a benchmark or another test.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

# Bottom up. Modules in one line may import each other.
LAYERS = (
    ("platform_support", "process_limits"),
    ("errors",),
    ("files", "config", "presets", "plugins", "randomness"),
    ("components",),
    ("core", "losses"),
    ("data",),
    ("models",),
    ("similarity", "tasks"),
    ("training", "accel", "tensor_files"),
    ("estimators",),
    ("learners",),
    ("features",),
    ("shift", "classifiers"),
    ("methods",),
    ("resolution",),
    ("freezing", "trajectory"),
    ("protocol",),
    ("session",),
    ("product",),
    ("report",),
    ("results",),
    ("experiment",),
    ("reproduce",),
    ("serve",),
    ("cli",),
    ("__main__",),
)
ALONE = ("reference",)  # literal transcription of the paper, neither imported by nor importing other modules
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

DOOR = ("accel/", "cli/doctor.py")  # modules that may use CUDA
BEHIND = (
    "torch.cuda",
    "torch.mps",
    "torch.backends.mps",
    "torch.compile",
    "torch._dynamo",
    "torch._inductor",
    "triton",
)
ANYWHERE = ("CUDAGraph",)  # forbidden even as attributes
IMPORTERS = ("import_module", "__import__", "find_spec")  # functions that take a module name

MOST_PARAMETERS = 8  # per function, without self; typer commands and Triton kernels are exempt
MOST_METHODS = 15  # per class of the core
MOST_LINES = 500  # per module
CORE = {"core", "learners", "shift", "classifiers", "trajectory", "training"}
EXCEPTIONS = {  # same table as in docs/architecture.md
    "accel/resnet_kernels.py::backward_reduce": "hands a kernel its arrays and flags, one by one",
    "core/class_stats.py": "one class: statistics, how they move, merge and are saved, with examples",
    "core/class_stats.py::ClassStats": "what can be done with statistics without knowing how Grams are stored",
    "core/gram_storage.py::LowRankGrams": "all that ClassStats asks of a storage, and properties of it",
    "core/metrics.py::AccuracyMatrix": "one short method for each measure of the literature",
    "data/cache.py": "one cache: keys, locks, decoding, eviction; its parts mean nothing elsewhere",
    "data/cache.py::load_decoded": "options of a data set, by name",
    "data/folder.py::load": "public: options of a folder, by name",
    "learners/foster.py::FOSTER": "overrides most hooks of Learner: it learns in two stages",
    "product/classifier.py": "one public class, with what its methods promise",
    "product/classifier.py::IncrementalClassifier.__init__": "public: the settings of a new model, by name",
    "reproduce/command.py::execute": "options of the command reproduce, by name",
    "serve/command.py::serve": "options of the command serve, by name",
    "session.py::Method.__init__": "public: the fields of a method, by name",
    "training/distributed.py::World": "what processes do together; alone every method does it without others",
    "trajectory.py::Trajectory": "the lifecycle of the statistics, and how they are read, saved and merged",
}

TEST_FOLDERS = ("benchmarks", "docs", "research", "tools", "support")  # what tests/ has besides the folders of efcil


def imported(path: Path) -> set[str]:
    """Return the parts of efcil that a file imports, including lazy imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{a.name}" for a in node.names} if node.module == "efcil" else {node.module}
    parts = {name.split(".")[1] for name in found if name.startswith("efcil.")}
    return parts - {"__version__"}


def wrong_imports(root: Path) -> list[str]:
    """List imports of higher layers and parts without a layer."""
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


def past_the_door(root: Path) -> list[str]:
    """List uses of names that only `DOOR` may use."""
    lines = []
    for path in sorted(root.rglob("*.py")):
        if not path.relative_to(root).as_posix().startswith(DOOR):
            found = sorted(set(_named(ast.parse(path.read_text(encoding="utf-8")))))
            lines += [f"{path}:{line}: names {name}; ask efcil.accel for what it is needed for" for line, name in found]
    return lines


def _named(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and full name of each restricted name, resolving aliases."""
    known: dict[str, str] = {}  # local name -> full name
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {
                a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0]
                for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and not node.level:
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        for name in _names(node, known):
            yield from ((node.lineno, b) for b in BEHIND if f"{name}.".startswith(f"{b}."))
            yield from ((node.lineno, word) for word in ANYWHERE if word in name.split("."))


def _names(node: ast.AST, known: Mapping[str, str]) -> list[str]:
    """Return the full names in a node."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Attribute):
        words, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            words, inner = [inner.attr, *words], inner.value
        return [".".join([known.get(inner.id, inner.id) if isinstance(inner, ast.Name) else "?", *words])]
    if isinstance(node, ast.Call):
        match getattr(node.func, "attr", getattr(node.func, "id", None)), node.args:
            case "getattr", [ast.Name(id=owner), ast.Constant(value=word), *_]:
                return [f"{known.get(owner, owner)}.{word}"]
            case function, [ast.Constant(value=word), *_] if function in IMPORTERS:
                return [str(word)]
    return []


def too_large(root: Path, exceptions: Mapping[str, str] = EXCEPTIONS) -> list[str]:
    """List functions, classes and modules above the limits, and unneeded exceptions."""
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        text, where = path.read_text(encoding="utf-8"), path.relative_to(root)
        length = len(text.splitlines())
        if length > MOST_LINES:
            found[where.as_posix()] = f"{length} lines, at most {MOST_LINES}"
        in_core = where.parts[0].removesuffix(".py") in CORE
        found |= {f"{where.as_posix()}::{name}": why for name, why in _large(ast.parse(text), "", in_core)}
    lines = [f"{root / place}: {why}; make it smaller, or say why not in EXCEPTIONS" for place, why in found.items()]
    lines = [line for line, place in zip(lines, found, strict=True) if place not in exceptions]
    return lines + [
        f"{root / place}: within the limits; take it out of EXCEPTIONS" for place in exceptions if place not in found
    ]


def _large(tree: ast.AST, inside: str, in_core: bool) -> Iterator[tuple[str, str]]:
    """Yield full names of too large functions and classes, with the exceeded limit."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _large(node, inside, in_core)
            continue
        name = f"{inside}{node.name}"
        if isinstance(node, ast.ClassDef):
            methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
            if in_core and len(methods) > MOST_METHODS:
                yield name, f"{len(methods)} methods, at most {MOST_METHODS}"
        elif not _is_foreign(node):
            every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg)
            count = sum(one is not None and one.arg not in ("self", "cls") for one in every)
            if count > MOST_PARAMETERS:
                yield name, f"{count} parameters, at most {MOST_PARAMETERS}"
        yield from _large(node, f"{name}.", in_core)


def _is_foreign(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is a typer command or a Triton kernel."""
    decorators = [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list]
    return any(d == "triton.jit" or d.endswith((".command", ".callback")) for d in decorators)


def misplaced_tests(tests: Path, root: Path) -> list[str]:
    """Return a line for each file in a folder that efcil does not have, and for each import of a benchmark or test."""
    lines = []
    for path in sorted(tests.rglob("*.py")):
        folder = path.relative_to(tests).parent
        if folder.parts and folder.parts[0] not in TEST_FOLDERS and not (root / folder).is_dir():
            lines.append(f"{path}: efcil has no folder {folder.as_posix()}; move the file, or add it to TEST_FOLDERS")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in [] if isinstance(node, ast.Attribute) else _names(node, {}):
                if name.split(".")[0] in ("benchmarks", "tests") or name.startswith("test_"):
                    lines.append(f"{path}:{node.lineno}: imports {name}; put what is shared into tests/support")
    return lines


if __name__ == "__main__":
    source = Path(__file__).resolve().parent.parent / "src" / "efcil"
    found = [*wrong_imports(source), *past_the_door(source), *too_large(source)]
    found += misplaced_tests(source.parent.parent / "tests", source)
    print("\n".join(found) or "imports, the door to the GPU, sizes and places of tests are as they should be")
    sys.exit(bool(found))
