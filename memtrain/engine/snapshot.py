"""Tensors that go on changing, as they are now: written to a safetensors file piece by piece."""

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memtrain.device import free_host_bytes
from memtrain.run_folder import write_synced

CHUNK_BYTES = 2**26
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the safetensors format (github.com/huggingface/safetensors, README, "Format")."""


class Snapshot:
    """Tensors as they are now, read by another thread while the owner goes on.

    That thread calls `copy` first. The owner calls `freeze` before it changes any of them: where host memory has no
    room for a copy it waits until the other has read them piece by piece.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._lock = threading.Lock()
        self._frozen = False
        self._all_read = threading.Event()

    def chunks(self, name: str) -> Iterator[memoryview]:
        """The bytes of one tensor, in its order; then it is forgotten."""
        n_elements, itemsize = self._tensors[name].numel(), self._tensors[name].element_size()
        length = max(1, CHUNK_BYTES // itemsize)
        for start in range(0, n_elements, length):
            with self._lock:  # not while all of it is being copied
                flat = self._tensors[name].detach().reshape(-1)
                piece = flat[start : start + length].to("cpu", copy=True)
            yield piece.view(torch.uint8).numpy().data
        del self._tensors[name]

    def finish(self) -> None:
        """Nothing is read any more."""
        self._all_read.set()

    def copy(self) -> bool:
        """What is left; False where host memory has no room for it."""
        with self._lock:
            left_bytes = sum(tensor.nbytes for tensor in list(self._tensors.values()))
            if not self._frozen and left_bytes < free_host_bytes() // 2:
                for name, tensor in list(self._tensors.items()):
                    self._tensors[name] = tensor.detach().to("cpu", copy=True)
                self._frozen = True
            return self._frozen

    def freeze(self) -> None:
        if not self._all_read.is_set() and not self.copy():
            self._all_read.wait()


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], snapshot: Snapshot, prefix: str
) -> None:
    """A safetensors file, one piece in memory at a time; `snapshot` knows the tensors as `prefix` + name."""
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[name]["data_offsets"] = [offset, end]
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    pieces = (piece for name in tensors for piece in snapshot.chunks(prefix + name))
    write_synced(path, [len(text).to_bytes(8, "little"), text], pieces)
