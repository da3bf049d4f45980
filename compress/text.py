"""Text for calibration, training and measurement: reads files, returns windows of token ids. Knows no model.

Legend: W windows, T tokens of a window.
"""

import gzip
import zlib
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from compress.errors import CompressError

_EXCERPTS = Path(__file__).parent / "excerpts"
CALIBRATION = _EXCERPTS / "calibration.txt.gz"
HELD_OUT = _EXCERPTS / "heldout.txt.gz"
"""Public-domain stories that ship with the project; HELD_OUT is not in the demo models' training text."""
END_OF_TEXT = "<|endoftext|>"
_KINDS = ("*.txt", "*.txt.gz", "*.md")


def read(path: Path) -> list[str]:
    """The texts of a file, or of a folder's .txt, .txt.gz and .md files but for those named heldout*.

    A line END_OF_TEXT parts texts of one file. Raises CompressError where there is no text.
    """
    found = (file for kind in _KINDS for file in path.glob(kind) if not file.name.startswith("heldout"))
    files = sorted(found) if path.is_dir() else [path]
    try:
        contents = [_content(file) for file in files]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise CompressError(f"text {path} cannot be read: {type(error).__name__}") from None
    texts = [text.strip() for content in contents for text in content.split(END_OF_TEXT) if text.strip()]
    if not texts:
        raise CompressError(f"no text in {path}: give a file, or a folder of .txt, .txt.gz or .md files")
    return texts


def tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of a model's folder. Raises CompressError."""
    if not (model / "tokenizer.json").is_file():
        raise CompressError(f"{model} has no tokenizer.json")
    try:
        return Tokenizer.from_file(str(model / "tokenizer.json"))
    except Exception as error:  # the library has no other kind
        raise CompressError(f"{model}: tokenizer.json cannot be read: {error}") from None


def windows(texts: list[str], model: Path, length: int, count: int | None = None) -> Tensor:
    """Token ids int64 [W, T], T = length: the texts in a row, cut, each window begun as the model begins a text.

    count: how many of them are taken, evenly spread; None: all. Raises CompressError where there is too little text.
    """
    reader = tokenizer(model)
    reader.no_truncation()  # A tokenizer that was saved in training may cut and fill up its texts.
    reader.no_padding()
    start = reader.encode("").ids
    encodings = reader.encode_batch_fast(texts, add_special_tokens=False)
    end = [reader.token_to_id(END_OF_TEXT)] if reader.token_to_id(END_OF_TEXT) is not None else []
    ids = torch.cat([torch.tensor(encoding.ids + end) for encoding in encodings])
    body = length - len(start)
    whole = ids.numel() // body
    if whole < (count or 1):
        found = f"{ids.numel()} tokens of text make {whole} windows of {length}"
        raise CompressError(f"{found}; {count or 1} are needed: give more text, or ask for shorter or fewer windows")
    cut = ids[: whole * body].view(whole, body)
    if count is not None:
        cut = cut[torch.linspace(0, whole - 1, count).round().long()]
    return torch.cat([torch.tensor(start, dtype=torch.int64).expand(len(cut), -1), cut], dim=1)


def described(windows_WT: Tensor) -> str:
    """Identifies a text, so that a run is not resumed with another text."""
    places = torch.arange(1, windows_WT.numel() + 1).view_as(windows_WT)
    mark = int((windows_WT * places).sum()) & 0xFFFFFFFF
    return f"{windows_WT.shape[0]} windows of {windows_WT.shape[1]} tokens ({mark:08x})"


def _content(file: Path) -> str:
    data = file.read_bytes()
    return (gzip.decompress(data) if file.suffix == ".gz" else data).decode()
