"""Bugs that tests must catch: a table of one-line changes of the code, each with the test that fails because of it.

    python -m tests.faults.seeded_bugs                     all of them
    python -m tests.faults.seeded_bugs --bugs poison       those with this word in their names

A bug exists only in a process whose WEFT_SEEDED_BUG names it and that loads this module as a plugin of pytest: the
changed module is compiled as it is imported. No file is changed.
"""

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
VARIABLE = "WEFT_SEEDED_BUG"
LIMIT_S = 300.0
"""A test that ends later than this has not caught anything."""


@dataclass(frozen=True, slots=True)
class Bug:
    """A change of one place, and the test that must fail."""

    name: str
    file: str
    """Path of the module without `.py`, below `services`."""
    old: str
    """Occurs exactly once in the file."""
    new: str
    test: str
    """Node id below `tests`."""

    @property
    def path(self) -> Path:
        """The file."""
        return ROOT / "services" / f"{self.file}.py"

    @property
    def module(self) -> str:
        """The dotted name."""
        return f"services.{self.file.replace('/', '.')}"

    def source(self) -> str:
        """The module with the bug."""
        text = self.path.read_text()
        assert text.count(self.old) == 1, f"{self.name}: {self.file} has {text.count(self.old)} of {self.old!r}"
        return text.replace(self.old, self.new)


_RETRY, _ATTEMPT, _LINK = "gateway/answers/retry_policy", "gateway/answers/attempt", "gateway/links/worker_link"
_CONTINUATION, _JOURNAL = "gateway/answers/continuation", "gateway/text/journal"
_JOBS, _RECORD = "worker/service/jobs", "worker/service/job_record"
_POISON, _PLACEMENT, _LANES = "scheduler/core/poison", "scheduler/core/placement", "scheduler/core/lanes"
_LOANS = "worker/test_loans.py::"
_SIMULATION, _SUBSCRIBERS = "faults/test_simulation.py::", "worker/test_subscribers.py::"

