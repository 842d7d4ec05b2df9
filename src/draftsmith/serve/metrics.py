"""The server's metrics, as `/metrics` serves them for Prometheus."""

from __future__ import annotations

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from draftsmith.serve.scheduler import BatchRecord

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.5, 5.0, 10.0)


class ServerMetrics:
    """Metrics of one server, in a registry of its own."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.sessions = Gauge("live_sessions", "Open sessions", registry=registry)
        self.hypotheses = Counter("live_hypotheses", "Hypotheses taken in", registry=registry)
        self.coalesced = Counter(
            "live_coalesced", "Hypotheses whose place a newer one took", registry=registry
        )
        self.updates = Counter("live_updates", "Updates decoded", registry=registry)
        self.finals = Counter("live_finals", "Final updates decoded", registry=registry)
        self.retried = Counter(
            "live_retried", "Updates decoded once more, from scratch", registry=registry
        )
        self.failed = Counter("live_failed", "Updates that could not be decoded", registry=registry)
        self.tokens = Counter("live_tokens", "Tokens of outputs", registry=registry)
        self.drafted = Counter("live_drafted", "Tokens drafted", registry=registry)
        self.accepted = Counter("live_accepted", "Drafted tokens that stayed", registry=registry)
        self.rows = Histogram(
            "live_batch_rows",
            "Sessions decoded side by side",
            buckets=(1, 2, 4, 8, 16, 32),
            registry=registry,
        )
        self.seconds = Histogram(
            "live_batch_seconds", "Duration of a batch", buckets=_SECONDS, registry=registry
        )
        self.errors = Counter("live_errors", "Refused frames", ["code"], registry=registry)

    def count(self, batch: BatchRecord) -> None:
        """Add one batch."""
        self.rows.observe(batch.rows)
        self.seconds.observe(batch.seconds)
        self.retried.inc(batch.retried)
        self.failed.inc(batch.failed)
        for record in batch.records:
            self.updates.inc()
            self.finals.inc(record.final)
            self.tokens.inc(record.tokens)
            self.drafted.inc(record.drafted)
            self.accepted.inc(record.accepted)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
