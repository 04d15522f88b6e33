"""The backend of GPUs: compiled, fused and folded networks, captured steps, batches that are loaded beside them."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from efcil.accel.backend import Backend, EpochLoader, Inference, LoadEpoch, LoadEpochs
from efcil.accel.captured_step import CaptureAtFirstBatch
from efcil.accel.compared_step import ComparedStep
from efcil.accel.folded_resnet import fold
from efcil.accel.fused_resnet import FusedResNet
from efcil.accel.optim import SGD
from efcil.accel.prefetch import TEACHER_BATCH_NUMEL, Prefetcher, precompute_teacher
from efcil.accel.stem import with_stems
from efcil.accel.streams import SharedExclusiveLock, _local, _thread_streams, thread_stream
from efcil.losses import Criterion
from efcil.models.resnet import ResNet
from efcil.training.batch import FrozenForward
from efcil.training.image_batches import ImageBatches
from efcil.training.loader import StoredBatch
from efcil.training.step import Optimizer, Step

M = TypeVar("M", bound=nn.Module)
R = TypeVar("R")
AUTOTUNE_THREAD = "autotune"  # name of the thread in which cuDNN tries its algorithms


@dataclass(frozen=True)
class Cuda(Backend):
    """Computes on a GPU. The loop is the same; networks, losses, steps and loaders are substituted by exact type."""

    compile: bool = False
    cuda_graphs: bool = False  # the whole training step as one CUDA graph
    sync_bn: bool = False  # batch normalization over the whole batch, not over each process's share of it

    @property
    def description(self) -> dict[str, Any]:
        """The fields of a summary that say what a run was computed on."""
        return {**super().description, "device": torch.cuda.get_device_name(self.device), "threads": None}

    @property
    def concurrent_runs(self) -> int:
        """How many runs share the device: small steps do not fill a large GPU; a CPU has nothing to spare."""
        return 3 if self.cuda_graphs and self.world.size == 1 else 1

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

    def trainable(self, backbone: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return a fast forward pass of a backbone in training."""
        if self.use_fused_resnet and type(backbone) is ResNet:
            return FusedResNet(backbone, self.dtype, self.maybe_compile(backbone))
        return self.maybe_compile(backbone)

    def frozen(self, backbone: nn.Module, call: Callable[[Tensor], Tensor]) -> FrozenForward:
        """Return the features of a backbone that does not learn now: `call` in a step, faster ahead of it."""
        return FrozenForward(call, fold(backbone, self.device, self.dtype) or call)

    def inference(self, backbone: nn.Module) -> Inference:
        """Return how the features of many images are computed by a backbone in eval mode."""
        folded = fold(backbone, self.device, self.dtype) if self.use_fused_resnet else None
        full = self.device.type == "cuda"  # cuDNN tries its algorithms for every new shape: longer than a full batch
        if folded is None:
            return Inference(backbone, full_batches=full)
        return Inference(folded, TEACHER_BATCH_NUMEL, full)  # the teacher's batch size: cuDNN was autotuned for it

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
        """Whether the exact type of an object is one of ours; what is not runs eagerly and is not captured.

        A captured step would freeze the Python branches and counters of a plug-in's loss, unless that is declared
        `capturable`.
        """
        return type(part).__module__.partition(".")[0] == "efcil"

    def step(
        self, step: Step, learner: nn.Module, loss_generator: torch.Generator | None = None
    ) -> Callable[..., None]:
        """Return the step, captured at the first batch where the learner is one of ours or says that it can be."""
        if self.cuda_graphs and self.knows(learner):
            return CaptureAtFirstBatch(step, learner, loss_generator)
        if self.cuda_graphs and getattr(learner, "capturable", False):
            return ComparedStep(step, learner, loss_generator, self.note)
        return step

    @contextlib.contextmanager
    def optimizer_in_backward(self, learner: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        """Hand gradients of the student's backbone to the optimizer during the backward pass.

        Neither a sum over processes nor a hook needs them all, and the learner is one of ours: it is known not to look
        at weights or gradients beside the features.
        """
        network, update = getattr(learner, "student_features", None), optimizer.update
        early = self.world.size == 1 and getattr(learner, "before_update", None) is None and self.knows(learner)
        if not (early and isinstance(network, FusedResNet) and isinstance(update, SGD)):
            yield
            return
        network.set_gradient_sink(update)
        try:
            yield
        finally:
            network.set_gradient_sink(None)

    def loader(
        self,
        load_epoch: LoadEpoch,
        load_epochs: LoadEpochs,
        pixels: ImageBatches,
        num_epochs: int,
        frozen: FrozenForward | None = None,
    ) -> EpochLoader:
        """Return what loads epochs beside the steps of those before, outputs of frozen networks included."""
        ahead = None if frozen is None else frozen.ahead

        def load_block(block: range) -> Sequence[Sequence[StoredBatch]]:
            found = load_epochs(block)
            return found if ahead is None else precompute_teacher(found, ahead, pixels, self)

        return Prefetcher(load_epoch, load_block, pixels.images, num_epochs, self)

    def normalize(self, batch: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        """Return uint8 images times `scale` minus `offset`, in the memory format of the network's input."""
        if self.use_fused_resnet and batch.is_cuda:
            from efcil.accel import training_kernels

            return training_kernels.normalize(batch, scale, offset)
        layout = torch.channels_last if self.device.type == "cuda" else torch.contiguous_format
        return (batch.float() * scale - offset).contiguous(memory_format=layout)

    def criterion(self, criterion: Criterion) -> Criterion:
        """Return a fused version of a loss where there is one for its exact type."""
        if not (self.compile and self.cuda_graphs):
            return criterion
        from efcil.accel.criteria import accelerate

        return accelerate(criterion, self.device, self.dtype)

    def warm_up_cudnn(self, look: Callable[[], object]) -> None:
        """Look at images before a run begins: what cuDNN tries out for them, the steps of no other run disturb."""
        if self.use_fused_resnet and self.world.size == 1:
            look()


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


_capture_lock = SharedExclusiveLock()
_preload_lock = threading.Lock()
