"""Throughput of `efcil serve` against a bare loop over the same model, in one run.

    python benchmarks/serve.py [--clients 32] [--seconds 20] [--rounds 3] [--check 0.8]
    python benchmarks/serve.py --soak 180 --clients 8

The bare loops run in this process, with the threads that the service has: one picture after another from the bytes of
a JPEG file to probabilities (`single`), and batches of 32 pictures that are decoded already (`batch`), which no service
can beat. The clients are threads of one more process on the same cores. ResNet-18 at 64 pixels, as in the issue.

Beside other busy processes threads that spin while they wait (the default) slow the bare loops down ten times or more,
and the service, whose threads sleep, not at all: run it with OMP_WAIT_POLICY=PASSIVE then, which holds for both.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

import numpy as np

CLASSES, SIZE = 10, 64
TOKEN = "benchmark"


def pictures(count: int) -> list[bytes]:
    from PIL import Image

    from efcil.data import glyphs

    data = glyphs.load(classes=CLASSES, size=160, train_per_class=max(2, count // CLASSES), test_per_class=1)
    found = []
    for image in np.asarray(data.train.images)[:count]:
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(file, "JPEG", quality=90)
        found.append(file.getvalue())
    return found


def make_model(place: Path, backbone: str) -> None:
    from efcil.data import glyphs
    from efcil.model import IncrementalClassifier

    data = glyphs.load(classes=CLASSES, size=SIZE, train_per_class=10, test_per_class=1)
    model = IncrementalClassifier(backbone=backbone, size=SIZE, epochs=1, device="cpu", progress=False)
    model.learn(data)
    model.save(place)


def bare(place: Path, files: list[bytes], seconds: float) -> dict[str, float]:
    """Pictures a second of the two loops without a service."""
    import torch

    from efcil.data.decode import read_image
    from efcil.model import IncrementalClassifier

    model = IncrementalClassifier.load(place, device="cpu")
    batch = torch.from_numpy(np.stack([read_image(data, SIZE) for data in (files * 32)[:32]]))
    found = {}
    for name, count, step in (
        ("single", 1, lambda i: model.predict_proba([files[i % len(files)]])),
        ("batch", 32, lambda i: model.predict_proba(batch)),
    ):
        step(0)
        begin, done = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            step(done)
            done += 1
        found[name] = done * count / (time.perf_counter() - begin)
    return found


def form(data: bytes) -> tuple[bytes, str]:
    head = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.jpg"\r\n\r\n'
    return head + data + b"\r\n--b--\r\n", "multipart/form-data; boundary=b"


def ask(port: int, clients: int, seconds: float, paths: list[str]) -> None:
    """Ask as many clients at once, each the next as soon as it has its answer; print the times of all."""
    bodies = [form(Path(path).read_bytes()) for path in paths]
    times: list[list[float]] = [[] for _ in range(clients)]
    errors = [0] * clients
    end = time.perf_counter() + seconds

    def client(number: int) -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=120)
        step = number
        while (begin := time.perf_counter()) < end:
            body, kind = bodies[step % len(bodies)]
            step += 1
            connection.request("POST", "/predict", body, {"Content-Type": kind})
            answer = connection.getresponse()
            text = answer.read()
            errors[number] += answer.status != 200 or b'"label"' not in text
            times[number].append(time.perf_counter() - begin)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"times": [t for mine in times for t in mine], "errors": sum(errors)}))


def asked(port: int, clients: int, seconds: float, folder: Path) -> dict[str, float]:
    paths = [str(path) for path in sorted(folder.glob("*.jpg"))]
    order = json.dumps({"port": port, "clients": clients, "seconds": seconds, "paths": paths})
    begin = time.perf_counter()
    out = subprocess.run([sys.executable, __file__, "--ask"], input=order, capture_output=True, text=True, check=True)
    found = json.loads(out.stdout)
    times = np.array(found["times"])
    ms = {f"p{q}_ms": float(np.percentile(times, q) * 1000) for q in (50, 90, 99)}
    return {"per_second": len(times) / seconds, "errors": found["errors"], "wall": time.perf_counter() - begin, **ms}


class Service:
    """`efcil serve` in a process."""

    def __init__(self, place: Path, threads: int):
        command = [sys.executable, "-m", "efcil", "serve", str(place), "--port", "0", "--threads", str(threads)]
        env = {**os.environ, "EFCIL_TOKEN": TOKEN, "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen([*command, "--device", "cpu"], stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        found = re.search(r":(\d+)\s*$", self.process.stdout.readline())
        assert found is not None
        self.port = int(found[1])

    def metrics(self) -> dict[str, float]:
        """What the service has counted."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    def close(self) -> None:
        """End the service."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def soak(service: Service, clients: int, seconds: float, folder: Path) -> float:
    """Ask for a long time and return the growth of memory in percent, after the first sixth."""
    sizes = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(5):
            sizes.append(service.metrics()["process_resident_memory_bytes"] / 2**20)

    thread = threading.Thread(target=watch)
    thread.start()
    found = asked(service.port, clients, seconds, folder)
    stop.set()
    thread.join()
    settled = sizes[len(sizes) // 6 :]
    third = max(1, len(settled) // 3)
    first, last = float(np.median(settled[:third])), float(np.median(settled[-third:]))
    print(f"soak: {found['per_second']:.1f} pictures/s for {seconds:.0f} s, {found['errors']} errors")
    print(f"soak: MiB every 5 s: {' '.join(f'{size:.0f}' for size in sizes)}")
    growth = 100 * (last / first - 1)
    print(f"soak: median of the first third {first:.1f} MiB, of the last {last:.1f} MiB: {growth:+.2f} %")
    return growth


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--check", type=float, help="least ratio to the single loop; exit 1 below it")
    parser.add_argument("--soak", type=float, help="ask for so many seconds and watch the memory instead")
    parser.add_argument("--ask", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        ask(**json.loads(sys.stdin.readline()))
        return 0
    import torch

    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        files = pictures(100)
        for number, data in enumerate(files):
            (root / f"{number}.jpg").write_bytes(data)
        make_model(root / "model", options.backbone)
        if options.soak:
            service = Service(root / "model", options.threads)
            growth = soak(service, options.clients, options.soak, root)
            service.close()
            return int(growth > 5)
        rounds = []
        service = Service(root / "model", options.threads)
        asked(service.port, options.clients, 3, root)
        for _ in range(options.rounds):  # in turn, so that whatever else the machine does falls on all of them
            loops = bare(root / "model", files, options.seconds / 2)
            begun = service.metrics()
            found = asked(service.port, options.clients, options.seconds, root)
            ended = service.metrics()
            passes, sizes = (ended[f"efcil_batch_size_{k}"] - begun[f"efcil_batch_size_{k}"] for k in ("count", "sum"))
            rounds.append({**loops, **found, "size": sizes / passes})
            say(rounds[-1])
        service.close()
    print(f"median of {len(rounds)} rounds, {options.clients} clients, {options.threads} threads, {options.backbone}:")
    median = {key: float(np.median([one[key] for one in rounds])) for key in rounds[0]}
    say(median)
    ratio = median["per_second"] / median["single"]
    failed = any(one["errors"] for one in rounds) or (options.check is not None and ratio < options.check)
    return int(failed)


def say(one: dict[str, float]) -> None:
    ratios = [one["per_second"] / one[name] for name in ("single", "batch")]
    print(
        f"  bare loop {one['single']:.1f}/s, in batches of 32 {one['batch']:.1f}/s; "
        f"served {one['per_second']:.1f}/s, {one['errors']:.0f} errors, p50 {one['p50_ms']:.0f} ms, "
        f"p90 {one['p90_ms']:.0f} ms, p99 {one['p99_ms']:.0f} ms, batches of {one['size']:.1f}; "
        f"ratio {ratios[0]:.2f} (batches {ratios[1]:.2f})",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
