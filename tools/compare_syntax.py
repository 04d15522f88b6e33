"""Verify that moved code changed only in paths and names: compare syntax trees up to renaming.

    python tools/compare_syntax.py OLD_REV:PATH NEW_PATH [--names names.yaml]
    python tools/compare_syntax.py --names names.yaml                            the pairs that the file lists

A path may select top-level definitions, `path.py#First,Second`; definitions that moved within a file are matched by
name. NEW_PATH may be REV:PATH too. names.yaml:

    names: {Seen: ImageView, dim: [dim, num_features]}    # a list: any of these may replace the old name
    pairs:
      - {old: "af2d951:src/efcil/backbones/kernels.py", new: src/efcil/accel/resnet_kernels.py, names: {Room: Work}}

Docstrings, comments, imports, `__all__` and annotations (except Triton's `constexpr`) are ignored. Everything else must
be equal up to renaming of:

- local variables and parameters, separately in each function and one to one
- names that the file defines or imports from this package, one to one and consistently; keywords like the
  parameter or attribute with their name
- anything else (attributes of external objects, keywords of their functions) if listed in `names`

`x.sum()` and `x.mean()` are therefore different, and names imported from other packages must not change. A string may
change if it is the name of something renamed. All renamings are printed. The exit code is 1 if trees differ.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

PACKAGE = "efcil"
IGNORED = {"ctx", "type_comment", "type_ignores", "returns", "annotation", "simple", "kind"}
IDENTIFIERS = {  # (node type, field) -> namespace of the identifier
    ("Name", "id"): "names",
    ("Attribute", "attr"): "attributes",
    ("keyword", "arg"): "keywords",
    ("arg", "arg"): "names",
    ("ExceptHandler", "name"): "names",
    ("FunctionDef", "name"): "names",
    ("AsyncFunctionDef", "name"): "names",
    ("ClassDef", "name"): "names",
    ("Global", "names"): "names",
    ("Nonlocal", "names"): "names",
    ("MatchAs", "name"): "names",
    ("MatchStar", "name"): "names",
    ("MatchMapping", "rest"): "names",
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Names = dict[str, list[str]]


class MismatchError(Exception):
    """Two nodes differ, as described in the message."""


@dataclass
class DatasetSpec:
    """Source file of one side."""

    label: str
    tree: ast.Module
    external: dict[str, str] = field(default_factory=dict)  # bound name -> name in another package
    own: set[str] = field(default_factory=set)  # names defined in the file or imported from this package

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    root = alias.name.partition(".")[0]
                    bound, path = (alias.asname, alias.name) if alias.asname else (root, root)
                    self._bind(bound, path, root == PACKAGE)
            elif isinstance(node, ast.ImportFrom):
                inside = node.level > 0 or (node.module or "").partition(".")[0] == PACKAGE
                for alias in node.names:
                    self._bind(alias.asname or alias.name, f"{node.module}.{alias.name}", inside)
            elif isinstance(node, DEFINITIONS):
                self.own.add(node.name)
            elif isinstance(node, ast.arg):
                self.own.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                self.own.add(node.attr)

    def _bind(self, name: str, path: str, inside: bool) -> None:
        if inside:
            self.own.add(name)
        else:
            self.external[name] = path


@dataclass
class Renaming:
    """One-to-one renaming of identifiers, except for declared names."""

    declared: Names = field(default_factory=dict)
    forward: dict[str, str] = field(default_factory=dict)
    backward: dict[str, str] = field(default_factory=dict)

    def check(self, old: str, new: str, allowed: bool) -> None:
        """Record that `old` became `new`; raise if this is inconsistent."""
        if old in self.declared:
            if new not in self.declared[old]:
                raise MismatchError(f"{old} became {new}, declared is {' or '.join(self.declared[old])}")
            return
        if old != new and not allowed:
            raise MismatchError(f"{old} became {new}, and is not defined in this file: declare it under `names`")
        if self.forward.setdefault(old, new) != new:
            raise MismatchError(f"{old} became {new} here, and {self.forward[old]} elsewhere")
        if self.backward.setdefault(new, old) != old:
            raise MismatchError(f"{old} became {new}, and so did {self.backward[new]}")

    def renamed(self) -> dict[str, str]:
        """Return the changed names."""
        return {old: new for old, new in self.forward.items() if old != new}


@dataclass
class Scope:
    """Variables of a function or comprehension on both sides."""

    old: set[str]
    new: set[str]
    renaming: Renaming = field(default_factory=Renaming)


@dataclass
class Difference:
    """Difference between the trees."""

    reason: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.reason}\n{self.old}\n{self.new}"


def variables(node: ast.AST) -> set[str]:
    """Return the names bound in the scope of a function or comprehension.

    >>> found = variables(ast.parse("def f(a):\\n    b = [c for c in a]\\n    def d(e): g = e").body[0])
    >>> sorted(found)
    ['a', 'b', 'd']
    """
    found: set[str] = set()
    outside: set[str] = set()

    def visit(inner: ast.AST) -> None:
        for child in ast.iter_child_nodes(inner):
            if isinstance(child, DEFINITIONS):
                found.add(child.name)
            elif isinstance(child, ast.arg):
                found.add(child.arg)
            elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                found.add(child.id)
            elif isinstance(child, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and child.name:
                found.add(child.name)
            elif isinstance(child, (ast.Global, ast.Nonlocal)):
                outside.update(child.names)
            if not isinstance(child, (*DEFINITIONS, ast.Lambda, *COMPREHENSIONS)):
                visit(child)

    visit(node)
    return found - outside


class Comparison:
    """Comparison of two trees."""

    def __init__(self, old: DatasetSpec, new: DatasetSpec, names: Names):
        self.old, self.new = old, new
        self.spaces = {space: Renaming(names) for space in ("names", "attributes", "keywords")}
        self.scopes: list[Scope] = []
        self.in_class = False
        self.strings: list[tuple[str, str, ast.AST, ast.AST]] = []  # strings and keywords that changed
        self.parameters: set[tuple[str, str]] = set()
        self.outside: set[int] = set()  # nodes compared outside their enclosing scope
        self.found: list[Difference] = []

    def run(self) -> list[Difference]:
        """Compare the modules and return the differences."""
        self._modules()
        renamed = set(self.renamed().items())
        declared = self.spaces["names"].declared
        for before, after, old, new in self.strings:
            known = renamed | self.parameters if isinstance(old, ast.keyword) else renamed
            if (before, after) not in known and after not in declared.get(before, ()):
                what = "keyword" if isinstance(old, ast.keyword) else "string"
                self._note(f"{what} {before!r} became {after!r}", old, new)
        return self.found

    def renamed(self) -> dict[str, str]:
        """Return the renamed names that are visible outside functions."""
        return self.spaces["names"].renamed() | self.spaces["attributes"].renamed()

    def _modules(self) -> None:
        """Compare the files: definitions by name, the remaining statements in order."""
        olds, news = body_of(self.old.tree), body_of(self.new.tree)
        free = {node.name: node for node in news if isinstance(node, DEFINITIONS)}
        declared = self.spaces["names"].declared
        rest: list[ast.stmt] = []
        for node in olds:
            names = declared.get(node.name, [node.name]) if isinstance(node, DEFINITIONS) else []
            mate = next((free.pop(name) for name in names if name in free), None)
            if mate is None:
                rest.append(node)
            else:
                news.remove(mate)
                self._bodies([node], [mate])
        self._bodies(rest, news)

    def _bodies(self, olds: Sequence[ast.AST], news: Sequence[ast.AST]) -> None:
        """Compare statements in order, or aligned by shape if their numbers differ."""
        for before, after in aligned(olds, news):
            if before is None or after is None:
                only = "new" if before is None else "old"
                self._note(f"only in the {only} code", before, after)
                continue
            try:
                self._nodes(before, after)
            except MismatchError as error:
                self._note(str(error), before, after)

    def _note(self, reason: str, old: ast.AST | None, new: ast.AST | None) -> None:
        self.found.append(Difference(reason, shown("-", self.old, old), shown("+", self.new, new)))

    def _nodes(self, old: ast.AST, new: ast.AST) -> None:
        if type(old) is not type(new):
            old, new = without_module(old, self.old), without_module(new, self.new)
        if not self.in_class:  # annotations in classes define dataclass fields
            old, new = as_assignment(old), as_assignment(new)
        if type(old) is not type(new):
            raise MismatchError(f"{type(old).__name__} became {type(new).__name__}")
        if isinstance(old, COMPREHENSIONS):
            assert isinstance(new, COMPREHENSIONS)
            self._nodes(old.generators[0].iter, new.generators[0].iter)  # evaluated in the outer scope
            self.outside.add(id(old.generators[0].iter))
        if isinstance(old, DEFINITIONS):
            assert isinstance(new, DEFINITIONS)
            self._identifier(old.name, new.name, "attributes" if self.in_class else "names", bound=True)
            self._lists(old.decorator_list, new.decorator_list)
        if isinstance(old, FUNCTIONS):
            self._defaults(old.args, new.args)  # type: ignore[attr-defined]
        scoped = isinstance(old, (*FUNCTIONS, *COMPREHENSIONS))
        was = self.in_class
        if scoped:
            self.scopes.append(Scope(variables(old), variables(new)))
            self.in_class = False
        elif isinstance(old, ast.ClassDef):
            self.in_class = True
        try:
            self._fields(old, new)
        finally:
            self.in_class = was
            if scoped:
                self.scopes.pop()

    def _fields(self, old: ast.AST, new: ast.AST) -> None:
        for name in old._fields:
            before, after = getattr(old, name, None), getattr(new, name, None)
            if isinstance(old, DEFINITIONS) and name in ("name", "decorator_list"):
                continue
            if id(before) in self.outside:
                continue
            if isinstance(old, ast.arguments) and name in ("defaults", "kw_defaults"):
                continue
            if name == "annotation" and (is_constexpr(before) or is_constexpr(after)):
                if is_constexpr(before) != is_constexpr(after):
                    raise MismatchError("a constexpr became another argument")
            elif name in IGNORED:
                continue
            elif (type(old).__name__, name) in IDENTIFIERS and (before or after):
                both = [value if isinstance(value, list) else [value] for value in (before, after)]
                if len(both[0]) != len(both[1]) or None in (*both[0], *both[1]):
                    raise MismatchError(f"{before} became {after}")
                space = IDENTIFIERS[type(old).__name__, name]
                if self.in_class and isinstance(getattr(old, "ctx", None), ast.Store):
                    space = "attributes"
                for one, other in zip(*both, strict=True):
                    self._identifier(one, other, space, bound=isinstance(old, ast.Name))
                if isinstance(old, ast.arg):
                    self.parameters.add((before, after))
                if isinstance(old, ast.keyword) and before != after:
                    self.strings.append((before, after, old, new))
            elif name == "body" and isinstance(before, list) and isinstance(after, list):
                self._bodies(body_of(old), body_of(new))
            elif name in ("orelse", "finalbody", "handlers", "cases") and isinstance(before, list):
                self._bodies(before, after)
            elif isinstance(before, list):
                self._lists(before, after or [])
            elif isinstance(before, ast.AST) and isinstance(after, ast.AST):
                self._nodes(before, after)
            elif isinstance(before, str) and isinstance(after, str) and before != after:
                self.strings.append((before, after, old, new))
            elif type(before) is not type(after) or before != after:
                raise MismatchError(f"{before!r} became {after!r}")

    def _defaults(self, old: ast.arguments, new: ast.arguments) -> None:
        self._lists(old.defaults, new.defaults)
        self._lists(old.kw_defaults, new.kw_defaults)

    def _lists(self, olds: Sequence[Any], news: Sequence[Any]) -> None:
        if len(olds) != len(news):
            raise MismatchError(f"{len(olds)} parts became {len(news)}")
        for before, after in zip(olds, news, strict=True):
            if (before is None) != (after is None):
                raise MismatchError("a part is missing")
            if before is not None:
                self._nodes(before, after)

    def _identifier(self, old: str, new: str, space: str, bound: bool) -> None:
        """Compare identifiers; `bound` ones are variables of the innermost scope that defines them."""
        if space == "names":
            places = [
                next((i for i in reversed(range(len(self.scopes))) if name in getattr(self.scopes[i], side)), None)
                for side, name in (("old", old), ("new", new))
            ]
            if places[0] != places[1]:
                raise MismatchError(f"{old} became {new}, which is a variable of another function")
            if places[0] is not None:
                self.scopes[places[0]].renaming.check(old, new, allowed=True)
                return
            if bound and self.old.external.get(old) != self.new.external.get(new):
                sides = (self.old.external.get(old, "no import"), self.new.external.get(new, "no import"))
                raise MismatchError(f"{old} became {new}: {sides[0]} became {sides[1]}")
        allowed = old in self.old.own or (space == "names" and old in self.old.external)
        self.spaces[space].check(old, new, allowed)


def aligned(olds: Sequence[ast.AST], news: Sequence[ast.AST]) -> Iterator[tuple[ast.AST | None, ast.AST | None]]:
    """Align two lists of statements; None marks a missing one."""
    if len(olds) == len(news):
        yield from zip(olds, news, strict=True)
        return
    shapes = [[" ".join(type(n).__name__ for n in ast.walk(node)) for node in nodes] for nodes in (olds, news)]
    for _, i, end_i, j, end_j in SequenceMatcher(None, *shapes, autojunk=False).get_opcodes():
        yield from zip_longest(olds[i:end_i], news[j:end_j])


def is_constexpr(annotation: object) -> bool:
    """Return whether an annotation is Triton's constexpr."""
    return isinstance(annotation, ast.AST) and ast.unparse(annotation).endswith("constexpr")


