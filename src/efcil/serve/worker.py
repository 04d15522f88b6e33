"""The process that teaches: `python -m efcil.serve.worker`, started by the service, never by hand.

It reads one line of JSON from its standard input (see jobs.py), teaches the copy of the model it is given, saves it
there and tells its progress as lines of JSON. When its input ends, the service is gone and so is the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from typing import IO, Any

from efcil.errors import EfcilError
from efcil.files import wait_for_end_of_input


def main() -> int:
    """Teach as told; return the exit code."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not stand between the lines of JSON
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_follow_the_service, daemon=True).start()
    with contextlib.suppress(OSError):
        os.nice(order["nice"])
    try:
        _teach(order, output)
    except EfcilError as error:
        _write_event(output, event="failed", reason=str(error))
        return error.exit_code
    except MemoryError:
        _write_event(output, event="failed", reason="memory ran out; teach fewer pictures at once")
        return 3
    except OSError as error:
        _write_event(output, event="failed", reason=f"{error.strerror or error}")
        return 3
    _write_event(output, event="saved")
    return 0


def _teach(order: dict[str, Any], output: IO[str]) -> None:
    import numpy as np
    import torch

    from efcil.product import IncrementalClassifier, Progress

    torch.set_num_threads(order["threads"])
    model = IncrementalClassifier.load(order["model"], device=order["device"])
    pixels = torch.from_numpy(np.load(order["pixels"], allow_pickle=False))

    def tell(progress: Progress) -> None:
        _write_event(output, event="progress", share=progress.fraction, message=progress.message)

    given = {key: order[key] for key in ("epochs", "budget") if order[key] is not None}
    model.learn(pixels, order["labels"], callbacks=(tell,), **given)
    model.save(order["model"])


def _write_event(output: IO[str], **event: Any) -> None:
    output.write(json.dumps(event) + "\n")
    output.flush()


def _follow_the_service() -> None:
    """End with the service, however it ended: nobody would take the model."""
    wait_for_end_of_input()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
