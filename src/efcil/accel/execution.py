"""Choose how a run computes: device, precision, compilation, CUDA graphs."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from efcil.accel.device import synchronize
from efcil.accel.stem import with_stems
from efcil.accel.streams import SharedExclusiveLock, _local, _thread_streams, thread_stream
from efcil.errors import ConfigError
from efcil.losses import Criterion
from efcil.training.distributed import SINGLE_PROCESS, World

M = TypeVar("M", bound=nn.Module)
R = TypeVar("R")
AUTOTUNE_THREAD = "autotune"  # name of the thread in which cuDNN tries its algorithms


@dataclass(frozen=True)
class Execution:
    """Where and how a run computes. The loop is the same on all of them."""

    device: torch.device
    precision: str = "fp32"  # fp32 | bf16 (parameters and statistics stay fp32 and fp64)
    compile: bool = False
    cuda_graphs: bool = False  # the whole training step as one CUDA graph
    world: World = SINGLE_PROCESS  # the processes that share the run
    sync_bn: bool = False  # batch normalization over the whole batch, not over each process's share of it

    @classmethod
    def choose(
        cls,
        device: str = "auto",
        precision: str = "auto",
        compile: bool | None = None,
        cuda_graphs: bool | None = None,
        world: World = SINGLE_PROCESS,
        sync_bn: bool = False,
    ) -> Execution:
        """Choose the fastest settings available unless given; with several processes, one GPU each."""
        # Read when CUDA starts. Streams share a GPU's queues, eight by default, and in a queue one waits for the other:
        # three runs have twenty streams.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if world.size > 1 and device.startswith("cuda"):
            device = _local_gpu(device, world)
        try:
            place = torch.device(device)
            torch.empty(1, device=place)
        except (RuntimeError, AssertionError, NotImplementedError):
            have = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
            raise ConfigError(f"--device {device} is not usable here; there is {', '.join(have)}") from None
        on_gpu = place.type == "cuda"
        if on_gpu:
            torch.backends.cudnn.benchmark = True  # shapes are few and fixed: the fastest convolution is worth a try
        if precision == "auto":
            precision = "bf16" if on_gpu and torch.cuda.is_bf16_supported() else "fp32"
        if precision not in ("fp32", "bf16"):
            raise ConfigError(f"--precision {precision}: must be fp32 or bf16")
        if cuda_graphs and not on_gpu:
            raise ConfigError(f"--cuda-graphs needs a CUDA device, not {place}")
        if sync_bn and not on_gpu:
            raise ConfigError(
                f"--sync-bn needs CUDA devices, not {place}: leave it out, and each process normalizes its own share"
            )
        compile, cuda_graphs = on_gpu if compile is None else compile, on_gpu if cuda_graphs is None else cuda_graphs
        return cls(place, precision, compile, cuda_graphs, world, sync_bn)

    @property
    def description(self) -> dict[str, Any]:
        """The fields of a summary that say what a run was computed on."""
        on_gpu = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.device) if on_gpu else f"{platform.machine()} CPU",
            "precision": self.precision,
            "threads": None if on_gpu else torch.get_num_threads(),
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
        """How many runs share the device: small steps do not fill a large GPU; a CPU has nothing to spare."""
        return 3 if self.cuda_graphs and self.world.size == 1 else 1

    @property
    def dtype(self) -> torch.dtype:
        """Of forward passes."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def autocast(self) -> torch.autocast:
        """Arithmetic of forward passes. The cache of cast weights is off, since a captured step must not keep one."""
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=not self.cuda_graphs
        )

    def place(self, module: M) -> M:
        """Move a module to the device, in the memory format that is fast there, and its stems with filled channels."""
        if self.sync_bn and self.world.size > 1:
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        if self.device.type == "cuda":
            with_stems(module)
            return module.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        return module.to(self.device)

    @property
    def use_fused_resnet(self) -> bool:
        """Whether ResNets are trained by `efcil.accel.fused_resnet`."""
        whole = self.world.size == 1 or not self.sync_bn  # its normalization is of one process
        return self.compile and self.cuda_graphs and self.precision == "bf16" and whole

    def start_lazy_init(self) -> None:
        """Start loading libraries in the background."""
        if self.cuda_graphs:
            with _preload_lock:
                _preload_libraries(self.device, self.use_fused_resnet)

    def wait_lazy_init(self) -> None:
        """Wait until the libraries are loaded."""
        if self.cuda_graphs:
            with _preload_lock:
                reading = _preload_libraries(self.device, self.use_fused_resnet)
            reading.join()

    def maybe_compile(self, call: Callable[..., R]) -> Callable[..., R]:
        """Compile a function or a module's forward pass; the module itself stays as it is."""
        if not self.compile:
            return call
        function = call.forward if isinstance(call, nn.Module) else call

        @functools.cache
        def compiled() -> Callable[..., R]:  # when it is first called: to load the compiler alone takes seconds
            # Several runs in one process compile the same code for several modules; past the limit it runs eagerly.
            torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
            # Many small kernels (casts of weights, running statistics) become a few: 4 % of a step on an H200.
            return torch.compile(function, dynamic=False, options={"combo_kernels": self.device.type == "cuda"})

        return lambda *given, **named: compiled()(*given, **named)

    @contextlib.contextmanager
    def fork_stream(self) -> Iterator[None]:
        """While a step is captured, record the block on a parallel branch that ends with `join_stream`."""
        if not (self.cuda_graphs and torch.cuda.is_current_stream_capturing()):
            yield
            return
        main, branch = torch.cuda.current_stream(), thread_stream(self.device, "branch")
        branch.wait_stream(main)
        with torch.cuda.stream(branch):
            yield

    def join_stream(self) -> None:
        """Make the main branch of a captured step wait for the parallel one."""
        if self.cuda_graphs and torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_stream(thread_stream(self.device, "branch"))

    def exclusive_capture(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock for a capture: other captures and whatever a capture forbids wait in other threads."""
        return _capture_lock.exclusive() if self.cuda_graphs else contextlib.nullcontext()

    def prevent_capture(self) -> contextlib.AbstractContextManager[None]:
        """Keep other threads from capturing during work that a capture forbids (cuDNN's autotuning)."""
        return _capture_lock.shared() if self.cuda_graphs else contextlib.nullcontext()

    def run_on_autotune_thread(self, work: Callable[[], R]) -> R:
        """Run work that autotunes convolutions in one thread shared by all concurrent runs.

        cuDNN's trials are remembered for each thread. So they are made once, by the run that begins, and not by the
        others beside its steps, which disturb the clock. Whoever asks from another run waits meanwhile. The streams
        are those of who asks: what one thread records for several runs on shared streams spoils their weights. The
        likely reason: cuBLAS has a workspace for each pair of thread and stream.

        Work asks for neither `exclusive_capture` nor `prevent_capture`: who asks for it holds what it needs.
        """
        here = threading.current_thread()
        if not self.cuda_graphs or here is threading.main_thread() or here.name.startswith(AUTOTUNE_THREAD):
            return work()
        stream, learning, streams = torch.cuda.current_stream(self.device), torch.is_grad_enabled(), _thread_streams()

        def there() -> R:
            _local.streams = streams
            with torch.cuda.stream(stream), torch.set_grad_enabled(learning):
                return work()

        return _autotune_pool().submit(there).result()

    @staticmethod
    def knows(part: object) -> bool:
        """Whether the exact type of an object is one of ours; what is not runs eagerly and is never captured.

        A captured step would freeze the Python branches and counters of a plug-in's loss.
        """
        return type(part).__module__.partition(".")[0] == "efcil"

    def criterion(self, criterion: Criterion) -> Criterion:
        """Return a fused version of a loss where there is one for its exact type."""
        if not (self.compile and self.cuda_graphs):
            return criterion
        from efcil.accel.criteria import accelerate

        return accelerate(criterion, self.device, self.dtype)

    def tensor(self, array: npt.NDArray[Any]) -> Tensor:
        """Copy an array (memory-mapped or not) to the device."""
        return torch.from_numpy(np.array(array)).to(self.device)

    def warm_up_cudnn(self, look: Callable[[], object]) -> None:
        """Look at images before a run begins: what cuDNN tries out for them, the steps of no other run disturb."""
        if self.use_fused_resnet and self.world.size == 1:
            look()

    def synchronize(self) -> None:
        """Wait until the device is done."""
        synchronize(self.device)


@functools.cache
def _autotune_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, AUTOTUNE_THREAD)


@functools.cache
def _preload_libraries(device: torch.device, kernels: bool) -> threading.Thread:
    """Let torch read its linear algebra and Triton find out who it is, once, in a thread of its own.

    Torch reads its linear algebra when it is first asked for, and fails where two threads ask at the same time. Triton
    reads all of itself.
    """

    def ask() -> None:
        with contextlib.suppress(Exception), _capture_lock.shared():  # whoever needs it will hear of it
            torch.linalg.cholesky_ex(torch.eye(2, dtype=torch.float64, device=device))
        if kernels:
            with contextlib.suppress(Exception):
                from triton.runtime.cache import triton_key

                triton_key()

    thread = threading.Thread(target=ask)  # waited for at the end: nothing may be cut off inside a library
    thread.start()
    return thread


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


_capture_lock = SharedExclusiveLock()
_preload_lock = threading.Lock()
