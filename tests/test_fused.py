"""The idea of benchmarks/fused.py computes what the backbone computes. Runs where Triton is, with a GPU or without."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with torch's CUDA builds")
def test_the_fused_backbone_is_the_backbone():
    command = [sys.executable, str(ROOT / "benchmarks" / "fused.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "largest deviation from autograd" in done.stdout
