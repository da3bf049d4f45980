"""A small generated corpus, so that training is tested without the real one."""

import gzip
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Runs torch with one thread, which is enough for toy models, and restores threads and precision afterwards."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with a few KB of stories, in the layout of the real corpus."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, seed, count in [("train-00", 1, 150), ("train-01", 2, 150), ("heldout", 3, 40)]:
        works = "\n<|endoftext|>\n".join(_work(random.Random(seed * 1000 + n)) for n in range(count))
        (folder / f"{name}.txt.gz").write_bytes(gzip.compress(f"{works}\n<|endoftext|>\n".encode()))
    return folder


def _work(chance: random.Random) -> str:
    who, what = (chance.choice(words.split()) for words in ("fox bear king girl", "bread gold honey water"))
    text = [f"The {who} went to the wood.", f'"Where is my {what}?" said the {who}.', f"So the {who} found the {what}."]
    return "\n\n".join([f"The {who.title()} and the {what.title()}", *text])
