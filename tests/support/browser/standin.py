"""A small server with the endpoints of `efcil serve` for tests of its page: it knows a class by its mean color.

It answers as the service is described to answer, without training, and can be told to be down, slow or strict.
Run it to look at the page: python tests/support/browser/standin.py [number of classes] [port]
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import re
import socket
import sys
import threading
import time
import zipfile
from dataclasses import dataclass, field
from datetime import date, timedelta
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from PIL import Image

PAGE = Path(__file__).resolve().parents[3] / "src" / "efcil" / "serve" / "page"
FILES = {
    "/": ("index.html", "text/html"),
    "/page/style.css": ("style.css", "text/css"),
    "/page/app.js": ("app.js", "text/javascript"),
}
POLICY = "default-src 'self'; img-src 'self' blob: data:"
FRUIT = "apple banana cherry grape kiwi lemon lime mango melon orange papaya peach pear pineapple plum quince".split()


class RefusedError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(body)
        self.status, self.body = status, body


@dataclass
class Known:
    """What is kept of a class."""

    name: str
    color: tuple[float, ...]
    images: int
    learned: str
    recall: float | None
    checked: int | None = None


@dataclass
class StandIn:
    """The server and what a test may set: change the fields while it runs."""

    classes: list[Known] = field(default_factory=list)
    token: str = "secret"
    seconds: float = 0.0  # that a teaching takes
    stops: tuple[float, ...] = ()  # shares of a teaching at which it waits for `go_on` instead
    leave: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    fails: str = ""  # why the next teaching fails
    limit: int = 64 * 2**20  # bytes of a request
    delay: float = 0.0  # before /predict answers
    requests: list[str] = field(default_factory=list)  # "POST /teach", in their order
    version: int = 1
    started: str = "2026-11-15T11:00:00+00:00"
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    before: list[Known] | None = None
    port: int = 0

    def __enter__(self) -> StandIn:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Serve on a free port, or on the one it had before."""
        handler = type("Bound", (Handler,), {"standin": self})
        self.server = Server(("127.0.0.1", self.port), handler)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Go away: connections are refused from now on, and those that are open end."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
        self.server.hang_up()

    def go_on(self) -> None:
        """Let the teaching that waits at one of its `stops` go on."""
        self.leave.release()

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.port}/"

    # -- what it knows

    def learn(self, label: str, pictures: list[bytes]) -> None:
        """Take the mean color of a class's pictures."""
        colors = [mean_color(picture) for picture in pictures]
        mean = tuple(sum(channel) / len(colors) for channel in zip(*colors, strict=True))
        old = next((known for known in self.classes if known.name == label), None)
        if old is not None:
            old.images += len(pictures)
            return
        recall = 90.0 if len(pictures) >= 5 else None
        self.classes.append(Known(label, mean, len(pictures), date(2026, 11, 15).isoformat(), recall))

    def similar(self, most: int = 60) -> list[list[Any]]:
        """Pairs of classes by the cosine of their colors, closest first."""
        pairs = []
        for index, one in enumerate(self.classes):
            for other in self.classes[:index]:
                dot = sum(a * b for a, b in zip(one.color, other.color, strict=True))
                norm = math.hypot(*one.color) * math.hypot(*other.color)
                pairs.append([other.name, one.name, round(dot / max(norm, 1e-9), 4)])
        return sorted(pairs, key=lambda pair: -pair[2])[:most]

    def confusions(self) -> dict[str, Any]:
        """Estimated confusions by the distance of colors, in the classes that have ten pictures."""
        known = [one for one in self.classes if one.images >= 10]
        if len(known) < 2:
            why = "few images" if len(self.classes) > 1 else "few classes"
            return {"classes": [], "percent": [], "estimated": 0, "unknown": why}

        def likeness(one: Known, other: Known) -> float:
            return math.exp(-math.dist(one.color, other.color) / 30)

        nearest = {one.name: max(likeness(one, other) for other in known if other is not one) for one in known}
        known = sorted(known, key=lambda one: -nearest[one.name])
        rows = [[likeness(one, other) for other in known] for one in known[:20]]
        return {
            "classes": [one.name for one in known[:20]],
            "percent": [[round(100 * value / sum(row), 1) for value in row[:20]] for row in rows],
            "estimated": len(known),
            "unknown": None,
        }

    def answer(self, picture: bytes, name: str, top: int) -> dict[str, Any]:
        """One prediction, or the error that its picture deserves."""
        try:
            color = mean_color(picture)
        except OSError:
            return {"file": name, "error": f"{name} is not a picture that can be read"}
        distances = [-(math.dist(color, known.color) ** 2) / 2000 for known in self.classes]
        weights = [math.exp(d - max(distances)) for d in distances]
        shares = [weight / sum(weights) for weight in weights]
        best = sorted(zip(shares, (known.name for known in self.classes), strict=True), reverse=True)[:top]
        rows = [{"label": label, "confidence": share} for share, label in best]
        # A gray picture is unlike every class; the others are as typical as can be.
        typicality = 0.01 if max(color) - min(color) < 10 else 1.0
        return {"file": name, **rows[0], "typicality": typicality, "top": rows}

    # -- endpoints

    def health(self) -> dict[str, Any]:
        """GET /health."""
        job = next((job["id"] for job in self.jobs.values() if job["status"] in ("queued", "running")), None)
        return {
            "status": "ok",
            "started": self.started,
            "model": {
                "name": "fruit",
                "classes": len(self.classes),
                "method": "slda",
                "backbone": "efficientnet-lite0",
                "size": 224,
                "version": self.version,
            },
            "job": job,
        }

    def listing(self) -> dict[str, Any]:
        """GET /classes."""
        keys = ("name", "images", "learned", "recall", "checked")
        return {
            "classes": [{key: getattr(known, key) for key in keys} for known in self.classes],
            "similar": self.similar(),
            "confusions": self.confusions(),
        }

    def predict(self, parts: list[tuple[str, str | None, bytes]], top: int) -> dict[str, Any]:
        """POST /predict."""
        time.sleep(self.delay)
        if not self.classes:
            raise RefusedError(409, {"detail": "the model knows no class yet; teach it first"})
        answers = [self.answer(content, file or "", top) for name, file, content in parts if name == "files"]
        if all("error" in answer for answer in answers):
            raise RefusedError(400, {"predictions": answers})
        return {"predictions": answers}

    def teach(self, parts: list[tuple[str, str | None, bytes]]) -> dict[str, Any]:
        """POST /teach: start a job in a thread."""
        if self.health()["job"]:
            raise RefusedError(409, {"detail": "A teaching job is running already; wait for it or cancel it."})
        lessons: dict[str, list[bytes]] = {}
        for name, _, content in parts:
            if name == "label":
                lessons[content.decode()] = [picture for part, _, picture in parts if part == "files"]
            if name == "archive":
                with zipfile.ZipFile(io.BytesIO(content)) as archive:
                    for entry in archive.namelist():
                        if not entry.endswith("/"):
                            lessons.setdefault(entry.split("/")[-2], []).append(archive.read(entry))
        refused = []
        for name, file, content in parts:
            if name == "files" and not readable(content):
                refused.append({"file": file, "error": "not a picture that can be read"})
        lessons = {label: [p for p in pictures if readable(p)] for label, pictures in lessons.items()}
        if not all(lessons.values()):
            raise RefusedError(400, {"detail": f"there is no readable picture for {next(iter(lessons))!r}"})
        job = {
            "id": f"job-{len(self.jobs) + 1}",
            "status": "running",
            "progress": 0.0,
            "message": "reading the pictures",
        }
        job |= {"started": "2026-11-15T12:00:00Z", "ended": None, "classes": list(lessons)}
        self.jobs[job["id"]] = job
        threading.Thread(target=self.work, args=(job, lessons), daemon=True).start()
        return {
            "job": job["id"],
            "classes": list(lessons),
            "images": sum(map(len, lessons.values())),
            "refused": refused,
        }

    def work(self, job: dict[str, Any], lessons: dict[str, list[bytes]]) -> None:
        """Pretend to train, then learn."""
        shares = self.stops or [step / 21 for step in range(1, 21)]
        for step, share in enumerate(shares, 1):
            job |= {"progress": share, "message": f"epoch {step} of {len(shares)}"}
            if not self.stops:
                time.sleep(self.seconds / len(shares))
            while job["status"] != "cancelled" and self.stops and not self.leave.acquire(timeout=0.05):
                pass
            if job["status"] == "cancelled":
                return
        if self.fails:
            job |= {"status": "failed", "message": self.fails}
            return
        self.before = [Known(**vars(known)) for known in self.classes]
        for label, pictures in lessons.items():
            self.learn(label, pictures)
        self.version += 1
        job |= {"status": "done", "progress": 1.0, "message": "ready", "ended": "2026-11-15T12:00:09Z"}

    def forget(self, names: list[str]) -> dict[str, Any]:
        """POST /forget."""
        self.classes = [known for known in self.classes if known.name not in names]
        self.before = None
        self.version += 1
        return {"forgotten": names}

    def undo(self) -> dict[str, Any]:
        """POST /undo."""
        if self.before is None:
            raise RefusedError(
                409,
                {"detail": "there is nothing to undo: no teaching yet, one undone already, or a class was forgotten"},
            )
        self.classes, self.before = self.before, None
        self.version += 1
        return {"model": self.health()["model"]}


