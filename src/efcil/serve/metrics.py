"""What the service counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

__all__ = ["CONTENT_TYPE", "Metrics"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class Metrics:
    """The metrics of one service, in a registry of their own."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        labels = ("method", "route", "status")
        self.requests = Counter("efcil_requests", "Requests answered.", labels, registry=own)
        self.seconds = Histogram(
            "efcil_request_seconds", "Time of a request, body included.", ("route",), buckets=SECONDS, registry=own
        )
        self.batches = Histogram("efcil_batch_size", "Pictures in one forward pass.", buckets=SIZES, registry=own)
        self.predictions = Counter("efcil_predictions", "Pictures answered with a class.", registry=own)
        self.refused = Counter("efcil_refused_images", "Pictures that could not be read.", registry=own)
        self.jobs = Counter("efcil_jobs", "Teaching jobs by how they ended.", ("status",), registry=own)
        ProcessCollector(registry=own)

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge; `value` is called whenever it is read."""
        Gauge(name, text, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)
