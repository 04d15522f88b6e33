"""Jobs at once in one process: in turn, each on a stream of its own, and none keeps the others waiting."""

import contextlib
import sys
import threading

import pytest
import torch

from efcil.accel import concurrent
from efcil.accel.concurrent import Job, run_concurrently

SOON = 20.0
CPU = torch.device("cpu")


def test_jobs_begin_in_turn_and_answer_in_order():
    said, order = [], threading.Lock()

    def job(number):
        def call():
            with order:
                said.append(number)
            if number == 0:
                assert not jobs[1].started.is_set()
                jobs[0].started.set()  # half way
                assert jobs[1].started.wait(SOON), "the next begins before this one has ended"
            else:
                jobs[number].started.set()
            return 10 * number

        return Job(call, CPU)

    jobs = [job(number) for number in range(5)]
    assert run_concurrently(jobs, 2) == [0, 10, 20, 30, 40]
    assert said == [0, 1, 2, 3, 4]


def test_no_more_jobs_than_the_limit_go_on_at_once():
    going, most, lock = [], [], threading.Lock()

    def call():
        with lock:
            going.append(1)
            most.append(len(going))
        barrier.wait(SOON)
        with lock:
            going.pop()

    barrier, started = threading.Barrier(2), threading.Event()
    started.set()  # nobody waits for the one before
    run_concurrently([Job(call, CPU, started) for _ in range(6)], 2)
    assert max(most) == 2


def test_an_error_stops_the_others_and_is_raised():
    begun = threading.Event()

    def fails():
        jobs[0].started.set()
        assert begun.wait(SOON)
        raise ValueError("broken")

    def goes_on():
        begun.set()
        assert jobs[1].stop.wait(SOON)

    jobs = [Job(fails, CPU), Job(goes_on, CPU)]
    with pytest.raises(ValueError, match="broken"):
        run_concurrently(jobs, 2)
    assert all(job.stop.is_set() for job in jobs)


def test_each_job_has_its_stream_while_it_runs(monkeypatch):
    here, seen = threading.local(), []

    @contextlib.contextmanager
    def on(device):
        here.device = device
        yield
        here.device = None

    monkeypatch.setattr(concurrent, "run_stream", on)
    devices = [torch.device("cpu"), torch.device("meta")]
    run_concurrently([Job(lambda: seen.append(here.device), device) for device in devices], 2)
    assert seen == devices


def test_threads_wait_less_for_each_other_meanwhile():
    usual = sys.getswitchinterval()
    assert run_concurrently([Job(sys.getswitchinterval, CPU)], 1) == [pytest.approx(0.001)]
    assert sys.getswitchinterval() == pytest.approx(usual)
