"""Prometheus metrics of the service."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

__all__ = ["CONTENT_TYPE", "Metrics"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class Metrics:
    """Metrics of one service in a separate registry."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        labels = ("method", "route", "status")
        self.requests = Counter("efcil_requests", "Requests answered.", labels, registry=registry)
        self.seconds = Histogram(
            "efcil_request_seconds", "Request duration, body included.", ("route",), buckets=SECONDS, registry=registry
        )
        self.batches = Histogram("efcil_batch_size", "Images per forward pass.", buckets=SIZES, registry=registry)
        self.predictions = Counter("efcil_predictions", "Classified images.", registry=registry)
        self.refused = Counter("efcil_refused_images", "Unreadable images.", registry=registry)
        self.jobs = Counter("efcil_jobs", "Update jobs by final status.", ("status",), registry=registry)
        ProcessCollector(registry=registry)

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge; `value` is called when it is collected."""
        Gauge(name, text, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """Return all metrics in Prometheus text format."""
        return generate_latest(self.registry)
