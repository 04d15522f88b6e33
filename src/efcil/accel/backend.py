"""Choose how a run computes, and compute eagerly; on a GPU `efcil.accel.cuda.Cuda` does it."""

from __future__ import annotations

import contextlib
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from efcil.accel.bf16 import bf16_problem
from efcil.accel.device import synchronize
from efcil.accel.folded_copy import folded_copy, use_channels_last
from efcil.errors import ConfigError
from efcil.losses import Criterion
from efcil.training.batch import FrozenForward
from efcil.training.distributed import SINGLE_PROCESS, World

if TYPE_CHECKING:
    from efcil.training.image_batches import ImageBatches
    from efcil.training.loader import StoredBatch
    from efcil.training.step import Optimizer, Step

M = TypeVar("M", bound=nn.Module)
R = TypeVar("R")
LoadEpoch = Callable[[int], "Iterable[StoredBatch]"]  # returns the batches of an epoch
LoadEpochs = Callable[[range], "Sequence[Sequence[StoredBatch]]"]  # returns those of several
CACHED_BATCH_NUMEL = 2**18  # numbers in a batch whose feature maps stay near a CPU's caches: 85 images of 32 x 32 x 3


class EpochLoader:
    """The batches of epochs, each loaded when its epoch begins."""

    def __init__(self, load_epoch: LoadEpoch):
        self.load_epoch = load_epoch

    def prefetch(self, epoch: int) -> None:
        """Start loading the batches of an epoch, and of those after it, where that pays."""

    def get(self, epoch: int) -> Iterable[StoredBatch]:
        """Return an epoch's batches; the caller synchronizes with the device before asking for the next."""
        return self.load_epoch(epoch)


@dataclass(frozen=True)
class Inference:
    """How features of many images are computed: by which call, in which batches."""

    call: Callable[[Tensor], Tensor]
    batch_numel: int | None = None  # numbers in a batch of images; None: as many as fit
    full_batches: bool = False  # whether a batch that is not full is filled up


