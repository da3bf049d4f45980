"""Counts of a service and how Prometheus reads them: the door to prometheus_client. Knows no name of any metric.

One thread owns all values, that of the event loop: it counts, and it renders what a scrape is answered with. Labels
come from small closed sets (models, codes, reasons), never from what a client wrote; a metric that grows too many
series puts the rest under "other".
"""

import asyncio
import bisect
import http.server
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

MOST_SERIES = 256
OTHER = "other"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The classic format whatever a scraper accepts: under OpenMetrics the colons of `vllm:...` would be rewritten."""
_ANSWER_S = 5.0
_POLL_S = 0.1  # How late the door may notice that it shall close.

# Seconds of requests and tokens as the OpenTelemetry conventions for generative AI have them.
DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKENS = tuple(float(4**power) for power in range(14))
# Seconds of what is short: look-ups, engine steps, work on one text.
SHORT_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

Series = Mapping[tuple[str, ...], float]


class _Family:
    """One metric: its name, help and label names, and what they share."""

    def __init__(self, name: str, help_: str, labels: tuple[str, ...]) -> None:
        self.name = name
        self._help = help_
        self._labels = labels

    def _place(self, labels: tuple[str, ...], known: Mapping[tuple[str, ...], object]) -> tuple[str, ...]:
        """The series that these label values belong to."""
        assert len(labels) == len(self._labels), (self.name, labels)
        if labels in known or len(known) < MOST_SERIES:
            return labels
        return (OTHER,) * len(labels)

    def family(self) -> Metric:
        """The values now."""
        raise NotImplementedError


class Counter(_Family):
    """What only grows. Its name is without the `_total` that readers see."""

    def __init__(self, name: str, help_: str, labels: tuple[str, ...]) -> None:
        super().__init__(name, help_, labels)
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, amount: float, *labels: str) -> None:
        """Counts so many more."""
        values = self._values
        if labels not in values:
            labels = self._place(labels, values)
        values[labels] = values.get(labels, 0.0) + amount

    def family(self) -> Metric:
        """The values now."""
        family = CounterMetricFamily(self.name, self._help, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        return family


class Histogram(_Family):
    """How values are distributed over buckets. Many equal ones cost as little as one."""

    def __init__(self, name: str, help_: str, buckets: tuple[float, ...], labels: tuple[str, ...]) -> None:
        super().__init__(name, help_, labels)
        self._bounds = buckets
        self._counts: dict[tuple[str, ...], list[int]] = {} if labels else {(): [0] * (len(buckets) + 1)}
        self._sums: dict[tuple[str, ...], float] = dict.fromkeys(self._counts, 0.0)

    def observe(self, value: float, *labels: str, times: int = 1) -> None:
        """There was this value, so many times."""
        counts = self._counts.get(labels)
        if counts is None:
            labels = self._place(labels, self._counts)
            counts = self._counts.setdefault(labels, [0] * (len(self._bounds) + 1))
            self._sums.setdefault(labels, 0.0)
        counts[bisect.bisect_left(self._bounds, value)] += times
        self._sums[labels] += value * times

    def family(self) -> Metric:
        """The values now."""
        family = HistogramMetricFamily(self.name, self._help, labels=self._labels)
        bounds = [*map(str, self._bounds), "+Inf"]
        for labels, counts in self._counts.items():
            sums = [sum(counts[: place + 1]) for place in range(len(counts))]
            family.add_metric(labels, list(zip(bounds, sums, strict=True)), self._sums[labels])
        return family


class _Reading(_Family):
    """A gauge or counter that others keep and that is read when somebody asks."""

    def __init__(
        self, kind: "type[GaugeMetricFamily | CounterMetricFamily]", name: str, help_: str,
        read: Callable[[], float | Series], labels: tuple[str, ...],
    ) -> None:  # fmt: skip
        super().__init__(name, help_, labels)
        self._kind = kind
        self._read = read

    def family(self) -> Metric:
        """The values now."""
        family = self._kind(self.name, self._help, labels=self._labels)
        values = self._read()
        series: Series = values if isinstance(values, Mapping) else {(): values}
        for labels, value in list(series.items())[:MOST_SERIES]:
            family.add_metric(labels, value)
        return family


class Metrics:
    """All metrics of one service, those of its process included."""

    def __init__(self) -> None:
        self._families: list[_Family] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def counter(self, name: str, help_: str, *labels: str) -> Counter:
        """A new counter; `name` is without `_total`."""
        counter = Counter(name, help_, labels)
        self._add(counter)
        return counter

    def histogram(self, name: str, help_: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        """A new histogram; buckets are upper bounds, the last one `+Inf` comes by itself."""
        histogram = Histogram(name, help_, buckets, labels)
        self._add(histogram)
        return histogram

    def gauge(self, name: str, help_: str, read: Callable[[], float | Series], *labels: str) -> None:
        """A value that `read` gives when somebody asks; with labels: a mapping from label values."""
        self._add(_Reading(GaugeMetricFamily, name, help_, read, labels))

    def total(self, name: str, help_: str, read: Callable[[], float | Series], *labels: str) -> None:
        """A count that others keep; `name` is without `_total`."""
        self._add(_Reading(CounterMetricFamily, name, help_, read, labels))

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client: everything as of now."""
        return iter([family.family() for family in self._families])

    def render(self) -> bytes:
        """Everything as of now in Prometheus's text format."""
        return generate_latest(self._registry)

    def _add(self, family: _Family) -> None:
        assert all(family.name != other.name for other in self._families), family.name
        self._families.append(family)


class Scrapes:
    """The HTTP door at which Prometheus reads: GET /metrics. Its thread waits for the event loop, which renders."""

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        """Listens (port 0 takes a free one). Raises OSError."""
        loop = asyncio.get_running_loop()

        async def render() -> bytes:
            return metrics.render()

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = _ANSWER_S

            def do_GET(self) -> None:
                if self.path.partition("?")[0] not in ("/", "/metrics"):
                    self.send_error(404)
                    return
                rendered = asyncio.run_coroutine_threadsafe(render(), loop)
                try:
                    body = rendered.result(_ANSWER_S)
                except Exception:  # A loop that is busy for so long, or gone, is what the scraper shall see.
                    rendered.cancel()
                    self.send_error(503)
                    return
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        class Server(socketserver.ThreadingTCPServer):  # An HTTPServer would ask the DNS for its own name.
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            allow_reuse_address = True
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """A scraper that left is nobody's trouble."""

        self._server = Server((host, port), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True).start()

    async def close(self) -> None:
        """Listens no more."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()


def by_label(pairs: Iterable[tuple[str, float]]) -> Series:
    """Values of a metric with one label."""
    return {(label,): value for label, value in pairs}
