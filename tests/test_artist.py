"""Figures drawn beside a run are those drawn here, and nobody is left behind."""

import io
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from efcil.errors import RunError
from efcil.report import write_report
from efcil.report.artist import Artist, Artists, artists
from efcil.report.figures import drawn
from test_report import summary

SOON = 60  # seconds


@pytest.fixture(scope="module")
def two():
    """Two processes for all tests of this file: to read matplotlib takes a second."""
    ready = Artists(2)
    yield ready
    for artist in ready.all:
        artist.end()


def test_a_report_drawn_beside_is_the_same_to_the_byte(tmp_path, two):
    runs = [summary("dpcr", 0.8, order=order) for order in ("1", "2")] + [summary("lwf", 0.5, order="1")]
    here, beside = write_report(runs, tmp_path / "here"), write_report(runs, tmp_path / "beside", two.draw)
    assert list(here) == list(beside)
    assert len(here) == 9
    assert all(path.read_bytes() == beside[name].read_bytes() for name, path in here.items())


def test_whoever_is_free_takes_the_next_and_all_keep_their_place(two, monkeypatch):
    asked = []

    def draw(self, order):
        asked.append(self)
        time.sleep(0.3 if order[0] == "slow" else 0.01)
        return order[0].encode()

    monkeypatch.setattr(Artist, "draw", draw)
    assert two.draw([("slow", []), *((f"{k}", []) for k in range(6))]) == [b"slow", *(b"%d" % k for k in range(6))]
    assert sorted(asked.count(artist) for artist in two.all) == [1, 6]


def test_who_cannot_draw_is_stood_in_for():
    gone, order = Artist(), ("matrix.png", [summary()])
    gone.process.kill()
    gone.process.wait()
    assert gone.draw(order) == drawn(order)
    gone.end()
    for said in (b"", (10).to_bytes(8, "big") + b"half"):  # and died
        dying = object.__new__(Artist)
        dying.process = SimpleNamespace(stdin=io.BytesIO(), stdout=io.BytesIO(said))
        assert dying.draw(order) == drawn(order)


def test_what_cannot_be_drawn_is_told_as_it_is_here():
    artist = Artist()
    with pytest.raises(RunError, match="has no 'dataset'"):
        artist.draw(("matrix.png", [{"method": "dpcr"}]))
    assert artist.process.wait(SOON) != 0
    artist.end()


@pytest.mark.parametrize(("figures", "cores", "count"), [(5, 16, 4), (2, 16, 2), (9, 8, 2), (9, 2, 0), (0, 16, 0)])
def test_as_many_are_ready_as_there_are_cores_and_figures(monkeypatch, figures, cores, count):
    begun = []
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(Artist, "__init__", lambda self: begun.append("begun"))
    monkeypatch.setattr(Artist, "end", lambda self: begun.append("ended"))
    held = artists(figures)
    ready = held.__enter__()
    assert (ready is None) is (count == 0)
    assert begun == ["begun"] * count
    assert not held.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None), "whatever happens meanwhile goes on"
    assert begun == ["begun"] * count + ["ended"] * count


def test_nobody_is_left_when_the_run_is_killed():
    lines = "from efcil.report.artist import Artist; a = Artist(); print(a.process.pid, flush=True); a.process.wait()"
    run = subprocess.Popen([sys.executable, "-c", lines], stdout=subprocess.PIPE, text=True)
    artist = int(run.stdout.readline())
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    until = time.monotonic() + SOON
    while time.monotonic() < until:
        try:
            os.kill(artist, 0)
        except ProcessLookupError:
            return
        with open(f"/proc/{artist}/stat") if os.path.exists(f"/proc/{artist}/stat") else open(os.devnull) as file:
            if " Z " in file.read():
                return
        time.sleep(0.1)
    pytest.fail("it still waits")
