"""aiperf: a streamed chat load and a load of completions, each without a failed request."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

MODEL = os.environ["WEFT_MODEL"]
TOKENIZER = Path(os.environ["WEFT_ROOT"]) / "models" / MODEL
REQUESTS = 12


def profile(kind: str) -> dict[str, dict[str, float]]:
    """The metrics of a load of one kind of endpoint, two requests at a time."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["venv/bin/aiperf", "profile", "--model", MODEL, "--url", os.environ["WEFT_HTTP"]]
        command += ["--endpoint-type", kind, "--streaming", "--tokenizer", str(TOKENIZER), "--ui-type", "none"]
        command += ["--request-count", str(REQUESTS), "--concurrency", "2", "--random-seed", "1"]
        command += ["--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "16"]
        command += ["--artifact-dir", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        [report] = Path(folder).rglob("profile_export_aiperf.json")
        return json.loads(report.read_text())


def loaded(kind: str) -> None:
    """Every request has succeeded, and the first token precedes the last."""
    metrics = profile(kind)
    assert metrics["request_count"]["avg"] == REQUESTS, metrics
    assert not metrics.get("error_summary"), metrics
    assert 0 < metrics["time_to_first_token"]["avg"] <= metrics["request_latency"]["avg"], metrics


for endpoint in ("chat", "completions"):
    loaded(endpoint)
    print(endpoint)
