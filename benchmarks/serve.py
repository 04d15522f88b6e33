"""Throughput of `efcil serve` compared with a plain loop over the same model.

    python benchmarks/serve.py [--clients 32] [--seconds 20] [--rounds 3] [--check 0.8] [--out FILE]
    python benchmarks/serve.py --soak 1200 --clients 8 [--out FILE]

The plain loops run in this process with the same number of threads: single JPEG files to probabilities (`single`), and
batches of 32 decoded images (`batch`), an upper bound. Clients are threads of another process on the same cores.
ResNet-18 at 64 pixels. Then one client sends single images, first alone and then during an update with five new
classes.

The soak test sends requests for a long time and samples memory every 5 seconds; it fails if the median of the last
third is more than 5 % above that of the first, or on any error.

On a busy machine, spinning OpenMP threads (the default) slow down the plain loops tenfold or more, but not the service,
whose threads sleep; set OMP_WAIT_POLICY=PASSIVE for a fair comparison.
"""

from __future__ import annotations

import argparse
import contextlib
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
import zipfile
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for use as a script

CLASSES, NEW, SIZE = 10, 5, 64
TOKEN = "benchmark"
MOST_GROWTH = 5.0  # memory growth limit in percent
EVERY = 5.0  # memory sampling interval in seconds


def pictures(count: int, first: int = 0, classes: int = CLASSES) -> dict[str, list[bytes]]:
    """Render JPEG files of 160 x 160 glyphs, `count` per class."""
    from PIL import Image

    from efcil.data import glyphs

    data = glyphs.load(classes=first + classes, size=160, train_per_class=count, test_per_class=1)
    found: dict[str, list[bytes]] = {}
    for image, label in zip(np.asarray(data.train.images), data.train.labels, strict=True):
        if label >= first:
            file = io.BytesIO()
            Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(file, "JPEG", quality=90)
            found.setdefault(data.class_names[label], []).append(file.getvalue())
    return found


def zipped(files: dict[str, list[bytes]]) -> bytes:
    """Return a zip file of class folders."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, pictures_of in files.items():
            for number, data in enumerate(pictures_of):
                archive.writestr(f"{name}/{number}.jpg", data)
    return out.getvalue()


def make_model(place: Path, backbone: str) -> None:
    from efcil.data import glyphs
    from efcil.product import IncrementalClassifier

    data = glyphs.load(classes=CLASSES, size=SIZE, train_per_class=10, test_per_class=1)
    model = IncrementalClassifier(backbone=backbone, size=SIZE, epochs=1, device="cpu", progress=False)
    model.learn(data)
    model.save(place)


def bare(place: Path, files: list[bytes], seconds: float) -> dict[str, float]:
    """Measure images per second of the two plain loops."""
    import torch

    from efcil.data.decode import read_image
    from efcil.product import IncrementalClassifier

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


def form(data: bytes, field: str = "files", **texts: str) -> tuple[bytes, str]:
    head = b'--b\r\nContent-Disposition: form-data; name="%s"' % field.encode()
    parts = [head + b'; filename="a"\r\n\r\n' + data + b"\r\n"]
    for name, text in texts.items():
        parts.append(f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n'.encode())
    return b"".join(parts) + b"--b--\r\n", "multipart/form-data; boundary=b"


def ask(port: int, clients: int, seconds: float, paths: list[str]) -> None:
    """Run concurrent clients that send requests one after the other; print all latencies."""
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


def _path_of(source: Path | None) -> dict[str, str]:
    return {} if source is None else {"PYTHONPATH": f"{source.resolve() / 'src'}{os.pathsep}{source.resolve()}"}


class Service:
    """`efcil serve` in a subprocess."""

    def __init__(self, place: Path, threads: int, source: Path | None = None):
        """Serve a model, with the code of another source tree if one is given."""
        command = [sys.executable, "-m", "efcil", "serve", str(place), "--port", "0", "--threads", str(threads)]
        env = {**os.environ, "EFCIL_TOKEN": TOKEN, "OMP_NUM_THREADS": str(threads)} | _path_of(source)
        self.process = subprocess.Popen([*command, "--device", "cpu"], stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        found = re.search(r":(\d+)\s*$", self.process.stdout.readline())
        assert found is not None
        self.port = int(found[1])

    def answer(self, method: str, path: str, body: bytes | None = None, kind: str = "") -> bytes:
        """Send a request with the token and return the response body."""
        head = {"Authorization": f"Bearer {TOKEN}"} | ({"Content-Type": kind} if kind else {})
        with contextlib.closing(HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, body, head)
            return connection.getresponse().read()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the service."""
        lines = self.answer("GET", "/metrics").decode().splitlines()
        return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    def teach(self, archive: bytes, seconds: float) -> str:
        """Start an update with a time limit; return its job."""
        answer = json.loads(self.answer("POST", "/teach", *form(archive, "archive", budget=str(seconds))))
        return str(answer["job"])

    def job(self, name: str) -> dict[str, Any]:
        """Return the state of a job."""
        found: dict[str, Any] = json.loads(self.answer("GET", f"/jobs/{name}"))
        return found

    def close(self) -> None:
        """Stop the service."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)


def soak(service: Service, clients: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Run the soak test; return images per second, errors, memory samples in MiB and memory growth in percent."""
    sizes = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(min(EVERY, seconds / 6)):
            sizes.append(round(service.metrics()["process_resident_memory_bytes"] / 2**20, 1))

    thread = threading.Thread(target=watch)
    thread.start()
    found = asked(service.port, clients, seconds, folder)
    stop.set()
    thread.join()
    return {"seconds": seconds, "clients": clients, **found, "mib": sizes, "growth": growth(sizes)}


