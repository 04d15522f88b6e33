"""Connections: idle and slow clients are ended, no number stops the service, and only its own names reach it."""

import asyncio
import contextlib
import random
import shutil
import socket
import threading
import time

import httpx2 as httpx
import numpy as np
import pytest

from efcil.errors import ConfigError
from efcil.serve import connections as connections_module
from efcil.serve import guard
from efcil.serve.app import create_app
from efcil.serve.command import make_server
from efcil.serve.connections import Connections
from efcil.serve.hosts import allowed_names
from efcil.serve.service import Service
from messages import raises
from served import LONG, TOKEN, Served, as_files, png, until

SEED = 29
MANY = 24
TIMEOUT = 0.5  # in place of ten seconds and more


@contextlib.contextmanager
def listening(model, limit=1000, per_sender=1000):
    """The service behind its own server, in a thread of this process."""
    bounded = Connections(limit, per_sender)
    service = Service(model, device="cpu")
    server = make_server(create_app(service, TOKEN), bounded)
    server.bounded, server.service = bounded, service
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server.port = listener.getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            until(lambda: server.started, "the server listens")
            yield server
        finally:
            server.should_exit = True
            thread.join()


def opened(server, data=b"", source="127.0.0.1"):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=LONG, source_address=(source, 0))
    connection.sendall(data)
    return connection


def answers(server):
    return httpx.get(f"http://127.0.0.1:{server.port}/health", timeout=LONG).status_code == 200


def ask_for_ever(connection):
    """Send requests and read no answer, until the connection is ended."""
    while True:
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)


def slow_clients():
    """What each client sends at once, and what it goes on to send byte by byte."""
    rng = random.Random(SEED)
    request = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n"
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for number in range(MANY):
        cut = rng.randrange(1, len(request))
        yield (
            (b"", b""),  # silence
            (request[:cut], b""),  # headers that stop
            (request[:cut], b"x" * 500),  # and that never end
            (request + b"\r\n", b""),  # a body that does not come
            (request + b"\r\n" + b"x" * rng.randrange(900), b""),  # or stops
            (request + b"\r\n", b"x" * 500),  # or never ends
            (get, b""),  # a connection kept alive
            (get * rng.randrange(2, 5) + get[:cut], b"x" * 500),  # requests in advance, the last of which never ends
        )[number % 8]


def test_idle_and_slow_clients_are_ended(taught, monkeypatch):
    """Before: silence ahead of the headers lasted for ever, and so did a byte from time to time."""
    monkeypatch.setattr(connections_module, "HEADER_TIMEOUT", TIMEOUT)
    monkeypatch.setattr(guard, "READ_TIMEOUT", TIMEOUT)
    with listening(taught) as server:
        clients = [(opened(server, first), rest) for first, rest in slow_clients()]
        left = {connection: iter(rest) for connection, rest in clients}
        end = time.monotonic() + LONG
        for connection, _ in clients:
            connection.settimeout(0.02)
        while left and time.monotonic() < end:
            for connection in list(left):
                with contextlib.suppress(TimeoutError):
                    try:
                        if (byte := next(left[connection], None)) is not None:
                            connection.sendall(bytes([byte]))
                        if not connection.recv(65536):
                            del left[connection]
                    except ConnectionError:
                        del left[connection]
        for connection, _ in clients:
            connection.close()
        assert not left
        assert answers(server)
        until(lambda: len(server.bounded) == 0, "all are closed")


def test_a_client_that_takes_no_answer_is_ended(taught, monkeypatch):
    monkeypatch.setattr(connections_module, "WRITE_TIMEOUT", TIMEOUT)
    with listening(taught) as server:
        for _ in range(3):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.settimeout(LONG)
            with pytest.raises(ConnectionError):
                ask_for_ever(connection)
            connection.close()
        assert answers(server)


def test_of_a_body_that_is_too_slow_nothing_more_is_read(taught, monkeypatch):
    monkeypatch.setattr(guard, "READ_TIMEOUT", TIMEOUT)
    monkeypatch.setattr(guard, "DRAIN_TIMEOUT", LONG)
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    with listening(taught) as server, opened(server, head + b"x") as connection:
        began, answer = time.monotonic(), b""
        while part := connection.recv(1000):
            answer += part
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - began < LONG / 2


