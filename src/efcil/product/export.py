"""Export of a model to ONNX: uint8 images of fixed size to probabilities, with class names in the metadata."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from efcil.errors import ConfigError
from efcil.files import StrPath, atomic_replace
from efcil.models.pretrained import notice
from efcil.product.classifier import IncrementalClassifier


def export_onnx(model: IncrementalClassifier, path: StrPath) -> Path:
    """Export `model` as an ONNX file: input `images` uint8 (n, 3, size, size), output `probabilities` (n, classes).

    Metadata: `class_names` (JSON list, columns of the output), `size`, `method`, `notice` (licenses of the weights).
    Weights are stored in the file.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"ONNX export needs {error.name}: pip install 'efcil[onnx]'") from None
    network = model.network().to("cpu")
    example = torch.zeros(2, 3, model.size, model.size, dtype=torch.uint8)
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            network,
            (example,),
            input_names=["images"],
            output_names=["probabilities"],
            dynamic_shapes=({0: torch.export.Dim("n")},),
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        proto = program.model_proto
    facts = {"class_names": json.dumps(model.classes_.tolist()), "size": str(model.size), "method": model.method}
    facts["notice"] = notice()
    onnx.helper.set_model_props(proto, facts)
    target = Path(os.fspath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replace(target) as temporary:
        onnx.save(proto, os.fspath(temporary))
    return target


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress output of the exporter."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
