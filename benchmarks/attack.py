"""Honest predictions of `efcil serve` while it is attacked, at its default limits.

    python benchmarks/attack.py [--seconds 60] [--clients 4] [--out FILE]

Three attacks at once, from another address of the loopback network, bounded in number and time: bodies (JSON that is
large when it is understood, forms of other character sets, headers that almost match, chunks without end or of a byte),
pictures (JPEG of thousands of scans or markers, PNG and WEBP that are small and take much to decode or to inflate), and
connections (silent ones, headers byte by byte). Meanwhile
clients send single pictures. Exit 1 unless 95 % of them are answered within 2 seconds and memory stays below 1.5 GB.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for use as a script

from benchmarks.record import add_options, write_record
from benchmarks.serve import Service, form, pictures

SEED = 29
WITHIN, SHARE, MOST_MIB = 2.0, 0.95, 1500.0
ATTACKER = "127.0.0.2"  # where attacks come from; honest clients have 127.0.0.1
BODIES, PICTURES, SILENT = 3, 8, 300  # attackers of each kind


def segment(kind: int, data: bytes) -> bytes:
    return bytes([0xFF, kind]) + struct.pack(">H", len(data) + 2) + data


def many_scans(width: int, height: int, scans: int) -> bytes:
    """Return a progressive JPEG whose scans hold nothing: each goes over all blocks."""
    blocks = -(-width // 8) * -(-height // 8)
    tables = segment(0xC4, bytes([0x00, 1] + [0] * 15 + [0])) + segment(0xC4, bytes([0x10, 1] + [0] * 15 + [0xE0]))
    frame = segment(0xC2, struct.pack(">BHHB", 8, height, width, 1) + bytes([1, 0x11, 0]))
    first = segment(0xDA, bytes([1, 1, 0, 0, 0, 0])) + bytes(-(-blocks // 8))
    one = segment(0xDA, bytes([1, 1, 0, 1, 63, 0])) + bytes(2 * (1 + blocks // 16384))
    return b"\xff\xd8" + segment(0xDB, bytes([0] + [1] * 64)) + frame + tables + first + one * scans + b"\xff\xd9"


def png(width: int, height: int, depth: int, color: int) -> bytes:
    """Return a PNG of zeros."""
    channels = {0: 1, 2: 3, 6: 4}[color]
    packer, row = zlib.compressobj(1), b"\0" * (1 + width * channels * depth // 8)
    data = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def hostile_pictures() -> list[bytes]:
    from PIL import Image

    rng, found = random.Random(SEED), []
    for _ in range(4):
        width = rng.randrange(5500, 6300)
        found += [many_scans(width, 6300, rng.randrange(4000, 8000)), png(width, 6300, 16, rng.choice([0, 2]))]
        found.append(png(width, 6300, 8, 6))
        file = io.BytesIO()
        Image.new("RGBA", (width // 2, 3000)).save(file, "WEBP", lossless=True, method=0, quality=0)
        found.append(file.getvalue())
        packed = zlib.compress(bytes(1_000_000), 9)
        texts = struct.pack(">I", len(packed) + 3) + b"zTXta\0\0" + packed
        texts += struct.pack(">I", zlib.crc32(texts[4:]))
        small = png(16, 16, 8, 0)
        found += [small[:33] + texts * rng.randrange(20, 50) + small[33:]] * 2
        file = io.BytesIO()
        Image.new("RGB", (64, 64)).save(file, "JPEG")
        data = file.getvalue()
        scan = data.index(b"\xff\xda")
        found.append(data[:scan] + b"\xff\xfe\0\2" * rng.randrange(300_000, 600_000) + data[scan:])
    return found


def bodies() -> list[tuple[str, bytes, str]]:
    """Return paths, bodies and content types."""
    text = b"a-" * 200_000 + b"z" * 200_000
    name = b'--b\r\nContent-Disposition: form-data; name="' + text + b'"\r\n\r\nx\r\n--b--\r\n'
    kind = "multipart/form-data; boundary=b"
    return [
        ("/predict", b'{"images": [' + b"1," * 7_000_000 + b"1]}", "application/json"),
        ("/predict", b"[" * 15_000_000, "application/json"),
        ("/predict", name, f"{kind}; charset=punycode"),
        ("/predict", name, kind),
        ("/predict", os.urandom(60_000_000), kind),
        ("/predict", b"--b--", f"multipart/form-data; a={' ' * 60_000}!"),
        ("/forget", b'{"classes": [' + b'"a",' * 3_000_000 + b'"a"]}', "application/json"),
    ]


def attack(port: int, seconds: float) -> None:
    """Attack for some seconds; print how many requests had which status."""
    end, counts = time.monotonic() + seconds, Counter[str]()
    images, others = hostile_pictures(), bodies()

    def send(what: str, path: str, body: bytes, kind: str) -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=10, source_address=(ATTACKER, 0))
        status = "no answer"
        with contextlib.suppress(OSError, HTTPException), contextlib.closing(connection):
            connection.request("POST", path, body, {"Content-Type": kind})
            status = str(connection.getresponse().status)
        counts[f"{what} {status}"] += 1

    def send_bodies(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end:
            send("bodies", *rng.choice(others))

    def send_pictures(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end:
            files = [form(data)[0].removesuffix(b"--b--\r\n") for data in rng.choices(images, k=8)]
            send("pictures", "/predict", b"".join(files) + b"--b--\r\n", "multipart/form-data; boundary=b")

    def send_chunks() -> None:
        head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 10, (ATTACKER, 0)) as one:
                one.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n[\r\n" * 500_000)
                one.recv(100)
            counts["bodies of small chunks"] += 1

    def connect() -> None:
        held: list[socket.socket] = []
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), 5, (ATTACKER, 0)))
                held[-1].setblocking(False)
                counts["connections"] += 1
            for one in held:
                with contextlib.suppress(OSError):
                    one.send(b"G")
            while len(held) > SILENT:
                held.pop(0).close()
            time.sleep(0.01)
        for one in held:
            one.close()

    threads = [threading.Thread(target=send_bodies, args=(number,)) for number in range(BODIES)]
    threads += [threading.Thread(target=send_pictures, args=(number,)) for number in range(PICTURES)]
    threads += [threading.Thread(target=send_chunks), threading.Thread(target=connect)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(counts))


def ask(port: int, clients: int, seconds: float, files: list[bytes]) -> dict[str, Any]:
    """Send single pictures from some clients, two a second each; return waits and errors."""
    end, times, errors = time.monotonic() + seconds, list[float](), Counter[str]()

    def client(number: int) -> None:
        step = number
        while time.monotonic() < end:
            body, kind = form(files[step % len(files)])
            step, began = step + 1, time.monotonic()
            try:
                with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
                    connection.request("POST", "/predict", body, {"Content-Type": kind})
                    answer = connection.getresponse()
                    if b'"label"' not in answer.read():
                        errors[str(answer.status)] += 1
            except (OSError, HTTPException) as error:
                errors[type(error).__name__] += 1
            times.append(time.monotonic() - began)
            time.sleep(max(0.0, 0.5 - times[-1]))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answered = sum(wait <= WITHIN for wait in times) - sum(errors.values())
    quantiles = {f"p{q}_ms": round(float(np.percentile(times, q)) * 1000) for q in (50, 95, 100)}
    return {"asked": len(times), "within": answered / len(times), "errors": dict(errors), **quantiles}


def make_model(place: Path, files: dict[str, list[bytes]]) -> None:
    """Save a model of the default method and backbone."""
    from efcil.product import IncrementalClassifier

    model = IncrementalClassifier(device="cpu", progress=False)
    model.learn([data for one in files.values() for data in one], [name for name, one in files.items() for _ in one])
    model.save(place)


def measure(service: Service, options: argparse.Namespace, files: list[bytes]) -> dict[str, Any]:
    """Ask alone, then under attack; watch memory all the time."""
    mib, stop = list[float](), threading.Event()

    def watch() -> None:
        while not stop.wait(0.5):
            with contextlib.suppress(OSError, HTTPException, KeyError):
                found = service.metrics()
                names = ("process_resident_memory_bytes", "efcil_decoders_resident_memory_bytes")
                mib.append(sum(found[name] for name in names) / 2**20)

    watcher = threading.Thread(target=watch)
    watcher.start()
    load = os.getloadavg()[0]
    alone = ask(service.port, options.clients, options.seconds / 4, files)
    command = [sys.executable, __file__, "--attack", str(service.port), "--seconds", str(options.seconds + 3)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        time.sleep(3)  # until it has made its pictures
        attacked = ask(service.port, options.clients, options.seconds, files)
        attackers = json.loads(process.communicate()[0])
    stop.set()
    watcher.join()
    return {
        "seconds": options.seconds,
        "clients": options.clients,
        "load_before": round(load, 2),
        "alone": alone,
        "attacked": attacked,
        "attackers": attackers,
        "most_mib": round(max(mib)),
        "readings": len(mib),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--attack", type=int, metavar="PORT", help=argparse.SUPPRESS)
    add_options(parser)
    options = parser.parse_args(arguments)
    if options.attack:
        attack(options.attack, options.seconds)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        files = pictures(10, classes=5)
        make_model(Path(folder) / "model", files)
        service = Service(Path(folder) / "model", os.cpu_count() or 1)
        try:
            found = measure(service, options, [data for one in files.values() for data in one])
        finally:
            service.close()
    print(json.dumps(found, indent=1))
    write_record(options, __file__, sys.argv[1:] if arguments is None else arguments, attack=found)
    return int(found["attacked"]["within"] < SHARE or found["most_mib"] > MOST_MIB)


if __name__ == "__main__":
    sys.exit(main())