def without_module(node: ast.AST, source: DatasetSpec) -> ast.AST:
    """Replace `module.name` by `name` for modules of this package."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in source.own:
        return ast.copy_location(ast.Name(node.attr, node.ctx), node)
    return node


def as_assignment(node: ast.AST) -> ast.AST:
    """Return `name: type = value` as `name = value`."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return ast.copy_location(ast.Assign([node.target], node.value), node)
    return node


def body_of(node: Any) -> list[ast.stmt]:
    """Return the statements to compare, without docstrings, imports, `__all__` and type-checking blocks."""

    def counts(statement: ast.stmt) -> bool:
        if isinstance(statement, (ast.Import, ast.ImportFrom, ast.Pass)):
            return False
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return not isinstance(statement.value.value, str)
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            return statement.targets[0].id != "__all__"
        return not (isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING"))

    return [statement for statement in node.body if counts(statement)]


def shown(sign: str, source: DatasetSpec, node: ast.AST | None) -> str:
    """Return the location of a node and its first lines."""
    if node is None:
        return f"{sign} {source.label}: not there"
    lines = ast.unparse(node).splitlines()
    cut = [*lines[:4], "..."] if len(lines) > 5 else lines
    return "\n".join([f"{sign} {source.label}:{getattr(node, 'lineno', '?')}", *(f"{sign}     {line}" for line in cut)])


def read(place: str) -> DatasetSpec:
    """Read `[REV:]PATH[#NAME,NAME]`."""
    path, _, selected = place.partition("#")
    if ":" in path:
        text = subprocess.run(["git", "show", path], capture_output=True, text=True, check=True).stdout
    else:
        text = Path(path).read_text(encoding="utf-8")
    source = DatasetSpec(path, ast.parse(text, path))
    if selected:
        wanted = selected.split(",")
        chosen = {name: node for node in source.tree.body for name in named(node) if name in wanted}
        if missing := [name for name in wanted if name not in chosen]:
            raise ValueError(f"{path} does not define {', '.join(missing)} at its top level")
        source.tree.body = list({id(chosen[name]): chosen[name] for name in wanted}.values())
    return source


def named(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a top-level statement defines."""
    if isinstance(node, DEFINITIONS):
        yield node.name
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from (inner.id for inner in ast.walk(target) if isinstance(inner, ast.Name))


def as_names(given: dict[str, Any] | None) -> Names:
    """Normalize declared names to lists."""
    return {old: [new] if isinstance(new, str) else list(new) for old, new in (given or {}).items()}


def compare(old: str, new: str, names: Names) -> tuple[list[Difference], dict[str, str]]:
    """Return the differences and renamings of two files."""
    comparison = Comparison(read(old), read(new), names)
    return comparison.run(), comparison.renamed()


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare all pairs; return 1 if any differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", metavar="OLD_REV:PATH")
    parser.add_argument("new", nargs="?", metavar="NEW_PATH")
    parser.add_argument("--names", type=Path, help="YAML file with names and pairs")
    asked = parser.parse_args(arguments)
    given = yaml.safe_load(asked.names.read_text(encoding="utf-8")) if asked.names else {}
    pairs = list(given.get("pairs", []))
    if asked.old is not None:
        if asked.new is None:
            parser.error("NEW_PATH is missing; give the file to compare OLD_REV:PATH with")
        pairs = [{"old": asked.old, "new": asked.new}]
    if not pairs:
        parser.error("nothing to compare: pass OLD_REV:PATH NEW_PATH, or --names with `pairs`")
    failed = False
    for pair in pairs:
        names = as_names(given.get("names")) | as_names(pair.get("names"))
        try:
            found, renamed = compare(pair["old"], pair["new"], names)
        except subprocess.CalledProcessError as error:
            parser.error(f"{pair['old']} cannot be read: {error.stderr.strip()}")
        except (OSError, ValueError, SyntaxError) as error:
            parser.error(str(error))
        failed |= bool(found)
        print(f"{pair['old']} -> {pair['new']}: {f'{len(found)} differences' if found else 'equal'}")
        print("".join(f"  {before} -> {after}\n" for before, after in sorted(renamed.items())), end="")
        for difference in found:
            print(f"\n{difference}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
