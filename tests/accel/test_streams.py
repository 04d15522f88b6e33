"""Several runs in one process: who captures is alone, runs begin one after the other, and none starves the others."""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import pytest
import torch

from efcil import protocol
from efcil.accel import cuda, fused_resnet
from efcil.accel import streams as stream_module
from efcil.accel.backend import Backend
from efcil.accel.cuda import AUTOTUNE_THREAD, Cuda, _preload_libraries
from efcil.accel.streams import SharedExclusiveLock, thread_stream
from efcil.errors import Interrupted
from efcil.experiment import concurrent
from efcil.experiment.callbacks import Started
from efcil.experiment.specification import ExperimentSpec, resolve
from efcil.training.callbacks import EpochReport
from efcil.training.image_batches import ImageBatches
from efcil.training.state import TrainState
from efcil.training.trainer import TrainingInterrupted

SOON = 20.0


def begun(call):
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_any_number_pass_together_and_again():
    lock, met = SharedExclusiveLock(), threading.Barrier(3)

    def come():
        with lock.shared(), lock.shared():
            met.wait(SOON)  # breaks unless all three are inside

    threads = [begun(come) for _ in range(3)]
    for thread in threads:
        thread.join(SOON)
    assert not met.broken
    with lock.exclusive():  # all have left
        pass


@pytest.mark.parametrize(
    ("first", "other"), [("exclusive", "shared"), ("shared", "exclusive"), ("exclusive", "exclusive")]
)
def test_who_is_alone_is_alone(first, other):
    lock, said = SharedExclusiveLock(), []

    def come():
        with getattr(lock, other)():
            said.append("other")

    with getattr(lock, first)():
        thread = begun(come)
        time.sleep(0.1)
        said.append("first")
    thread.join(SOON)
    assert said == ["first", "other"]


def test_who_is_alone_may_do_what_waits_elsewhere():
    lock = SharedExclusiveLock()
    with lock.exclusive(), lock.shared():
        pass
    with lock.exclusive():
        pass


def test_a_gate_opens_after_a_failure():
    lock = SharedExclusiveLock()
    for way in (lock.exclusive, lock.shared):
        with pytest.raises(ValueError, match="no"), way():
            raise ValueError("no")
    with lock.exclusive():
        pass


def test_without_captures_nobody_waits():
    backend = Cuda(torch.device("cpu"))
    with backend.exclusive_capture(), backend.exclusive_capture(), backend.prevent_capture():
        pass


def test_streams_of_several_runs_have_queues_of_their_own(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    Backend.choose("cpu")
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "4")
    Backend.choose("cpu")
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "4", "the user's own"


def test_triton_reads_itself_ahead_where_it_is(monkeypatch):
    asked = []
    there = SimpleNamespace(triton_key=lambda: asked.append(1))
    for name, module in {"triton": SimpleNamespace(), "triton.runtime": SimpleNamespace(cache=there)}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", there)
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    fast = Cuda(torch.device("cpu"), "bf16", compile=True, cuda_graphs=True)
    plain = Cuda(torch.device("cpu"), "fp32", compile=True, cuda_graphs=True)
    for known, backend in ((0, Backend(torch.device("cpu"))), (0, plain), (1, fast), (1, fast)):
        backend.start_lazy_init()
        backend.wait_lazy_init()
        assert len(asked) == known, "once, where there are kernels"
    _preload_libraries.cache_clear()
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", None)  # not installed
    fast.wait_lazy_init()
    _preload_libraries.cache_clear()
    assert not failed


def test_linear_algebra_is_read_by_one_thread_and_waited_for(monkeypatch):
    """torch fails where two threads ask for it first at the same time, as two runs do that end a task together."""
    asked, go_on, over = [], threading.Event(), []
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda matrix: asked.append(matrix.dtype) or go_on.wait(SOON))
    backend = Cuda(torch.device("cpu"), cuda_graphs=True)
    _preload_libraries.cache_clear()

    def one(_):
        backend.start_lazy_init()
        backend.wait_lazy_init()
        over.append(1)

    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(one, k) for k in range(4)]
        assert wait(waiting, 0.2).not_done == set(waiting), "it is not read yet"
        assert not over
        go_on.set()
        for future in waiting:
            future.result(SOON)
    _preload_libraries.cache_clear()
    assert asked == [torch.float64]


def test_a_run_begins_when_all_is_read_and_tried_out():
    said = []

    @contextlib.contextmanager
    def prevent_capture():
        said.append("no capture")
        yield

    backend = SimpleNamespace(wait_lazy_init=lambda: said.append("read"), prevent_capture=prevent_capture)
    learner = SimpleNamespace(backend=backend, transform=lambda size: None)
    evaluator = SimpleNamespace(warm_up_cudnn=said.append)
    trajectory = SimpleNamespace(learner=learner)
    protocol.run_protocol([], SimpleNamespace(size=8), evaluator, trajectory, {}, SimpleNamespace(callbacks=[]))
    assert said == ["read", "no capture", learner]


