"""`efcil serve` in a process of its own, and what its clients need."""

import contextlib
import os
import re
import subprocess
import sys
import time

import httpx2 as httpx

TOKEN = "a-token-for-tests"
AUTH = {"Authorization": f"Bearer {TOKEN}"}
LONG = 120.0  # seconds that something may take on a busy machine before it is taken for hung


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

    def __init__(self, model, *arguments, **environment):
        command = [sys.executable, "-m", "efcil", "serve", str(model), "--port", "0", "--device", "cpu", *arguments]
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
                    if parent == self.process.pid:
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
