"""The commands that a user types, on whatever system this is: `python tests/support/commands.py [--device cpu]`."""

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
from PIL import Image

SMALL = ["width=2", "first.epochs=2", "later.epochs=1", "first.milestones=[]", "later.milestones=[]"]
EFCIL = [sys.executable, "-m", "efcil"]


def command(*arguments):
    """Run a command, which must succeed, and return what it printed."""
    print("efcil", *arguments, flush=True)
    done = subprocess.run([*EFCIL, *map(str, arguments)], stdout=subprocess.PIPE, encoding="utf-8", check=True)
    return done.stdout


def pictures(folder, names):
    """Draw 40 pictures for each class."""
    random = np.random.default_rng(len(names[0]))
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for i in range(40):
            pixels = random.normal(80 + 80 * number, 30, (12, 12, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def main():
    """Run, compare, demo, teach twice, predict, serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    on = ("--device", parser.parse_args().device)
    few = [part for setting in SMALL for part in ("--set", setting)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        command("run", "dpcr", "digits", "--tasks", 2, "--out", home / "run", "--quiet", *on, *few)
        assert json.loads((home / "run" / "summary.json").read_text(encoding="utf-8"))["status"] == "complete"
        methods = "dpcr,dpcr:rank_rule=none,lwf"
        command("compare", methods, "digits", "--tasks", 2, "--out", home / "compare", "--quiet", *on, *few)
        assert (home / "compare" / "dpcr-rank_rule=none" / "summary.json").exists()
        command("demo", "--out", home / "demo", "--quiet")
        first, more = pictures(home / "first", ("cat", "dog")), pictures(home / "more", ("owl", "yak"))
        command("teach", home / "model", first, "--size", 16, "--width", 8, "--epochs", 4, *on)
        command("teach", home / "model", more, "--epochs", 4, *on)
        answers = json.loads(command("predict", home / "model", first / "cat", "--json", *on))
        assert len(answers) == 40
        service = subprocess.Popen(
            [*EFCIL, "serve", str(home / "model"), "--port", "0", *on], stdout=subprocess.PIPE, encoding="utf-8"
        )
        try:
            address = re.search(r"https?://\S+", service.stdout.readline())
            with urllib.request.urlopen(f"{address[0]}/health", timeout=60) as answer:
                assert answer.status == 200
        finally:
            service.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                service.wait(60)
    print("all commands work")


if __name__ == "__main__":
    main()
