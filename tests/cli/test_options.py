"""Options as they are declared."""

import ast
from pathlib import Path

import efcil.cli

SOURCES = sorted(Path(efcil.cli.__file__).parent.glob("*.py"))


def renamed(source: str) -> list[str]:
    """Return the options without a name of their own whose metavar is the name in capitals.

    typer before 0.29 takes the metavar of such an option for its name, and `--order` becomes `--ORDER`.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        name, kind = None, None
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, kind = node.targets[0].id, node.value
        elif isinstance(node, ast.arg) and node.annotation:
            name, kind = node.arg, node.annotation
        for call in ast.walk(kind) if kind else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "typer.Option":
                named = any(isinstance(a, ast.Constant) and isinstance(a.value, str) for a in call.args)
                metavar = {k.arg: ast.unparse(k.value) for k in call.keywords}.get("metavar", "")
                if not named and metavar.strip("'").lower() == str(name).lower():
                    found.append(str(name))
    return found


def test_no_option_is_named_after_its_metavar():
    assert SOURCES
    assert {path.name: renamed(path.read_text(encoding="utf-8")) for path in SOURCES} == {p.name: [] for p in SOURCES}


def test_an_option_named_after_its_metavar_is_found():
    assert renamed('Order = Annotated[str, typer.Option(metavar="ORDER")]') == ["Order"]
    assert renamed('def run(port: Annotated[int, typer.Option(0, metavar="PORT")]): ...') == ["port"]
    assert renamed('Order = Annotated[str, typer.Option("--order", metavar="ORDER")]') == []
