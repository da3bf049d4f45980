"""Hostile checkpoints: each is refused in one line, within 10 s of processor time and 1 GiB of memory.

python -m tests.security.checkpoints [--good FOLDER] [NAME ...]     # all, or some: one line each

FOLDER: a checkpoint whose copies are damaged; without it, one is made.
"""

import argparse
import json
import os
import resource
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_S = 10.0
MOST_BYTES = 1 << 30
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], object]


def _sparse(name: str, size: int, begin: bytes = b"") -> Damage:
    """A file that is mostly a hole."""

    def damage(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.write(begin)
            file.truncate(size)

    return damage


def _written(name: str, make: Callable[[], bytes]) -> Damage:
    return lambda folder: (folder / name).write_bytes(make())


def _header(make: Callable[[], bytes], data: int = 0) -> Damage:
    """A safetensors file with this header and this number of bytes of data."""

    def damage(folder: Path) -> None:
        header = make()
        with (folder / SINGLE).open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + data)

    return damage


def _tensors(count: int, shape: Sequence[int] = (0,), size: int = 0, name: str = "t{}") -> Callable[[], bytes]:
    entry = json.dumps({"dtype": "F32", "shape": list(shape), "data_offsets": [0, size]})
    return lambda: ("{" + ",".join(f'"{name.format(i)}":{entry}' for i in range(count)) + "}").encode()


def _entry(**changes: Any) -> Callable[[], bytes]:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}
    return lambda: json.dumps({"model.embed_tokens.weight": entry}).encode()


def _edited(name: str, **changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **changes}))

    return damage


def _tokenizer(**changes: Any) -> Damage:
    return _edited("tokenizer.json", **changes)


def _split(pattern: str) -> Damage:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _tokenizer(pre_tokenizer=step)


def _template(source: str) -> Damage:
    return _written("chat_template.jinja", lambda: source.encode())


