import gc
import threading
import time
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.data.loader import (
    IGNORE_INDEX,
    Batch,
    Batching,
    Loader,
    RandomTokens,
    _to_batch,
    count_samples,
    eval_batches,
)
from memtrain.errors import UserError

SEQ_LEN = 4
Windows = Loader | RandomTokens


def loader(
    n_samples: int, micro_batch: int = 2, accum: int = 3, seed: int = 0, **options: bool | int
) -> Loader:
    """Tokens count up, so that a sample's first token names it."""
    tokens = np.arange(n_samples * SEQ_LEN + 1, dtype=np.uint32)
    return Loader(tokens, SEQ_LEN, Batching(micro_batch, accum, seed, **options))  # type: ignore[arg-type]


def samples(window: list[Batch]) -> list[int]:
    return [int(row[0]) // SEQ_LEN for batch in window for row in batch.tokens]


def take(windows: Windows, n: int) -> list[list[int]]:
    iterator = iter(windows)
    try:
        return [batch.tokens.flatten().tolist() for w in islice(iterator, n) for batch in w]
    finally:
        iterator.close()


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.parametrize(("n_tokens", "seq_len", "expected"), [(17, 16, 1), (1000, 64, 15)])
def test_sample_count(n_tokens: int, seq_len: int, expected: int) -> None:
    tokens = np.arange(n_tokens, dtype=np.uint16)
    assert Loader(tokens, seq_len, Batching(1, 1, 0, prefetch=0)).n_samples == expected
    batches = list(eval_batches(tokens, seq_len, 1))
    assert len(batches) == expected
    assert batches[-1].targets[0, -1] == expected * seq_len


@pytest.mark.parametrize("n_tokens", [0, 1, 16])
def test_too_few_tokens_are_refused(n_tokens: int) -> None:
    tokens = np.zeros(n_tokens, dtype=np.uint16)
    message = rf"tiny\.txt: {n_tokens} tokens found, 17 needed"
    with pytest.raises(UserError, match=message):
        Loader(tokens, 16, Batching(1, 1, 0), name="tiny.txt")
    with pytest.raises(UserError, match=message):
        eval_batches(tokens, 16, 1, None, name="tiny.txt")
    with pytest.raises(UserError, match=message):
        count_samples(tokens, 16, "tiny.txt")


def test_targets_are_the_next_tokens() -> None:
    (batch,) = next(iter(loader(1, shuffle=False, prefetch=0)))
    assert batch.tokens.tolist() == [[0, 1, 2, 3]]
    assert batch.targets.tolist() == [[1, 2, 3, 4]]
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.n_targets == 4


def test_ignored_targets_are_not_counted() -> None:
    assert _to_batch(np.array([[1, 2, IGNORE_INDEX], [3, IGNORE_INDEX, 4]])).n_targets == 2


def test_a_batch_moves_as_a_whole() -> None:
    batch = next(iter(loader(5, prefetch=0)))[0].to(torch.device("meta"))
    assert batch.tokens.device.type == batch.targets.device.type == "meta"
    assert batch.n_targets == 2 * SEQ_LEN


@settings(deadline=None)
@given(
    n_samples=st.integers(1, 40),
    micro_batch=st.integers(1, 5),
    accum=st.integers(1, 5),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    stop=st.integers(0, 60),
)
def test_each_sample_once_per_epoch_also_after_resuming(
    n_samples: int, micro_batch: int, accum: int, seed: int, shuffle: bool, stop: int
) -> None:
    def make() -> Loader:
        return loader(n_samples, micro_batch, accum, seed, shuffle=shuffle, prefetch=0)

    first = make()
    per_epoch = first.windows_per_epoch
    stop %= 2 * per_epoch + 1
    windows = list(islice(first, stop))
    second = make()
    second.load_state_dict(first.state_dict())
    windows += islice(second, 3 * per_epoch - stop)
    for epoch in range(3):
        part = windows[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(s for window in part for s in samples(window)) == list(range(n_samples))
        assert all(len(window) == accum for window in part[:-1])
    sizes = [len(batch.tokens) for window in windows[:per_epoch] for batch in window]
    assert all(size == micro_batch for size in sizes[:-1])
    assert second.state_dict() == {"epoch": 3, "sample": 0, "content": ""}


@settings(deadline=None, max_examples=30)
@given(
    n_samples=st.integers(1, 20),
    accum=st.integers(1, 4),
    seed=st.integers(0, 3),
    stop=st.integers(0, 10),
)
def test_batches_and_state_are_the_same_for_any_prefetch(
    n_samples: int, accum: int, seed: int, stop: int
) -> None:
    makers = (
        lambda prefetch: loader(n_samples, 2, accum, seed, prefetch=prefetch),
        lambda prefetch: RandomTokens(
            50, SEQ_LEN, n_samples, Batching(2, accum, seed, prefetch=prefetch)
        ),
    )
    for make in makers:
        results = []
        for prefetch in (0, 1, 3):
            windows = make(prefetch)
            results.append((take(windows, stop), windows.state_dict(), take(windows, 3)))
        assert results[0] == results[1] == results[2]
        straight = take(make(0), stop + 3)
        assert results[0][0] + results[0][2] == straight
    assert not prefetch_threads()


def test_order_depends_on_seed_and_epoch() -> None:
    windows = list(islice(loader(30, 30, 1, prefetch=0), 2))
    other = next(iter(loader(30, 30, 1, seed=1, prefetch=0)))
    assert len({tuple(samples(window)) for window in [*windows, other]}) == 3
    in_order = next(iter(loader(30, 30, 1, shuffle=False, prefetch=0)))
    assert samples(in_order) == list(range(30))


def test_the_state_is_what_was_handed_out() -> None:
    windows = loader(20, 2, 2, prefetch=3)
    iterator = iter(windows)
    next(iterator)
    time.sleep(0.05)  # lets the thread run ahead
    assert windows.state_dict() == {"epoch": 0, "sample": 4, "content": ""}
    iterator.close()


def test_a_position_outside_the_data_is_refused() -> None:
    with pytest.raises(UserError, match="sample 7 of epoch 2: the data has 5 samples"):
        loader(5).load_state_dict({"epoch": 2, "sample": 7, "content": ""})


def test_loading_a_state_ends_the_iterator() -> None:
    windows = loader(10)
    iterator = iter(windows)
    next(iterator)
    windows.load_state_dict({"epoch": 0, "sample": 2, "content": ""})
    assert next(iterator, None) is None
    assert windows.state_dict() == {"epoch": 0, "sample": 2, "content": ""}
    assert not prefetch_threads()


def test_close_ends_the_thread() -> None:
    windows = loader(10)
    next(iter_kept := iter(windows))
    assert len(prefetch_threads()) == 1
    windows.close()
    assert not prefetch_threads()
    assert next(iter_kept, None) is None
    windows.close()


def test_leaving_the_loop_ends_the_thread() -> None:
    for _ in loader(10):
        break
    assert not prefetch_threads()


def test_forgetting_all_ends_the_thread() -> None:
    windows = loader(10)
    iterator = iter(windows)
    next(iterator)
    cycle: list[object] = [windows, iterator]
    cycle.append(cycle)
    del windows, iterator, cycle
    gc.collect()
    assert not prefetch_threads()


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_an_error_while_reading_reaches_the_trainer(prefetch: int) -> None:
    windows = loader(10, 1, 1, shuffle=False, prefetch=prefetch)
    windows._tokens = windows._tokens[: 3 * SEQ_LEN + 1]
    iterator = iter(windows)
    assert [samples(next(iterator)) for _ in range(3)] == [[0], [1], [2]]
    with pytest.raises(IndexError):
        next(iterator)
    assert windows.state_dict() == {"epoch": 0, "sample": 3, "content": ""}
    assert not prefetch_threads()


def test_random_tokens_are_uniform_and_depend_on_the_sample_alone() -> None:
    tokens = np.array(take(RandomTokens(50, 8, 100, Batching(4, 1, 0, prefetch=0)), 25))
    assert (tokens.min(), tokens.max()) == (0, 49)
    one_by_one = np.array(take(RandomTokens(50, 8, 100, Batching(1, 3, 0, prefetch=0)), 34))
    np.testing.assert_array_equal(tokens.reshape(-1, 8), one_by_one)
    assert len(np.unique(one_by_one, axis=0)) == 100


def test_eval_batches_are_in_order_and_limited() -> None:
    tokens = np.arange(9 * SEQ_LEN + 3, dtype=np.uint16)
    every = list(eval_batches(tokens, SEQ_LEN, 4))
    assert [samples([batch]) for batch in every] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert sum(batch.n_targets for batch in every) == 9 * SEQ_LEN
    for micro_batch in (1, 2, 4, 5):
        first = eval_batches(tokens, SEQ_LEN, micro_batch, max_samples=5)
        assert samples(list(first)) == [0, 1, 2, 3, 4]
