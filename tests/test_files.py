"""Writes are whole or not at all, whoever else writes and whatever fails."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from efcil import platform_support
from efcil.errors import CheckpointError, EfcilError, FileRefusedError
from efcil.files import (
    atomic_replace,
    atomic_write_bytes,
    atomic_write_text,
    exclusive_lock,
    make_directory,
    read_json,
    read_json_lines,
    remove_temporary_files,
    remove_tree,
    working_directory,
    write_json,
    write_json_lines,
)
from efcil.platform_support import HeldDirectory
from messages import raises


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_replaced_shows_the_new_content_only_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(b"old")
    with atomic_replace(path) as temporary:
        assert temporary.parent == tmp_path
        assert temporary.suffix == ".npy"  # np.save would append one otherwise
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a.npy"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_replaced_leaves_the_old_file_when_the_writer_fails(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def write() -> None:
        with atomic_replace(path) as temporary:
            temporary.write_bytes(b"half")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_replaced_reports_a_writer_that_wrote_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_replace(tmp_path / "a.bin"):
        pass
    assert names(tmp_path) == []


def test_replaced_syncs_file_and_directory_around_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, replace = os.fsync, os.replace

    def seen_sync(descriptor: int) -> None:
        events.append("directory" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        sync(descriptor)

    def seen_replace(source: str, target: str, **where: int) -> None:
        events.append("rename")
        replace(source, target, **where)

    monkeypatch.setattr(os, "fsync", seen_sync)
    monkeypatch.setattr(os, "replace", seen_replace)
    atomic_write_bytes(tmp_path / "a", b"x")
    assert [event for event in events if event == "rename"] == ["rename"]
    if os.path.isdir("/proc/self/fd"):
        assert events == ["file", "rename", "directory"]


def entries(root: Path) -> dict[str, bytes | str]:
    """Return everything below a directory: contents of files, targets of links, kinds of the rest."""
    found: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_file():
            found[name] = path.read_bytes()
        else:
            found[name] = "directory" if path.is_dir() else "special"
    return found


@pytest.fixture(params=["openat", "paths"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with directories held open, and with what is left where the system cannot do that."""
    if request.param == "paths":
        monkeypatch.setattr(platform_support, "_can_open_directories", lambda: False)
    return str(request.param)


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("kind", ["link", "broken link", "link to directory", "directory", "fifo", "device"])
def test_only_regular_files_are_replaced(tmp_path: Path, kind: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis").write_bytes(b"years of work")
    path = tmp_path / "report.html"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/null")
    else:
        path.symlink_to(tmp_path / "other" / {"link": "thesis", "broken link": "new"}.get(kind, ""))
    before = entries(tmp_path)
    with raises(FileRefusedError, "report.html", "which is not written to"):
        atomic_write_bytes(path, b"new")
    assert entries(tmp_path) == before


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("seed", range(24))
def test_links_below_a_directory_of_ours_are_not_followed(tmp_path: Path, seed: int) -> None:
    """Any directory between ours and the file may be a link, to a near or far place, in any form."""
    draw = random.Random(seed)
    parts = [f"d{i}" for i in range(draw.randint(1, 4))]
    ours, other = tmp_path / "ours", tmp_path / "other"
    ours.mkdir()
    place = other
    for part in parts:
        place.mkdir(exist_ok=True)
        place = place / part
    place.mkdir()
    (place / "file").write_bytes(b"theirs")
    linked = draw.randrange(len(parts))
    at = ours.joinpath(*parts[:linked])
    at.mkdir(parents=True, exist_ok=True)
    target = other.joinpath(*parts[: linked + 1])
    (at / parts[linked]).symlink_to(target if draw.random() < 0.5 else os.path.relpath(target, at))
    before = entries(tmp_path)
    path = ours.joinpath(*parts, "file")
    with raises(FileRefusedError, f"{parts[linked]} is a link, not a directory; move it away"):
        atomic_write_bytes(path, b"ours", root=ours)
    with raises(FileRefusedError, "is a link"):
        make_directory(ours, path.parent)
    assert entries(tmp_path) == before
    (at / parts[linked]).unlink()
    make_directory(ours, path.parent)
    atomic_write_bytes(path, b"ours", root=ours)
    assert path.read_bytes() == b"ours"
    assert (place / "file").read_bytes() == b"theirs"


@pytest.mark.usefixtures("system")
def test_a_directory_that_is_replaced_while_a_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a").write_bytes(b"theirs")

    def write() -> None:
        with atomic_replace(tmp_path / "ours" / "a") as temporary:
            os.rename(tmp_path / "ours", tmp_path / "moved")
            (tmp_path / "ours").symlink_to(tmp_path / "other")
            temporary.write_bytes(b"ours")

    with pytest.raises(OSError):
        write()
    assert (tmp_path / "other" / "a").read_bytes() == b"theirs"


@pytest.mark.usefixtures("system")
def test_a_removed_tree_takes_nothing_with_it_that_it_links_to(tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "deep").mkdir(parents=True)
    (other / "deep" / "thesis").write_bytes(b"years of work")
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "file").write_bytes(b"x")
    (tree / "a" / "b" / "link").symlink_to(other)
    (tree / "file").symlink_to(other / "deep" / "thesis")
    os.mkfifo(tree / "fifo")
    before = entries(other)
    with HeldDirectory(tmp_path) as folder:
        remove_tree(folder, "tree")
        (tmp_path / "link").symlink_to(other)
        with pytest.raises(OSError):
            remove_tree(folder, "link")
    assert names(tmp_path) == ["link", "other"]
    assert entries(other) == before


