"""Downloads against a server on this machine: whole, broken, resumed, changed, wrong and malicious."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import tarfile
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from efcil.data import fetch as module
from efcil.data.fetch import Remote, fetch
from efcil.errors import DataError
from efcil.files import exclusive_lock
from messages import assert_names, raises

PAYLOAD = np.random.default_rng(0).bytes(1_000_000)


@dataclass
class Site:
    """What the server has, how it behaves, and what was asked of it."""

    content: bytes = PAYLOAD
    ranges: bool = True
    status: int = 200
    cut: int | None = None  # close the connection after so many bytes of an answer
    stall: bool = False  # ... and keep it open without a word instead
    late: int = 0  # bytes that a resumed answer leaves out
    length: bool = True  # tell Content-Length
    asked: list[dict[str, str]] = field(default_factory=list)
    served: int = 0
    url: str = ""
    over: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def site():
    site = Site()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            site.asked.append(dict(self.headers))
            if site.status != 200:
                self.send_error(site.status)
                return
            start, wanted = 0, self.headers.get("Range")
            if wanted and site.ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= len(site.content):
                    self.send_error(416)
                    return
            start += site.late if start else 0
            body = site.content[start:]
            self.send_response(206 if start else 200)
            if start:
                last, total = len(site.content) - 1, len(site.content)
                self.send_header("Content-Range", f"bytes {start}-{last}/{total}")
            if site.length:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            body = body if site.cut is None else body[: site.cut]
            site.served += len(body)  # before the first byte leaves: whoever got one may look, or ask again
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)
                self.wfile.flush()
            if site.stall:
                site.over.wait()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}/file.bin"
    yield site
    site.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def remote(site: Site, content: bytes | None = None, algorithm: str = "sha256", **more) -> Remote:
    content = site.content if content is None else content
    more.setdefault("size", len(content))
    return Remote(site.url, more.pop("name", "file.bin"), f"{algorithm}:{digest(content, algorithm)}", **more)


def digest(content: bytes, algorithm: str = "sha256") -> str:
    return hashlib.new(algorithm, content).hexdigest()


def names(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def break_after(site: Site, count: int, source: Remote, directory) -> None:
    site.cut = count
    with raises(DataError, directory / "file.bin.part"):
        fetch(source, directory)
    site.cut = None
    assert names(directory) == ["file.bin.part"]
    assert (directory / "file.bin.part").read_bytes() == site.content[:count]
    site.served = 0


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
@pytest.mark.parametrize("known_size", [True, False])
def test_a_plain_download(site, tmp_path, algorithm, known_size):
    seen = []
    source = remote(site, algorithm=algorithm, **({} if known_size else {"size": None}))
    path = fetch(source, tmp_path / "new" / "folder", progress=lambda done, total: seen.append((done, total)))
    assert path == tmp_path / "new" / "folder" / "file.bin"
    assert path.read_bytes() == PAYLOAD
    assert names(path.parent) == ["file.bin"]
    assert seen[0] == (0, len(PAYLOAD))
    assert seen[-1] == (len(PAYLOAD), len(PAYLOAD))
    assert seen == sorted(seen)


def test_what_is_complete_is_not_downloaded_again(site, tmp_path):
    fetch(remote(site), tmp_path)
    fetch(remote(site), tmp_path)
    assert len(site.asked) == 1


def test_a_broken_connection_is_resumed_with_the_rest_only(site, tmp_path):
    break_after(site, 300_000, remote(site), tmp_path)
    seen = []
    path = fetch(remote(site), tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == PAYLOAD
    assert site.served == 700_000
    assert site.asked[1]["Range"] == "bytes=300000-"
    assert seen[0] == (300_000, 1_000_000)
    assert names(tmp_path) == ["file.bin"]


def test_several_breaks(site, tmp_path):
    site.cut = 400_000
    for _ in range(2):
        with raises(DataError, site.url, "1,000,000", "file.bin.part"):
            fetch(remote(site), tmp_path)
    assert fetch(remote(site), tmp_path).read_bytes() == PAYLOAD
    assert site.served == len(PAYLOAD)


def test_a_server_without_ranges_starts_again(site, tmp_path):
    break_after(site, 300_000, remote(site), tmp_path)
    site.ranges = False
    assert fetch(remote(site), tmp_path).read_bytes() == PAYLOAD
    assert site.served == 1_000_000


def test_a_changed_file_starts_again(site, tmp_path):
    break_after(site, 300_000, remote(site), tmp_path)
    site.content = PAYLOAD[::-1]
    assert fetch(remote(site), tmp_path).read_bytes() == PAYLOAD[::-1]
    assert site.served == 1_700_000
    assert [("Range" in asked) for asked in site.asked] == [False, True, False]


@pytest.mark.parametrize("known", [{}, {"size": None}], ids=["known size", "unknown size"])
def test_another_part_than_asked_for_starts_again(site, tmp_path, known):
    break_after(site, 300_000, remote(site), tmp_path)
    site.late = 5
    assert fetch(remote(site, **known), tmp_path).read_bytes() == PAYLOAD
    assert [("Range" in asked) for asked in site.asked] == [False, True, False]


def test_a_download_is_resumed_from_another_address(site, tmp_path):
    break_after(site, 300_000, remote(site), tmp_path)
    site.url += "?mirror"
    assert fetch(remote(site), tmp_path).read_bytes() == PAYLOAD
    assert site.served == 700_000


def test_a_resumed_download_that_stays_wrong_is_reported(site, tmp_path):
    source = remote(site)
    break_after(site, 300_000, source, tmp_path)
    site.content = PAYLOAD[::-1]
    with raises(DataError, site.url, source.checksum, tmp_path / "file.bin.bad"):
        fetch(source, tmp_path)
    assert [("Range" in asked) for asked in site.asked] == [False, True, False]
    assert (tmp_path / "file.bin.bad").read_bytes() == PAYLOAD[::-1]


def test_range_not_satisfiable_starts_again(site, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(PAYLOAD + b"more")
    assert fetch(remote(site, size=None), tmp_path).read_bytes() == PAYLOAD
    assert [("Range" in asked) for asked in site.asked] == [True, False]


def test_a_part_longer_than_the_file_starts_again(site, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(PAYLOAD + b"more")
    assert fetch(remote(site), tmp_path).read_bytes() == PAYLOAD
    assert "Range" not in site.asked[0]


def test_stopped_between_the_last_byte_and_the_rename(site, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(PAYLOAD)
    assert fetch(remote(site), tmp_path).read_bytes() == PAYLOAD
    assert site.asked == []


def test_a_wrong_checksum_is_reported_and_the_next_try_is_clean(site, tmp_path):
    site.content = b"x" * len(PAYLOAD)
    source = remote(site, PAYLOAD)
    with pytest.raises(DataError) as caught:
        fetch(source, tmp_path)
    message = str(caught.value)
    assert_names(message, f"sha256:{digest(PAYLOAD)}", f"sha256:{digest(site.content)}", "file.bin.bad")
    assert "\n" not in message
    assert names(tmp_path) == ["file.bin.bad"]
    site.content = PAYLOAD
    assert fetch(source, tmp_path).read_bytes() == PAYLOAD
    assert "Range" not in site.asked[1]


def test_a_damaged_part_is_found_by_the_checksum(site, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(b"x" * 1000)
    assert fetch(remote(site), tmp_path).read_bytes() == PAYLOAD
    assert [("Range" in asked) for asked in site.asked] == [True, False]


def test_a_damaged_part_of_full_length_is_found_by_the_checksum(site, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(b"x" * len(PAYLOAD))
    assert fetch(remote(site), tmp_path).read_bytes() == PAYLOAD
    assert [("Range" in asked) for asked in site.asked] == [False]


def test_a_foreign_file_under_the_final_name_is_left_alone(site, tmp_path):
    (tmp_path / "file.bin").write_bytes(b"mine")
    with raises(DataError, tmp_path / "file.bin", f"sha256:{digest(PAYLOAD)}", f"sha256:{digest(b'mine')}"):
        fetch(remote(site), tmp_path)
    assert (tmp_path / "file.bin").read_bytes() == b"mine"
    assert site.asked == []


def test_a_file_of_another_size_is_refused_before_it_is_downloaded(site, tmp_path):
    with raises(DataError, site.url, "1,000,000", "999,999"):
        fetch(remote(site, size=999_999), tmp_path)
    assert names(tmp_path) == []


def test_a_server_that_sends_without_end(site, tmp_path):
    site.length = False
    with raises(DataError, site.url, "500,000"):
        fetch(remote(site, size=500_000), tmp_path)
    assert "file.bin" not in names(tmp_path)


@pytest.mark.parametrize("status", [404, 403, 500, 503])
def test_http_errors_are_one_line(site, tmp_path, status):
    site.status = status
    with raises(DataError, site.url, status) as caught:
        fetch(remote(site), tmp_path)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == []


def test_an_http_error_keeps_the_part(site, tmp_path):
    break_after(site, 300_000, remote(site), tmp_path)
    site.status = 503
    with raises(DataError, 503, tmp_path / "file.bin.part"):
        fetch(remote(site), tmp_path)
    site.status = 200
    assert fetch(remote(site), tmp_path).read_bytes() == PAYLOAD
    assert site.served == 700_000


def test_no_server(site, tmp_path):
    source = Remote("http://127.0.0.1:1/x", "x", "md5:" + "0" * 32)
    with raises(DataError, source.url, "ConnectionRefusedError"):
        fetch(source, tmp_path)


def test_a_silent_server_keeps_what_came(site, tmp_path):
    site.cut, site.stall = 1000, True
    part = tmp_path / "file.bin.part"
    for timeout in (0.2, 1.0, 5.0, 25.0):  # on a busy machine even the first bytes may be late
        with raises(DataError, site.url, part):
            fetch(remote(site), tmp_path, timeout=timeout)
        if part.exists() and part.stat().st_size:
            break
    assert part.read_bytes() == PAYLOAD[:1000]
    site.over.set()
    site.cut, site.stall = None, False
    assert fetch(remote(site), tmp_path).read_bytes() == PAYLOAD


def test_a_full_disk_is_one_line(site, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "fsync", full)
    with raises(DataError, tmp_path / "file.bin.part"):
        fetch(remote(site), tmp_path)
    monkeypatch.undo()
    assert "file.bin" not in names(tmp_path)


def test_an_interruption_by_the_user_is_resumed(site, tmp_path):
    def interrupt(done, total):
        if done > 200_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(remote(site), tmp_path, progress=interrupt)
    have = (tmp_path / "file.bin.part").stat().st_size
    assert have > 200_000
    site.served = 0
    assert fetch(remote(site), tmp_path).read_bytes() == PAYLOAD
    assert site.served == len(PAYLOAD) - have


def test_two_processes_do_not_fetch_into_one_folder(site, tmp_path):
    with exclusive_lock(tmp_path / ".lock"), raises(DataError, tmp_path):
        fetch(remote(site), tmp_path)
    assert fetch(remote(site), tmp_path).read_bytes() == PAYLOAD


def test_a_folder_that_cannot_be_made(site, tmp_path):
    (tmp_path / "file").touch()
    with raises(DataError, tmp_path / "file" / "below"):
        fetch(remote(site), tmp_path / "file" / "below")


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "file:///etc/passwd"},
        {"name": "../x"},
        {"unpack": ".."},
        {"checksum": "md5:123"},
        {"checksum": "sha1:" + "0" * 40},
        {"files": {"a": "md5:xyz"}},
    ],
)
def test_an_impossible_remote_is_refused(wrong):
    good = {"url": "https://example.org/x", "name": "x", "checksum": "md5:" + "0" * 32}
    Remote(**good)
    with pytest.raises(DataError):
        Remote(**{**good, **wrong})


# -------------------------------------------------------------------------------------------------------------- unpack


def archive(members: dict[str, bytes], link: tuple[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        if link is not None:
            info = tarfile.TarInfo(link[0])
            info.type, info.linkname = tarfile.SYMTYPE, link[1]
            tar.addfile(info)
    return buffer.getvalue()


MEMBERS = {"set/train": b"train" * 1000, "set/deep/test": b"test"}
FILES = {"train": "md5:" + digest(MEMBERS["set/train"], "md5"), "deep/test": "sha256:" + digest(b"test")}


def packed(site: Site, content: bytes | None = None, **more) -> Remote:
    site.content = archive(MEMBERS) if content is None else content
    return remote(site, name="set.tar.gz", unpack="set", files=more.pop("files", FILES), **more)


def test_an_archive_is_unpacked(site, tmp_path):
    source = packed(site)
    path = fetch(source, tmp_path)
    assert path == tmp_path / "set"
    assert (path / "train").read_bytes() == MEMBERS["set/train"]
    assert (path / "deep" / "test").read_bytes() == b"test"
    assert names(tmp_path) == ["set", "set.tar.gz"]
    (tmp_path / "set.tar.gz").unlink()  # no longer needed
    assert fetch(source, tmp_path) == path
    assert len(site.asked) == 1


def test_what_was_unpacked_is_for_everybody_as_any_new_file(site, tmp_path):
    """Whatever the archive says of owners and modes: data sets are shared."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, kind in (("set", tarfile.DIRTYPE), ("set/train", tarfile.REGTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.uid = kind, 0o4700, 12345
            tar.addfile(info)
    path = fetch(packed(site, buffer.getvalue(), files={}), tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for found, new in ((path, tmp_path / "folder"), (path / "train", tmp_path / "file")):
        assert (found.stat().st_mode, found.stat().st_uid) == (new.stat().st_mode, new.stat().st_uid)


def test_a_complete_folder_needs_no_right_to_write(site, tmp_path):
    source = packed(site)
    fetch(source, tmp_path)
    held = exclusive_lock(tmp_path / ".lock")  # nor is a lock asked for
    assert fetch(source, tmp_path) == tmp_path / "set"
    held.close()


def test_a_header_of_an_impossible_length_is_refused(site, tmp_path):
    """Found by fuzzing: the length of a record of the header is beyond what an index can be."""
    buffer, record = io.BytesIO(), b"9" * 30 + b" comment=x\n"
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo("header")
        info.type, info.size = tarfile.XHDTYPE, len(record)
        tar.addfile(info, io.BytesIO(record))
    with pytest.raises(DataError, match="cannot be unpacked safely"):
        fetch(packed(site, buffer.getvalue()), tmp_path)
    assert names(tmp_path) == ["set.tar.gz"]


def test_interrupted_between_download_and_unpacking(site, tmp_path, monkeypatch):
    source = packed(site)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_unpack", killed)
        with pytest.raises(KeyboardInterrupt):
            fetch(source, tmp_path)
    assert names(tmp_path) == ["set.tar.gz"]
    assert (fetch(source, tmp_path) / "train").read_bytes() == MEMBERS["set/train"]
    assert len(site.asked) == 1


def test_killed_while_unpacking_leaves_nothing_that_looks_complete(site, tmp_path, monkeypatch):
    source = packed(site)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "rename", killed)
        patch.setattr(module.shutil, "rmtree", lambda *_, **__: None)  # as after a kill: nothing is tidied up
        with pytest.raises(KeyboardInterrupt):
            fetch(source, tmp_path)
    assert names(tmp_path) == [".set.unpacking", "set.tar.gz"]
    assert (fetch(source, tmp_path) / "train").read_bytes() == MEMBERS["set/train"]
    assert names(tmp_path) == ["set", "set.tar.gz"]
    assert len(site.asked) == 1


