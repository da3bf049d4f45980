"""A worker's metrics: their names and labels. Updated once at each step and each end of a job.

Dashboards, autoscalers and gateways made for vLLM read the `vllm:` names, which mean what they mean in vLLM.
"""

import sys
import time
from collections.abc import Callable

from services import metrics
from services.worker.job import Ended, EndReason, GuessCounts, Stats

_REASONS = {
    EndReason.STOP: "stop",
    EndReason.LENGTH: "length",
    EndReason.CANCELLED: "abort",
    EndReason.DEADLINE: "abort",
    EndReason.ERROR: "error",
}
_ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
           160.0, 640.0, 2560.0)  # fmt: skip
_REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
              960.0, 1920.0, 7680.0)  # fmt: skip


class WorkerMetrics:
    """The metrics of one worker. Those of its engine are added once that is loaded."""

    def __init__(self) -> None:
        self.all = metrics.Metrics()
        self._model = ""
        self._last_step_at = 0.0
        self._begun = 0
        """Tokens of a step that is not over."""
        add = self.all
        self._jobs = add.counter("weft_worker_jobs", "Ended jobs by reason.", "model", "reason")
        self._prefill = add.counter("weft_worker_prefill_tokens", "Prompt tokens computed.", "model")
        self._fetched = add.counter(
            "weft_worker_fetched_tokens", "Prompt tokens whose KV was fetched from a lower tier.", "model"
        )
        self._step = add.histogram("weft_worker_step_seconds", "Duration of engine steps.", metrics.SHORT_S, "model")
        self._rows = add.histogram("weft_worker_step_tokens", "New tokens per step.", metrics.TOKENS[:8], "model")
        name = "model_name"
        self._queries = add.counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", name)
        self._hits = add.counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", name)
        self._prompt = add.counter("vllm:prompt_tokens", "Tokens of prompts.", name)
        self._generated = add.counter("vllm:generation_tokens", "Tokens generated.", name)
        self._success = add.counter("vllm:request_success", "Requests that ended.", name, "finished_reason")
        self._first = add.histogram(
            "vllm:time_to_first_token_seconds", "Time from arrival to first token.", _TTFT_S, name
        )
        self._itl = add.histogram("vllm:inter_token_latency_seconds", "Time between tokens.", _ITL_S, name)
        self._whole = add.histogram("vllm:e2e_request_latency_seconds", "Time from arrival to end.", _REQUEST_S, name)
        self._queued = add.histogram("vllm:request_queue_time_seconds", "Time in the waiting queue.", _REQUEST_S, name)
        self._prefilled = add.histogram("vllm:request_prefill_time_seconds", "Time of prefill.", _REQUEST_S, name)
        self._decoded = add.histogram(
            "vllm:request_decode_time_seconds", "Time from first to last token.", _REQUEST_S, name
        )

    def loaded(self, model: str, slots: int, stats: Callable[[], Stats]) -> None:
        """Adds the metrics of an engine for `model` with `slots` places in the batch."""
        self._model = model

        def gauge(name: str, help_: str, read: Callable[[Stats], float], label: str = "model") -> None:
            self.all.gauge(name, help_, lambda: {(model,): read(stats())}, label)

        def total(name: str, help_: str, read: Callable[[Stats], float], label: str = "model") -> None:
            self.all.total(name, help_, lambda: {(model,): read(stats())}, label)

        def blocks() -> metrics.Series:
            now = stats()
            states = {"free": now.free_blocks, "cached": now.cached_blocks, "active": now.active_blocks}
            return {(model, state): count for state, count in states.items()}

        self.all.gauge("weft_worker_kv_blocks", "Blocks of the KV pool by state.", blocks, "model", "state")
        gauge("weft_worker_slots", "Most jobs in the batch.", lambda now: slots)
        gauge(
            "weft_worker_backlog_tokens",
            "Prompt tokens that are still to be computed.",
            lambda now: now.prefill_backlog,
        )
        gauge("weft_worker_prefill_rate", "Measured prompt tokens per second.", lambda now: now.prefill_rate)
        total("weft_worker_steps", "Engine steps.", lambda now: now.steps)
        self.all.gauge(
            "weft_worker_gpu_memory_bytes",
            "GPU memory: allocated and reserved by torch, used by all processes, and total.",
            _gpu_memory,
            "kind",
        )
        gauge("vllm:num_requests_running", "Requests in the batch.", lambda now: now.running, "model_name")
        gauge("vllm:num_requests_waiting", "Requests in the waiting queue.", lambda now: now.waiting, "model_name")
        gauge("vllm:kv_cache_usage_perc", "Blocks in use, 0 to 1.", _usage, "model_name")
        self._add_guesses(model, stats)
        total("vllm:num_preemptions", "Preempted requests.", lambda now: now.preemptions, "model_name")

    def _add_guesses(self, model: str, stats: Callable[[], Stats]) -> None:
        def by_place(read: Callable[[GuessCounts], list[int]]) -> Callable[[], metrics.Series]:
            return lambda: {(model, str(place)): count for place, count in enumerate(read(stats().guesses))}

        def total(name: str, help_: str, read: Callable[[GuessCounts], float], label: str) -> None:
            self.all.total(name, help_, lambda: {(model,): read(stats().guesses)}, label)

        self.all.total(
            "weft_worker_drafted_tokens", "Guesses by place in the row.", by_place(lambda c: c.drafted_at),
            "model", "place",
        )  # fmt: skip
        self.all.total(
            "weft_worker_accepted_tokens", "Right guesses by place in the row.", by_place(lambda c: c.accepted_at),
            "model", "place",
        )  # fmt: skip
        total(
            "weft_worker_wasted_tokens", "Row-tokens that were computed for wrong guesses.",
            lambda c: c.drafted - c.accepted, "model",
        )  # fmt: skip
        name = "model_name"
        total("vllm:spec_decode_num_drafts", "Rows with guesses.", lambda c: c.rows, name)
        total("vllm:spec_decode_num_draft_tokens", "Guesses.", lambda c: c.drafted, name)
        total("vllm:spec_decode_num_accepted_tokens", "Right guesses.", lambda c: c.accepted, name)

    def stepped(self, seconds: float | None, tokens: int, first_tokens: int, extra: int = 0) -> None:
        """Records a step with `tokens` new tokens, `first_tokens` of which are the first of their jobs. `extra` of them
        came together with another one of their job.

        `seconds` is the step's duration, or None if the step computed nothing, or if it is not over: then these tokens
        are counted with it when it is.
        """
        now, before = time.monotonic(), self._last_step_at
        if seconds is None:
            self._begun += tokens
        else:
            self._last_step_at = now
            self._step.observe(seconds, self._model)
            self._rows.observe(self._begun + tokens, self._model)
            self._begun = 0
        if tokens > first_tokens + extra:  # A job with a later token had its previous one from the previous step.
            self._itl.observe(now - before, self._model, times=tokens - first_tokens - extra)
        if extra:
            self._itl.observe(0.0, self._model, times=extra)
        self._generated.add(tokens, self._model)

    def ended(self, ended: Ended, prompt_tokens: int, cacheable: bool) -> None:
        """Records an ended job. `cacheable`: its prompt was looked up in the prefix cache."""
        cost, model = ended.cost, self._model
        self._jobs.add(1, model, ended.reason.value)
        self._success.add(1, model, _REASONS[ended.reason])
        self._prefill.add(cost.prefill_tokens, model)
        self._fetched.add(cost.fetched_tokens, model)
        self._prompt.add(prompt_tokens, model)
        if cacheable:
            self._queries.add(prompt_tokens, model)
            self._hits.add(min(cost.cached_tokens, prompt_tokens), model)
        self._queued.observe(cost.queue_s, model)
        self._whole.observe(cost.queue_s + cost.prefill_s + cost.decode_s, model)
        if cost.steps:
            self._prefilled.observe(cost.prefill_s, model)
            self._decoded.observe(cost.decode_s, model)
            self._first.observe(cost.queue_s + cost.prefill_s, model)


def _usage(stats: Stats) -> float:
    return stats.active_blocks / max(stats.total_blocks, 1)


def _gpu_memory() -> metrics.Series:
    """Bytes of GPU memory by kind; empty if torch is not loaded or has no GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    free, total = torch.cuda.mem_get_info()
    kinds = {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "used": total - free,
        "total": total,
    }
    return metrics.by_label(kinds.items())
