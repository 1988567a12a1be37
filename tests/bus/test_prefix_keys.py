"""Keys of prompt prefixes: equal exactly when everything that decides the KV of a span is equal."""

import hashlib
import itertools

import numpy as np
from allspark_bus.prefix_keys import KEY_BYTES, PrefixSalt, child_key, span_keys
from hypothesis import given
from hypothesis import strategies as st

TEXT = st.text(alphabet="ab", max_size=3)
SALTS = st.builds(PrefixSalt, TEXT, st.sampled_from([16, 32]), TEXT, st.integers(0, 2), TEXT)
TOKENS = st.lists(st.integers(0, 3), max_size=70)


def keys(salt: PrefixSalt, tokens: list[int], limit: int | None = None) -> list[bytes]:
    return list(span_keys(salt, np.asarray(tokens, np.int64), limit))


@given(SALTS, SALTS, TOKENS, TOKENS)
def test_keys_agree_exactly_as_far_as_salt_and_tokens_agree(
    a: PrefixSalt, b: PrefixSalt, left: list[int], right: list[int]
) -> None:
    common = 0
    if a == b:
        for x, y in zip(left, right, strict=False):
            if x != y:
                break
            common += 1
    got = [x == y for x, y in zip(keys(a, left), keys(b, right), strict=False)]
    assert got == [(index + 1) * a.span_size <= common for index in range(len(got))]


def test_no_field_of_the_salt_can_pose_as_another() -> None:
    """Every placement of the same few texts is another key: model, adapter, mode, embeddings, span size."""
    salts = [
        PrefixSalt(model, size, adapter, mode, embeddings)
        for model, adapter, embeddings in itertools.product(("", "a", "ab", "1", "16"), repeat=3)
        for size in (1, 16)
        for mode in (0, 1, 2, 16)
    ]
    tokens = np.zeros(16, np.int64)
    found = {next(span_keys(salt, tokens)) for salt in salts}
    assert len(found) == len(salts)


def test_only_full_spans_have_keys_and_the_limit_holds() -> None:
    salt = PrefixSalt("m", 16)
    assert [len(keys(salt, [5] * n)) for n in (0, 15, 16, 31, 32, 33)] == [0, 0, 1, 1, 2, 2]
    assert keys(salt, [5] * 64, limit=2) == keys(salt, [5] * 32)
    assert {len(key) for key in keys(salt, [5] * 64)} == {KEY_BYTES}


def test_the_same_span_at_another_place_has_another_key() -> None:
    repeated = keys(PrefixSalt("m", 16), [7] * 160)
    assert len(set(repeated)) == 10


def test_the_key_is_blake2b_of_parent_and_little_endian_ids() -> None:
    parent, ids = b"p" * 16, [1, 2**40]
    raw = parent + b"".join(token.to_bytes(8, "little") for token in ids)
    expected = hashlib.blake2b(raw, digest_size=16, person=b"allspark span").digest()
    assert child_key(parent, np.asarray(ids, np.int64)) == expected
    assert child_key(parent, np.asarray(ids, ">i8")) == expected