@pytest.mark.parametrize(
    ("members", "link"),
    [
        ({**MEMBERS, "../escaped": b"x"}, None),
        ({**MEMBERS, "set/../../escaped": b"x"}, None),
        (MEMBERS, ("set/link", "../../escaped")),
        (MEMBERS, ("set/link", "/etc")),
    ],
)
def test_a_member_that_leaves_the_folder_is_refused(site, tmp_path, members, link):
    source = packed(site, archive(members, link))
    inner = tmp_path / "inner"
    with raises(DataError, inner / "set.tar.gz"):
        fetch(source, inner)
    assert names(tmp_path) == ["inner"]
    assert names(inner) == ["set.tar.gz"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"no archive at all", ("ReadError",)),
        (archive(MEMBERS)[:-200], ("ReadError",)),
        (archive({"other/train": b"x"}), ("set",)),
        (archive({"set/train": b"x", "set/deep/test": b"test"}), ("train", f"md5:{hashlib.md5(b'x').hexdigest()}")),
        (archive({"set/train": MEMBERS["set/train"]}), ("deep/test",)),
    ],
)
def test_an_archive_that_is_not_what_it_should_be(site, tmp_path, content, named):
    with raises(DataError, tmp_path / "set.tar.gz", *named):
        fetch(packed(site, content), tmp_path)
    assert names(tmp_path) == ["set.tar.gz"]


