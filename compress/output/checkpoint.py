"""Writes a compressed model as a Hugging Face folder, layer by layer, so that an interrupted run can resume.

Work lies in OUT.partial: each finished layer is a shard already, `recipe.json` names the recipe that made it,
and the state that the next piece needs lies beside it. The folder gets its own name when it is whole.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.base.files import copied
from compress.errors import CompressError

_RECIPE = "recipe.json"


class Workspace:
    """The partial output folder of a run, which a later run can resume."""

    def __init__(
        self, base: Path, out: Path, settings: Mapping[str, Any], pieces: int, teacher: Path | None = None
    ) -> None:
        """Find the output of an interrupted run with the same settings and weights; delete that of any other run.

        `pieces`: shards of the whole; `teacher`: another checkpoint that is read. Raises CompressError if `out` is
        there.
        """
        if out.exists():
            raise CompressError(f"{out} exists: remove it or name another folder")
        self.base, self.out, self.settings, self._pieces = base, out, dict(settings), pieces
        self.folder = out.with_name(out.name + ".partial")
        read = [_identity(folder) for folder in (base, teacher) if folder]
        recipe = json.dumps({**self.settings, "read": read}, indent=2)
        file = self.folder / _RECIPE
        if not (file.exists() and file.read_text() == recipe):
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            file.write_text(recipe)

    @property
    def done(self) -> int:
        """Number of complete shards, from the first on."""
        return next(n for n in range(self._pieces + 1) if not self._shard(n).exists())

    def write(self, piece: int, tensors: Mapping[str, Tensor]) -> None:
        """Write one shard; it is counted when it is complete."""
        _save(self._shard(piece), tensors)

    def keep(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Save state of the run under a name, replacing earlier state."""
        _save(self.folder / f"{name}.state", tensors)

    def kept(self, name: str) -> dict[str, Tensor] | None:
        """State that an earlier run saved; None if there is none."""
        file = self.folder / f"{name}.state"
        return load_file(file) if file.exists() else None

    def forget(self, name: str) -> None:
        """Delete saved state."""
        (self.folder / f"{name}.state").unlink(missing_ok=True)

    def finish(self, config: Mapping[str, Any], *, with_tokenizer: bool = True) -> None:
        """Write index, configuration, tokenizer and card, then rename the folder to its final name."""
        assert self.done == self._pieces, f"{self.done} of {self._pieces} shards"
        owners, total = {}, 0
        for piece in range(self._pieces):
            tensors = load_file(self._shard(piece))
            owners.update(dict.fromkeys(tensors, self._shard(piece).name))
            total += sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(owners.items()))}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        (self.folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
        (self.folder / "README.md").write_text(self._card(total))
        for file in copied(self.base) if with_tokenizer else ():
            shutil.copy2(file, self.folder)
        for file in (*self.folder.glob("*.state"), self.folder / _RECIPE):
            file.unlink()
        self.folder.rename(self.out)

    def _shard(self, piece: int) -> Path:
        return self.folder / f"model-{piece + 1:05}-of-{self._pieces:05}.safetensors"

    def _card(self, size: int) -> str:
        lines = "".join(f"| {name.replace('_', ' ')} | {value} |\n" for name, value in self.settings.items())
        return (
            f"# {self.out.name}\n\nMade from `{self.base.name}` by `weft compress`. {size:,} bytes of tensors.\n\n"
            f"| setting | |\n|---|---|\n{lines}"
        )


def as_stored(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Unquantized weights in the checkpoint's number format."""
    return {name: tensor.detach().to(dtype).contiguous() for name, tensor in tensors.items()}


def _identity(folder: Path) -> dict[str, Any]:
    """Identifies a checkpoint; it changes when its files are rewritten."""
    weights = ((file.name, file.stat()) for file in sorted(folder.glob("*.safetensors")))
    return {str(folder.resolve()): [[name, status.st_size, status.st_mtime_ns] for name, status in weights]}


def _save(file: Path, tensors: Mapping[str, Tensor]) -> None:
    begun = file.with_suffix(".begun")
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(held, begun, {"format": "pt"})
    except SafetensorError as error:
        raise CompressError(f"{file} cannot be written: {error}") from None
    begun.rename(file)
