"""The choice per block that a byte budget finds for Llama-2-7B, against the best one that is the same in every block.

    python benchmarks/budget.py

bf16_true, optimizer on the host, 2,048 tokens. To reach: at most 5 % slower (predicted) than the best of an exhaustive
search over the uniform choices, in under 60 s on two cores. Where nothing fits, the search has to say so.
"""

import time
from typing import Any

from measure import composed_config, print_rows, save_result

from memtrain.cards import load_card
from memtrain.engine.build import build_dimensions
from memtrain.errors import UserError
from memtrain.planner.budget import CHEAPEST_FIRST, budget_bytes, choose, outcome
from memtrain.report.planned import runs
from memtrain.units import format_bytes

CASES = (("rtx4090", 1), ("a100_40gb", 4), ("a100_40gb", 8), ("a100_80gb", 8), ("a100_80gb", 16))


def search(card_name: str, micro_batch: int) -> dict[str, Any]:
    config = composed_config(
        ["model=llama2_7b", "seq_len=2048", f"micro_batch={micro_batch}", "precision=bf16_true",
         "offload=optimizer", "checkpointing=budget"]
    )  # fmt: skip
    dimensions, card = build_dimensions(config, 32000), load_card(card_name)
    limit_bytes = budget_bytes(config, card)
    start_s = time.perf_counter()
    found: dict[str, Any] = {
        "card": card.name,
        "micro_batch": micro_batch,
        "limit_bytes": limit_bytes,
    }
    try:
        choice = choose(config, dimensions, card)
    except UserError as error:
        return found | {"seconds": time.perf_counter() - start_s, "refused": str(error)}
    found["seconds"] = time.perf_counter() - start_s
    uniform = [
        outcome(config, dimensions, card, (policy,) * dimensions.n_layers)
        for policy in CHEAPEST_FIRST
    ]
    best = min((o.step_seconds for o in uniform if o.peak_bytes <= limit_bytes), default=None)
    found |= {"per_block": runs(choice.per_block), "peak_bytes": choice.peak_bytes}
    return found | {"step_seconds": choice.step_seconds, "best_uniform_step_seconds": best}


def row(found: dict[str, Any]) -> list[str]:
    head = [f"{found['card']}, {found['micro_batch']} x 2048", f"{found['seconds']:.0f}"]
    if "refused" in found:
        return [*head, found["refused"].split(";")[0], "", "", ""]
    best = found["best_uniform_step_seconds"]
    against = f"{found['step_seconds'] / best - 1:+.1%}" if best else "no uniform choice fits"
    sizes = f"{format_bytes(found['peak_bytes'])} of {format_bytes(found['limit_bytes'])}"
    return [*head, ", ".join(found["per_block"]), sizes, f"{found['step_seconds']:.2f}", against]


def main() -> None:
    found = [search(*case) for case in CASES]
    columns = ("", "searched s", "choice", "reserved", "step s", "against the best uniform")
    print_rows("llama2_7b within what a card has", columns, [row(one) for one in found])
    print(save_result("budget", ("torch", "memtrain"), {"cases": found}))


if __name__ == "__main__":
    main()