def small_chunks():
    """Chunked bodies of a few MB: what each chunk costs adds up to minutes of the event loop."""
    rng = random.Random(SEED)
    for number in range(MANY):
        size = rng.randrange(1, 9)
        blank = (b"", b"0" * rng.randrange(1, 4), b"")[number % 3]
        extension = (b"", b"", b";a=b")[number % 3]
        data = rng.choice([b"[", b"x", b"-", b"\r"]) * size
        yield (
            rng.choice(["/predict", "/teach", "/health", "/nowhere"]),
            (blank + b"%x" % size + extension + b"\r\n" + data + b"\r\n") * (2_000_000 // (size + 5)),
        )


def test_bodies_of_small_chunks_are_ended(taught):
    """Before: eight such clients stopped the service; one request held it for 44 s."""
    with listening(taught) as server:
        parsed, stop = [0.0], threading.Event()

        def watch():
            while not stop.is_set():
                began = time.monotonic()
                assert answers(server)
                parsed.append(time.monotonic() - began)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for path, body in small_chunks():
                head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                connection = opened(server, f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
                with contextlib.suppress(ConnectionError):
                    connection.sendall(body)
                with contextlib.suppress(ConnectionError):
                    while connection.recv(65536):  # it is closed, although the body has not ended
                        pass
                connection.close()
        finally:
            stop.set()
            watcher.join()
        assert max(parsed) < 5


def test_chunks_as_clients_send_them_are_read(taught, drawn):
    """A client that streams a form sends a chunk for each head and each file, or for some hundred bytes."""
    noise = np.random.default_rng(SEED).integers(0, 256, (3, 320, 320), np.uint8)
    pictures = [*(drawn["0"][number % 6] for number in range(40)), png(noise)]

    def parts():
        for data in pictures:
            yield b'--b\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n'
            for at in range(0, len(data), 200):
                yield data[at : at + 200]
            yield b"\r\n"
        yield b"--b--\r\n"

    assert sum(1 for _ in parts()) > connections_module.SMALL_CHUNKS * 1.3
    with listening(taught) as server:
        url, kind = f"http://127.0.0.1:{server.port}/predict", {"content-type": "multipart/form-data; boundary=b"}
        with httpx.Client(timeout=LONG) as client:
            for _ in range(3):  # in one connection: each request is counted alone
                assert client.post(url, content=parts(), headers=kind).status_code == 200


def test_what_strangers_send_is_not_logged(taught, caplog):
    """Before: a traceback for what is no HTTP after the head of a request, as often as somebody sends it."""
    rng = random.Random(SEED)
    with listening(taught) as server:
        for number in range(MANY):
            path = ("/page/app.js", "/openapi.json", "/health", "/predict")[number % 4]
            expect = ("", "Expect: 100-continue\r\n")[number // 4 % 2]
            connection = opened(server)
            connection.settimeout(1)
            with contextlib.suppress(ConnectionError, TimeoutError), connection:
                head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{expect}Transfer-Encoding: chunked\r\n\r\n"
                connection.sendall(head.encode())
                time.sleep(rng.random() / 100)
                connection.sendall(
                    rng.choice([b"zz\r\n\r\n", b"5\r\nabcdefgh\r\n", b"\0\0", rng.randbytes(30) + b"\r\n"])
                )
                connection.recv(100)
        assert answers(server)
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def test_who_keeps_the_service_waiting_makes_room(taught):
    """Thousands of sockets from one address, or from many, do not keep others out."""
    with listening(taught, limit=40, per_sender=20) as server:
        honest = httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=LONG)
        with honest, contextlib.ExitStack() as held:
            rng = random.Random(SEED)
            head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
            sockets = []
            for number in range(300):
                source = f"127.0.0.{rng.randrange(2, 9)}" if number % 2 else "127.0.0.9"
                sockets.append(held.enter_context(opened(server, head[: rng.randrange(len(head) + 1)], source)))
                if number % 30 == 0:
                    assert honest.get("/health").status_code == 200
                    assert answers(server)
            assert len(server.bounded) <= 40
            until(lambda: server.bounded._count["127.0.0.9"] <= 20, "the share of an address is kept")
        until(lambda: len(server.bounded) == 0, "all are closed")


def test_requests_at_work_are_not_closed_for_new_connections(taught, drawn):
    go = threading.Event()
    with listening(taught, limit=2, per_sender=2) as server:
        part = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n'
        body = part + drawn["0"][0] + b"\r\n--b--\r\n"
        head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        service = server.service
        scorer = service.batcher._scorer

        def waiting():
            names, score = scorer()
            return names, lambda pixels: (go.wait(LONG), score(pixels))[1]

        service.batcher._scorer = waiting
        request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        working = [opened(server, request) for _ in range(2)]
        until(lambda: [one.waiting for one in server.bounded._open] == [None, None], "both are at work")
        with opened(server) as third:
            assert third.recv(1000).startswith(b"HTTP/1.1 503 ")
        go.set()
        for connection in working:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
            connection.close()


def answered(http, files):
    """Ask once more where the connection, idle until then, was closed for a new one."""
    try:
        return http.post("/predict", files=files)
    except httpx.TransportError:
        return http.post("/predict", files=files)


def test_without_descriptors_it_serves_those_it_has_and_says_so_once(taught, tmp_path, drawn):
    """Before: 1,040 sockets stopped it, and its log grew by 7 MB a second."""
    model = shutil.copytree(taught, tmp_path / "model")
    with Served(model, files=160) as served:
        port = served.http.base_url.port
        with contextlib.ExitStack() as held:
            for _ in range(400):
                held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LONG))
            for _ in range(3):
                assert answered(served.http, as_files([drawn["0"][0]])).status_code == 200
                time.sleep(0.5)
        served.process.terminate()
        _, err = served.process.communicate(timeout=LONG)
    assert len(err) < 2000
    notes = ["connections: ", "no connection can be accepted"]  # which of the two depends on who comes first
    assert sorted(err.count(note) for note in notes) in ([0, 1], [1, 1])


