"""Masks of tokens, and sampling."""

from tests.kernels.cases import check_masks, check_sampling
from tests.kernels.interpreted import HALF


def test_masks_of_tokens() -> None:
    for samples, masks, vocab, words in ((1, 1, 50, 2), (5, 3, 1300, 41), (4, 4, 64, 2), (3, 2, 100, 2)):
        check_masks(samples, masks, vocab, words, HALF)


def test_sampling_follows_the_reference() -> None:
    for vocab, rounded in ((300, False), (130, True)):
        check_sampling(6, 8, vocab, rounded, 5, 64, 128)