BUGS = (
    # ---- recovery of the gateway ----
    Bug("a worker that failed is not avoided", _RETRY, "avoid=(*state.avoid, placement.worker_id)", "avoid=state.avoid",
        "gateway/test_retry_policy.py::test_a_worker_that_failed_the_job_is_avoided"),
    Bug("attempts have no bound", _RETRY, " or losses >= self.max_attempts", "",
        "gateway/test_retry_policy.py::test_attempts_are_bounded"),
    Bug("repeated tokens are taken again", _LINK, "if position != self.expected:", "if position > self.expected:",
        "gateway/test_recovery.py::test_repeated_positions_are_dropped"),
    Bug("a missing token is not noticed", _LINK,
        "        if position != self.expected:\n            if position > self.expected:\n"
        "                self.link.lose(self, worker_lost())\n            return\n        self.expected += 1\n",
        "        if position < self.expected:\n            return\n        self.expected = position + 1\n",
        "gateway/test_recovery.py::test_a_gap_in_positions_loses_the_attempt_not_a_token"),
    Bug("a cancelled leader ends its followers", _ATTEMPT,
        "return worker_lost()  # The worker cancelled a job that this gateway had not cancelled.",
        "self._answer.end(Ending(api.FINISH_REASON_LENGTH))\n        return None",
        f"{_SIMULATION}test_no_history_loses_repeats_or_changes_a_token"),
    Bug("tokens arrive after a result was chosen", _CONTINUATION,
        "                    self._attempt = None\n                    return result",
        "                    return result", f"{_SIMULATION}test_histories_that_found_a_fault_hold"),
    Bug("another request joins a generation by its id", "gateway/answers/registry",
        "elif generation.admitted.body != admitted.body:", "elif False:",
        "gateway/test_sharing.py::test_the_same_id_with_another_body_is_refused"),
    # ---- journal ----
    Bug("the next attempt forgets the tokens so far", _JOURNAL, "return [*self.prompt, *self.tokens]",
        "return [*self.prompt]", f"{_SIMULATION}test_no_history_loses_repeats_or_changes_a_token"),
    Bug("tokens after a stop string are kept", _JOURNAL, "self.tokens += tokens[:kept]", "self.tokens += tokens",
        "gateway/test_journal.py::test_tokens_after_a_stop_string_are_dropped"),
    Bug("the first token of an attempt has the number of the last one", _JOURNAL, "if start <= position:",
        "if start < position:", "gateway/test_journal.py::test_each_token_belongs_to_the_attempt_that_produced_it"),
    Bug("log-probabilities of a prompt are repeated", _JOURNAL, "details[len(self.prompt_details) + 1 - position :]",
        "details", "gateway/test_journal.py::test_log_probabilities_of_a_prompt_are_kept_once_over_attempts"),
    # ---- joins ----
    Bug("a join begins at the start", _RECORD, "return tokens[position:]", "return tokens",
        f"{_SUBSCRIBERS}test_a_request_that_another_gateway_placed_itself_joins_the_running_one"),
    Bug("a leader that leaves ends its followers", _JOBS,
        "        if not record.subscribers:\n            record.cancelled_by",
        "        if True:\n            record.cancelled_by",
        f"{_SUBSCRIBERS}test_a_job_runs_on_for_a_subscriber_that_waited_for_it"),
    Bug("another request joins a job by its id", _JOBS, "if not running.same_request(job):", "if False:",
        f"{_SUBSCRIBERS}test_another_request_with_the_id_of_a_running_one_is_refused"),
    Bug("a join continues other tokens", _RECORD, "tokens[: len(answer)] == answer and ", "",
        f"{_SUBSCRIBERS}test_a_gateways_later_attempt_replaces_its_own_and_one_that_has_other_tokens"),
    # ---- prefix cache and tenants' salts ----
    Bug("a block's key does not depend on the blocks before it", "hashing", "hashlib.sha256(key + tokens[",
        "hashlib.sha256(tokens[", "test_hashing.py::test_the_key_of_a_block_depends_on_all_tokens_before_it"),
    Bug("prefixes are shared between tenants", "hashing", 'digest(b"weft/prefix/1", salt, fingerprint)',
        'digest(b"weft/prefix/1", fingerprint)',
        "test_hashing.py::test_prefixes_of_two_tenants_or_models_have_no_key_in_common"),
    Bug("results are shared between tenants", "gateway/links/result_cache",
        '        b"weft/result/1",\n        salt,', '        b"weft/result/1",',
        "gateway/test_sharing.py::test_results_are_shared_only_within_a_tenant_and_a_model"),
    Bug("a worker matches blocks behind one that it lacks", _PLACEMENT, "further = remaining & self._holders",
        "further = self._holders",
        "scheduler/test_placement.py::test_the_index_matches_the_leading_blocks_that_each_worker_holds"),
    Bug("evicted blocks still match", _PLACEMENT, "self._clear(key, self._bits[worker_id])", "pass",
        "scheduler/test_core.py::test_evicted_blocks_no_longer_match"),
    # ---- cached values ----
    Bug("a cached value needs no secret", "security/frames", "digest_size=CHECKSUM_BYTES, key=secret",
        "digest_size=CHECKSUM_BYTES",
        "cache/test_frames.py::test_a_frame_that_was_made_without_the_secret_is_detected"),
    Bug("a cached value is taken under another key", "security/frames", "    hasher.update(key)\n", "",
        "cache/test_frames.py::test_a_frame_of_another_key_is_detected"),
    Bug("a damaged value is taken", "security/frames", "    hasher.update(payload)\n", "",
        "cache/test_frames.py::test_every_single_bit_of_one_frame"),
    # ---- blocks that others copy ----
    Bug("copies of a loan that is over are confirmed", "worker/service/block_lender", "            if loan.over:\n",
        "            if False:\n", f"{_LOANS}test_nothing_is_confirmed_when_a_loan_is_over"),
    Bug("lent blocks are evicted", "worker/engine/sharing/block_loans", "            self._pool.share(found)\n",
        "            self._pool.share(found)\n            self._pool.release(found)\n            lent.blocks.clear()\n",
        f"{_LOANS}test_lent_blocks_are_kept_until_they_are_returned"),
    Bug("the memory of a dead worker is read", "worker/service/block_lender",
        "if first.open.memory_id != self._memory_id:", "if False:",
        f"{_LOANS}test_a_new_worker_at_the_address_is_mapped_anew"),
    Bug("layers of a step that failed count", "worker/kvcache/mapped_peer",
        "copies.lend(response.places, response.first_layer)", "copies.lend(response.places, 99)",
        "worker/test_parts.py::test_a_block_of_a_step_that_failed_is_copied_anew"),
    Bug("layers that are not computed are read", "worker/planner/planner",
        "(row.start + row.tokens) // self.block_size", "sequence.computed // self.block_size",
        "worker/test_parts.py::test_parts_of_the_step_that_is_waited_for_come_while_the_next_one_is_in_flight"),
    Bug("memory is shared over plain links", "worker/service/block_lender", "if not self._protected:", "if False:",
        f"{_LOANS}test_where_memory_is_not_shared_blocks_come_over_grpc"),
    Bug("the budget counts bytes that do not travel", "worker/kvcache/peer_tier", "blocks * self._moved_bytes",
        "blocks * self._peers.block_bytes",
        "worker/test_fp8_fetches.py::test_the_budget_counts_the_bytes_that_really_travel"),
    Bug("rounded blocks are taken for exact ones", "worker/numerics",
        'parts += [f"fetched in {self.fetch_dtype}"] if self.fetch_dtype != "auto" else []', "pass",
        "worker/test_fp8_fetches.py::test_two_models_never_share_rounded_blocks"),
    # ---- poison ----
    Bug("a poisoned request is never blamed", _POISON, "        if self.suspect(culprit):\n", "        if False:\n",
        "scheduler/test_poison.py::test_a_request_that_kills_two_workers_is_refused_and_stays_refused"),
    Bug("the neighbours of a poisoned request are blamed", _POISON, "record.suspect = True",
        "record.suspect = record.poisoned = True",
        "scheduler/test_poison.py::test_neighbours_of_a_poisoned_request_are_not_blamed"),
    Bug("a suspect of a worker's death stays one", _POISON, "if record is not None and not record.poisoned:",
        "if False:", "scheduler/test_poison.py::test_a_success_clears_a_suspect"),
    # ---- placement and lanes ----
    Bug("placement ignores the load", _PLACEMENT, " + BACKLOG_WEIGHT * backlog", "",
        "scheduler/test_placement.py::test_the_cost_rule"),
    Bug("sheddable work is not shed", _LANES, "if job.submit.sheddable and", "if False and",
        "scheduler/test_overload.py::test_sheddable_work_is_shed_first_and_fills_what_others_leave"),
    Bug("only the first token is forecast", _LANES, " - forecast.answer_s(loads, model.answer_tokens(job))", "",
        "scheduler/test_core.py::test_the_whole_answer_must_end_before_the_deadline"),
    Bug("a wait takes no longer than its forecast", _LANES, "_LONGER = 1.5", "_LONGER = 1.0",
        "scheduler/test_overload.py::test_hardly_any_job_is_dropped_after_its_wait_though_the_worker_changes_its_speed"),
    Bug("calls are passed on to a full queue", "gateway/links/queue_share", "self.waiting * _LEFT", "math.inf",
        "gateway/test_queue_share.py::test_without_marks_the_scheduler_refuses_few_and_the_queue_is_never_empty"),
    Bug("a queue that is nearly full marks no placement", "scheduler/core/admission", "if waiting >= _NEARLY_FULL *",
        "if waiting >= 2 *", "scheduler/test_core.py::test_answers_are_marked_while_the_queue_is_nearly_full"),
    Bug("messages behind the first one are dropped", "send_queue", "enumerate(message.more, 1)", "enumerate((), 1)",
        "scheduler/test_service.py::test_several_messages_share_one"),
    # ---- texts ----
    Bug("the refusals of a flood are immediate", "gateway/text/refusal_pace", "return max(0.0, ends - now)",
        "return 0.0",
        "gateway/test_encoder.py::test_the_refusals_of_a_flood_have_a_rate_and_those_of_other_tenants_do_not_wait"),
    Bug("a prompt that cannot fit is read", "gateway/answers/serve",
        "        request = record.request\n        if request.ByteSize() > SMALL_BYTES:",
        "        request = record.request\n        if False:",
        "gateway/test_encoder.py::test_a_prompt_that_cannot_fit_is_refused_before_anything_is_done_with_it"),
)  # fmt: skip
BY_NAME = {bug.name: bug for bug in BUGS}


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads one module with its bug."""

    def get_code(self, fullname: str) -> CodeType:
        return compile(ARMED.source() if ARMED else "", self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module before anybody else does."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if ARMED is None or fullname != ARMED.module:
            return None
        return importlib.util.spec_from_file_location(fullname, ARMED.path, loader=_Loader(fullname, str(ARMED.path)))


ARMED = BY_NAME[os.environ[VARIABLE]] if os.environ.get(VARIABLE) else None
"""The bug of this process."""
if ARMED is not None:
    assert ARMED.module not in sys.modules
    sys.meta_path.insert(0, _Finder())


def caught(bug: Bug) -> str:
    """Runs the test of a bug with the bug. -> "" if it fails, else what happened instead."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout=60"]
    command += ["-p", "tests.faults.seeded_bugs", f"tests/{bug.test}"]
    env = {**os.environ, VARIABLE: bug.name}
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{bug.test} did not end"
    if done.returncode == 1:
        return ""
    return f"{bug.test} ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}"


def main(arguments: Sequence[str]) -> int:
    """Runs bugs one after the other, and prints a line for each. -> the exit code."""
    parser = argparse.ArgumentParser(prog="make seeded-bugs", description=__doc__)
    parser.add_argument("--bugs", nargs="*", help="parts of the names of bugs; all without it")
    words = parser.parse_args(arguments).bugs or [""]
    chosen = [bug for bug in BUGS if any(word in bug.name for word in words)]
    missed = 0
    for bug in chosen:
        began = time.monotonic()
        problem = caught(bug)
        missed += bool(problem)
        print(
            f"{'MISSED' if problem else 'caught':<8}{bug.name}, {time.monotonic() - began:.0f} s {problem}", flush=True
        )
    print(f"{len(chosen) - missed} of {len(chosen)} bugs were caught")
    return int(missed > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
