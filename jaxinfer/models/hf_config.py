"""Reading a published config.json: both spellings of its keys, defaults, and a list of everything that does not fit."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from jaxinfer.models import rope
from jaxinfer.models.model import ModelError

ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
)
"""RoPE's parameters that have to be above 0."""


DEFAULT_THETA = 10000.0


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class HfConfig:
    """A config.json with its problems collected, so that one refusal names them all."""

    def __init__(self, config: Mapping[str, Any], tensors: Collection[str] = ()):
        """tensors: names in the checkpoint, as far as they are known: some say what the config leaves open."""
        self.tensors = tensors
        self._config = {**config, **config["text_config"]} if isinstance(config.get("text_config"), Mapping) else config
        self._problems: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        """The value of an optional key; null counts as absent."""
        value = self._config.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number; a problem if it is absent without a default, or anything else."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.problem(f"{key} is {value!r}; a positive whole number is needed")
            return 1
        return value

    def number(self, key: str, default: float) -> float:
        """A number of an optional key; a problem if it is anything else."""
        value = self.get(key, default)
        if not _is_finite(value):
            self.problem(f"{key} is {value!r}; a number is needed")
            return default
        return value

    def flag(self, key: str) -> bool:
        """Whether an optional key is true; a problem if it is neither true nor false."""
        value = self.get(key, False)
        if not isinstance(value, bool):
            self.problem(f"{key} is {value!r}; true or false is needed")
            return False
        return value

    def problem(self, text: str) -> None:
        self._problems.append(text)

    def only(self, key: str, supported: Any) -> None:
        """A problem if an optional key has another value than the one that is implemented."""
        if (value := self.get(key, supported)) != supported:
            self.problem(f"{key} is {value!r}; only {supported!r} is implemented")

    def rope(self, width: int, max_positions: int, *, partial: bool = False) -> rope.Rope:
        """From `rope_parameters` (new spelling) or `rope_theta` and `rope_scaling` (old spelling).

        partial: whether `partial_rotary_factor` may leave channels of a head out.
        """
        key = "rope_parameters" if self.get("rope_parameters") else "rope_scaling"
        given = self.get(key) or {}
        if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
            self.problem(f"{key} is {given!r}; one set of RoPE parameters for all layers is needed")
            return rope.Rope(())
        scaling = {name: value for name, value in given.items() if value is not None}
        theta = scaling.get("rope_theta") or self.get("rope_theta", DEFAULT_THETA)
        for name, value in {**scaling, "rope_theta": theta}.items():
            if name in ROPE_NUMBERS and (not _is_finite(value) or value <= 0):
                self.problem(f"RoPE's {name} is {value!r}; a number above 0 is needed")
                return rope.Rope(())
        share = scaling.get("partial_rotary_factor", self.get("partial_rotary_factor", 1.0))
        if share != 1.0 and not partial:
            self.problem(f"partial_rotary_factor is {share!r}; only 1 is implemented for this architecture")
            return rope.Rope(())
        if not _is_finite(share) or not 0 < share <= 1 or int(width * share) % 2:
            self.problem(f"partial_rotary_factor is {share!r}; an even share of {width} channels is needed")
            return rope.Rope(())
        try:
            return rope.from_config(int(width * share), theta, scaling, max_positions)
        except KeyError as missing:
            self.problem(f"RoPE scaling {scaling} lacks {missing}")
        except ValueError as error:
            self.problem(str(error))
        return rope.Rope(())

    def finish(self, architecture: str) -> None:
        """Raises ModelError with every problem found."""
        if self._problems:
            raise ModelError(f"config of {architecture} does not fit: " + "; ".join(self._problems))
