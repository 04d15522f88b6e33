"""The numbers of every method stay what they were when the goldens were made: `tools/goldens.py` compares."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = ROOT / "tools" / "goldens.py"


@pytest.mark.slow
def test_every_method_means_what_the_goldens_say():
    done = subprocess.run([sys.executable, GOLDENS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_comparison_sees_another_number():
    """A changed digest and a changed logit are found, with bits and without."""
    sys.path.insert(0, str(GOLDENS.parent))
    try:
        import goldens
    finally:
        sys.path.remove(str(GOLDENS.parent))
    one = {"logits": {"digest": "a" * 24, "values": [[1.0]]}, "correct": [[3]]}
    other = {"logits": {"digest": "b" * 24, "values": [[1.0 + 1e-7]]}, "correct": [[3]]}
    assert goldens.differences(one, one, bits=True) == []
    assert goldens.differences(one, other, bits=True) != []
    assert goldens.differences(one, other, bits=False) == []
    assert goldens.differences(one, {**other, "correct": [[2]]}, bits=False) != []
    further = {"logits": {"digest": "b" * 24, "values": [[1.001]]}, "correct": [[3]]}
    assert goldens.differences(one, further, bits=False) != []