@dataclass(frozen=True)
class Backend:
    """Where and how a run computes: here eagerly, on any device. The loop is the same on all of them."""

    device: torch.device
    precision: str = "fp32"  # fp32 | bf16 (parameters and statistics stay fp32 and fp64)
    world: World = SINGLE_PROCESS  # the processes that share the run
    note: Callable[[str], None] = field(default=warnings.warn, compare=False)  # what the user should know of a choice

    compile = False  # whether networks are compiled
    cuda_graphs = False  # whether training steps are captured

    @staticmethod
    def choose(
        device: str = "auto",
        precision: str = "auto",
        compile: bool | None = None,
        cuda_graphs: bool | None = None,
        world: World = SINGLE_PROCESS,
        sync_bn: bool = False,
        note: Callable[[str], None] = warnings.warn,
    ) -> Backend:
        """Choose the fastest settings available unless given; with several processes, one GPU each."""
        # Read when CUDA starts. Streams share a GPU's queues, eight by default, and in a queue one waits for the other:
        # three runs have twenty streams.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "mps" if _has_mps(world, note) else "cpu"
        if world.size > 1 and device.startswith("cuda"):
            device = _local_gpu(device, world)
        try:
            with warnings.catch_warnings(action="ignore"):  # of what torch means to give up
                place = torch.device(device)
            torch.zeros(1, device=place).item()  # meta has no numbers
        except (RuntimeError, AssertionError, NotImplementedError):
            have = " or ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
            why = "is not available here" if torch.cuda.is_available() or "cuda" not in device else "needs CUDA"
            raise ConfigError(f"--device {device} {why}; use --device {have}") from None
        on_gpu = place.type == "cuda"
        if on_gpu:
            torch.backends.cudnn.benchmark = True  # shapes are few and fixed: the fastest convolution is worth a try
        if precision == "auto":
            precision = "bf16" if on_gpu and torch.cuda.is_bf16_supported() else "fp32"
        if precision not in ("fp32", "bf16"):
            raise ConfigError(f"--precision {precision}: must be fp32 or bf16")
        for option, given in (("--compile", compile), ("--cuda-graphs", cuda_graphs)):
            if given and not on_gpu:
                raise ConfigError(f"{option} needs a CUDA device, not {place}: leave it out")
        if sync_bn and not on_gpu:
            raise ConfigError(
                f"--sync-bn needs CUDA devices, not {place}: leave it out, and each process normalizes its own share"
            )
        if place.type == "mps":
            return _mps(place, precision, world, note)
        if not on_gpu:
            if precision == "bf16" and (problem := bf16_problem()) is not None:
                note(f"--precision bf16: {problem}; leave it out")
            return Backend(place, precision, world, note)
        from efcil.accel.cuda import Cuda

        compile, cuda_graphs = compile is None or compile, cuda_graphs is None or cuda_graphs
        return Cuda(place, precision, world, note, compile, cuda_graphs, sync_bn)

    @property
    def description(self) -> dict[str, Any]:
        """The fields of a summary that say what a run was computed on."""
        return {
            "device": f"{platform.machine()} CPU",
            "precision": self.precision,
            "threads": torch.get_num_threads(),
            "world_size": self.world.size,
        }

    @property
    def name(self) -> str:
        """The same in words."""
        device, precision, threads, processes = self.description.values()
        words = device if threads is None else f"{device}, {threads} thread{'s' * (threads > 1)}"
        return f"{words}, {precision}" + (f", {processes} processes" if processes > 1 else "")

    @property
    def concurrent_runs(self) -> int:
        """How many runs share the device: a CPU has nothing to spare."""
        return 1

    @property
    def dtype(self) -> torch.dtype:
        """Of forward passes."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def autocast(self) -> torch.autocast:
        """Arithmetic of forward passes."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def place(self, module: M) -> M:
        """Move a module to the device; on a CPU, networks of ours in the memory format that is fast there.

        A network of somebody else may rely on the layout of what its convolutions return (`view`) and stays as it is.
        """
        if self._on_cpu:
            use_channels_last(module)
        return module.to(self.device)

    @property
    def _on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def fold(self, backbone: nn.Module) -> nn.Module:
        """Return a frozen copy of a backbone that is faster in eval mode, where there is one for its exact type."""
        return folded_copy(backbone) if self._on_cpu else backbone

    def trainable(self, backbone: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return a fast forward pass of a backbone in training, where there is one for its exact type."""
        return backbone

    def frozen(self, backbone: nn.Module, call: Callable[[Tensor], Tensor]) -> FrozenForward:
        """Return the features of a backbone that does not learn now: `call`, or a folded copy."""
        folded = self.fold(backbone)
        fast = call if folded is backbone else folded
        return FrozenForward(fast, fast)

    def inference(self, backbone: nn.Module) -> Inference:
        """Return how the features of many images are computed by a backbone in eval mode."""
        return Inference(self.fold(backbone), CACHED_BATCH_NUMEL if self._on_cpu else None)

    def maybe_compile(self, call: Callable[..., R]) -> Callable[..., R]:
        """Return a fast form of a function or a module's forward pass, where there is one."""
        return call

    def normalize(self, batch: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        """Return uint8 images times `scale` minus `offset`, in the memory format of the network's input."""
        return (batch.float() * scale - offset).contiguous()

    def criterion(self, criterion: Criterion) -> Criterion:
        """Return a fused version of a loss, where there is one for its exact type."""
        return criterion

    def step(
        self, step: Step, learner: nn.Module, loss_generator: torch.Generator | None = None
    ) -> Callable[..., None]:
        """Return what takes a training step on each batch; the loss draws from `loss_generator`."""
        return step

    def optimizer_in_backward(
        self, learner: nn.Module, optimizer: Optimizer
    ) -> contextlib.AbstractContextManager[None]:
        """Update weights while other gradients are still being computed, meanwhile and where that changes nothing."""
        return contextlib.nullcontext()

    def loader(
        self,
        load_epoch: LoadEpoch,
        load_epochs: LoadEpochs,
        pixels: ImageBatches,
        num_epochs: int,
        frozen: FrozenForward | None = None,
    ) -> EpochLoader:
        """Return what loads the batches of `num_epochs` epochs, one or several at a time.

        The outputs of a frozen network come with them where they are computed ahead of the steps.
        """
        return EpochLoader(load_epoch)

    def start_lazy_init(self) -> None:
        """Start loading libraries in the background."""

    def wait_lazy_init(self) -> None:
        """Wait until the libraries are loaded."""

    def warm_up_cudnn(self, look: Callable[[], object]) -> None:
        """Look at images before a run begins, where cuDNN would try something out for them."""

    def fork_stream(self) -> contextlib.AbstractContextManager[None]:
        """Compute the block beside what follows, until `join_stream`, where the device can."""
        return contextlib.nullcontext()

    def join_stream(self) -> None:
        """Wait for what `fork_stream` began."""

    def exclusive_capture(self) -> contextlib.AbstractContextManager[None]:
        """Keep other threads from capturing, and what a capture forbids from beginning in them."""
        return contextlib.nullcontext()

    def prevent_capture(self) -> contextlib.AbstractContextManager[None]:
        """Keep other threads from capturing meanwhile."""
        return contextlib.nullcontext()

    def run_on_autotune_thread(self, work: Callable[[], R]) -> R:
        """Run work that autotunes convolutions where concurrent runs share what was found."""
        return work()

    def tensor(self, array: npt.NDArray[Any]) -> Tensor:
        """Copy an array (memory-mapped or not) to the device."""
        return torch.from_numpy(np.array(array)).to(self.device)

    def synchronize(self) -> None:
        """Wait until the device is done."""
        synchronize(self.device)


def _has_mps(world: World, note: Callable[[str], None]) -> bool:
    """Return whether there is a Mac's GPU that computes what the CPU computes; note it if it does not."""
    if world.size > 1 or not torch.backends.mps.is_available():
        return False
    from efcil.accel.mps import mps_problem

    problem = mps_problem()
    if problem is not None:
        note(f"the GPU of this Mac {problem}; the CPU is used")
    return problem is None


def _mps(place: torch.device, precision: str, world: World, note: Callable[[str], None]) -> Backend:
    from efcil.accel.mps import Mps

    if world.size > 1:
        raise ConfigError(f"--device {place}: several processes cannot share it; use --device cpu")
    if precision != "fp32":
        raise ConfigError(f"--precision {precision} is not supported on {place}; leave it out")
    return Mps(torch.device("cpu"), precision, world, note, place)


def _local_gpu(device: str, world: World) -> str:
    """Return this process's GPU: each of a machine takes the one of its number."""
    if device != "cuda":
        raise ConfigError(f"--device {device} is one GPU for {world.size} processes: pass --device cuda, one for each")
    if world.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"process {world.local_rank + 1} of this machine finds {torch.cuda.device_count()} GPUs: start as many "
            "processes as there are GPUs (--nproc-per-node), or pass --device cpu"
        )
    torch.cuda.set_device(world.local_rank)
    return f"cuda:{world.local_rank}"
