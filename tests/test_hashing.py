"""Keys of prompt prefixes: each depends on all tokens before it, on the tenant and on the model."""

import hashlib

from services.hashing import block_keys, chain_root, digest


def test_the_key_of_a_block_depends_on_all_tokens_before_it() -> None:
    first, second = block_keys([1, 2, 3, 4], 2, b"root")
    assert first == hashlib.sha256(b"root" + b"\1\0\0\0\2\0\0\0").digest()
    assert second == hashlib.sha256(first + b"\3\0\0\0\4\0\0\0").digest()
    assert list(block_keys([9, 2, 3, 4], 2, b"root"))[1] != second
    assert list(block_keys([1, 2, 3], 2, b"root")) == [first]


def test_prefixes_of_two_tenants_or_models_have_no_key_in_common() -> None:
    roots = {chain_root(salt, fingerprint) for salt in (b"a", b"b") for fingerprint in (b"m", b"n")}
    assert len(roots) == 4


def test_different_lists_of_parts_have_different_digests() -> None:
    assert digest(b"ab", b"c") != digest(b"a", b"bc") != digest(b"abc")
