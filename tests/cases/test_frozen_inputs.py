"""With embeddings frozen, recomputed blocks get the gradient they have without recomputing."""

from collections.abc import Callable

from workbench import Workbench

from memtrain.config import Config


def test_recomputed_blocks_learn_on_frozen_inputs(
    tiny: Callable[..., Config], bench: Workbench
) -> None:
    window = bench.window(bench.samples(), 4)
    frozen = "model.train_only=all"
    kept = bench.gradients(bench.step(tiny(frozen, "checkpoint_every=0")), window)
    again = bench.gradients(bench.step(tiny(frozen, "checkpoint_every=1")), window)
    assert kept.keys() == again.keys()
    assert {name.split(".")[0] for name in kept} == {"blocks"}
    for name, gradient in kept.items():
        assert gradient.equal(again[name]) and gradient.any(), name
