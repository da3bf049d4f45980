"""The inputs of a step: edits of slots, lists of rows and tokens."""

from tests.kernels.cases import (
    check_draft_pass,
    check_edits,
    check_padding_tokens,
    check_parallel_pass,
    check_pass_behind_a_step,
    check_step_lists,
)


def test_edits_of_slots() -> None:
    check_edits(5, 7, [], 1)
    check_edits(9, 300, [(0, 150), (7, 1), (20, 128)], 0)
    check_edits(140, 4, [(2, 2), (0, 4)], 133)
    check_edits(9, 40, [(5, 20), (0, 30)], 3, room=50)


def test_lists_of_a_step() -> None:
    prompt, chunk, answer = (37, 37, True, True), (130, 150, True, False), (1, 91, False, True)
    for rows, sizes in (
        ([prompt], (64, 8, 8)),
        ([answer] * 3, (3, 3, 3)),
        ([answer, chunk, (1, 1, True, True)], (132, 3, 2)),
        ([answer] * 150, (160, 160, 160)),
    ):
        check_step_lists(rows, sizes, 16)
    check_padding_tokens(150, (160, 3, 2), 16)


def test_ends_of_passes_of_a_draft_model() -> None:
    for held, wanted in ((1, [3]), (1, [1]), (5, [0, 2, 1]), (64, [4, 1] * 32), (131, [2, 1, 0, 8] * 25)):
        check_draft_pass(held, wanted)


def test_passes_behind_a_step() -> None:
    some = [(5, 5), (5, 2), (1, 1), (3, 0), (9, 9), (2, 1)]
    for held, drawn in ((1, [(5, 5)]), (1, [(5, 4)]), (4, [(2, 2), (2, 1), (3, 3)]), (8, some), (64, some * 10)):
        for redo in (False, True):
            check_pass_behind_a_step(held, drawn, redo)


def test_passes_of_a_parallel_draft_model() -> None:
    some = [(5, 5), (5, 2), (1, 1), (3, 0), (9, 9), (2, 1)]
    for held, drawn, depth in (
        (1, [(5, 5)], 4), (1, [(5, 1)], 8), (4, [(2, 2), (2, 1), (2, 1)], 1), (8, some, 8), (64, some * 10, 8),
    ):  # fmt: skip
        check_parallel_pass(held, drawn, depth)
        check_parallel_pass(held, drawn, depth, all_of=depth)
