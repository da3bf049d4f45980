"""A fingerprint depends on every byte of a model: models with equal fingerprints may share results and KV blocks."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from services.worker.errors import CheckpointError
from services.worker.loader import digests as digests_module
from services.worker.loader import presets
from services.worker.loader.checkpoint import fingerprint, start_hashing
from services.worker.loader.digests import DigestCache, FileDigests, cache_file
from services.worker.loader.weight_files import INDEX, SINGLE


def print_of(folder: Path, *numerics: str) -> bytes:
    with start_hashing(folder) as digests:
        return fingerprint(digests, *numerics)


@pytest.fixture
def copy(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint that a test may change."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "copy"))


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_other_weights_change_the_fingerprint(checkpoint: Callable[[str], Path], copy: Path, name: str) -> None:
    folder = checkpoint("llama")
    assert print_of(copy) == print_of(folder)
    tensors = load_file(copy / SINGLE)
    tensors[name] *= 1.05
    save_file(tensors, copy / SINGLE, {"format": "pt"})
    assert (copy / SINGLE).stat().st_size == (folder / SINGLE).stat().st_size
    assert print_of(copy) != print_of(folder)


def test_every_byte_of_the_weights_changes_the_fingerprint(copy: Path) -> None:
    """The byte may be anywhere in its tensor, and the file's size and time may be unchanged."""
    before, stat = print_of(copy), (copy / SINGLE).stat()
    content = bytearray((copy / SINGLE).read_bytes())
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    begin, end = max((entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"), key=_length)
    place = len(content) - max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    assert end - begin > 16384
    content[place + begin + (end - begin) // 4] ^= 1
    (copy / SINGLE).write_bytes(content)
    os.utime(copy / SINGLE, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert print_of(copy) != before


def _length(offsets: list[int]) -> int:
    return offsets[1] - offsets[0]


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"rope_theta": 20000.0}),
        ("generation_config.json", {"eos_token_id": 5}),
        ("tokenizer.json", {"added_tokens": []}),
        ("tokenizer_config.json", {"chat_template": "{{ messages }}"}),
        ("chat_template.jinja", None),
    ],
)
def test_other_settings_change_the_fingerprint(copy: Path, file: str, changes: dict[str, object] | None) -> None:
    before, path = print_of(copy), copy / file
    if changes is None:
        path.write_text("{{ messages }}")
    else:
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **changes}))
    assert print_of(copy) != before


def test_files_that_are_not_loaded_do_not_change_the_fingerprint(copy: Path) -> None:
    before = print_of(copy)
    (copy / "README.md").write_text("A model.")
    (copy / "consolidated.safetensors").write_bytes(b"the same weights once more")
    assert print_of(copy) == before


def test_shards_are_hashed_by_the_index(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("qwen3"), tmp_path / "sharded"))
    before = print_of(folder)
    (folder / "more.safetensors").write_bytes(b"of no index")
    assert print_of(folder) == before
    shard = folder / next(iter(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    assert print_of(folder) != before


def test_other_numerics_change_the_fingerprint(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama")
    assert print_of(folder, "float32") != print_of(folder, "bfloat16")


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, (2).to_bytes(8, "little") + b"[]", bytes(7)])
def test_damaged_weights_have_a_fingerprint_too(checkpoint: Callable[[str], Path], copy: Path, content: bytes) -> None:
    (copy / SINGLE).write_bytes(content)
    assert print_of(copy) != print_of(checkpoint("llama"))


def test_presets_have_a_fingerprint_without_weights() -> None:
    assert print_of(presets.folder_of("random:tiny")) == print_of(presets.folder_of("random:tiny"))
    assert print_of(presets.folder_of("random:tiny")) != print_of(presets.folder_of("random:llama-3.2-1b"))


def test_a_file_that_changes_while_it_loads_is_refused(copy: Path) -> None:
    with start_hashing(copy) as digests:
        (copy / SINGLE).write_bytes((copy / SINGLE).read_bytes()[:-1] + b"\x7f")
        with pytest.raises(CheckpointError, match=f"{SINGLE} changed while it was loaded"):
            fingerprint(digests)


def test_a_digest_does_not_depend_on_how_threads_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests_module, "PIECE_BYTES", 1000)
    monkeypatch.setattr(digests_module, "_READ_BYTES", 300)
    file, cache = tmp_path / "file", DigestCache(None)
    file.write_bytes(bytes(range(256)) * 20)
    found = [FileDigests([file], cache).result() for _ in range(2)]
    assert found[0] == found[1]
    for place in (0, 999, 1000, 5119):
        content = bytearray(bytes(range(256)) * 20)
        content[place] ^= 1
        file.write_bytes(content)
        assert FileDigests([file], cache).result() != found[0], place


# ---- the cache of digests ----


@pytest.fixture
def settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that was written long ago."""
    (tmp_path / "file").write_bytes(b"weights" * 1000)
    later = time.time_ns() + 60 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: later)
    return tmp_path / "file"


def test_the_next_start_reads_no_weights(settled: Path) -> None:
    cache = DigestCache(settled.parent / "cache" / "digests.json", least_bytes=1)
    first = FileDigests([settled], cache)
    digests = first.result()
    second = FileDigests([settled], DigestCache(settled.parent / "cache" / "digests.json", least_bytes=1))
    assert second.result() == digests
    assert (first.hashed_bytes, second.hashed_bytes) == (7000, 0)
    assert [path.name for path in (settled.parent / "cache").iterdir()] == ["digests.json"]


def test_a_file_with_the_same_size_and_time_is_hashed_again(settled: Path) -> None:
    cache, stat = DigestCache(settled.parent / "digests.json", least_bytes=1), settled.stat()
    before = FileDigests([settled], cache).result()
    settled.write_bytes(b"WEIGHTS" * 1000)
    os.utime(settled, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert settled.stat().st_mtime_ns == stat.st_mtime_ns
    assert FileDigests([settled], cache).result() != before


def test_the_digest_of_a_recently_changed_file_is_not_cached(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"weights")
    cache = DigestCache(tmp_path / "digests.json", least_bytes=1)
    FileDigests([tmp_path / "file"], cache).result()
    assert not (tmp_path / "digests.json").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[" * 10**5, b'{"FILE": 1}', b'{"FILE": [[], "x"]}', b"\xff"])
def test_a_damaged_cache_is_replaced(settled: Path, content: bytes) -> None:
    path = settled.parent / "digests.json"
    path.write_bytes(content.replace(b"FILE", str(settled).encode()))
    cache = DigestCache(path, least_bytes=1)
    first = FileDigests([settled], cache)
    first.result()
    second = FileDigests([settled], cache)
    assert second.result() == first.result()
    assert (first.hashed_bytes, second.hashed_bytes) == (7000, 0)


def test_an_unwritable_cache_does_not_fail_the_start(settled: Path) -> None:
    (settled.parent / "taken").write_text("no folder")
    cache = DigestCache(settled.parent / "taken" / "digests.json", least_bytes=1)
    assert FileDigests([settled], cache).result() == FileDigests([settled], DigestCache(None)).result()


def test_the_folder_of_the_digest_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_file() == Path("/somewhere/weft/digests.json")
    monkeypatch.setenv("WEFT_HOME", "/home/of/weft")
    assert cache_file() == Path("/home/of/weft/digests.json")