@pytest.mark.parametrize(
    ("precision", "processes", "looks"), [("bf16", 1, True), ("fp32", 1, False), ("bf16", 2, False)]
)
def test_a_rehearsal_looks_at_one_image_where_cudnn_tries_out(monkeypatch, precision, processes, looks):
    seen, world = [], SimpleNamespace(size=processes)
    backend = Cuda(torch.device("cpu"), precision, compile=True, cuda_graphs=True, world=world)
    evaluator = object.__new__(protocol.Evaluator)
    evaluator.backend = backend
    evaluator.pixels = ImageBatches(torch.zeros(5, 3, 8, 8, dtype=torch.uint8), (0.5,) * 3, (0.5,) * 3, backend)
    learner = SimpleNamespace(
        backbone="net", feature_extractor=lambda net: f"features of {net}", options=SimpleNamespace(crop=4)
    )
    monkeypatch.setattr(protocol, "extract", lambda net, pixels, *rest: seen.append((net, len(pixels.images), *rest)))
    evaluator.warm_up_cudnn(learner)
    assert seen == ([("features of net", 1, backend, 4)] if looks else [])


class Watched(ThreadPoolExecutor):
    """A thread that fails where it would wait for itself."""

    def submit(self, work):
        assert not threading.current_thread().name.startswith(AUTOTUNE_THREAD), "it would wait for itself"
        return super().submit(work)


@pytest.fixture
def streams(monkeypatch):
    """Stand-ins for the streams of a GPU: each has a number and a priority, and the current one is known."""
    numbers, now = itertools.count(), threading.local()

    def made(device, priority):
        return SimpleNamespace(number=next(numbers), priority=priority)

    @contextlib.contextmanager
    def switched(stream):
        before, now.stream = getattr(now, "stream", None), stream
        yield
        now.stream = before

    monkeypatch.setattr(torch.cuda, "Stream", made)
    monkeypatch.setattr(torch.cuda, "stream", switched)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: getattr(now, "stream", None))
    local = threading.local()
    monkeypatch.setattr(stream_module, "_local", local)
    monkeypatch.setattr(cuda, "_local", local)
    with Watched(1, AUTOTUNE_THREAD) as pool:
        monkeypatch.setattr(cuda, "_autotune_pool", lambda: pool)
        yield


def test_what_a_run_waits_for_goes_first(streams):
    place = torch.device("cpu")
    found = {purpose: thread_stream(place, purpose) for purpose in ("run", "capture", "branch", "prefetch", "files")}
    assert found["run"].priority < found["capture"].priority < found["branch"].priority < found["prefetch"].priority
    assert found["files"].priority == found["prefetch"].priority == 0
    assert thread_stream(place, "run") is found["run"]
    fused_resnet._branch_stream.cache_clear()
    assert fused_resnet._branch_stream(place, "weights").priority == found["branch"].priority
    fused_resnet._branch_stream.cache_clear()


def test_convolutions_of_concurrent_runs_are_tuned_in_one_thread(streams):
    """Each on its own streams: runs whose steps one thread records on shared ones spoil each other's weights."""
    place = torch.device("cpu")
    backend, meet = Cuda(place, cuda_graphs=True), threading.Barrier(3, timeout=SOON)

    def here():
        thread = threading.current_thread().name
        return thread, thread_stream(place, "capture").number, torch.cuda.current_stream(place).number

    def one(learning):
        own = thread_stream(place, "run")
        meet.wait()
        with torch.cuda.stream(own), torch.set_grad_enabled(learning):
            found = [backend.run_on_autotune_thread(lambda: (*here(), torch.is_grad_enabled())) for _ in range(3)]
            assert backend.run_on_autotune_thread(lambda: backend.run_on_autotune_thread(here)) == found[0][:3], (
                "also from inside"
            )
        assert len(set(found)) == 1
        assert found[0][1:] == (thread_stream(place, "capture").number, own.number, learning)
        return found[0]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(one, (True, False, True)))
    assert len({thread for thread, *_ in found}) == 1
    assert found[0][0].startswith(AUTOTUNE_THREAD)
    assert len({capture for _, capture, *_ in found}) == 3
    assert backend.run_on_autotune_thread(threading.current_thread) is threading.main_thread(), "a run alone"


