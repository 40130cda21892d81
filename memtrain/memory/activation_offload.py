"""What autograd saves for backward waits in host memory (saved-tensor hooks, torch.autograd.graph)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class _OnHost:
    device: torch.device
    data: Tensor


class ActivationOffload(torch.autograd.graph.saved_tensors_hooks):
    """Context for the forward pass. Tensors under `min_bytes` and the parameters themselves stay where they are.

    On CUDA the host side is pinned. `moved_bytes` counts what went to the host since it was made.
    """

    def __init__(self, model: nn.Module, min_bytes: int) -> None:
        self.moved_bytes = 0
        self._min_bytes = min_bytes
        self._kept = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _OnHost:
        size_bytes = tensor.numel() * tensor.element_size()
        if size_bytes < self._min_bytes or tensor.untyped_storage()._cdata in self._kept:
            return tensor
        data = torch.empty_strided(
            tensor.size(),
            tensor.stride(),
            dtype=tensor.dtype,
            device="cpu",
            pin_memory=tensor.device.type != "cpu",
        )
        data.copy_(tensor, non_blocking=True)
        self.moved_bytes += size_bytes
        return _OnHost(tensor.device, data)

    @staticmethod
    def _unpack(packed: Tensor | _OnHost) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        data = torch.empty_strided(
            packed.data.size(), packed.data.stride(), dtype=packed.data.dtype, device=packed.device
        )
        return data.copy_(packed.data, non_blocking=True)
