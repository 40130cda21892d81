"""Documents in rows: nothing lost, as full as the rule says, and the same after going on."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.data.loader import IGNORE_INDEX, Batch, Batching
from memtrain.data.packing import Packed, PackedLoader, best_fit, pack_split, packed_batches
from memtrain.data.store import DTYPES, LAST, LEARNED, TokenFile, unigram_entropy, write_tokens

Documents = list[tuple[int, int]]
"""(tokens read only, tokens learned), one pair per document"""
DOCUMENTS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 30)), min_size=1, max_size=25)


def token_file(folder: Path, documents: Documents) -> TokenFile:
    """Tokens count up over all documents, from 1: 0 is padding."""
    n_tokens = sum(map(sum, documents))
    array = np.empty(n_tokens, DTYPES["uint32+role"])
    array["id"] = np.arange(1, n_tokens + 1)
    roles: list[int] = []
    for n_read, n_learned in documents:
        part = [0] * n_read + [LEARNED] * n_learned
        part[0] = 0
        part[-1] |= LAST
        roles += part
    array["role"] = roles
    return write_tokens(folder / "t", [array], n_tokens + 1, "", "", with_roles=True)


def pairs(documents: Documents) -> list[tuple[int, int]]:
    """By hand: (token, the one that it predicts) for every target."""
    found, begin = [], 1
    for n_read, n_learned in documents:
        end = begin + n_read + n_learned
        found += [(i - 1, i) for i in range(begin + max(n_read, 1), end)]
        begin = end
    return found


def taught(batches: list[Batch]) -> list[tuple[int, int]]:
    found = []
    for batch in batches:
        kept = batch.targets != IGNORE_INDEX
        assert int(kept.sum()) == batch.n_targets
        found += list(zip(batch.tokens[kept].tolist(), batch.targets[kept].tolist(), strict=True))
    return found


def used(packed: Packed) -> np.ndarray[Any, Any]:
    return np.add.reduceat(packed.lengths, packed.first[:-1])


@settings(deadline=None)
@given(
    documents=DOCUMENTS,
    seq_len=st.integers(1, 40),
    batching=st.builds(
        Batching,
        st.integers(1, 4),
        st.integers(1, 3),
        st.integers(0, 3),
        st.booleans(),
        prefetch=st.integers(0, 2),
    ),
    stop=st.integers(0, 60),
)
def test_every_token_and_target_once_per_epoch_also_after_resuming(
    tmp_path_factory: pytest.TempPathFactory,
    documents: Documents,
    seq_len: int,
    batching: Batching,
    stop: int,
) -> None:
    file = token_file(tmp_path_factory.mktemp("t"), documents)
    packed, val = pack_split(file, 0.0, seq_len, keep_apart=True)
    assert val is None

    def make() -> PackedLoader:
        return PackedLoader(packed, batching)

    first = make()
    per_epoch = first.windows_per_epoch
    stop %= per_epoch + 1
    windows = list(islice(first, stop))
    second = make()
    second.load_state_dict(first.state_dict())
    windows += list(islice(second, 2 * per_epoch - stop))
    first.close()
    second.close()
    for epoch in range(2):
        part = windows[epoch * per_epoch : (epoch + 1) * per_epoch]
        batches = [batch for window in part for batch in window]
        assert sorted(taught(batches)) == pairs(documents)
        tokens = [t for batch in batches for t in real_tokens(batch)]
        assert sorted(tokens) == list(range(1, file.count + 1))
    straight = make()
    for ours, theirs in zip(windows, islice(straight, 2 * per_epoch), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets)
    straight.close()


def real_tokens(batch: Batch) -> list[int]:
    """Without padding, which is a document of its own at the end of a row. Checks where documents start."""
    found = []
    assert batch.starts is not None
    for tokens, starts in zip(batch.tokens.tolist(), batch.starts.tolist(), strict=True):
        row = tokens[: tokens.index(0)] if 0 in tokens else tokens
        assert starts[len(row) :] == [len(row)] * (len(tokens) - len(row))
        for place, token in enumerate(row):
            assert token - row[starts[place]] == place - starts[place]  # one document, in order
        found += row
    return found


@given(st.lists(st.integers(1, 30), max_size=60), st.integers(30, 60))
def test_the_rule_is_best_fit_decreasing(lengths: list[int], capacity: int) -> None:
    """Against the rule as a textbook has it, one piece at a time."""
    rows = best_fit(np.array(lengths, dtype=np.int64), capacity)
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [size for size in free if size >= length]
        if fitting:
            free.remove(min(fitting))
        free.append(min(fitting, default=capacity) - length)
    filled = np.bincount(rows, weights=lengths, minlength=len(free)).astype(int)
    assert sorted((capacity - filled).tolist()) == sorted(free)
    _, first = np.unique(rows, return_index=True)
    assert first.tolist() == sorted(first.tolist())


def test_packing_a_million_documents_is_quick_and_full() -> None:
    lengths = np.random.default_rng(0).integers(1, 2049, size=1_000_000)
    rows = best_fit(lengths, 2048)
    filled = np.bincount(rows, weights=lengths)
    assert filled.max() <= 2048
    assert filled.mean() / 2048 > 0.99


def test_shares_are_those_of_the_batches(tmp_path: Path) -> None:
    packed, _ = pack_split(token_file(tmp_path, [(3, 2), (0, 9), (5, 5)]), 0.0, 8, True)
    (batch,) = packed_batches(packed, 10, 10)
    assert batch.starts is not None
    places = batch.tokens.numel()
    assert packed.n_documents == 3
    assert packed.n_targets == batch.n_targets == 2 + 8 + 5
    assert packed.target_share == batch.n_targets / places
    assert packed.padding_share == pytest.approx(1 - 24 / places)
    assert batch.n_tokens == batch.to(torch.device("cpu")).n_tokens == 24
    assert used(packed).max() <= 8


def test_a_document_longer_than_a_row_loses_no_target(tmp_path: Path) -> None:
    packed, _ = pack_split(token_file(tmp_path, [(0, 10)]), 0.0, 4, True)
    batch = packed.batch(np.arange(3))
    assert batch.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 0]]
    assert batch.targets.tolist() == [[2, 3, 4, 5], [6, 7, 8, 9], [10, -100, -100, -100]]
    assert batch.starts is not None
    assert batch.starts.tolist() == [[0] * 4, [0] * 4, [0, 0, 2, 2]]


def test_without_a_mask_a_batch_says_nothing_of_documents(tmp_path: Path) -> None:
    packed, _ = pack_split(token_file(tmp_path, [(1, 2), (1, 2)]), 0.0, 8, False)
    assert packed.batch(np.arange(1)).starts is None


@given(DOCUMENTS, st.floats(0, 0.5))
def test_a_document_is_on_one_side(
    tmp_path_factory: pytest.TempPathFactory, documents: Documents, val_fraction: float
) -> None:
    file = token_file(tmp_path_factory.mktemp("t"), documents)
    train, val = pack_split(file, val_fraction, 16, True)
    assert (val is not None) == (len(documents) > 1 and val_fraction > 0)
    batches = [*packed_batches(train, 3, 10**9), *(packed_batches(val, 3, 10**9) if val else ())]
    assert sorted(taught(batches)) == pairs(documents)
    assert train.n_documents + (val.n_documents if val else 0) == len(documents)
    assert train.n_targets + (val.n_targets if val else 0) == len(pairs(documents))


def test_the_share_held_out_is_one_of_tokens(tmp_path: Path) -> None:
    """One document of 2,000 tokens among 300 of 10: 5 % of all tokens are held out, and 25 documents for it."""
    documents = [(1, 9)] * 150 + [(1, 1_999)] + [(1, 9)] * 150
    train, val = pack_split(token_file(tmp_path, documents), 0.05, 16, True)
    assert val is not None
    assert (int(train.lengths.sum()), int(val.lengths.sum())) == (4_750, 250)
    assert (train.n_documents, val.n_documents) == (276, 25)


@given(DOCUMENTS)
def test_entropy_is_that_of_the_targets(
    tmp_path_factory: pytest.TempPathFactory, documents: Documents
) -> None:
    file = token_file(tmp_path_factory.mktemp("t"), documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memtrain.data.packing.CHUNK_TOKENS", 16)
        patch.setattr("memtrain.data.store.CHUNK_TOKENS", 7)
        packed, _ = pack_split(file, 0.0, 8, True)
        targets = np.array([target for _, target in pairs(documents)], dtype=np.int64)
        assert packed.n_targets == len(targets)
        assert packed.target_entropy(2000) == pytest.approx(unigram_entropy(targets, 2000))


def test_a_batch_says_where_its_documents_start(tmp_path: Path) -> None:
    packed, _ = pack_split(token_file(tmp_path, [(1, 2), (1, 2)]), 0.0, 8, True)
    batch = packed.batch(np.arange(1))
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 0, 0]]
    assert batch.starts is not None
    assert batch.starts.tolist() == [[0, 0, 0, 3, 3, 3, 6, 6]]