@pytest.mark.parametrize("kind", ["fifo", "directory", "device", "too long"])
def test_what_is_no_file_is_not_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"[" + b" " * 100 + b"]")
    with raises(EfcilError, "cannot read", "a.json"):
        read_json(path, limit=100)


def test_json_of_more_values_than_there_is_room_for(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"[" + b"{}," * 5_000_000 + b"{}]")
    with raises(EfcilError, "a.json", "10,000,002 values"):
        read_json(path)


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_new_files_get_the_usual_permissions(tmp_path: Path, mask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(mask)
    try:
        (tmp_path / "plain").write_bytes(b"")
        with atomic_replace(tmp_path / "atomic") as temporary:
            temporary.write_bytes(b"")
            temporary.chmod(0o600)  # as safetensors makes them
        monkeypatch.setattr("builtins.open", lambda *_, **__: (_ for _ in ()).throw(OSError))  # no /proc
        assert platform_support.new_file_mode() == 0o666 & ~mask
    finally:
        os.umask(before)
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_name_of_the_greatest_length_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250 + ".json")
    atomic_write_text(path, "x")
    assert path.read_text() == "x"


def test_many_writers_never_show_a_mixture(tmp_path: Path) -> None:
    path = tmp_path / "a"
    contents = [bytes([65 + i]) * 20_000 for i in range(6)]
    atomic_write_bytes(path, contents[0])

    def write(data: bytes) -> None:
        for _ in range(5):
            atomic_write_bytes(path, data)

    threads = [threading.Thread(target=write, args=(data,)) for data in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert path.read_bytes() in contents
    assert names(tmp_path) == ["a"]


def test_text_keeps_its_line_ends(tmp_path: Path) -> None:
    atomic_write_text(tmp_path / "a", "één\r\ntwee\n")
    assert (tmp_path / "a").read_bytes() == "één\r\ntwee\n".encode()


def test_json_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    value = {"mean": np.float32(0.5), "rows": np.arange(3), "path": Path("x") / "y", "name": "naïve"}
    write_json(path, value)
    assert read_json(path) == {"mean": 0.5, "rows": [0, 1, 2], "path": str(Path("x") / "y"), "name": "naïve"}
    assert "naïve" in path.read_text(encoding="utf-8")


def test_json_lines_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    values = [{"name": "two\nlines\u2028naïve"}, [np.int64(1)], None]
    write_json_lines(path, values)
    assert path.read_bytes().count(b"\n") == 3
    assert read_json_lines(path) == [values[0], [1], None]
    write_json_lines(path, [])
    assert read_json_lines(path) == []
    path.write_text('{"a": 1}\n{"a": 2\n')
    with pytest.raises(CheckpointError, match=r"a\.jsonl: not valid JSON.*line [23]"):
        read_json_lines(path, error=CheckpointError)


def test_json_keeps_file_names_that_are_not_unicode(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    write_json(tmp_path / "a.json", [name])
    assert read_json(tmp_path / "a.json") == [name]


@pytest.mark.parametrize(
    ("value", "error"), [({"a": float("nan")}, ValueError), ({"a": {1, 2}}, TypeError), ([object()], TypeError)]
)
def test_json_that_nobody_could_read_is_not_written(tmp_path: Path, value: object, error: type[Exception]) -> None:
    path = tmp_path / "a.json"
    write_json(path, 1)
    with pytest.raises(error):
        write_json(path, value)
    assert json.loads(path.read_text()) == 1
    assert names(tmp_path) == ["a.json"]


def test_read_json_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with raises(EfcilError, path):
        read_json(path)
    path.write_bytes(b'{"a": ')
    with raises(CheckpointError, path):
        read_json(path, error=CheckpointError)
    path.write_bytes(b"\xff\xfe\xfd")
    with raises(EfcilError, path):
        read_json(path)
    with raises(EfcilError, tmp_path):
        read_json(tmp_path)


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    """At any depth, and nothing else: other hidden files and other people's temporary files stay."""
    (tmp_path / "deep").mkdir()
    left = []
    for path in (tmp_path / "a.json", tmp_path / "deep" / "task-01.safetensors", tmp_path / "plain"):
        with contextlib.suppress(KeyboardInterrupt), atomic_replace(path) as temporary:
            temporary.write_bytes(b"half")
            left.append(temporary.with_name(temporary.name))
            raise KeyboardInterrupt
    others = [tmp_path / ".a.tmp", tmp_path / ".lock", tmp_path / "deep" / ".b.12-xyz.tmp.npy", tmp_path / "c.tmp"]
    for path in (*left, *others):
        path.write_bytes(b"half")
    remove_temporary_files(tmp_path)
    assert [path for path in left if path.exists()] == []
    assert [path for path in others if not path.exists()] == []


# -- locks -------------------------------------------------------------------------------------------------------------


def holder(path: Path, then: str) -> subprocess.Popen[str]:
    """A process that has locked a file, and does something while it holds it."""
    code = f"import sys; from efcil.files import exclusive_lock; lock = exclusive_lock({str(path)!r}); {then}"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_lock_held_by_another_process_is_refused_until_that_one_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path, "print(flush=True); sys.stdin.read()") as process:
        with pytest.raises(BlockingIOError, match="another process"):
            exclusive_lock(path)
        process.kill()
        process.wait()
        exclusive_lock(path).close()
    assert names(tmp_path) == ["lock"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_does_not_hold_what_its_dead_parent_locked(tmp_path: Path) -> None:
    """A worker that outlives the run must not keep the next one out."""
    path = tmp_path / "lock"
    # The child ends with this test: its standard input is the other end of our pipe.
    with holder(path, "import os; child = os.fork(); child or print(flush=True); sys.stdin.read()") as process:
        process.kill()
        process.wait()
        exclusive_lock(path).close()


@pytest.mark.parametrize("remove", [False, True])
def test_whoever_waits_comes_next(tmp_path: Path, remove: bool) -> None:
    """Also when the file that it waits for is removed meanwhile; of several never two hold it at once."""
    path, inside, most = tmp_path / "lock", 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(5):
            with exclusive_lock(path, wait=True, remove=remove):
                inside += 1
                most = max(most, inside)
                time.sleep(0.002)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert names(tmp_path) == ([] if remove else ["lock"])


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_where_there_are_no_locks_nobody_is_kept_out(tmp_path: Path, monkeypatch, code: int) -> None:
    """And never by a file that a crash leaves behind."""
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with exclusive_lock(tmp_path / "lock"), exclusive_lock(tmp_path / "lock"):
        pass


def test_a_lock_where_nothing_can_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file") as caught:
        exclusive_lock(tmp_path / "file" / "lock")
    assert not isinstance(caught.value, BlockingIOError)


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("seed", range(24))
def test_a_working_directory_that_is_not_ours_is_refused(tmp_path: Path, seed: int) -> None:
    draw, work, other = random.Random(seed), tmp_path / ".model.serving", tmp_path / "other"
    (other / "photos").mkdir(parents=True)
    (other / "photos" / "wedding.jpg").write_bytes(b"once")
    if seed % 3 == 0:
        work.symlink_to(draw.choice([other, Path("other"), tmp_path / "nowhere"]))
    elif seed % 3 == 1:
        (other / draw.choice(["a", ".efcil", "marker"])).write_bytes(b"x")
        other.rename(work)
        if draw.random() < 0.7:
            text = draw.choice(['{"kind": "keras"}', "[]", "{", '{"kind": "efcil"}'])
            (work / ".efcil.json").write_text(text)
    else:
        work.write_bytes(b"years of work") if draw.random() < 0.5 else os.mkfifo(work)
    before = entries(tmp_path)
    with raises(FileRefusedError, ".model.serving"), working_directory(work, "efcil serving"):
        pytest.fail("claimed")
    assert entries(tmp_path) == before


@pytest.mark.usefixtures("system")
def test_a_working_directory_is_cleaned_and_removed(tmp_path: Path) -> None:
    work, other = tmp_path / "work", tmp_path / "other"
    other.mkdir()
    (other / "thesis").write_bytes(b"years of work")
    for _ in range(2):
        with working_directory(work, "mine") as folder:
            assert folder.path == work.resolve()
            assert {".efcil.json"} <= set(names(work)) <= {".efcil.json", ".efcil.json.lock"}
            (work / "job").mkdir()
            (work / "job" / "link").symlink_to(other)
            with pytest.raises(BlockingIOError), working_directory(work, "mine"):
                pytest.fail("claimed twice")
            left = entries(work)
        assert names(tmp_path) == ["other"]
        for name, content in left.items():  # as after a kill
            path = work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
    with working_directory(work, "mine"):
        assert "job" not in names(work)
    assert entries(other) == {"thesis": b"years of work"}
