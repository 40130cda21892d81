"""Weights of a Hugging Face folder or a .gguf file, into parameters: a few rows in memory at a time."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from memtrain.errors import UserError
from memtrain.model.pretrained.config_values import HFConfig
from memtrain.model.pretrained.families import Rows
from memtrain.model.pretrained.folder import read_config, stored_tensors
from memtrain.units import MIB

PIECE_BYTES = 16 * MIB
"""Copied and checked at a time: in a cache both times, and enough for the threads of a copy."""

NO_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$|attn\.(masked_)?bias$")
"""Tables that old versions of transformers have stored."""


class Readable(Protocol):
    """A tensor that is read by rows."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def rows(self, first: int, n: int) -> Tensor: ...


class Source:
    """`config` and `tensors`, by name, of what lies at `path`; weights are read by the fillers.

    A .gguf file is unpacked in host memory, in fp32, when its tensors are first asked for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_gguf = path.suffix == ".gguf"
        self.config: HFConfig
        self._tensors: Mapping[str, Readable] | None = None
        if self.is_gguf:
            from memtrain.model.pretrained.gguf import read_gguf_config

            self.config = read_gguf_config(path)
        else:
            self.config = read_config(path)

    @property
    def tensors(self) -> Mapping[str, Readable]:
        if self._tensors is None:
            if self.is_gguf:
                from memtrain.model.pretrained.gguf import read_gguf_tensors

                self._tensors = read_gguf_tensors(self.path)
            else:
                self._tensors = stored_tensors(self.path)
        return self._tensors

    def fingerprint(self) -> str:
        """Of names, types, shapes and a sample of the values: two copies of a model have one."""
        found = hashlib.sha256()
        for name in sorted(self.tensors):
            stored = self.tensors[name]
            found.update(f"{name} {stored.dtype} {tuple(stored.shape)}".encode())
            for first in sorted({0, stored.shape[0] // 2, stored.shape[0] - 1}):
                row = stored.rows(first, 1).contiguous().view(-1)
                found.update(row.view(torch.uint8).numpy().data)
        return found.hexdigest()

    def check(self, rows: Sequence[Rows], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Names and shapes, from headers alone; `shapes` are those of our parameters. Raises UserError."""
        left = {name for name in self.tensors if not NO_WEIGHTS.search(name)}
        for group in rows:
            for name, shape in zip(group.theirs, shapes_of_theirs(group, shapes), strict=True):
                stored = self._name(name)
                left.discard(stored)
                found = tuple(self.tensors[stored].shape)
                if found != shape:
                    raise UserError(
                        f"{self.path}: {stored} is {found}; by its config.json it is {shape}"
                    )
        self._check_tied(rows, left)
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise UserError(
                f"{self.path}: {min(left)}{more}: no such weights by its config.json; are both of one model?"
            )

    def filler(self, rows: Sequence[Rows]) -> Callable[[str, Tensor], None]:
        """A function (name, parameter) that gives the parameter its values, in the parameter's own type.

        It raises UserError for values that are not finite.
        """
        groups = {name: (group, index) for group in rows for index, name in enumerate(group.ours)}

        @torch.no_grad()
        def fill(name: str, parameter: Tensor) -> None:
            group, index = groups[name]
            for part in parts_of(group, index, len(parameter)):
                name_there = self._name(group.theirs[part.theirs])
                target = parameter[part.start : part.stop]
                if group.transposed:
                    target = target.t()
                copy_rows(
                    self.tensors[name_there], part.first, target, self._not_finite(name_there)
                )

        return fill

    def _name(self, name: str) -> str:
        """As it is stored: a model saved without its head has no prefix, and tied weights can have either name."""
        bare = name.partition(".")[2]
        if name in self.tensors:
            return name
        if bare in self.tensors:
            return bare
        if name == "model.embed_tokens.weight" and "lm_head.weight" in self.tensors:
            return "lm_head.weight"
        raise UserError(f"{self.path}: {name} is missing; get the folder again")

    def _check_tied(self, rows: Sequence[Rows], left: set[str]) -> None:
        """A head that is stored though it is the embedding has to be that."""
        if "lm_head.weight" not in left:
            return
        left.discard("lm_head.weight")
        (embedding,) = (self._name(r.theirs[0]) for r in rows if r.ours[0] == "embedding.weight")
        one, other = self.tensors[embedding], self.tensors["lm_head.weight"]
        if one.shape != other.shape or one.dtype != other.dtype or not equal(one, other):
            raise UserError(
                f"{self.path}: lm_head.weight is not {embedding}, though tie_word_embeddings is true; "
                "set that to false in its config.json"
            )

    def _not_finite(self, name: str) -> UserError:
        return UserError(f"{self.path}: {name} has values that are not finite; get it again")


@dataclass(frozen=True)
class Part:
    """Rows of one parameter that lie in one of the tensors."""

    start: int
    stop: int
    theirs: int
    first: int
    """Their first row there."""


def parts_of(group: Rows, index: int, n_rows: int) -> Iterator[Part]:
    """Of parameter `index` of the group, which has `n_rows`."""
    ends = list(accumulate(group.heights, initial=0))
    if len(group.theirs) > 1:
        for theirs, (start, stop) in enumerate(pairwise(ends)):
            yield Part(start, stop, theirs, 0)
    else:
        yield Part(0, n_rows, 0, ends[index] if len(group.ours) > 1 else 0)


def shapes_of_theirs(group: Rows, shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    columns = shapes[group.ours[0]][1:]
    if len(group.theirs) > 1:
        return [(height, *columns) for height in group.heights]
    shape = (sum(shapes[name][0] for name in group.ours), *columns)
    return [shape[::-1] if group.transposed else shape]


def copy_rows(stored: Readable, first: int, target: Tensor, not_finite: Exception) -> None:
    """`target` becomes the rows from `first` on; raises `not_finite` for such values."""
    for start, piece in pieces(stored, first, len(target)):
        target[start : start + len(piece)].copy_(piece)
        # a sum is not finite if one value is not, or if it overflows
        if not piece.sum().isfinite() and not piece.isfinite().all():
            raise not_finite


def pieces(stored: Readable, first: int, n_rows: int) -> Iterator[tuple[int, Tensor]]:
    """Rows `first` to `first + n_rows`, a piece after the other."""
    row_bytes = stored.dtype.itemsize * torch.Size(stored.shape[1:]).numel()
    step = max(1, min(n_rows, PIECE_BYTES // row_bytes))
    for start in range(0, n_rows, step):
        yield start, stored.rows(first + start, min(step, n_rows - start))


def equal(one: Readable, other: Readable) -> bool:
    both = zip(pieces(one, 0, one.shape[0]), pieces(other, 0, other.shape[0]), strict=True)
    return all(torch.equal(a, b) for (_, a), (_, b) in both)