def test_no_descriptor_at_all_is_said_once(caplog):
    bounded = Connections(10, 10)
    loop = asyncio.new_event_loop()
    try:
        for _ in range(1000):
            error = OSError(24, "Too many open files")
            bounded.handle_exception(loop, {"message": "socket.accept() out of system resource", "exception": error})
    finally:
        loop.close()
    assert len(caplog.records) == 1
    assert "Too many open files" in caplog.text


FOREIGN = ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "evil.localhost"]
FOREIGN += ["127.0.0.1@evil.example", "evil.example#127.0.0.1", "localhost/evil", "0x7f000001", "2130706433", "127.1"]
FOREIGN += ["[::1", "[::1].evil.example", "[evil.example]", "localhost evil", "localhost:80:80", "localhost:x", ":80"]
FOREIGN += ["xn--local-host", "localhost\u00ad", "a" * 400, "photos.example.org.evil"]


@pytest.mark.parametrize("host", FOREIGN)
def test_other_names_do_not_reach_the_service(reader, host):
    """A page of another site whose name was pointed here (DNS rebinding) reads nothing."""
    for method, path in (("GET", "/classes"), ("POST", "/predict"), ("GET", "/"), ("GET", "/classes/")):
        answer = reader.request(method, path, headers={"host": host.encode("utf-8")})
        assert answer.status_code == 421
        assert "--allowed-host" in answer.json()["detail"]
        assert "location" not in answer.headers
        assert host not in answer.text


def test_its_own_names_and_every_address_reach_it(reader):
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]", "10.1.2.3:80", "localhost."):
        assert reader.get("/health", headers={"host": host}).status_code == 200


def test_names_that_are_allowed():
    own = allowed_names("0.0.0.0", ["Photos.example.org"])
    assert {"localhost", "photos.example.org", socket.gethostname().lower()} <= own
    for wrong in ("http://a", "a:80", "a/b", "*", "", "-a"):
        with raises(ConfigError, "--allowed-host"):
            allowed_names("127.0.0.1", [wrong])


@pytest.mark.parametrize("path", ["/health/", "/classes/", "/page", "/docs/"])
def test_nothing_is_redirected(reader, path):
    """A redirect would go to whatever the Host header names."""
    answer = reader.get(path, headers={"host": "127.0.0.1"}, follow_redirects=False)
    assert answer.status_code == 404
    assert "location" not in answer.headers
