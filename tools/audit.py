"""Check all locked packages for known vulnerabilities (pip-audit; needs network access).

make audit                      fails if one is known or the database is unavailable
make audit AUDIT=--may-skip     continues if the database is unavailable; fails if one is known
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LOCK = Path(__file__).resolve().parent.parent / "requirements" / "dev.txt"
VULNERABLE, UNREACHABLE = 1, 3


def judged(found: list[dict[str, Any]], may_skip: bool) -> tuple[int, list[str]]:
    """Return the exit code and messages for pip-audit's findings."""
    known = [d for d in found if d.get("vulns")]
    skipped = [d for d in found if "skip_reason" in d]
    lines = [
        f"{d['name']} {d['version']}: {v['id']}, mended in {', '.join(v['fix_versions']) or 'no version yet'}"
        for d in known
        for v in d["vulns"]
    ]
    lines += [f"not looked up: {d['name']}: {d['skip_reason']}" for d in skipped if len(skipped) < len(found)]
    if known:
        return VULNERABLE, [*lines, f"{len(known)} of {len(found)} packages have known vulnerabilities"]
    if len(skipped) == len(found):
        why = skipped[0]["skip_reason"] if skipped else "pip-audit gave no answer"
        words = "AUDIT SKIPPED" if may_skip else "AUDIT FAILED"
        return (0 if may_skip else UNREACHABLE), [f"{words}: the database cannot be reached from here ({why})"]
    return 0, [*lines, f"{len(found) - len(skipped)} packages looked up, none has a known vulnerability"]


def main() -> int:
    """Run pip-audit on the lock file and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--may-skip", action="store_true", help="continue if the database is unavailable")
    may_skip = parser.parse_args().may_skip
    command = [sys.executable, "-m", "pip_audit", "-r", str(LOCK), "--require-hashes", "--disable-pip", "-f", "json"]
    done = subprocess.run([*command, "--progress-spinner", "off"], capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        found = [{"name": "all", "skip_reason": (done.stderr.strip().splitlines() or ["no answer"])[-1]}]
    code, lines = judged(found, may_skip)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
