"""Training process `python -m efcil.serve.worker`, started by the service.

It reads one line of JSON from standard input (see jobs.py), updates and saves the given copy of the model, and reports
progress as JSON Lines. It exits when its input is closed, as the service has then ended.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import IO, Any

from efcil.errors import EfcilError
from efcil.files import wait_for_end_of_input
from efcil.platform_support import lower_priority


def main() -> int:
    """Run the update; return the exit code."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keep output of libraries out of the JSON Lines
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_follow_the_service, daemon=True).start()
    lower_priority(order["nice"])
    try:
        _teach(order, output)
    except EfcilError as error:
        _write_event(output, event="failed", reason=str(error))
        return error.exit_code
    except MemoryError:
        _write_event(output, event="failed", reason="out of memory; send fewer images at once")
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
    """Exit when the service has ended."""
    wait_for_end_of_input()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
