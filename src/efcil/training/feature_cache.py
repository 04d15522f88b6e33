"""Features of images by a network that is never trained: computed once, and kept on disk for every later run.

    <cache>/features/<key>/<name>.safetensors    digests (n, 32) and features (n, dim) of a part

The key is a hash of the network's weights and of all that happens to an image before them; within it an image is found
by the hash of its stored pixels. So it does not matter from which data set, class order, split or run an image comes,
and an image that was replaced is another one. Files carry a checksum: one that is damaged is computed again. The whole
cache is at most `LIMIT` bytes; what was not used for longest goes first. Where nothing can be written, features are
kept in memory alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from efcil.accel.backend import Backend
from efcil.data.cache import cache_directory
from efcil.errors import CheckpointError
from efcil.tensor_files import digest, load_tensors, save_tensors, to_cpu
from efcil.training.extraction import extract
from efcil.training.image_batches import ImageBatches

LIMIT = 4 * 2**30
"""Bytes that all features in the cache may take."""
PART = 4096  # images of a file: what is lost when a computation is interrupted
CHUNK_BYTES = 2**26  # of images that are looked up at once
VERSION = 2  # of what features depend on beside the key: increase when extraction changes

Progress = Callable[[int, int], None]


class FeatureCache:
    """Features of one network by the content of the images."""

    def __init__(self, network: nn.Module, backend: Backend, crop: int | None, folder: Path | None = None):
        """`network` must not change; `crop` is the side of its input, None: that of the images."""
        self.network, self.backend, self.crop = network, backend, crop
        self.root = (cache_directory() if folder is None else folder) / "features"
        self.identity = f"{VERSION} {type(network).__qualname__} {backend.precision} {crop} "
        self.identity += digest(to_cpu(network.state_dict()))
        self._known: dict[Path, dict[bytes, Tensor]] = {}
        self._is_writable = True

    def features(self, pixels: ImageBatches, progress: Progress | None = None) -> Tensor:
        """Return the features (n, dim) of all images, and compute those that are not known."""
        home = self._home(pixels)
        known = self._read(home)
        total, row = len(pixels.images), int(np.prod(pixels.images.shape[1:]))
        found: list[Tensor] = []
        fresh: dict[bytes, Tensor] = {}
        for rows in torch.arange(total).split(max(1, CHUNK_BYTES // row)):
            images = pixels.images[rows.to(pixels.images.device)]
            keys = [hashlib.sha256(image.data).digest() for image in images.cpu().numpy()]
            new = list({key: place for place, key in enumerate(keys) if key not in known}.values())
            if new:
                batch = pixels.with_images(images[torch.tensor(new, device=images.device)])
                computed = extract(self.network, batch, self.backend, self.crop).cpu()
                fresh |= {keys[place]: feature for place, feature in zip(new, computed, strict=True)}
                known |= {keys[place]: fresh[keys[place]] for place in new}
            found.append(torch.stack([known[key] for key in keys]))
            if len(fresh) >= PART:
                self._write(home, fresh)
                fresh = {}
            if progress is not None:
                progress(int(rows[-1]) + 1, total)
        if fresh:
            self._write(home, fresh)
        return torch.cat(found).to(self.backend.device)

    def _home(self, pixels: ImageBatches) -> Path:
        """Return the folder of the features of this network behind this preprocessing."""
        before = (pixels.scale.flatten().tolist(), pixels.offset.flatten().tolist(), pixels.short, pixels.resize)
        return self.root / hashlib.sha256(f"{self.identity} {before}".encode()).hexdigest()[:24]

    # --- files --------------------------------------------------------------------------------------------------------

    def _read(self, home: Path) -> dict[bytes, Tensor]:
        """Read all files of a folder, once."""
        if home not in self._known:
            known: dict[bytes, Tensor] = {}
            for path in sorted(home.glob("*.safetensors")):
                try:
                    tensors, _ = load_tensors(path)
                    keys = [key.tobytes() for key in tensors["digests"].numpy()]
                    known |= dict(zip(keys, tensors["features"], strict=True))
                    os.utime(path)  # used: see `_make_room`
                except (CheckpointError, KeyError, ValueError, OSError) as error:
                    if path.exists():  # not removed by another process meanwhile
                        self.backend.note(f"cached features are computed again: {error}")
                        with contextlib.suppress(OSError):
                            path.unlink()
            self._known[home] = known
        return self._known[home]

    def _write(self, home: Path, fresh: dict[bytes, Tensor]) -> None:
        """Store features that were computed; where that is impossible, say it once."""
        if not self._is_writable:
            return
        digests = torch.frombuffer(bytearray(b"".join(fresh)), dtype=torch.uint8).view(-1, 32)
        name = hashlib.sha256(b"".join(sorted(fresh))).hexdigest()[:24]
        features = torch.stack(list(fresh.values()))
        try:
            home.mkdir(parents=True, exist_ok=True)
            self._make_room(features.nbytes + digests.nbytes)
            save_tensors(home / f"{name}.safetensors", {"digests": digests, "features": features}, {})
        except OSError as error:
            self._is_writable = False
            why = error.strerror or str(error)
            self.backend.note(f"features are not cached: {self.root}: {why}; free some space or set EFCIL_CACHE")

    def _make_room(self, wanted: int) -> None:
        """Remove the files that were not used for longest until `wanted` bytes more are within the limit."""
        files = []
        for path in self.root.glob("*/*.safetensors"):
            with contextlib.suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        size = wanted + sum(file[1] for file in files)
        for _, bytes_freed, path in sorted(files):
            if size <= LIMIT:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                size -= bytes_freed