class Server(ThreadingHTTPServer):
    """Knows its connections: a browser keeps some open before it asks, and would be answered there after the end."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread."""
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End one connection."""
        self.connections.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """End all connections."""
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    """Read requests, check the token and the size, write JSON."""

    standin: StandIn
    protocol_version = "HTTP/1.0"  # a closed connection ends each answer: nothing is left open when the server stops

    def log_message(self, *_: object) -> None:
        """Stay quiet."""

    def do_GET(self) -> None:
        """Serve files and what can be read."""
        self.reply(b"")

    def do_POST(self) -> None:
        """Serve what changes something."""
        self.reply(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def reply(self, body: bytes) -> None:
        """Find the answer to a request and send it."""
        path = urlsplit(self.path).path
        self.standin.requests.append(f"{self.command} {path}")
        status, kind = 200, "application/json"
        if self.command == "GET" and path in FILES:
            name, kind = FILES[path]
            content = (PAGE / name).read_bytes()
        else:
            try:
                found = self.route(path, body)
                status = 202 if path == "/teach" else 200
            except RefusedError as refused:
                status, found = refused.status, refused.body
            content = json.dumps(found).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Security-Policy", POLICY)
            self.end_headers()
            self.wfile.write(content)
        except ConnectionError:  # the page was closed meanwhile
            pass

    def route(self, path: str, body: bytes) -> dict[str, Any]:
        """Return the JSON for an endpoint."""
        s = self.standin
        writes = self.command == "POST" and path != "/predict"
        if writes and self.headers.get("Authorization") != f"Bearer {s.token}":
            raise RefusedError(401, {"detail": "This needs the header Authorization: Bearer TOKEN."})
        if len(body) > s.limit:
            raise RefusedError(413, {"detail": f"The request has {len(body)} bytes, at most {s.limit} are taken."})
        job = re.fullmatch("/jobs/([^/]+)(/cancel)?", path)
        if job and job[1] not in s.jobs:
            raise RefusedError(404, {"detail": f"There is no job {job[1]}."})
        if job and job[2] and self.command != "POST":
            raise RefusedError(405, {"detail": "Method Not Allowed"})
        if job and job[2]:
            s.jobs[job[1]]["status"] = "cancelled"
        if job:
            return s.jobs[job[1]]
        if self.command == "GET":
            plain = {"/health": s.health, "/classes": s.listing, "/jobs": lambda: {"jobs": list(s.jobs.values())}}
            if path in plain:
                return plain[path]()
        elif path == "/predict":
            top = int(parse_qs(urlsplit(self.path).query).get("top", ["3"])[0])
            return s.predict(self.parts(body), top)
        elif path == "/teach":
            return s.teach(self.parts(body))
        elif path == "/forget":
            return s.forget(json.loads(body)["classes"])
        elif path == "/undo":
            return s.undo()
        raise RefusedError(404, {"detail": "Not Found"})

    def parts(self, body: bytes) -> list[tuple[str, str | None, bytes]]:
        """Return (field, file name, content) for each part of a form."""
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        message = BytesParser().parsebytes(head + body)
        found = []
        for part in message.get_payload():
            name = part.get_param("name", header="content-disposition")
            file = part.get_filename()
            found.append(
                (
                    name,
                    file and file.encode("latin-1", "surrogateescape").decode("utf-8", "replace"),
                    part.get_payload(decode=True),
                )
            )
        return found


def mean_color(picture: bytes) -> tuple[float, ...]:
    """Return the mean red, green and blue of a picture."""
    with Image.open(io.BytesIO(picture)) as image:
        return tuple(map(float, image.convert("RGB").resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))))


def readable(picture: bytes) -> bool:
    """Tell whether these bytes are a picture."""
    try:
        mean_color(picture)
    except OSError:
        return False
    return True


def some_classes(number: int, seed: int = 1) -> list[Known]:
    """Make classes with names, counts and dates of all kinds."""
    draw = random.Random(seed)
    names = [*FRUIT, "Rhinoceros hornbill, adult male in flight (a very long name)"]
    names += [f"part {index:03d}" for index in range(len(names), number)]
    known = []
    for index, name in enumerate(names[:number]):
        images = draw.choice([1, 3, 24, 36, 60, 120, 1250])
        recall = None if images < 5 else draw.choice([100.0, 96.7, 90.0, 85.0, 75.0, 50.0])
        day = date(2026, 11, 14) - timedelta(days=7 * (number - index) // 2)
        known.append(Known(name, tuple(draw.uniform(20, 235) for _ in range(3)), images, day.isoformat(), recall))
    return known


if __name__ == "__main__":
    number, port = (int(argument) for argument in (*sys.argv[1:], *("3", "8123")[len(sys.argv) - 1 :]))
    with StandIn(classes=some_classes(number), seconds=8, port=port) as standin:
        print(f"{standin.url} with the token {standin.token}")
        standin.thread.join()
