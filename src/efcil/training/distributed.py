"""Data-parallel training with torchrun: each process computes its share of every batch and feature extraction.

All processes run the same steps and have identical weights, momentum buffers and running statistics after each step.
The number of processes may therefore change when a run is resumed, and statistics and classifiers are computed by all
processes instead of being broadcast. Only the first process writes files.

Gradients are reduced here after `backward` and not by `DistributedDataParallel`: losses are not the `forward` of a
module (teacher, stages, growing head), a captured CUDA graph includes the reduction, and losses are weighted by the
share of the batch, so that the sum is the gradient of the full batch even for shares of different size. Communication
does not overlap with `backward`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from efcil import accel
from efcil.core.class_stats import ClassStats
from efcil.core.linear_algebra import pack_symmetric, unpack_symmetric
from efcil.errors import ConfigError, EfcilError, FailedOnOtherRank, Interrupted, TrainingError

TIMEOUT = timedelta(hours=1)  # of collectives; longer than any process works without one
BUCKET_NUMEL = 2**23  # numbers per collective, to bound the copy of the gradients
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun


def world_size() -> int:
    """Return the number of processes started by torchrun, 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if all(os.environ.get(name) for name in TORCHRUN_VARIABLES) else 1


class World:
    """Process group of a run; with a single process, every method is local."""

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, node: int = 0, store: Any = None):
        self.rank, self.size, self.local_rank, self.node, self.store = rank, size, local_rank, node, store
        self._copies = 1  # number of processes that have each row of the current batch
        self._turns = 0  # number of calls of `local_main_first`

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and reports progress."""
        return self.rank == 0

    # --- sharding ---------------------------------------------------------------------------------------------------

    def shard(self, count: int) -> slice:
        """Return this process's share of `count` rows, or all rows if there are fewer rows than processes.

        >>> World(rank=0, size=2).shard(5), World(rank=1, size=2).shard(5), World(rank=1, size=2).shard(1)
        (slice(0, 3, None), slice(3, 5, None), slice(0, 1, None))
        """
        if count < self.size:
            return slice(0, count)
        share, left = divmod(count, self.size)
        start = self.rank * share + min(self.rank, left)
        return slice(start, start + share + (self.rank < left))

    def begin_batch(self, count: int) -> float:
        """Begin a step on a batch of `count` rows and return the weight of this process's share; weights sum to one."""
        self._copies = self.size if count < self.size else 1
        own = self.shard(count)
        return (own.stop - own.start) / (count * self._copies)

    # --- collectives ------------------------------------------------------------------------------------------------

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        if self.size > 1:
            with self._collective_errors():
                dist.all_reduce(tensor)
        return tensor

    def all_reduce_many_(self, tensors: Iterable[Tensor]) -> None:
        """Sum many tensors of one dtype over all processes, in place and in buckets."""
        if self.size == 1:
            return
        bucket: list[Tensor] = []
        for tensor in tensors:
            if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET_NUMEL:
                self._all_reduce_bucket(bucket)
                bucket = []
            bucket.append(tensor)
        if bucket:
            self._all_reduce_bucket(bucket)

    def _all_reduce_bucket(self, tensors: Sequence[Tensor]) -> None:
        rows = [_flat(tensor) for tensor in tensors]
        parts = self.all_reduce_(torch.cat(rows)).split([len(row) for row in rows])
        torch._foreach_copy_(rows, parts)  # a single kernel launch

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast the first process's tensors, in place."""
        if self.size > 1:
            with self._collective_errors():
                for tensor in tensors:
                    dist.broadcast(tensor, 0)

    def all_gather(self, own: Tensor, count: int) -> Tensor:
        """Gather the rows of all processes in order; `own` is this process's `shard` of `count`."""
        if self.size == 1 or count < self.size:
            return own
        most = -(-count // self.size)
        padded = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        with self._collective_errors():
            dist.all_gather(parts, padded)
        left = count % self.size  # number of processes with one more row
        return torch.cat([part if not left or rank < left else part[:-1] for rank, part in enumerate(parts)])

    def norm(self, rows: Tensor) -> Tensor:
        """Return the Euclidean norm over the rows of all processes, differentiable in every share."""
        if self.size == 1:
            return torch.linalg.vector_norm(rows)
        found: Tensor = _Norm.apply(rows, self)
        return found

    def class_stats(self, features: Tensor, labels: Tensor) -> ClassStats:
        """Compute statistics of features (n, dim) that all processes have; each sums its share in float64."""
        if self.size == 1 or len(labels) < self.size:
            return ClassStats.from_features(features, labels)
        rows = self.shard(len(labels))
        own = ClassStats.from_features(features[rows], labels[rows])
        classes = labels.unique()
        at = torch.searchsorted(classes, own.classes)
        count = torch.zeros_like(classes)
        count[at] = own.count
        total = own.mean.new_zeros(len(classes), own.dim)
        total[at] = own.mean * own.count[:, None]
        packed = own.mean.new_zeros(len(classes), own.dim * (own.dim + 1) // 2)
        packed[at] = pack_symmetric(own.gram)
        for tensor in (count, total, packed):
            self.all_reduce_(tensor)
        return ClassStats(classes, count, total / count[:, None], unpack_symmetric(packed))

    # --- synchronization --------------------------------------------------------------------------------------------

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        return flag if self.size == 1 else bool(self.all_reduce_(torch.tensor(int(flag))))

    def barrier(self) -> None:
        """Wait for all processes."""
        self.any(False)

    def broadcast_object(self, value: Any) -> Any:
        """Broadcast the first process's value, which must be JSON-serializable."""
        return value if self.size == 1 else json.loads(self._broadcast_text(0, json.dumps(value)))

    def _broadcast_text(self, rank: int, text: str) -> str:
        """Broadcast the text of one process."""
        data = bytearray(text.encode())
        length = torch.tensor(len(data))
        with self._collective_errors():
            dist.broadcast(length, rank)
            if self.rank != rank:
                data = bytearray(int(length))
            if data:
                dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), rank)
        return data.decode()

    def broadcast_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Broadcast the first process's CPU tensors."""
        if self.size == 1:
            return dict(tensors)
        kinds = {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()}
        found = {}
        for name, (kind, shape) in self.broadcast_object(kinds).items():
            own = tensors[name].contiguous() if self.is_main else torch.empty(shape, dtype=getattr(torch, kind))
            if own.numel():
                self.broadcast_([own.view(-1).view(torch.uint8)])
            found[name] = own
        return found

    @contextmanager
    def sync_errors(self) -> Iterator[None]:
        """Raise an error of one process in all processes; the block must not use collectives."""
        if self.size == 1:
            yield
            return
        problem: EfcilError | None = None
        try:
            yield
        except EfcilError as error:
            problem = error
        own = "" if problem is None else str(problem.exit_code)
        for rank in range(self.size):
            code = self._broadcast_text(rank, own)
            if code and problem is not None and rank == self.rank:
                raise problem
            if code:
                raise FailedOnOtherRank(int(code))

    def check_equal(self, what: str, value: str) -> None:
        """Raise ConfigError if the value differs from that of the first process."""
        first = self.broadcast_object(value)
        with self.sync_errors():
            if value != first:
                raise ConfigError(
                    f"{what} differs: {value} here, {first} in the first process; use the same everywhere"
                )

    @contextmanager
    def local_main_first(self) -> Iterator[None]:
        """Run the block in one process per machine before the others."""
        if self.size == 1:
            yield
            return
        self._turns += 1
        done = f"efcil/turn-{self._turns}/node-{self.node}"
        if self.local_rank == 0:
            try:
                yield
            finally:
                self.store.set(done, "1")
            return
        while not self.store.check([done]):  # not a collective, as decoding a large set may exceed its timeout
            time.sleep(0.1)
        yield

    @contextmanager
    def _collective_errors(self) -> Iterator[None]:
        """Convert errors of collectives to RunError with a remedy."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            detail = (first.partition("] ")[2] or first).partition(". ")[0][:120]  # without gloo's place and its advice
            raise TrainingError(
                f"another process of the run has died ({detail}); continue from the last checkpoint with --resume, "
                "with any number of processes"
            ) from None


SINGLE_PROCESS = World()


class _Norm(torch.autograd.Function):
    """Norm |D| of the rows D of all processes; its gradient is D / |D|, and zero at zero."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: World) -> Tensor:
        """Reduce the squares."""
        found = (world.all_reduce_(rows.square().sum()) / world._copies).sqrt()
        ctx.world = world
        ctx.save_for_backward(rows, found)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Reduce the gradients of all processes, whose weights sum to one."""
        rows, found = ctx.saved_tensors
        upstream = ctx.world.all_reduce_(gradients[0].clone()) / ctx.world._copies
        return torch.where(found > 0, upstream / found, 0.0) * rows, None


def _flat(tensor: Tensor) -> Tensor:
    """Return a flat view (n,) of a tensor in memory order."""
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.view(-1)


def running_statistics(module: nn.Module) -> list[Tensor]:
    """Return the running means and variances of normalization layers in training mode."""
    found: list[Tensor] = []
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:
            found += [s for s in (part.running_mean, part.running_var) if s is not None]
    return found


@contextmanager
def init_distributed() -> Iterator[World]:
    """Initialize the process group of torchrun within the context; SINGLE_PROCESS without torchrun."""
    if world_size() == 1:
        yield SINGLE_PROCESS
        return
    # Functions of this module have the default group as argument default. If an optimizer imports it while the group
    # exists, the group and its threads outlive the context, and a thread that frees a tensor at interpreter shutdown
    # aborts the process.
    import torch.distributed.nn.functional  # noqa: F401

    variables = os.environ
    store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    backend = "cpu:gloo,cuda:nccl" if accel.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    local_rank, node = int(variables.get("LOCAL_RANK", rank)), int(variables.get("GROUP_RANK", 0))
    world = World(rank, size, local_rank, node, dist.PrefixStore("efcil", store))
    try:
        yield world
        world.barrier()
    except Interrupted as error:  # in all processes, after the same step
        dist.destroy_process_group()
        raise error if world.is_main else FailedOnOtherRank(error.exit_code) from None
    except EfcilError as error:
        if not accel.is_available():  # NCCL would wait for a process that may have died
            dist.destroy_process_group()
        if not world.is_main and str(error):
            error.args = (f"process {rank + 1} of {size}: {error}",)
        raise
    dist.destroy_process_group()
