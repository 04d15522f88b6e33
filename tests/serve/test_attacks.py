"""Attacks on the service, each as a class of variants that are generated from a seed.

Every variant must be answered with its 4xx within seconds and without memory to speak of, and the service must answer
others meanwhile and afterwards.
"""

import asyncio
import random
import shutil
import socket
import threading
import time

import pytest

from efcil.product.names import MAX_LENGTH
from efcil.serve import guard as guard_module
from efcil.serve import multipart
from efcil.serve.app import create_app
from efcil.serve.forms import MAX_ELEMENTS
from efcil.serve.limits import MIB, Limits
from efcil.serve.service import Service
from served import AUTH, Served, as_files, teach_zip, zipped

SEED = 29
MANY = 24  # variants of a class
QUICK = 20.0  # seconds for the answer to a variant, on a busy machine; before, minutes or never


def resident():
    """Resident memory of this process in MiB (Linux)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


class Watched:
    """Ask for /health in a second thread all the time, and keep the longest wait."""

    def __init__(self, client):
        self.client, self.longest, self._stop = client, 0.0, threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self):
        while not self._stop.is_set():
            began = time.monotonic()
            assert self.client.get("/health").status_code == 200
            self.longest = max(self.longest, time.monotonic() - began)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def json_variants():
    """Bodies of a few MB that stand for much more when they are understood."""
    rng = random.Random(SEED)
    values = [b"1", b"[]", b"{}", b"null", b"1e5", b'""', b'"a"', b"[1]", b'{"a":1}', b"-0.5"]
    for number in range(MANY):
        count = rng.randrange(200_000, 1_000_000)
        key = rng.choice([b"images", b"classes", b"x"])
        kind, value = number % 6, rng.choice(values)
        if kind == 0:
            yield b'{"%b": [%b]}' % (key, b",".join([value] * count))
        elif kind == 1:
            yield rng.choice([b"[", b'{"a":', b'{"images":[', b"[[1,"]) * count
        elif kind == 2:
            yield b"{%b}" % b",".join(b'"%d":%b' % (i, value) for i in range(count // 4))
        elif kind == 3:
            yield b'{"%b": %b}' % (key, str(rng.randrange(1, 10)).encode() * count)  # a number of that many digits
        elif kind == 4:
            yield b'{"%b": ["%b' % (key, b"\\u%04x" % rng.randrange(0x100, 0xD000) * count)  # and no end
        else:
            yield b'{"images": [' + b",".join([b'"aGk="'] * rng.randrange(MAX_ELEMENTS // 2, 40_000)) + b"]}"


def test_json_that_is_much_larger_when_it_is_understood(reader):
    """Before: a list of 20 million numbers made 24 GB of errors, on the event loop."""
    before = resident()
    with Watched(reader) as others:
        for number, body in enumerate(json_variants()):
            for path in ("/predict", "/forget"):
                began = time.monotonic()
                headers = {"content-type": "application/json", **AUTH}
                answer = reader.post(path, content=body, headers=headers)
                assert answer.status_code in (413, 422), (number, answer.text)
                assert len(answer.content) < 1000
                assert time.monotonic() - began < QUICK, number
    assert others.longest < QUICK
    assert resident() - before < 300


def test_one_json_body_is_refused_by_its_length_alone(reader):
    for path in ("/predict", "/forget"):
        body = b'{"images": ["' + b"A" * (17 * MIB) + b'"]}'
        answer = reader.post(path, content=body, headers={"content-type": "application/json", **AUTH})
        assert answer.status_code == 413
        assert "16,777,216 bytes" in answer.json()["detail"]


CHARSETS = ("punycode", "idna", "undefined", "utf-16", "utf-7", "utf-32", "unicode_escape", "raw_unicode_escape")
CHARSETS += ("latin-1", "cp037", "hz", "iso2022_jp", "big5", "shift_jis", "rot13", "hex", "zip", "bz2", "base64", "uu")
CHARSETS += ("mbcs", "oem", "none", "../../etc/passwd", '"quoted; x"', "%s", "utf-8-sig", "UTF_8 ", "\u212b")


@pytest.mark.parametrize("charset", CHARSETS)
def test_forms_are_utf_8(reader, drawn, charset):
    """Before: punycode stopped the event loop for two minutes; idna and undefined were a 500."""
    body = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n' % (b"a-" * 200_000 + b"z" * 200_000)
    kind = f"multipart/form-data; charset={charset}; boundary=b".encode("utf-8", "replace")
    began = time.monotonic()
    answer = reader.post("/predict", content=body + b"x\r\n--b--\r\n", headers={"content-type": kind})
    assert answer.status_code in (400, 415)
    assert time.monotonic() - began < QUICK
    assert len(answer.content) < 1000
    head = b'--b\r\nContent-Disposition: form-data; name="files"; filename="1.png"\r\n\r\n'
    sound = head + drawn["0"][0] + b"\r\n--b--\r\n"
    assert reader.post("/predict", content=sound, headers={"content-type": kind}).status_code == 415
    usual = {"content-type": "multipart/form-data; charset=UTF-8; boundary=b"}
    assert reader.post("/predict", content=sound, headers=usual).status_code == 200


def header_variants():
    """Parameters of a header that almost match, as long as a header may be."""
    rng = random.Random(SEED)
    blanks = [" ", "\t", " \t", "  "]
    for number in range(MANY):
        blank, size = rng.choice(blanks), rng.randrange(50_000, 60_000)
        key = "".join(rng.choices("ab-_9", k=rng.randrange(1, 9)))
        yield (
            f";{key}=" + blank * (size // len(blank)) + '"',  # before: quadratic, minutes on the event loop
            f";{key}=x" + blank * (size // len(blank)) + "x",
            f";{key}" + blank * (size // len(blank)) + "x",
            ";" + blank * (size // len(blank)) + "!",
            f";{key * (size // len(key))}",
            f';{key}="' * (size // (len(key) + 3)),
            f';{key}="' + "\\a" * (size // 2),
            f";{key}=" * (size // (len(key) + 2)),
        )[number % 8]


def test_headers_that_almost_match(reader, drawn):
    """The time to read one is linear: on the event loop for a request, in a thread for a part of a form."""
    names = f"files{MAX_LENGTH}"
    for tail in header_variants():
        with Watched(reader) as others:
            for content_type in (f"multipart/form-data{tail}", f"multipart/form-data; boundary=b{tail}"):
                answer = reader.post("/predict", content=b"--b--", headers={"content-type": content_type})
                assert answer.status_code in (400, 415, 422), answer.text
                assert len(answer.content) < 1000
            head = f'--b\r\nContent-Disposition: form-data; name="{names}"; filename=a{tail[:3900]}\r\n\r\n\r\n'
            kind = {"content-type": "multipart/form-data; boundary=b"}
            answer = reader.post("/predict", content=f"{head * 64}--b--\r\n".encode(), headers=kind)
            assert answer.status_code in (400, 422), answer.text
        assert others.longest < 3


def form_variants():
    """Forms whose parts, headers and names are too many, too long or not what they seem."""
    rng = random.Random(SEED)
    head = b'--b\r\nContent-Disposition: form-data; name="files"'
    for number in range(MANY):
        size = rng.randrange(500_000, 4_000_000)
        kind = number % 8
        if kind == 0:  # a header without end
            yield head + b'; filename="' + b"a" * size + b'"\r\n\r\nx\r\n--b--\r\n'
        elif kind == 1:  # what looks like a boundary
            yield head + b'; filename="a"\r\n\r\n' + rng.choice([b"\r\n-", b"\r\n--", b"\r", b"\r\n--c"]) * (size // 4)
        elif kind == 2:  # headers without number
            yield b"--b\r\n" + b"X-%d: y\r\n" % rng.randrange(99) * (size // 10)
        elif kind == 3:  # parts without number
            yield (head + b'; filename="a"\r\n\r\n\r\n') * (size // 80) + b"--b--\r\n"
        elif kind == 4:  # a field where files are wanted, or one that is not known
            yield b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n' % rng.choice([b"files", b"a" * 3000]) + (
                b"x" * size + b"\r\n--b--\r\n"
            )
        elif kind == 5:  # quotes and semicolons that do not end
            yield (
                b"--b\r\nContent-Disposition: form-data"
                + rng.choice([b'; a="', b";a=;", b'; name="\\']) * 700
                + b"\r\n\r\n"
            )
        elif kind == 6:  # bytes that are no text
            yield (
                b'--b\r\nContent-Disposition: form-data; name="\xff%b"\r\n\r\nx\r\n--b--\r\n'
                % rng.randbytes(8).hex().encode()
            )
        else:
            yield rng.randbytes(size)


def test_forms_that_are_too_much(reader):
    before = resident()
    with Watched(reader) as others:
        for number, body in enumerate(form_variants()):
            began = time.monotonic()
            answer = reader.post("/predict", content=body, headers={"content-type": "multipart/form-data; boundary=b"})
            assert answer.status_code in (400, 413, 422), (number, answer.text)
            assert len(answer.content) < 1000
            assert time.monotonic() - began < QUICK, number
    assert others.longest < QUICK
    assert resident() - before < 200


def test_names_and_fields_have_a_length(reader, drawn):
    rng = random.Random(SEED)
    good = drawn["0"][0]
    for _ in range(MANY):
        name = rng.choice("aé€😀") * rng.randrange(MAX_LENGTH + 1, 1500)
        for answer in (
            reader.post("/teach", data={"label": name}, files=as_files([good]), headers=AUTH),
            teach_zip(reader, zipped({f"{name}/1.png": good})),
            reader.post("/forget", json={"classes": ["0", name]}, headers=AUTH),
            reader.post("/teach", data={"label": "9", "epochs": "1" * 5000}, files=as_files([good]), headers=AUTH),
            reader.post("/teach", data={"label": "9", name: "1"}, files=as_files([good]), headers=AUTH),
            reader.get(f"/jobs/{name}"),
        ):
            assert answer.status_code in (400, 404, 413, 422), answer.text
            assert len(answer.content) < 1000
    long = reader.post("/teach", data={"label": "9", "epochs": "1" * 5000}, files=as_files([good]), headers=AUTH)
    assert long.status_code == 413, "before it is understood"
    assert reader.get("/jobs").json()["jobs"] == []


def test_forms_of_browsers_and_tools_are_understood():
    """Quotes and semicolons in names, an empty file, a line before the first boundary, white space after one."""
    mark = "----WebKitFormBoundary7MA4"
    parts = [
        'Content-Disposition: form-data; name="label"\r\n\r\nKätzchen; "groß"',
        'content-disposition:form-data; name=files; filename="a;b\\"c.jpg"\r\nX: y\r\n\r\n\r\n--\r\n',
        'Content-Type: image/png\r\nContent-Disposition: form-data; name="files"; filename=""\r\n\r\n',
    ]
    body = "\r\n" + "".join(f"--{mark} \r\n{part}\r\n" for part in parts) + f"--{mark}--\r\nafterwards"
    found = multipart.parse(bytearray(body.encode()), mark.encode(), 2, ("label", "files"))
    assert found.texts == {"label": 'Kätzchen; "groß"'}
    assert [(file.name, file.data) for file in found.files["files"]] == [('a;b"c.jpg', b"\r\n--\r\n"), ("", b"")]
    assert multipart.boundary(f'multipart/form-data; charset="UTF-8"; boundary="{mark}"') == mark.encode()


# --- bodies on a socket -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(taught, tmp_path_factory):
    """A service in a process of its own, whose clients are sockets."""
    with Served(shutil.copytree(taught, tmp_path_factory.mktemp("attacked") / "model"), "--max-mib", "1") as found:
        yield found


def opened(served, data=b""):
    connection = socket.create_connection(("127.0.0.1", served.http.base_url.port), timeout=30)
    connection.sendall(data)
    return connection


def test_nothing_is_read_after_a_refusal(served):
    """Before: 3 GiB were read and thrown away after the 413."""
    rng = random.Random(SEED)
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    for number in range(MANY):
        length = rng.randrange(MIB + 1, 2**40)
        how = "Transfer-Encoding: chunked" if number % 2 else f"Content-Length: {length}"
        path = rng.choice(["/predict", "/teach", "/nowhere", "/forget"])
        kind = rng.choice(["multipart/form-data; boundary=b", "application/json", "text/plain"])
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{how}\r\nContent-Type: {kind}\r\n"
        with opened(served, f"{head}Authorization: {AUTH['Authorization']}\r\n\r\n".encode()) as connection:
            sent = 0
            try:
                while sent < 64 * MIB:
                    connection.sendall(chunk)
                    sent += len(chunk)
            except (ConnectionResetError, BrokenPipeError):
                pass
            assert sent < 32 * MIB  # what fits into the buffers of two sockets, and no more
    assert served.http.get("/health").status_code == 200


def test_bodies_under_way_have_a_limit_together():
    """The largest is refused; a small one gets its answer."""
    held = guard_module.HeldBytes(1000)

    class Body:
        def __init__(self, count):
            self.count, self.ended, self.evicted = count, False, False

        def evict(self):
            self.evicted = True

    small, large, whole = Body(100), Body(500), Body(600)
    whole.ended = True  # its request is being answered
    held.add(small, 100)
    held.add(whole, 300)
    held.add(large, 500)
    assert not large.evicted
    held.add(whole, 300)
    assert (small.evicted, large.evicted, whole.evicted) == (False, True, False)
    held.remove(large)
    held.remove(whole)
    again = Body(900)
    held.add(again, 900)
    assert not again.evicted
    held.add(small, 1)
    assert again.evicted
    assert not small.evicted


def test_a_body_that_is_evicted_gets_a_503(taught):
    service = Service(taught, device="cpu", limits=Limits(bytes=2000, held=3000))
    app, answers = create_app(service, "t"), {}

    async def post(name, sizes, go):
        headers = [(b"content-type", b"multipart/form-data; boundary=b"), (b"transfer-encoding", b"chunked")]
        headers.append((b"host", b"localhost"))
        left = list(sizes)

        async def receive():
            if not left:
                await asyncio.sleep(60)
            size = left.pop(0)
            if size is None:
                await go.wait()
                return {"type": "http.request", "body": b"", "more_body": False}
            return {"type": "http.request", "body": b"x" * size, "more_body": True}

        async def send(message):
            if message["type"] == "http.response.start":
                answers[name] = message["status"], dict(message["headers"]).get(b"connection")

        scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers, "query_string": b""}
        await app(scope, receive, send)

    async def run():
        go = asyncio.Event()
        posts = [asyncio.create_task(post("large", [1900], go))]
        await asyncio.sleep(0.05)
        posts.append(asyncio.create_task(post("small", [1200, None], go)))
        await asyncio.wait(posts, timeout=2, return_when=asyncio.FIRST_COMPLETED)
        assert answers == {"large": (503, b"close")}
        go.set()
        await asyncio.wait(posts, timeout=10)

    asyncio.run(run())
    assert answers["small"] == (400, None)  # it came whole, and is no form
