"""The service in this process and in one of its own, and what its clients need."""

import atexit
import contextlib
import functools
import io
import os
import re
import subprocess
import sys
import time
import zipfile

import httpx2 as httpx
import numpy as np
from fastapi.testclient import TestClient
from PIL import Image

from efcil.serve.app import create_app
from efcil.serve.decoding import Decoders
from efcil.serve.limits import Limits
from efcil.serve.service import Service

TOKEN = "a-token-for-tests"
AUTH = {"Authorization": f"Bearer {TOKEN}"}
SIZE = 16
KNOWN = ["0", "1", "2"]  # classes of the fixture `taught`
LONG = 120.0  # seconds that something may take on a busy machine before it is taken for hung


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(file, "PNG")
    return file.getvalue()


@functools.cache
def shared_decoders():
    """Decoding processes of all services in this process that have the usual limits: to start them takes a second."""
    decoders = Decoders(Limits(), 1)
    decoders.start()
    atexit.register(decoders.close)
    return decoders


@contextlib.contextmanager
def client_of(model, **options):
    if "limits" not in options:
        options["decoders"] = shared_decoders()
    service = Service(model, device="cpu", teach_threads=1, **options)
    with TestClient(create_app(service, TOKEN), base_url="http://localhost", raise_server_exceptions=False) as client:
        client.service = service
        yield client


def zipped(entries, **options):
    """A zip of {path: bytes}, or of (ZipInfo, bytes)."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as archive:
        for name, data in entries.items() if isinstance(entries, dict) else entries:
            archive.writestr(name, data)
    return file.getvalue()


def teach_zip(client, data, headers=AUTH, **fields):
    return client.post("/teach", files={"archive": ("a.zip", data, "application/zip")}, data=fields, headers=headers)


def as_files(pictures, field="files"):
    return [(field, (f"{number}.png", data, "image/png")) for number, data in enumerate(pictures)]


def until(found, what):
    """Wait for something that is true, and return it."""
    end = time.monotonic() + LONG
    while not (value := found()):
        assert time.monotonic() < end, f"{what}: not within {LONG:.0f} seconds"
        time.sleep(0.02)
    return value


class Served:
    """`efcil serve` in a process."""

    def __init__(self, model, *arguments, files=None, **environment):
        """Start it; with `files`, as a process that may open so many."""
        command = [sys.executable, "-m", "efcil", "serve", str(model), "--port", "0", "--device", "cpu", *arguments]
        if files is not None:
            command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "EFCIL_TOKEN": TOKEN, **environment}
        env = {key: value for key, value in env.items() if value is not None}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        self.line = self.process.stdout.readline()
        found = re.search(r"https?://\S+", self.line)
        assert found, self.line + self.process.communicate()[1]
        self.http = httpx.Client(base_url=found[0], timeout=LONG)

    def __enter__(self):
        try:
            self.http.get("/health")  # it listens when its line is printed: the answer comes when it has started
        except httpx.TransportError as error:
            self.process.kill()
            raise AssertionError(f"the service does not answer: {self.process.communicate()[1]}") from error
        return self

    def __exit__(self, *_):
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def teach(self, label, pictures, **fields):
        answer = self.http.post("/teach", data={"label": label, **fields}, files=as_files(pictures), headers=AUTH)
        assert answer.status_code == 202, answer.text
        return answer.json()["job"]

    def worker(self):
        """Id of the process that teaches, once there is one."""

        def child():
            for entry in os.listdir("/proc"):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    with open(f"/proc/{int(entry)}/stat") as file:
                        parent = int(file.read().rpartition(")")[2].split()[1])
                    with open(f"/proc/{int(entry)}/cmdline") as file:
                        if parent == self.process.pid and "efcil.serve.worker" in file.read():
                            return int(entry)
            return None

        return until(child, "a process teaches")


def gone(process):
    """Wait until a process has ended."""

    def over():
        try:
            with open(f"/proc/{process}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):  # the latter where it goes between opening and reading
            return True

    return until(over, "the process ends")
