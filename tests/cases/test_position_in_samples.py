"""A position in the data counts samples, not steps: what was seen is not seen again, and nothing is left out."""

from itertools import islice

import numpy as np

from memtrain.data.loader import Batching, Loader

SEQ_LEN = 4


def loader(seed: int = 0) -> Loader:
    """24 samples, one a micro-batch; sample i begins with token 4 i."""
    tokens = np.arange(24 * SEQ_LEN + 1)
    return Loader(tokens, SEQ_LEN, Batching(1, 4, seed, shuffle=False))


def ids(windows: Loader, n: int) -> list[int]:
    found = list(islice(windows, n))
    return [int(batch.tokens[0, 0]) // SEQ_LEN for window in found for batch in window]


def test_three_steps_and_three_more() -> None:
    first, second = loader(), loader()
    before = ids(first, 3)
    second.load_state_dict(first.state_dict())
    after = ids(second, 3)
    assert after[0] == 12
    assert before + after == list(range(24))
    for windows in (first, second):
        windows.close()
