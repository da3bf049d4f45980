"""Reads a folder of stories and cuts it into training windows. Knows texts and token ids, never models.

A folder holds `train-*.txt.gz` and `heldout.txt.gz`: works one after another, each ended by a line
`<|endoftext|>`, one paragraph a line, paragraphs parted by a blank line.

Legend: N tokens of a split, W windows, T tokens of a window.
"""

import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
PARAGRAPH_BREAK = "\n\n"

# A chapter's heading stands alone, is short, and ends without the punctuation of a sentence.
_HEADING = re.compile(r"[A-Z0-9][^\n]{1,69}[A-Za-z0-9]")
_SMALL_WORDS = re.compile("an?|and|as|at|but|by|for|from|he|in|into|is|it|of|on|or|she|the|to|was|with")


@dataclass(frozen=True)
class Split:
    """One side of the corpus, tokenized: every text is followed by END_OF_TEXT."""

    tokens_N: torch.Tensor  # int64
    starts: torch.Tensor  # int64, ascending: positions where a paragraph begins
    text_bytes: int

    def __len__(self) -> int:
        return self.tokens_N.numel()

    def on(self, device: torch.device) -> "Split":
        """This split with its tokens on `device`; the starts stay on the CPU."""
        return replace(self, tokens_N=self.tokens_N.to(device))


def read_texts(folder: Path, pattern: str) -> list[str]:
    """The texts of the files in `folder` that match `pattern`, a chapter or short story each.

    Raises FileNotFoundError where no file matches, ValueError where those that do hold no text.
    """
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise FileNotFoundError(f"no {pattern} in {folder}")
    works = (work for path in paths for work in gzip.decompress(path.read_bytes()).decode().split(END_OF_TEXT))
    texts = [chapter for work in works if work.strip() for chapter in chapters(work.strip())]
    if not texts:
        raise ValueError(f"no text in {pattern} of {folder}")
    return texts


def chapters(work: str) -> Iterator[str]:
    """Cut a work before each heading, so that a model learns from many endings how a text ends."""
    begun: list[str] = []
    for paragraph in work.split(PARAGRAPH_BREAK):
        if len(begun) > 2 and is_heading(paragraph):
            yield PARAGRAPH_BREAK.join(begun)
            begun = []
        begun.append(paragraph)
    yield PARAGRAPH_BREAK.join(begun)


def is_heading(paragraph: str) -> bool:
    """Whether a paragraph reads as the heading of a chapter: a short line of capitalised words."""
    if not _HEADING.fullmatch(paragraph):
        return False
    return all(
        word[:1].isupper() or word[:1].isdigit() or bool(_SMALL_WORDS.fullmatch(word)) for word in paragraph.split()
    )


def tokenize(texts: list[str], tokenizer: Tokenizer) -> Split:
    """Join the texts into one row of ids, each text followed by END_OF_TEXT."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    tokens_N = torch.cat([torch.tensor([*encoding.ids, end]) for encoding in encodings])
    breaks = torch.isin(tokens_N, torch.tensor([end, tokenizer.token_to_id("ĊĊ")]))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), breaks[:-1].nonzero().flatten() + 1])
    return Split(tokens_N, starts, sum(len(text.encode()) for text in texts))


def training_windows(split: Split, window: int, generator: torch.Generator) -> torch.Tensor:
    """The positions (W,) where one epoch's windows begin, shuffled; each begins a paragraph.

    An even grid with a random offset, moved on to the next paragraph: every epoch reads nearly every
    token once, cut differently each time.
    """
    offset = int(torch.randint(window, (1,), generator=generator))
    grid = torch.arange(offset, len(split) - window, window)
    starts = split.starts[torch.searchsorted(split.starts, grid).clamp(max=split.starts.numel() - 1)]
    starts = starts[starts <= len(split) - window]
    return starts[torch.randperm(starts.numel(), generator=generator)]


def batch_at(split: Split, starts: torch.Tensor, window: int, bos: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (W, T), T = window, on the split's device: inputs are the targets moved on by `bos`."""
    device = split.tokens_N.device
    targets_WT = split.tokens_N[starts.to(device)[:, None] + torch.arange(window, device=device)]
    return torch.cat([torch.full_like(targets_WT[:, :1], bos), targets_WT[:, :-1]], dim=1), targets_WT
