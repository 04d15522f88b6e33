"""Counters, gauges and histograms in Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _labelled(name: str, labels: Sequence[tuple[str, str]]) -> str:
    inside = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels)
    return f"{name}{{{inside}}}" if inside else name


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


class Counter:
    """A number that only grows, one for each combination of labels.

    >>> counter = Counter("answers_total", "Answers.", ("status",))
    >>> counter.add("200")
    >>> counter.lines()[-1]
    'answers_total{status="200"} 1'
    """

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()):
        self.name, self.text, self.labels = name, text, tuple(labels)
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}
        self._lock = threading.Lock()

    def add(self, *labels: str, amount: float = 1.0) -> None:
        """Count `amount` more."""
        with self._lock:
            self._values[labels] = self._values.get(labels, 0.0) + amount

    def lines(self) -> list[str]:
        """Return the counter as text."""
        with self._lock:
            values = sorted(self._values.items())
        head = [f"# HELP {self.name} {self.text}", f"# TYPE {self.name} counter"]
        return head + [
            f"{_labelled(self.name, list(zip(self.labels, k, strict=True)))} {_number(v)}" for k, v in values
        ]


class Gauge:
    """A number that is asked for when it is read."""

    def __init__(self, name: str, text: str, value: Callable[[], float]):
        self.name, self.text, self.value = name, text, value

    def lines(self) -> list[str]:
        """Return the gauge as text."""
        return [
            f"# HELP {self.name} {self.text}",
            f"# TYPE {self.name} gauge",
            f"{self.name} {_number(self.value())}",
        ]


class Histogram:
    """How often a value fell below each bound, one row of counts for each combination of labels.

    >>> sizes = Histogram("batch_size", "Pictures of a pass.", (1.0, 4.0))
    >>> sizes.add(3)
    >>> [line for line in sizes.lines() if "bucket" in line]
    ['batch_size_bucket{le="1"} 0', 'batch_size_bucket{le="4"} 1', 'batch_size_bucket{le="+Inf"} 1']
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str] = ()):
        self.name, self.text, self.bounds, self.labels = name, text, tuple(bounds), tuple(labels)
        self._rows: dict[tuple[str, ...], tuple[list[int], list[float]]] = {}
        self._lock = threading.Lock()

    def add(self, value: float, *labels: str) -> None:
        """Count one value."""
        with self._lock:
            counts, total = self._rows.setdefault(labels, ([0] * (len(self.bounds) + 1), [0.0]))
            counts[bisect_left(self.bounds, value)] += 1
            total[0] += value

    def lines(self) -> list[str]:
        """Return the histogram as text, counts summed up from the lowest bound as the format wants them."""
        with self._lock:
            rows = sorted((key, list(counts), total[0]) for key, (counts, total) in self._rows.items())
        found = [f"# HELP {self.name} {self.text}", f"# TYPE {self.name} histogram"]
        bounds = [*map(_number, self.bounds), "+Inf"]
        for key, counts, total in rows:
            labels = list(zip(self.labels, key, strict=True))
            for bound, count in zip(bounds, accumulate(counts), strict=True):
                found.append(f"{_labelled(f'{self.name}_bucket', [*labels, ('le', bound)])} {count}")
            found.append(f"{_labelled(f'{self.name}_sum', labels)} {_number(total)}")
            found.append(f"{_labelled(f'{self.name}_count', labels)} {sum(counts)}")
        return found


def resident_bytes() -> float:
    """Return the memory this process holds; its greatest so far where the system does not tell the present one."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return float(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource
        import sys

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)


class Metrics:
    """All that the service counts."""

    def __init__(self) -> None:
        self.requests = Counter("efcil_requests_total", "Requests answered.", ("method", "route", "status"))
        self.seconds = Histogram("efcil_request_seconds", "Time of a request, body included.", SECONDS, ("route",))
        self.batches = Histogram("efcil_batch_size", "Pictures in one forward pass.", SIZES)
        self.predictions = Counter("efcil_predictions_total", "Pictures answered with a class.")
        self.refused = Counter("efcil_refused_pictures_total", "Pictures that could not be read.")
        self.jobs = Counter("efcil_jobs_total", "Teaching jobs by how they ended.", ("status",))
        self.gauges = [Gauge("process_resident_memory_bytes", "Memory of the serving process.", resident_bytes)]

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge."""
        self.gauges.append(Gauge(name, text, value))

    def text(self) -> str:
        """Return everything in the text format."""
        counted: tuple[Counter | Histogram, ...] = (
            self.requests,
            self.seconds,
            self.batches,
            self.predictions,
            self.refused,
            self.jobs,
        )
        lines = [family.lines() for family in counted] + [gauge.lines() for gauge in self.gauges]
        return "\n".join(line for family in lines for line in family) + "\n"