@pytest.mark.parametrize("kind", ["damaged", "lacking", "file"])
def test_a_folder_of_other_content_is_reported_and_left_alone(site, tmp_path, kind):
    source, target = packed(site), tmp_path / "set"
    if kind == "file":
        target.touch()
    else:
        target.mkdir()
    if kind == "damaged":
        (target / "train").write_bytes(b"mine")
    before = sorted(tmp_path.rglob("*"))
    with raises(DataError, target, *(["train"] if kind != "file" else [])):
        fetch(source, tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    assert site.asked == []


def test_the_folder_is_held_for_one_process_while_bytes_come(site, tmp_path):
    refused = []

    def try_as_well(done, total):
        try:
            exclusive_lock(tmp_path / ".lock").close()
        except BlockingIOError:
            refused.append(done)

    fetch(remote(site), tmp_path, progress=try_as_well)
    assert 0 in refused
    assert len(PAYLOAD) in refused


# ---------------------------------------------------------------- archives that servers pack anew, such as of a commit


def of_files(site: Site, content: bytes | None = None) -> Remote:
    """A remote whose files are checked together, and not the archive."""
    lines = [f"{digest(MEMBERS[f'set/{name}'])}  {name}\n" for name in ("deep/test", "train")]
    checksum = "tree:" + digest("".join(lines).encode())
    site.content = archive(MEMBERS) if content is None else content
    return Remote(site.url, "set.tar.gz", checksum, sum(map(len, MEMBERS.values())), "set")


def test_an_archive_without_a_checksum_is_not_resumed(site, tmp_path):
    source = of_files(site)
    (tmp_path / "set.tar.gz.part").write_bytes(site.content[:100])
    fetch(source, tmp_path)
    assert [("Range" in asked) for asked in site.asked] == [False]


def test_files_are_checked_whatever_the_archive(site, tmp_path):
    again = archive(dict(reversed(MEMBERS.items())))
    assert again != archive(MEMBERS)
    for number, content in enumerate((archive(MEMBERS), again)):
        site.length = bool(number)  # GitHub does not say how long it will be
        path = fetch(of_files(site, content), tmp_path / str(number))
        assert (path / "train").read_bytes() == MEMBERS["set/train"]
        assert fetch(of_files(site, content), tmp_path / str(number)) == path
    assert len(site.asked) == 2


@pytest.mark.parametrize(
    "members",
    [
        {**MEMBERS, "set/train": b"other" * 1000},
        {**MEMBERS, "set/more": b""},
        {"set/train": MEMBERS["set/train"]},
        {**MEMBERS, "set/train": b"0" * 10_000_000},
    ],
    ids=["changed", "one more", "one less", "a bomb"],
)
def test_other_files_are_refused(site, tmp_path, members):
    with raises(DataError, "set.tar.gz", "nothing was extracted"):
        fetch(of_files(site, archive(members)), tmp_path)
    assert names(tmp_path) == ["set.tar.gz"]


def test_a_file_that_was_changed_later_is_found(site, tmp_path):
    source = of_files(site)
    (fetch(source, tmp_path) / "train").write_bytes(b"changed")
    with raises(DataError, str(tmp_path / "set"), "tree:"):
        fetch(source, tmp_path)


def test_a_tree_needs_a_folder_and_a_size(site):
    for lacking in ({"unpack": None}, {"size": None}):
        given = {"url": site.url, "name": "x", "checksum": "tree:" + "0" * 64, "unpack": "x", "size": 1, **lacking}
        with raises(DataError, site.url, "tree"):
            Remote(**given)
