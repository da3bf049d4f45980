"""What the cache service counts: names of its metrics, read off the store's counters. Latencies are counted by rpc."""

from services import metrics
from services.cache.counters import Counters, Miss


def metrics_of(counters: Counters) -> metrics.Metrics:
    """The metrics of a store with these counters."""
    all_ = metrics.Metrics()
    all_.total("weft_cache_hits", "Look-ups that found a value.", lambda: counters.hits)
    all_.total(
        "weft_cache_misses",
        "Look-ups that did not, and why.",
        lambda: metrics.by_label((str(reason), counters.misses[reason]) for reason in Miss),
        "reason",
    )
    all_.total("weft_cache_stores", "Values stored.", lambda: counters.stores)
    all_.total("weft_cache_refused", "Values that were not stored.", lambda: counters.refused)
    all_.total("weft_cache_evictions", "Values removed to make room.", lambda: counters.evictions)
    return all_
