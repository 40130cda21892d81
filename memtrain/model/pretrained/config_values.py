"""Values of a config.json, each of the kind that it has to be."""

import math
from collections.abc import Mapping
from typing import Any

from memtrain.errors import UserError
from memtrain.model.layers import RopeScaling

HFConfig = Mapping[str, Any]
"""The content of a config.json."""


class NotNative(Exception):
    """Our Transformer does not represent the model; the message says why in a few words."""


class Config:
    """Values by key. `usual` is what an absent key means. Raises UserError for a value of another kind."""

    def __init__(self, values: HFConfig) -> None:
        self.values = values

    def get(self, key: str, usual: Any = None) -> Any:
        return self.values.get(key, usual)

    def count(self, key: str, usual: int | None = None) -> int:
        if key not in self.values and usual is None:
            raise UserError(f"config.json: no {key} in it; get the folder again")
        found = self.whole(key, usual)
        if found < 1:
            raise self._wrong(key, "is at least 1")
        return found

    def optional_count(self, key: str, usual: int | None) -> int | None:
        return None if self.get(key, usual) is None else self.count(key, usual)

    def whole(self, key: str, usual: int | None = None) -> int:
        found = self.get(key, usual)
        if not isinstance(found, int) or isinstance(found, bool):
            raise self._wrong(key, "is a whole number")
        return found

    def number(self, key: str, usual: float) -> float:
        """More than 0."""
        found = self.get(key, usual)
        if not is_number(found) or not 0 < found < math.inf:
            raise self._wrong(key, "is a number above 0")
        return float(found)

    def share(self, key: str, usual: float) -> float:
        found = self.get(key, usual)
        if not is_number(found) or not 0 <= found < 1:
            raise self._wrong(key, "is at least 0 and below 1")
        return float(found)

    def flag(self, key: str, usual: bool) -> bool:
        found = self.get(key, usual)
        if not isinstance(found, bool):
            raise self._wrong(key, "is true or false")
        return found

    def text(self, key: str, usual: str) -> str:
        found = self.get(key, usual)
        if not isinstance(found, str):
            raise self._wrong(key, "is a name")
        return found

    def check_list(self, key: str, found: Any, n_layers: int) -> None:
        if not isinstance(found, (list, tuple)) or len(found) < n_layers:
            raise UserError(f"config.json: {key} has to list all {n_layers} layers")

    def check_divides(self, small_key: str, small: int, large_key: str, large: int) -> None:
        if large % small:
            raise UserError(
                f"config.json: {large_key}={large} is no multiple of {small_key}={small}"
            )

    def refuse_unless(self, key: str, usual: Any) -> None:
        """Raises NotNative where the key asks for what we do not have."""
        found = self.get(key, usual)
        if found is not None and found != usual:
            raise NotNative(f"{key}={found}")

    def _wrong(self, key: str, wanted: str) -> UserError:
        return UserError(f"config.json: {key}={self.get(key)!r}: {wanted}")


def is_number(found: Any) -> bool:
    return isinstance(found, (int, float)) and not isinstance(found, bool)


KNOWN_ROPES = ("dynamic", "longrope", "su", "mrope", "proportional", "axial")
"""Rope types of transformers that our Transformer does not have."""


def rope_of(config: Config, theta: float, max_seq_len: int) -> tuple[float, RopeScaling | None]:
    """Theta, and how it is scaled: `rope_parameters` (transformers 5) or `rope_scaling` beside `rope_theta`."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise UserError(f"config.json: rope_parameters={found!r}: has to be a table of keys")
    if any(isinstance(value, dict) for value in found.values()):
        raise NotNative("rope_parameters differ between layers")
    theta = Config(found).number("rope_theta", config.number("rope_theta", theta))
    rope = Config({key: value for key, value in found.items() if value is not None})
    rope.refuse_unless("partial_rotary_factor", 1.0)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return theta, None
    if kind in KNOWN_ROPES:
        raise NotNative(f"rope_type={kind}")
    if kind not in ("linear", "llama3", "yarn"):
        raise UserError(
            f"config.json: rope_type={kind}: unknown; known are default, linear, llama3, yarn"
        )
    if "factor" not in rope.values:
        raise UserError(f"config.json: rope_type={kind}: no factor beside it")
    if kind == "linear":
        return theta, RopeScaling(kind, rope.number("factor", 1.0))
    top = config.optional_count("original_max_position_embeddings", None)
    length = top or rope.count("original_max_position_embeddings", max_seq_len)
    return theta, llama3(rope, length) if kind == "llama3" else yarn(rope, length)


def llama3(rope: Config, length: int) -> RopeScaling:
    for key in ("low_freq_factor", "high_freq_factor"):
        if key not in rope.values:
            raise UserError(f"config.json: rope_type=llama3: no {key} beside it")
    low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
    if low >= high:
        raise UserError(
            f"config.json: low_freq_factor={low:g} is not below high_freq_factor={high:g}"
        )
    factor = rope.number("factor", 1.0)
    return RopeScaling("llama3", factor, length, low_freq_factor=low, high_freq_factor=high)


def yarn(rope: Config, length: int) -> RopeScaling:
    rope.refuse_unless("truncate", True)
    factor = rope.number("factor", 1.0)
    return RopeScaling(
        "yarn",
        factor,
        length,
        beta_slow=rope.number("beta_slow", 1.0),
        beta_fast=rope.number("beta_fast", 32.0),
        attention_factor=rope.number("attention_factor", _yarn_attention(rope, factor)),
    )


def _yarn_attention(rope: Config, factor: float) -> float:
    """Scores grow with the log of the factor (Peng et al. 2023, section 3.4)."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    weight, weight_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if weight and weight_all:
        of_all = temperature(rope.number("mscale_all_dim", 1.0))
        return temperature(rope.number("mscale", 1.0)) / of_all
    return temperature(1.0)
