"""Conversion of out-of-memory errors to one-line messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from efcil.errors import TrainingError


@contextlib.contextmanager
def memory_guard(what: str) -> Iterator[None]:
    """Convert out-of-memory errors to TrainingError with a remedy."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _out_of_memory(what, error) from None
    except RuntimeError as error:
        if "can't allocate memory" in str(error) or "not enough memory" in str(error):
            raise _out_of_memory(what, error) from None
        raise


def _out_of_memory(what: str, error: BaseException) -> TrainingError:
    detail = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return TrainingError(
        f"out of memory while {what} ({detail}); lower --set batch_size=..., --set width=... or the image size "
        "(--set data.short_side=...), or use --precision bf16, then continue with --resume"
    )
