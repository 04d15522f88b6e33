"""Export of a model to ONNX: uint8 images to probabilities; the metadata says what is done to a picture before.

int8 makes the file four times smaller: ONNX Runtime's static quantization of the convolutions, with the ranges that
activations have on a few pictures. The classifier behind them stays as it is. Every second picture is left out of the
calibration; on these the answers of both models are compared, with each other and with the class where that is known.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from efcil import __version__
from efcil.errors import ConfigError, DataError
from efcil.files import StrPath, atomic_replace
from efcil.models.pretrained import notice
from efcil.product.classifier import IncrementalClassifier
from efcil.product.inputs import Images, read_images

LEAST = 8
"""Pictures that int8 needs: half of them to calibrate, half to compare."""
MOST = 500
"""Pictures that are read at most, spread over all that are given."""
BATCH = 16


@dataclass(frozen=True)
class Export:
    """A file that was written."""

    path: Path
    size: int  # bytes
    size_fp32: int  # bytes of the same model without int8
    compared: int = 0  # pictures on which int8 and fp32 were compared
    agreement: float | None = None  # share of them with the same answer
    labeled: int = 0  # of these, pictures whose class is known
    accuracy: float | None = None  # on them
    accuracy_fp32: float | None = None

    def __str__(self) -> str:
        text = f"{self.path} ({self.size / 1e6:.1f} MB)"
        if self.agreement is None:
            return text
        text = (
            f"{text}: int8, {self.size_fp32 / 1e6:.1f} MB in fp32; same class as fp32 for {self.agreement:.1%} of "
            f"{self.compared} images that were not used for calibration"
        )
        if self.accuracy is None:
            return text
        return f"{text}; accuracy on {self.labeled} of them {self.accuracy:.1%}, in fp32 {self.accuracy_fp32:.1%}"


def export_onnx(
    model: IncrementalClassifier, path: StrPath, int8: Any = None, labels: Sequence[str] | None = None
) -> Export:
    """Export `model` as an ONNX file: input `images` uint8 (n, 3, size, size), output `probabilities` (n, classes).

    `int8`: pictures (paths, bytes, Pillow images or arrays) like those that the model will see, to quantize it with.
    `labels`: their classes, to state the accuracy; a name that is no class of the model stands for an unknown one.

    The metadata describe everything else: `class_names` (JSON list, columns of the output), `preprocessing` (JSON:
    color order, resize, crop, resampling; the normalization is inside), `method`, `backbone`, `notice` (license of the
    backbone's weights). Weights are stored in the file.
    """
    target = Path(os.fspath(path))
    if target.is_dir():
        raise ConfigError(f"{target} is a directory; give a file, such as {target / 'model.onnx'}")
    pictures = None if int8 is None else read_images(_spread_out(int8), model.preprocessing)
    names = np.array([] if labels is None else _spread_out(list(labels)), dtype=np.str_)
    if pictures is not None and labels is not None and len(names) != len(pictures):
        raise DataError(f"{len(labels)} labels for {len(pictures)} images; give one for each")
    if pictures is not None and len(pictures) < LEAST:
        raise DataError(f"int8 needs {LEAST} images or more, got {len(pictures)}; give some that the model may see")
    proto = _program(model, pictures is not None)
    proto_size = proto.ByteSize()
    target.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    if pictures is not None:
        quantized = _quantized(proto, pictures[::2])
        plain, small = (model.classes_[_answers(one, pictures[1::2])] for one in (proto, quantized))
        found = {"compared": len(plain), "agreement": float((plain == small).mean())}
        truth, proto = names[1::2], quantized
        known = np.isin(truth, model.classes_)
        if known.any():
            own, full = (float((answers[known] == truth[known]).mean()) for answers in (small, plain))
            found |= {"labeled": int(known.sum()), "accuracy": own, "accuracy_fp32": full}
    _describe(proto, _facts(model) | _quality(found))
    with atomic_replace(target) as temporary:
        Path(temporary).write_bytes(proto.SerializeToString())
    return Export(target, target.stat().st_size, proto_size, **found)


def _spread_out(pictures: Any) -> Any:
    """Return at most `MOST` of listed pictures, at equal distances: a list may have more than memory holds."""
    if not isinstance(pictures, list | tuple) or len(pictures) <= MOST:
        return pictures
    return [pictures[place] for place in np.linspace(0, len(pictures) - 1, MOST).round().astype(int)]


def _program(model: IncrementalClassifier, int8: bool) -> Any:
    """Return the model as an ONNX graph."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401

        if int8:
            import onnxruntime  # noqa: F401
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
        return program.model_proto


def _facts(model: IncrementalClassifier) -> dict[str, str]:
    """Return what the file says of itself."""
    wanted = model.preprocessing
    return {
        "class_names": json.dumps(model.classes_.tolist()),
        "size": str(model.size),
        "method": model.method,
        "backbone": str(model.summary()["backbone"]),
        "preprocessing": json.dumps(
            {
                "input": "uint8, 0 to 255, (n, channel, row, column)",
                "color": "RGB",
                "orientation": "as EXIF says",
                "transparency": "over white",
                "size": wanted.size,
                "resize": "the whole picture" if wanted.squash else "the central square",
                "crop": wanted.crop,
                "crop_meaning": "share of the short side that the side of the central square takes",
                "interpolation": wanted.interpolation,
                "antialias": True,
                "normalization": "inside the model",
                "mean": list(wanted.mean),
                "std": list(wanted.std),
            }
        ),
        "efcil": __version__,
        "notice": notice(),
    }


def _quality(found: Mapping[str, Any]) -> dict[str, str]:
    """Return what the file says of its quantization."""
    texts = {key: f"{value:.4f}" if isinstance(value, float) else str(value) for key, value in found.items()}
    return {"quantization": "int8, static", **texts} if texts else {}


def _describe(proto: Any, facts: Mapping[str, str]) -> None:
    import onnx

    onnx.helper.set_model_props(proto, dict(facts))


# --- int8 -------------------------------------------------------------------------------------------------------------


def _quantized(proto: Any, pictures: Images) -> Any:
    """Return the graph with int8 convolutions, whose ranges come from pictures."""
    import onnx
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        """Gives the pictures in batches."""

        def __init__(self) -> None:
            self.batches = iter(np.array_split(pictures, -(-len(pictures) // BATCH)))

        def get_next(self) -> dict[str, Images] | None:
            """Return the next batch, None at the end."""
            batch = next(self.batches, None)
            return None if batch is None else {"images": batch}

    with tempfile.TemporaryDirectory(prefix="efcil-") as folder, _quiet():
        plain, prepared, small = (Path(folder) / name for name in ("plain.onnx", "prepared.onnx", "small.onnx"))
        onnx.save(proto, os.fspath(plain))
        quant_pre_process(os.fspath(plain), os.fspath(prepared), skip_symbolic_shape=True)  # folds normalization
        quantization.quantize_static(
            os.fspath(prepared),
            os.fspath(small),
            Reader(),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=["Conv"],
            per_channel=True,
            reduce_range=True,  # CPUs without VNNI overflow otherwise
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
        )
        return onnx.load(os.fspath(small))


def _answers(proto: Any, pictures: Images) -> npt.NDArray[np.int64]:
    """Return the class of each picture, by ONNX Runtime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    parts = np.array_split(pictures, -(-len(pictures) // BATCH))
    found: npt.NDArray[np.int64] = np.concatenate([session.run(None, {"images": part})[0].argmax(1) for part in parts])
    return found


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
