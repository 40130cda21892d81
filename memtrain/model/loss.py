"""Head and cross-entropy: hidden states in, the summed loss of all target tokens out, always in fp32."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from memtrain.data.loader import IGNORE_INDEX

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Hidden states (B, T, C), head weight (V, C), targets (B, T) -> summed loss, a scalar in fp32."""


def full_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over all logits at once; targets of IGNORE_INDEX count nothing."""
    logits = F.linear(hidden, head)  # (B, T, V)
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        targets.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )
