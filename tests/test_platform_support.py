"""Take away what other systems lack: from the module that knows of it, and from commands in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from commands import SMALL, pictures
from efcil import platform_support
from efcil.errors import Interrupted, describe_exit
from efcil.files import atomic_write_text, exclusive_lock
from efcil.training.threads import fitting_threads, multiply_adds
from served import AUTH, Served, as_files

HERE = Path(__file__).parent
TINY = [part for setting in SMALL for part in ("--set", setting)]
WITHOUT = {
    "PYTHONPATH": f"{HERE / 'support' / 'without_posix'}{os.pathsep}{HERE.parent / 'src'}",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture
def windows(monkeypatch):
    """The module as on Windows, as far as Linux can play it."""
    monkeypatch.setattr(platform_support, "WINDOWS", True)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("dpcr", "dpcr"),
        ("dpcr:rank_rule=none:ridge=2", "dpcr-rank_rule=none-ridge=2"),
        ('a<b>c"d|e?f*g\\h/i\x07', "a-b-c-d-e-f-g-h-i-"),
        ("COM1.txt", "_COM1.txt"),
        ("nul", "_nul"),
        ("nullify", "nullify"),
        ("end. .", "end"),
        ("...", "_"),
        ("été", "été"),
    ],
)
def test_names_that_every_system_takes(text, name):
    assert platform_support.file_name(text) == name
    assert platform_support.file_name(name) == name


@pytest.mark.usefixtures("windows")
def test_a_file_that_is_read_is_replaced_when_the_reader_is_done(tmp_path, monkeypatch):
    replace, tries = os.replace, []

    def busy(source, target):
        tries.append(source)
        if len(tries) < 3:
            raise PermissionError(13, "the file is used by another process")
        replace(source, target)

    monkeypatch.setattr(os, "replace", busy)
    atomic_write_text(tmp_path / "f", "new")
    assert (len(tries), (tmp_path / "f").read_text(encoding="utf-8")) == (3, "new")
    monkeypatch.setattr(platform_support, "REPLACE_TRIES", 2)
    tries[:] = []
    with pytest.raises(PermissionError):
        atomic_write_text(tmp_path / "f", "newer")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_elsewhere_a_refusal_is_reported_immediately(tmp_path, monkeypatch):
    tries = []

    def refused(source, target):
        tries.append(source)
        raise PermissionError(13, "not permitted")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(PermissionError):
        platform_support.replace(tmp_path / "a", tmp_path / "b")
    assert len(tries) == 1


def test_room_is_reserved_with_and_without_the_system_call(tmp_path, monkeypatch):
    for name in ("with", "without"):
        with open(tmp_path / name, "wb") as file:
            platform_support.reserve(file, 1000)
        assert (tmp_path / name).stat().st_size == 1000
        monkeypatch.delattr(os, "posix_fallocate", raising=False)


def test_directories_are_not_exchanged_where_the_system_cannot(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    monkeypatch.setattr(sys, "platform", "win32")
    assert not platform_support.exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "a").exists()


def test_the_cache_lies_where_the_system_wants_it(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert platform_support.user_cache() == tmp_path / ".cache"
    monkeypatch.setattr(platform_support, "WINDOWS", True)
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert platform_support.user_cache() == tmp_path / "local"
    monkeypatch.delenv("LOCALAPPDATA")
    assert platform_support.user_cache() == tmp_path / "AppData" / "Local"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert platform_support.user_cache() == tmp_path / "Library" / "Caches"


@pytest.mark.usefixtures("windows")
def test_read_only_files_need_not_be_synced_on_windows(tmp_path, monkeypatch):
    (tmp_path / "f").write_bytes(b"x")
    refused = PermissionError(13, "read-only")

    def no_writing(path, flags):
        raise refused

    monkeypatch.setattr(os, "open", no_writing)
    platform_support.sync_file(tmp_path / "f")
    platform_support.sync_directory(tmp_path)
    with pytest.raises(PermissionError):
        platform_support.sync_file(tmp_path)


def test_nobody_is_kept_out_where_the_system_has_no_locks(tmp_path):
    script = f"""
import errno, sys
from efcil.files import exclusive_lock
with exclusive_lock({str(tmp_path / "lock")!r}), exclusive_lock({str(tmp_path / "lock")!r}):
    print("both")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **WITHOUT})
    assert (done.stdout, done.stderr) == ("both\n", "")
    with exclusive_lock(tmp_path / "lock"), pytest.raises(BlockingIOError), exclusive_lock(tmp_path / "lock"):
        pass


def test_processes_start_and_end_with_and_without_groups(monkeypatch):
    for killpg in (True, False):
        if not killpg:
            monkeypatch.delattr(os, "killpg", raising=False)
        process = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, **platform_support.own_group()
        )
        platform_support.kill_group(process)
        assert process.returncode != 0
        platform_support.kill_group(process)  # it has ended: nothing to do
        process.stdin.close()


@pytest.mark.usefixtures("windows")
def test_a_group_of_its_own_on_windows(monkeypatch):
    monkeypatch.setattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0x200, raising=False)
    assert platform_support.own_group() == {"creationflags": 0x200}


@pytest.mark.parametrize("as_windows", [False, True])
def test_a_thread_stops_its_process_as_a_signal_does(as_windows, monkeypatch):
    monkeypatch.setattr(platform_support, "WINDOWS", as_windows)
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        thread = threading.Thread(target=platform_support.stop_this_process)
        thread.start()
        thread.join()
        until = time.monotonic() + 30
        while not heard and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_without_priorities_and_masks_work_goes_on(monkeypatch):
    monkeypatch.delattr(os, "nice", raising=False)
    monkeypatch.delattr(signal, "pthread_sigmask", raising=False)
    platform_support.lower_priority(10)
    with platform_support.blocked_interrupt():
        pass


def test_ends_are_described_without_the_names_of_signals(monkeypatch):
    assert describe_exit(-250, "") == "was killed by 250"
    assert describe_exit(3221225477, "last words\n") == "failed with code 3221225477: last words"
    monkeypatch.delattr(signal, "SIGKILL")
    assert describe_exit(-9, "") == "was killed by SIGKILL; perhaps out of memory"
    assert "SIGINT" in str(Interrupted(signal.SIGINT, "start again"))


def test_text_goes_to_consoles_of_few_characters():
    script = "import efcil.platform_support as p; p.tolerate_any_text(); print('50 \\u00b1 3 \\u2192 \\u4e2d')"
    env = {**os.environ, "PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=env)
    assert (done.returncode, done.stdout.decode("cp1252").strip()) == (0, "50 ± 3 ? ?")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env={**env, "PYTHONIOENCODING": "utf-8"})
    assert done.stdout.decode("utf-8").strip() == "50 ± 3 → 中"


# --- the machine ------------------------------------------------------------------------------------------------------


def test_cores_are_those_that_a_container_gives(tmp_path, monkeypatch):
    assert platform_support.cores() <= os.cpu_count()
    assert platform_support._quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n", encoding="ascii")
    assert platform_support._quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n", encoding="ascii")
    assert platform_support._quota(tmp_path) is None
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("400000\n", encoding="ascii")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n", encoding="ascii")
    assert platform_support._quota(tmp_path) == 4
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n", encoding="ascii")
    assert platform_support._quota(tmp_path) is None
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(platform_support, "_quota", lambda: 0.5)
    assert platform_support.cores() == 1


def test_memory_is_unknown_where_nobody_tells(monkeypatch):
    assert platform_support.memory() > 2**28
    monkeypatch.delattr(os, "sysconf")
    assert platform_support.memory() is None
    monkeypatch.setattr(platform_support, "WINDOWS", True)
    assert platform_support.memory() is None


def test_the_command_is_found_by_the_names_of_every_system(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert not platform_support.command_beside_python("efcil")
    (tmp_path / "efcil.exe").touch()
    assert platform_support.command_beside_python("efcil")


@pytest.fixture
def unset(monkeypatch):
    """No variable of threads is set, and nothing has been chosen."""
    for name in (*platform_support.THREADS, *platform_support.WAITING):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(platform_support, "_quota", lambda: None)
    monkeypatch.setattr(platform_support, "thread_choice", platform_support.ThreadChoice())


@pytest.mark.usefixtures("unset")
def test_threads_that_wait_sleep(monkeypatch):
    assert not platform_support.may_choose_threads(), "a notebook's threads are its own"
    assert platform_support.choose_threads().variables == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert (os.environ["OMP_WAIT_POLICY"], "OMP_NUM_THREADS" in os.environ) == ("PASSIVE", False)
    assert platform_support.may_choose_threads()
    platform_support.thread_choice.fixed = True
    assert not platform_support.may_choose_threads()


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("name", platform_support.WAITING)
def test_how_threads_wait_is_the_users_choice(name, monkeypatch):
    monkeypatch.setenv(name, "7")
    chosen = platform_support.choose_threads()
    assert not chosen.variables
    assert f"{name}=7" in chosen.reasons[0]
    assert platform_support.may_choose_threads(), "their number was not set"


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("name", platform_support.THREADS)
def test_the_number_of_threads_is_the_users_choice(name, monkeypatch):
    monkeypatch.setattr(platform_support, "_quota", lambda: 1.0)
    monkeypatch.setenv(name, "3")
    assert "OMP_NUM_THREADS" not in platform_support.choose_threads().variables
    assert not platform_support.may_choose_threads()


@pytest.mark.usefixtures("unset")
def test_a_container_has_no_more_threads_than_it_is_given(monkeypatch):
    monkeypatch.setattr(platform_support, "_quota", lambda: 1.5)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert platform_support.choose_threads().variables["OMP_NUM_THREADS"] == "1"
    assert platform_support.may_choose_threads(), "the limit is not the user's choice"


@pytest.mark.usefixtures("unset")
def test_a_small_network_trains_on_one_thread(monkeypatch):
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 64, 2)
    ).train()
    state = {name: value.clone() for name, value in network.state_dict().items()}
    torch.set_num_threads(2)
    try:
        with fitting_threads(network, (3, 8, 8), 128):
            assert torch.get_num_threads() == 2, "nobody has chosen"
        platform_support.choose_threads()
        with fitting_threads(network, (3, 8, 8), 128):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        assert 40_000 * multiply_adds(network, (3, 8, 8)) > 500_000_000
        with fitting_threads(network, (3, 8, 8), 40_000):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert network.training
    assert network[1].training


