"""AdamW with moments in 8 bits and an fp32 scale per 256 elements (Dettmers et al. 2022, arXiv:2110.02861).

bitsandbytes' own, which steps on CUDA and on the CPU, made to be planned and made one per parameter, too. Imported
where it is wanted, for bitsandbytes is an extra. Parameters below 4,096 elements keep 32 bits.
"""

from functools import cache

import bitsandbytes
import torch
from bitsandbytes.functional import create_dynamic_map
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

PAGED_FROM = 10**5
"""Elements from which bitsandbytes pages a state."""


@cache
def table(*, signed: bool) -> list[float]:
    """The 256 numbers that 8 bits stand for: real ones even where a mode makes tensors without data."""
    with _disable_current_modes():
        values: list[float] = create_dynamic_map(signed).tolist()
    return values


class _Tables:
    """bitsandbytes computes the tables for every optimizer anew."""

    name2qmap: dict[str, Tensor]

    def fill_qmap(self) -> None:
        self.name2qmap["dynamic"] = torch.tensor(table(signed=True))
        self.name2qmap["udynamic"] = torch.tensor(table(signed=False))


class AdamW8bit(_Tables, bitsandbytes.optim.AdamW8bit):  # type: ignore[misc]
    """State on the parameter's device."""


class PagedAdamW8bit(_Tables, bitsandbytes.optim.PagedAdamW8bit):  # type: ignore[misc]
    """State in CUDA's managed memory, which torch takes for the host's; elsewhere than on CUDA the host's it is."""

    def get_state_buffer(self, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        if p.device.type == "cuda":
            return super().get_state_buffer(p, dtype)  # type: ignore[no-any-return]
        if p.numel() < PAGED_FROM:
            return torch.zeros_like(p, dtype=dtype)
        buffer = torch.zeros(p.shape, dtype=dtype)
        buffer.is_paged = True  # type: ignore[attr-defined]  # may be on another device than the weight
        return buffer

    def prefetch_state(self, p: Tensor) -> None:
        if p.device.type == "cuda":
            super().prefetch_state(p)
