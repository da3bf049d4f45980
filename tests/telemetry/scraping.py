"""Reads the metrics of a service as Prometheus does."""

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.mesh.harness import Process


class Scraped:
    """One response of /metrics."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._families = {family.name: family for family in text_string_to_metric_families(text)}

    def type(self, name: str) -> str:
        """The type of a metric; a counter's name is without `_total`."""
        return str(self._families[name].type)

    def value(self, sample: str, **labels: str) -> float:
        """The sum of a sample over the series that have these labels."""
        found = [
            entry.value
            for family in self._families.values()
            for entry in family.samples
            if entry.name == sample and labels.items() <= entry.labels.items()
        ]
        assert found, f"no {sample} {labels} in:\n{self.text}"
        return sum(found)

    def bounds(self, name: str) -> list[float]:
        """Upper bounds of a histogram's buckets."""
        samples = [entry for entry in self._families[name].samples if entry.name == f"{name}_bucket"]
        return list(dict.fromkeys(float(entry.labels["le"]) for entry in samples))

    def series(self) -> int:
        """The number of series."""
        return sum(len(family.samples) for family in self._families.values())


async def scrape(process: Process) -> Scraped:
    """Reads the metrics of a process."""

    def read() -> str:
        url = f"http://127.0.0.1:{process.env['WEFT_METRICS_PORT']}/metrics"
        accept = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
        with urllib.request.urlopen(urllib.request.Request(url, headers=accept), timeout=5) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            return str(answer.read().decode())

    return Scraped(await asyncio.to_thread(read))
