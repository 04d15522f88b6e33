"""Several runs in one process: who captures is alone, runs begin one after the other, and none starves the others."""

import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from efcil import runs
from efcil.errors import Interrupted
from efcil.training.loop import EpochReport, Stopped
from efcil.training.machine import Gate, Machine, _kernels_known

SOON = 20.0


def begun(call):
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_any_number_pass_together_and_again():
    gate, met = Gate(), threading.Barrier(3)

    def come():
        with gate.together(), gate.together():
            met.wait(SOON)  # breaks unless all three are inside

    threads = [begun(come) for _ in range(3)]
    for thread in threads:
        thread.join(SOON)
    assert not met.broken
    with gate.alone():  # all have left
        pass


@pytest.mark.parametrize(("first", "other"), [("alone", "together"), ("together", "alone"), ("alone", "alone")])
def test_who_is_alone_is_alone(first, other):
    gate, said = Gate(), []

    def come():
        with getattr(gate, other)():
            said.append("other")

    with getattr(gate, first)():
        thread = begun(come)
        time.sleep(0.1)
        said.append("first")
    thread.join(SOON)
    assert said == ["first", "other"]


def test_who_is_alone_may_do_what_waits_elsewhere():
    gate = Gate()
    with gate.alone(), gate.together():
        pass
    with gate.alone():
        pass


def test_a_gate_opens_after_a_failure():
    gate = Gate()
    for way in (gate.alone, gate.together):
        with pytest.raises(ValueError, match="no"), way():
            raise ValueError("no")
    with gate.alone():
        pass


def test_without_captures_nobody_waits():
    machine = Machine(torch.device("cpu"))
    with machine.capturing(), machine.capturing(), machine.uncaptured():
        pass


def test_streams_of_several_runs_have_queues_of_their_own(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    Machine.choose("cpu")
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "4")
    Machine.choose("cpu")
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "4", "the user's own"


def test_triton_reads_itself_ahead_where_it_is(monkeypatch):
    asked = []
    there = SimpleNamespace(triton_key=lambda: asked.append(1))
    for name, module in {"triton": SimpleNamespace(), "triton.runtime": SimpleNamespace(cache=there)}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", there)
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    fast = Machine(torch.device("cpu"), "bf16", compile=True, capture=True)
    for known, machine in ((0, Machine(torch.device("cpu"))), (1, fast), (1, fast)):
        machine.wake()
        assert _kernels_known.cache_info().currsize == known, "only where there are kernels"
    _kernels_known().join(SOON)
    assert asked == [1], "once"
    _kernels_known.cache_clear()
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", None)  # not installed
    fast.wake()
    _kernels_known().join(SOON)
    _kernels_known.cache_clear()
    assert not failed


class Fake:
    """A run of one task of nine epochs, so far as `execute_all` sees it."""

    def __init__(self, said, number, fails=False):
        self.said, self.number, self.fails = said, number, fails
        self.stop, self.underway, self.training, self.runs_at_once = threading.Event(), threading.Event(), True, 1
        self.machine, self.group = Machine(torch.device("cpu")), SimpleNamespace(size=1, is_first=True)
        self.log = SimpleNamespace(add=lambda **event: None)
        self.reporter = SimpleNamespace(epoch=lambda report: None, note=lambda text: None)
        self.checkpoint_seconds, self._saved, self._usual = 1000.0, time.monotonic(), 9

    def execute(self, resume):
        self.said.append((self.number, 0))
        if self.fails:
            raise ValueError("broken")
        for epoch in range(9):
            time.sleep(0.01)
            self.said.append((self.number, epoch + 1))
            runs.Run.after_epoch(self, EpochReport(0, epoch, 9, 0.0, 0.1), None)
        return [{"run": self.number}]


def test_runs_begin_one_after_the_other():
    said = []
    found = runs.execute_all([Fake(said, k) for k in range(3)], False, at_once=3)
    assert found == [[{"run": 0}], [{"run": 1}], [{"run": 2}]]
    for k in (1, 2):  # each when the one before has a third of a task behind it, and before that one has ended
        assert said.index((k - 1, 3)) < said.index((k, 0)) < said.index((k - 1, 9))


def test_more_runs_than_go_on_at_once_all_get_their_turn():
    said = []
    assert len(runs.execute_all([Fake(said, k) for k in range(5)], False, at_once=2)) == 5
    assert [number for number, epoch in said if epoch == 0] == [0, 1, 2, 3, 4]


def test_one_that_fails_keeps_nobody_waiting():
    said = []
    with pytest.raises(ValueError, match="broken"):
        runs.execute_all([Fake(said, 0, fails=True), Fake(said, 1)], False, at_once=2)
    assert said[0] == (0, 0)


def test_one_that_is_stopped_before_its_turn_does_not_begin():
    said = []
    all_of_them = [Fake(said, k) for k in range(2)]
    all_of_them[1].stop.set()
    with pytest.raises((Stopped, Interrupted)):
        runs.execute_all(all_of_them, False, at_once=2)
    assert (1, 0) not in said


def test_a_signal_is_heard_whichever_thread_it_comes_to():
    """The system may hand it to any thread of the process; Python's handler runs in the main one, which waits."""

    class Told(Fake):
        def execute(self, resume):
            time.sleep(0.3)  # until the main thread waits
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            self.said.append(self.stop.wait(SOON))
            raise Stopped

    said = []
    with pytest.raises(Interrupted):
        runs.execute_all([Told(said, 0), Fake(said, 1)], False, at_once=2)
    assert said == [True]


def test_threads_wait_less_for_each_other_meanwhile():
    usual, seen = sys.getswitchinterval(), []

    class Looking(Fake):
        def execute(self, resume):
            seen.append(sys.getswitchinterval())
            return []

    runs.execute_all([Looking([], k) for k in range(2)], False, at_once=2)
    assert seen == [pytest.approx(0.001)] * 2
    assert sys.getswitchinterval() == pytest.approx(usual)
