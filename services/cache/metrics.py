"""The cache service's metrics, read from the counters of its stores. Knows no calls and no clock."""

from services import metrics
from services.cache.counters import Miss, StoreCounters


def metrics_of(results: StoreCounters, blocks: StoreCounters) -> metrics.Metrics:
    """The metrics of the stores of results and of KV blocks."""
    all_ = metrics.Metrics()
    _add(all_, "weft_cache", results)
    _add(all_, "weft_cache_block", blocks)
    return all_


def _add(all_: metrics.Metrics, name: str, counters: StoreCounters) -> None:
    all_.total(f"{name}_hits", "Look-ups that returned a value.", lambda: counters.hits)
    all_.total(
        f"{name}_misses",
        "Look-ups that returned no value, by reason.",
        lambda: metrics.by_label((str(reason), counters.misses[reason]) for reason in Miss),
        "reason",
    )
    all_.total(f"{name}_stores", "Values stored.", lambda: counters.stores)
    all_.total(f"{name}_refused", "Values that were not stored.", lambda: counters.refused)
    all_.total(f"{name}_evictions", "Values that were removed to make room for others.", lambda: counters.evictions)
