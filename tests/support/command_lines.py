"""The commands of efcil and their options, to check command lines that are written down."""

from typing import Any

import typer.main

from efcil.cli import app


def commands() -> dict[str, Any]:
    """Every command by the words typed after `efcil`."""
    found = {}

    def walk(command: Any, words: str) -> None:
        for word, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{words} {word}".strip())
        if not getattr(command, "commands", {}):
            found[words] = command

    walk(typer.main.get_command(app), "")
    return found


def options(command: Any) -> dict[str, Any]:
    """Options by each of their spellings, --help included."""
    params = [p for p in command.params if p.param_type_name == "option"]
    return {"--help": None} | {spelling: p for p in params for spelling in (*p.opts, *p.secondary_opts)}


def misspelt(words: list[str]) -> list[str]:
    """What of a command line does not exist: the command, or options of it."""
    known = commands()
    if words[0].startswith("--"):
        top = options(typer.main.get_command(app))
        return [word for word in words if word not in top]
    key = next((k for k in (" ".join(words[:2]), words[0]) if k in known), None)
    if key is None:
        return [" ".join(words[:2])]
    return [word for word in words if word.startswith("-") and word.split("=")[0] not in options(known[key])]
