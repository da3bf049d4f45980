"""Metrics of a service and the HTTP server where Prometheus reads them. Knows no metric's name; only this file imports
prometheus_client.

The thread of the event loop owns all values: it counts, and it renders the answers to scrapes. Label values come from
small closed sets (models, codes, reasons), never from a client's text; a metric with too many series counts the rest
under "other".
"""

import asyncio
import bisect
import http.server
import socket
import socketserver
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

MOST_SERIES = 256
OTHER = "other"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus's text format for every scraper: OpenMetrics would replace the colons of `vllm:...`."""
_ANSWER_S = 5.0
_POLL_S = 0.1  # How often the server thread checks whether it was shut down.

# Buckets in seconds and tokens, from the OpenTelemetry conventions for generative AI.
DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKENS = tuple(float(4**power) for power in range(14))
# Buckets in seconds for short operations: look-ups, engine steps, tokenizing.
SHORT_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

Series = Mapping[tuple[str, ...], float]


class _Family:
    """One metric: its name, help text and label names."""

    def __init__(self, name: str, help_: str, labels: tuple[str, ...]) -> None:
        self.name = name
        self._help = help_
        self._labels = labels

    def _series(self, labels: tuple[str, ...], known: Mapping[tuple[str, ...], object]) -> tuple[str, ...]:
        """The label values to count under: `labels`, or "other" if the metric has too many series."""
        assert len(labels) == len(self._labels), (self.name, labels)
        if labels in known or len(known) < MOST_SERIES:
            return labels
        return (OTHER,) * len(labels)

    def family(self) -> Metric:
        """The current values."""
        raise NotImplementedError


class Counter(_Family):
    """A value that only grows. `name` is without the suffix `_total`, which Prometheus shows."""

    def __init__(self, name: str, help_: str, labels: tuple[str, ...]) -> None:
        super().__init__(name, help_, labels)
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, amount: float, *labels: str) -> None:
        """Adds to the series with these label values."""
        values = self._values
        if labels not in values:
            labels = self._series(labels, values)
        values[labels] = values.get(labels, 0.0) + amount

    def family(self) -> Metric:
        """The current values."""
        family = CounterMetricFamily(self.name, self._help, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        return family


class Histogram(_Family):
    """The distribution of values over buckets. Observing many equal values costs as much as one."""

    def __init__(self, name: str, help_: str, buckets: tuple[float, ...], labels: tuple[str, ...]) -> None:
        super().__init__(name, help_, labels)
        self._bounds = buckets
        self._counts: dict[tuple[str, ...], list[int]] = {} if labels else {(): [0] * (len(buckets) + 1)}
        self._sums: dict[tuple[str, ...], float] = dict.fromkeys(self._counts, 0.0)

    def observe(self, value: float, *labels: str, times: int = 1) -> None:
        """Counts a value `times` times."""
        counts = self._counts.get(labels)
        if counts is None:
            labels = self._series(labels, self._counts)
            counts = self._counts.setdefault(labels, [0] * (len(self._bounds) + 1))
            self._sums.setdefault(labels, 0.0)
        counts[bisect.bisect_left(self._bounds, value)] += times
        self._sums[labels] += value * times

    def family(self) -> Metric:
        """The current values."""
        family = HistogramMetricFamily(self.name, self._help, labels=self._labels)
        bounds = [*map(str, self._bounds), "+Inf"]
        for labels, counts in self._counts.items():
            sums = [sum(counts[: place + 1]) for place in range(len(counts))]
            family.add_metric(labels, list(zip(bounds, sums, strict=True)), self._sums[labels])
        return family


class _Callback(_Family):
    """A gauge or counter whose value is read from a function at each scrape."""

    def __init__(
        self, kind: "type[GaugeMetricFamily | CounterMetricFamily]", name: str, help_: str,
        read: Callable[[], float | Series], labels: tuple[str, ...],
    ) -> None:  # fmt: skip
        super().__init__(name, help_, labels)
        self._kind = kind
        self._read = read

    def family(self) -> Metric:
        """The current values."""
        family = self._kind(self.name, self._help, labels=self._labels)
        values = self._read()
        series: Series = values if isinstance(values, Mapping) else {(): values}
        for labels, value in list(series.items())[:MOST_SERIES]:
            family.add_metric(labels, value)
        return family


class Metrics:
    """All metrics of one service, including those of its process."""

    def __init__(self) -> None:
        self._families: list[_Family] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def counter(self, name: str, help_: str, *labels: str) -> Counter:
        """Adds a counter; `name` is without `_total`."""
        counter = Counter(name, help_, labels)
        self._add(counter)
        return counter

    def histogram(self, name: str, help_: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        """Adds a histogram; `buckets` are upper bounds without the last one, `+Inf`."""
        histogram = Histogram(name, help_, buckets, labels)
        self._add(histogram)
        return histogram

    def gauge(self, name: str, help_: str, read: Callable[[], float | Series], *labels: str) -> None:
        """Adds a gauge that `read` returns at each scrape; with labels, `read` returns a mapping from label values."""
        self._add(_Callback(GaugeMetricFamily, name, help_, read, labels))

    def total(self, name: str, help_: str, read: Callable[[], float | Series], *labels: str) -> None:
        """Adds a counter that `read` returns at each scrape; `name` is without `_total`."""
        self._add(_Callback(CounterMetricFamily, name, help_, read, labels))

    def collect(self) -> Iterator[Metric]:
        """The current values of all metrics, for prometheus_client."""
        return iter([family.family() for family in self._families])

    def render(self) -> bytes:
        """The current values of all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    async def rendered(self) -> bytes:
        """The same as `render`, for `MetricsServer`."""
        return self.render()

    def _add(self, family: _Family) -> None:
        assert all(family.name != other.name for other in self._families), family.name
        self._families.append(family)


class MetricsServer:
    """Serves GET /metrics over HTTP. Its thread waits for the event loop, which renders the metrics."""

    def __init__(self, render: Callable[[], Awaitable[bytes]], host: str, port: int) -> None:
        """Listens; port 0 takes a free port. `render` runs in the calling event loop. Raises OSError."""
        loop = asyncio.get_running_loop()

        async def answer() -> bytes:
            return await render()

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = _ANSWER_S

            def do_GET(self) -> None:
                if self.path.partition("?")[0] not in ("/", "/metrics"):
                    self.send_error(404)
                    return
                rendered = asyncio.run_coroutine_threadsafe(answer(), loop)
                try:
                    body = rendered.result(_ANSWER_S)
                except Exception:  # The event loop is blocked or has ended.
                    rendered.cancel()
                    self.send_error(503)
                    return
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Logs no requests."""

        class Server(socketserver.ThreadingTCPServer):  # HTTPServer would resolve its own name.
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            allow_reuse_address = True
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """Ignores scrapers that disconnect early."""

        self._server = Server((host, port), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True).start()

    async def close(self) -> None:
        """Stops the server."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()


def by_label(pairs: Iterable[tuple[str, float]]) -> Series:
    """The series of a metric with one label, from (label value, value)."""
    return {(label,): value for label, value in pairs}


def merged(texts: Mapping[str, bytes]) -> bytes:
    """The metrics of several processes, by name of the process, as one text: each series gets the label `process`."""
    families: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text.decode()):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                whole.add_sample(sample.name, {**sample.labels, "process": name}, sample.value)
    return generate_latest(_Given(families.values()))


class _Given(CollectorRegistry):
    """A registry of families that are given."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """The families."""
        return iter(self._families)
