"""Output of commands to a pipe: no text is cut, and long commands print their progress."""

import io

import pytest
from rich.console import Console

from protos import inference_pb2 as api
from report.console import amount, bold, console, progress
from weft.cli.terminal import AnswerWriter, models_table


def written(*updates: tuple[str, int, int], every_s: float) -> list[str]:
    out = Console(file=io.StringIO(), width=100)
    with progress(out, every_s) as show:
        for update in updates:
            show(*update)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue().splitlines()


def test_progress_in_a_pipe_is_a_line_at_start_and_end_of_each_phase() -> None:
    updates = [("layers", done, 30) for done in range(31)] + [("steps", 5, 9), ("steps", 9, 9), ("steps", 9, 9)]
    assert written(*updates, every_s=60) == ["layers: 0 of 30", "layers: 30 of 30", "steps: 5 of 9", "steps: 9 of 9"]


def test_progress_in_a_pipe_is_repeated_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))  # One update per second.
    monkeypatch.setattr("report.console.time.monotonic", lambda: float(next(clock)))
    updates = [("layers", done, 30) for done in range(31)]
    assert written(*updates, every_s=10) == [f"layers: {done} of 30" for done in (0, 10, 20, 30)]


def test_progress_on_a_terminal_is_a_bar() -> None:
    out = Console(file=io.StringIO(), force_terminal=True, width=100)
    with progress(out) as show:
        show("layers", 1, 2)
    assert isinstance(out.file, io.StringIO)
    assert "layers" in out.file.getvalue()
    assert "1 of 2" not in out.file.getvalue()


def test_a_long_name_is_not_cut_in_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    console().print("x" * 500)
    assert capsys.readouterr().out == "x" * 500 + "\n"


@pytest.mark.parametrize(("count", "text"), [(999, "999"), (11_300_000, "11.3 M"), (8_000_000_000, "8.0 B")])
def test_large_counts_have_a_unit(count: int, text: str) -> None:
    assert amount(count) == text


def test_brackets_are_text_in_every_output(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = [api.TokenLogprob(text=text, logprob=-1.0) for text in ("[/INST]", " [i]", "[name", "]")]
    delta = api.Delta(finish_reason=api.FINISH_REASON_STOP)
    delta.logprobs.extend(api.PositionLogprobs(chosen=token, top=tokens) for token in tokens)
    AnswerWriter(1, logprobs=True).add(delta)
    out = console()
    out.print(models_table([api.Model(name="fox[v2]")], out.width))
    out.print(f"{bold('fox[v2]')} at {bold('[fd00::1]:50051')}", markup=True)
    printed = capsys.readouterr().out
    assert all(printed.count(f"{token.text!r} ") == 1 + len(tokens) for token in tokens)
    assert "\nfox[v2] " in printed
    assert printed.endswith("fox[v2] at [fd00::1]:50051\n")