def test_the_command_chooses_before_torch_is_imported():
    """`efcil doctor` says what was chosen; what is set wins."""
    for given, said in (
        ({}, "OMP_WAIT_POLICY=PASSIVE"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "OMP_WAIT_POLICY=ACTIVE, as set"),
    ):
        env = {k: v for k, v in os.environ.items() if k not in (*platform_support.THREADS, *platform_support.WAITING)}
        line = [sys.executable, "-m", "efcil", "doctor"]
        done = subprocess.run(line, capture_output=True, text=True, env={**env, **given})
        assert said in done.stdout, done.stderr[-2000:]
    script = """
import sys
from efcil import cli, platform_support
real = platform_support.choose_threads
cli.choose_threads = lambda: print("torch" in sys.modules, "numpy" in sys.modules) or real()
sys.argv = ["efcil", "--version"]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert done.stdout.startswith("False False\n"), done.stderr


# --- the commands -----------------------------------------------------------------------------------------------------


def command(*arguments):
    """Run the command where the calls are missing; return what it printed."""
    line = [sys.executable, "-m", "efcil", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, **WITHOUT}, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_calls_are_missing_indeed():
    script = """
import importlib, os, signal
for name in ("fcntl", "resource", "termios"):
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    raise SystemExit(name)
print([n for n in ("killpg", "sysconf", "fork", "nice") if hasattr(os, n)], hasattr(signal, "pthread_sigmask"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **WITHOUT})
    assert done.stdout == "[] False\n", done.stderr


def test_run_and_compare_work(tmp_path):
    out = tmp_path / "run"
    command("run", "dpcr", "digits", "--tasks", 2, "--out", out, "--quiet", *TINY)
    assert json.loads((out / "summary.json").read_text(encoding="utf-8"))["status"] == "complete"
    out = tmp_path / "compare"
    labels = {"dpcr": "dpcr", "dpcr:rank_rule=none": "dpcr-rank_rule=none", "lwf": "lwf"}
    command("compare", ",".join(labels), "digits", "--tasks", 2, "--out", out, "--quiet", *TINY)
    assert {path.name for path in out.iterdir() if (path / "summary.json").exists()} == set(labels.values())
    assert (out / "report.html").exists()
    assert "unknown memory" in command("doctor")


def test_teach_and_predict_work(tmp_path):
    album, more = pictures(tmp_path / "album", ("cat", "dog")), pictures(tmp_path / "more", ("owl", "yak"))
    command("teach", tmp_path / "model", album, "--size", 16, "--width", 8, "--epochs", 4)
    command("teach", tmp_path / "model", more, "--epochs", 4)
    answers = json.loads(command("predict", tmp_path / "model", album / "cat", "--json"))
    assert len(answers) == 40
    assert {answer["label"] for answer in answers} <= {"cat", "dog", "owl", "yak"}


@pytest.mark.slow
def test_serve_teaches_and_answers(tmp_path):
    album = pictures(tmp_path / "album", ("cat", "dog"))
    command("teach", tmp_path / "model", album, "--size", 16, "--width", 8, "--epochs", 4)
    files = [path.read_bytes() for path in sorted((pictures(tmp_path / "more", ("owl",)) / "owl").iterdir())]
    with Served(tmp_path / "model", **WITHOUT) as served:
        job = served.teach("owl", files, epochs=1)
        until = time.monotonic() + 200
        while (found := served.http.get(f"/jobs/{job}", headers=AUTH).json())["status"] in ("waiting", "running"):
            assert time.monotonic() < until
            time.sleep(0.2)
        assert found["status"] == "done", found
        answer = served.http.post("/predict", files=as_files(files[:1]))
        assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_demo_works(tmp_path):
    command("demo", "--out", tmp_path / "demo", "--quiet")
    assert (tmp_path / "demo" / "report.html").exists()