def _link(name: str, target: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return damage


def _pipe(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def _renamed(name: str, to: str) -> Damage:
    return lambda folder: (folder / name).rename(folder / to)


def _sharded(damage: Damage) -> Damage:
    """Without the single file, beside which no index is read."""

    def both(folder: Path) -> None:
        (folder / SINGLE).unlink()
        damage(folder)

    return both


def _shards(count: int, named: str = "model-{:07d}.safetensors") -> Damage:
    def damage(folder: Path) -> None:
        owners = ",".join(f'"t{i}":"{named.format(i)}"' for i in range(count))
        (folder / INDEX).write_text(f'{{"weight_map":{{{owners}}}}}')

    return _sharded(damage)


def _many_words() -> bytes:
    return b'{"model":{"type":"BPE","merges":[],"vocab":{' + b'"w1234567":1234567,' * 4_000_000 + b'"w":0}}}'


def _many_merges() -> bytes:
    return b'{"model":{"type":"BPE","vocab":{"a":0},"merges":[' + b'["a","a"],' * 5_000_000 + b'["a","a"]]}}'


_G = 1 << 30
_HEADERS: Mapping[str, Damage] = {
    "a sparse header of 6 GiB": _sparse(SINGLE, 6 * _G, struct.pack("<Q", 6 * _G - 8)),
    "a sparse header of 90 MB": _sparse(SINGLE, 91_000_000, struct.pack("<Q", 90_000_000)),
    "a header of 2**63 bytes": _sparse(SINGLE, _G, struct.pack("<Q", 1 << 63)),
    "a header of 2**64 - 1 bytes": _sparse(SINGLE, 64, b"\xff" * 8),
    "a header longer than its file": _sparse(SINGLE, 64, struct.pack("<Q", 57)),
    "a million empty tensors": _header(_tensors(1_000_000)),
    "200,000 empty tensors": _header(_tensors(200_000)),
    "200,000 layers": _header(_tensors(200_000, name="model.layers.{}.self_attn.q_proj.weight")),
    "long names": _header(_tensors(2000, name="x" * 10_000 + "{}")),
    "eleven million lists": _header(lambda: b'{"a":[' + b"[]," * 11_000_000 + b"0]}"),
    "six million lists": _header(lambda: b'{"a":[' + b"[]," * 6_000_000 + b"0]}"),
    "a million dimensions": _header(_entry(shape=[1] * 1_000_000), 4),
    "deep lists": _header(lambda: b'{"a":' + b"[" * 1_000_000),
    "deep objects": _header(lambda: b'{"a":' * 1_000_000),
    "a number of a million digits": _header(lambda: b'{"a":' + b"9" * 1_000_000 + b"}"),
    "offsets of 10**400": _header(_entry(data_offsets=[0, 10**400]), 4),
    "negative offsets": _header(_entry(data_offsets=[-4, 0]), 4),
    "a shape of 10**30": _header(_entry(shape=[10**30]), 4),
    "a shape that overflows": _header(_entry(shape=[1 << 32, 1 << 32, 0], data_offsets=[0, 0])),
    "a type of a megabyte": _header(_entry(dtype="F" * 1_000_000), 4),
    "overlapping tensors of 5 GiB": _header(_tensors(1000, (5 << 18,), 5 << 20), 5 << 20),
    "metadata of 30 MB": _header(lambda: b'{"__metadata__":{"a":"' + b"x" * 30_000_000 + b'"}}'),
    "a header that is a list": _header(lambda: b"[1]"),
    "a header that is no text": _header(lambda: b"\xff" * 100_000),
}
_FOLDERS: Mapping[str, Damage] = {
    "a million shards": _shards(1_000_000),
    "5,000 shards": _shards(5_000),
    "a shard outside": _shards(1, "../../etc/passwd{}"),
    "a shard that is a device": _link(SINGLE, "/dev/zero"),
    "a shard that is random": _link(SINGLE, "/dev/urandom"),
    "a shard that is a pipe": _pipe(SINGLE),
    "an index that is a pipe": _sharded(_pipe(INDEX)),
    "a sparse index of 6 GiB": _sharded(_sparse(INDEX, 6 * _G)),
    "an index of lists": _sharded(_written(INDEX, lambda: b"[" * 10_000_000)),
    "a sparse config of 6 GiB": _sparse("config.json", 6 * _G),
    "a sparse generation config of 6 GiB": _sparse("generation_config.json", 6 * _G),
    "a sparse tokenizer of 6 GiB": _sparse("tokenizer.json", 6 * _G),
    "a sparse tokenizer config of 6 GiB": _sparse("tokenizer_config.json", 6 * _G),
    "a sparse template of 6 GiB": _sparse("chat_template.jinja", 6 * _G),
    "a config that is endless": _link("config.json", "/dev/zero"),
    "a tokenizer that is endless": _link("tokenizer.json", "/dev/zero"),
    "a template that is endless": _link("chat_template.jinja", "/dev/zero"),
    "a config of lists": _written("config.json", lambda: b"[" * 10_000_000),
    "a config of five million values": _written("config.json", lambda: b'{"a":[' + b"0," * 5_000_000 + b"0]}"),
    "weights that are a pickle": _renamed(SINGLE, "pytorch_model.bin"),
}
_CONFIGS: Mapping[str, Damage] = {
    "a hidden size of 2**50": _edited("config.json", hidden_size=1 << 50, head_dim=16),
    "a vocabulary of 2**50": _edited("config.json", vocab_size=1 << 50),
    "2**20 layers": _edited("config.json", num_hidden_layers=1 << 20),
    "1,024 layers": _edited("config.json", num_hidden_layers=1024),
    "2**40 heads": _edited("config.json", num_attention_heads=1 << 40, num_key_value_heads=1),
    "an intermediate size of 2**50": _edited("config.json", intermediate_size=1 << 50),
    "a name of a megabyte": _edited("config.json", architectures=["A" * 1_000_000]),
    "code of the checkpoint": _edited("config.json", architectures=["Own"], auto_map={"AutoModel": "own.Own"}),
}
_TEXTS: Mapping[str, Damage] = {
    "a tokenizer of four million words": _written("tokenizer.json", _many_words),
    "five million merges": _written("tokenizer.json", _many_merges),
    "a pattern of a megabyte": _split("(a|" * 200_000 + "b" + ")" * 200_000),
    "a normalizer of normalizers": _written(
        "tokenizer.json", lambda: b'{"normalizer":' + b'{"type":"Sequence","normalizers":[' * 100_000
    ),
    "a template with a power": _template("{{ 9 ** 9 ** 9 }}{% for %}"),
    "a template with a long text": _template("{{ 'x' * 99999999999 }}{% for %}"),
    "a deep template": _template("{% if 1 %}" * 5000 + "{% endfor %}"),
    "deep parentheses in a template": _template("{{ " + "(" * 100_000),
}  # fmt: skip
HOSTILE: Mapping[str, Damage] = {**_HEADERS, **_FOLDERS, **_CONFIGS, **_TEXTS}
SHORT = (
    "a sparse header of 6 GiB", "a million empty tensors", "200,000 empty tensors", "eleven million lists",
    "a million shards", "a sparse config of 6 GiB", "a hidden size of 2**50", "a pattern of a megabyte",
    "a tokenizer of four million words", "a template with a power",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """What loading a checkpoint came to, and what it cost."""

    name: str
    reason: str
    """The line of its refusal; empty if it was not refused."""
    processor_s: float
    wall_s: float
    peak_bytes: int

    @property
    def holds(self) -> bool:
        """It was refused in one line, within the bounds."""
        is_line = bool(self.reason) and "\n" not in self.reason and len(self.reason) < 500
        return is_line and self.processor_s <= MOST_S and self.peak_bytes <= MOST_BYTES


def load_all(folder: Path, names: Sequence[str]) -> Iterator[Outcome]:
    """Damages copies of a good checkpoint and loads each in a process of its own."""
    import torch

    from services.worker.build.load import load_model
    from services.worker.settings import WorkerSettings

    torch.set_num_threads(1)
    for name in names:
        with tempfile.TemporaryDirectory() as place:
            copy = Path(shutil.copytree(folder, Path(place) / "model"))
            HOSTILE[name](copy)

            def load(copy: Path = copy) -> str:
                os.environ["WEFT_HOME"] = place
                settings = WorkerSettings.model_validate({"model": str(copy), "engine": "torch", "kv_blocks": 8})
                load_model(settings, "m", lambda *_: None)
                return ""

            yield _in_a_child(name, load)


def _in_a_child(name: str, load: Callable[[], str]) -> Outcome:
    reading, writing = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _report(load, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        reason = file.read().decode(errors="replace")
    _, _, used = os.wait4(child, 0)
    spent = used.ru_utime + used.ru_stime
    return Outcome(name, reason, spent, time.monotonic() - began, used.ru_maxrss * 1024)


def _report(load: Callable[[], str], writing: int) -> None:
    from services.worker.errors import CheckpointError

    try:
        reason = load()
    except CheckpointError as error:
        reason = str(error)
    except BaseException as error:
        reason = f"\n{type(error).__name__}: {error}"
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)  # The process that checks a tokenizer counts, too.
    if spent.ru_utime + spent.ru_stime > MOST_S or spent.ru_maxrss * 1024 > MOST_BYTES + (64 << 20):
        reason = f"\nthe check of the tokenizer took {spent.ru_utime:.0f} s and {spent.ru_maxrss >> 10} MiB"
    os.write(writing, reason.encode(errors="replace")[:4096])
    os._exit(0)


def main(arguments: Sequence[str]) -> int:
    """Prints a line for each checkpoint; returns 1 if one breaks the rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--good", type=Path)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args(arguments)
    broken = 0
    with tempfile.TemporaryDirectory() as place:
        for each in load_all(asked.good or _make_good(Path(place) / "good"), asked.names or list(HOSTILE)):
            broken += not each.holds
            verdict = "ok  " if each.holds else "FAIL"
            cost = f"{each.processor_s:5.1f} s {each.peak_bytes >> 20:5d} MiB"
            print(f"{verdict} {cost}  {each.name}: {each.reason.strip()[:100] or 'was loaded'}", flush=True)
    print(f"{broken} of {len(asked.names or HOSTILE)} checkpoints break the rule")
    return min(broken, 1)


def _make_good(folder: Path) -> Path:
    from tests.checkpoints import make_checkpoint

    return make_checkpoint(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