def test_there_is_one_thread_of_convolutions():
    assert cuda._autotune_pool() is cuda._autotune_pool()
    names = {cuda._autotune_pool().submit(lambda: threading.current_thread().name).result(SOON) for _ in range(5)}
    assert len(names) == 1


def test_runs_that_capture_and_runs_that_look_keep_nobody_waiting(streams):
    backend, said = Cuda(torch.device("cpu"), cuda_graphs=True), []

    def one(way):
        for _ in range(30):
            with way():
                backend.run_on_autotune_thread(lambda: said.append(time.sleep(0.001)))

    with ThreadPoolExecutor(3) as pool:
        for future in [
            pool.submit(one, way)
            for way in (backend.exclusive_capture, backend.prevent_capture, backend.prevent_capture)
        ]:
            future.result(SOON)
    assert len(said) == 90


def test_what_fails_in_the_thread_of_convolutions_fails_where_it_was_asked_for(streams):
    def fails():
        raise torch.OutOfMemoryError("no room")

    backend = Cuda(torch.device("cpu"), cuda_graphs=True)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            pool.submit(backend.run_on_autotune_thread, fails).result(SOON)
        assert pool.submit(backend.run_on_autotune_thread, lambda: 1).result(SOON) == 1, "and the next goes on"


class Fake:
    """A run of one task of twenty epochs, so far as `execute_all` sees it."""

    experiment = resolve(ExperimentSpec(("lwf",), "digits"))
    has_begun = True

    def __init__(self, said, number, fails=False):
        self.said, self.number, self.fails = said, number, fails
        self.stop, self.started, self.training = threading.Event(), threading.Event(), True
        self.backend, self.world = Backend(torch.device("cpu")), SimpleNamespace(size=1, is_main=True)
        self.reporter = SimpleNamespace(note=lambda text: None)
        self.follower = Started(self.started, 20)
        self.concurrent_runs = 1

    def execute(self, resume):
        self.said.append((self.number, 0))
        if self.fails:
            raise ValueError("broken")
        for epoch in range(20):
            time.sleep(0.005)
            self.said.append((self.number, epoch + 1))
            self.follower.on_epoch_end(EpochReport(0, epoch, 20, 0.0, 0.1), TrainState(0))
        return [{"run": self.number}]


def test_runs_begin_one_after_the_other():
    said = []
    all_of_them = [Fake(said, k) for k in range(3)]
    found = concurrent.execute_all(all_of_them, False, concurrent_runs=4)
    assert [run.concurrent_runs for run in all_of_them] == [3, 3, 3]
    assert found == [[{"run": 0}], [{"run": 1}], [{"run": 2}]]
    for k in (1, 2):  # each when the one before has a tenth of a task behind it, and before that one has ended
        assert said.index((k - 1, 2)) < said.index((k, 0)) < said.index((k - 1, 20))


def test_more_runs_than_go_on_at_once_all_get_their_turn():
    said = []
    assert len(concurrent.execute_all([Fake(said, k) for k in range(5)], False, concurrent_runs=2)) == 5
    assert [number for number, epoch in said if epoch == 0] == [0, 1, 2, 3, 4]


def test_one_that_fails_keeps_nobody_waiting():
    said = []
    with pytest.raises(ValueError, match="broken"):
        concurrent.execute_all([Fake(said, 0, fails=True), Fake(said, 1)], False, concurrent_runs=2)
    assert said[0] == (0, 0)


def test_one_that_is_stopped_before_its_turn_does_not_begin():
    said = []
    all_of_them = [Fake(said, k) for k in range(2)]
    all_of_them[1].stop.set()
    with pytest.raises((TrainingInterrupted, Interrupted)):
        concurrent.execute_all(all_of_them, False, concurrent_runs=2)
    assert (1, 0) not in said


def test_a_signal_is_heard_whichever_thread_it_comes_to():
    """The system may hand it to any thread of the process; Python's handler runs in the main one, which waits."""

    class Signaled(Fake):
        def execute(self, resume):
            time.sleep(0.3)  # until the main thread waits
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            self.said.append(self.stop.wait(SOON))
            raise TrainingInterrupted

    said = []
    with pytest.raises(Interrupted):
        concurrent.execute_all([Signaled(said, 0), Fake(said, 1)], False, concurrent_runs=2)
    assert said == [True]


def test_threads_wait_less_for_each_other_meanwhile():
    usual, seen = sys.getswitchinterval(), []

    class Looking(Fake):
        def execute(self, resume):
            seen.append(sys.getswitchinterval())
            return []

    concurrent.execute_all([Looking([], k) for k in range(2)], False, concurrent_runs=2)
    assert seen == [pytest.approx(0.001)] * 2
    assert sys.getswitchinterval() == pytest.approx(usual)
