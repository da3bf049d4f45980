"""The corpus: stories are split into texts, tokens and windows."""

import gzip
from pathlib import Path

import pytest
import torch

from models.corpus import batch_at, chapters, is_heading, read_texts, tokenize, training_windows
from models.tokenizer import train_tokenizer


@pytest.mark.parametrize(
    "line", ["The Box of Robbers", "Peter Rabbit is Impolite", "27th May", "How He Came to an End"]
)
def test_a_short_line_of_capitalised_words_is_a_heading(line: str) -> None:
    assert is_heading(line)


@pytest.mark.parametrize("line", ["He ran.", "the end", "The fox ran away", '"Who?"', "The Fox\nand the Hen", "A" * 80])
def test_other_lines_are_not_headings(line: str) -> None:
    assert not is_heading(line)


def test_a_work_is_split_before_each_heading_without_loss() -> None:
    work = "The Fox\n\nHe ran.\n\nHe hid.\n\nThe Hen\n\nShe saw.\n\nShe flew."
    assert list(chapters(work)) == ["The Fox\n\nHe ran.\n\nHe hid.", "The Hen\n\nShe saw.\n\nShe flew."]


def test_a_folder_without_stories_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"train-\*"):
        read_texts(tmp_path, "train-*.txt.gz")


def test_files_without_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train-0.txt.gz").write_bytes(gzip.compress(b"\n<|endoftext|>\n"))
    with pytest.raises(ValueError, match="no text"):
        read_texts(tmp_path, "train-*.txt.gz")


def test_every_text_is_followed_by_the_end_of_text(corpus: Path) -> None:
    texts = read_texts(corpus, "train-*.txt.gz")
    tokenizer = train_tokenizer(texts, 300)
    split = tokenize(texts, tokenizer)
    assert len(texts) == 300
    assert int((split.tokens_N == 0).sum()) == len(texts)
    assert split.tokens_N[-1] == 0
    assert split.text_bytes == sum(len(text.encode()) for text in texts)
    assert len(split.starts) == sum(text.count("\n\n") + 1 for text in texts)


def test_windows_start_at_paragraphs_and_cover_nearly_the_whole_text(corpus: Path) -> None:
    texts = read_texts(corpus, "train-*.txt.gz")
    split = tokenize(texts, train_tokenizer(texts, 300))
    window = 64
    starts = training_windows(split, window, torch.Generator().manual_seed(0))
    assert torch.isin(starts, split.starts).all()
    assert abs(starts.numel() - len(split) // window) <= 1
    assert starts.max() + window <= len(split)


def test_inputs_are_the_targets_shifted_by_one(corpus: Path) -> None:
    texts = read_texts(corpus, "heldout.txt.gz")
    split = tokenize(texts, train_tokenizer(texts, 300))
    inputs, targets = batch_at(split, torch.tensor([0, 5]), 16, bos=0)
    assert inputs.shape == targets.shape == (2, 16)
    assert inputs[:, 0].tolist() == [0, 0]
    assert inputs[:, 1:].equal(targets[:, :-1])
    assert targets[1].equal(split.tokens_N[5:21])