def growth(sizes: list[float]) -> float:
    """Return the growth in percent from the median of the first third to that of the last, after a warm-up of one
    sixth.

    >>> growth([50, 100, 100, 100, 100, 110, 110])
    10.0
    """
    settled = sizes[len(sizes) // 6 :]
    third = max(1, len(settled) // 3)
    first, last = float(np.median(settled[:third])), float(np.median(settled[-third:]))
    return round(100 * (last / first - 1), 3)


def taught_meanwhile(service: Service, seconds: float, folder: Path) -> dict[str, Any]:
    """Measure latencies of one client, alone and during an update."""
    alone = asked(service.port, 1, seconds, folder)
    job = service.teach(zipped(pictures(20, CLASSES, NEW)), 2 * seconds)
    teaching = asked(service.port, 1, seconds, folder)
    running = (state := service.job(job))["status"] == "running"  # the update lasted longer than all requests
    while state["status"] in ("queued", "running"):
        time.sleep(0.2)
        state = service.job(job)
    return {"alone": alone, "teaching": teaching, "job": state["status"], "job_outlasted_the_questions": running}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--check", type=float, help="minimum ratio to the single loop; exit 1 below it")
    parser.add_argument("--before", type=Path, help="source tree of an earlier version, asked in turns with this one")
    parser.add_argument("--soak", type=float, help="run the soak test for this many seconds instead")
    if sys.argv[1:] == ["--ask"]:
        ask(**json.loads(sys.stdin.readline()))
        return 0
    from benchmarks.record import add_options, write_record

    add_options(parser)
    options = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(options.threads)
    about = {"clients": options.clients, "threads": options.threads, "backbone": options.backbone}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        files = [data for pictures_of in pictures(10).values() for data in pictures_of]
        for number, data in enumerate(files):
            (root / f"{number}.jpg").write_bytes(data)
        make_model(root / "model", options.backbone)
        service = Service(root / "model", options.threads)
        try:
            if options.soak:
                found = {**about, **soak(service, options.clients, options.soak, root)}
            elif options.before:
                found = {**about, **compared(service, root, options.before, options)}
            else:
                found = {**about, **throughput(service, root, files, options)}
        finally:
            service.close()
    given = sys.argv[1:] if arguments is None else arguments
    if options.soak:
        say_soak(found)
        write_record(options, __file__, given, soak=found)
        return int(found["growth"] > MOST_GROWTH or found["errors"] > 0)
    if options.before:
        write_record(options, __file__, given, compared=found)
        return int(found["errors"] > 0 or (options.check is not None and found["ratio"] < options.check))
    write_record(options, __file__, given, serve=found)
    return int(found["errors"] > 0 or (options.check is not None and found["ratio"] < options.check))


def throughput(service: Service, root: Path, files: list[bytes], options: argparse.Namespace) -> dict[str, Any]:
    """Alternate plain loops and the service, so that other load on the machine affects both."""
    rounds = []
    asked(service.port, options.clients, min(3.0, options.seconds), root)
    for _ in range(options.rounds):
        loops = bare(root / "model", files, options.seconds / 2)
        begun = service.metrics()
        found = asked(service.port, options.clients, options.seconds, root)
        ended = service.metrics()
        passes, sizes = (ended[f"efcil_batch_size_{k}"] - begun[f"efcil_batch_size_{k}"] for k in ("count", "sum"))
        rounds.append({**loops, **found, "size": sizes / passes})
        say(rounds[-1])
    median = {key: float(np.median([one[key] for one in rounds])) for key in rounds[0]}
    print(f"median of {len(rounds)} rounds, {options.clients} clients, {options.threads} threads, {options.backbone}:")
    say(median)
    meanwhile = taught_meanwhile(service, options.seconds, root)
    for name, one in meanwhile.items():
        print(f"  one client, {name}: {one}")
    return {
        "rounds": rounds,
        "median": median,
        "ratio": median["per_second"] / median["single"],
        "ratio_to_batches": median["per_second"] / median["batch"],
        "errors": sum(one["errors"] for one in (*rounds, meanwhile["alone"], meanwhile["teaching"])),
        "meanwhile": meanwhile,
    }


def compared(service: Service, root: Path, before: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Ask this service and that of an earlier source tree in turns; each has a model that its own code made."""
    make = "import sys, pathlib, benchmarks.serve as b; b.make_model(pathlib.Path(sys.argv[1]), sys.argv[2])"
    command = [sys.executable, "-c", make, str(root / "before"), options.backbone]
    subprocess.run(command, check=True, cwd=before, env={**os.environ} | _path_of(before))
    earlier = Service(root / "before", options.threads, before)
    rounds: list[dict[str, float]] = []
    try:
        services = {"before": earlier, "now": service}
        for one in services.values():
            asked(one.port, options.clients, min(3.0, options.seconds), root)
        for number in range(options.rounds):
            found = {"load": os.getloadavg()[0]}
            for name in sorted(services, reverse=bool(number % 2)):
                answer = asked(services[name].port, options.clients, options.seconds, root)
                found |= {name: answer["per_second"], f"{name}_errors": answer["errors"]}
            rounds.append(found)
            print(f"  before {found['before']:.1f}/s, now {found['now']:.1f}/s, load {found['load']:.1f}", flush=True)
    finally:
        earlier.close()
    ratio = float(np.median([one["now"] / one["before"] for one in rounds]))
    print(f"median ratio of {len(rounds)} rounds: {ratio:.2f}")
    return {"rounds": rounds, "ratio": ratio, "errors": sum(one["now_errors"] for one in rounds)}


def say_soak(found: dict[str, Any]) -> None:
    print(f"soak: {found['per_second']:.1f} pictures/s for {found['seconds']:.0f} s, {found['errors']} errors")
    print(f"soak: MiB every {EVERY:.0f} s: {' '.join(f'{size:.0f}' for size in found['mib'])}")
    print(f"soak: from the first third to the last {found['growth']:+.2f} %")


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
