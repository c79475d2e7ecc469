"""Reading a published config.json: both spellings of its keys, defaults, and a list of everything that does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models import rope
from jaxinfer.models.model import ModelError


class HfConfig:
    """A config.json with its problems collected, so that one refusal names them all."""

    def __init__(self, config: Mapping[str, Any]):
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

    def problem(self, text: str) -> None:
        self._problems.append(text)

    def only(self, key: str, supported: Any) -> None:
        """A problem if an optional key has another value than the one that is implemented."""
        if (value := self.get(key, supported)) != supported:
            self.problem(f"{key} is {value!r}; only {supported!r} is implemented")

    def rope(self, width: int, max_positions: int, default_theta: float = 10000.0) -> rope.Rope:
        """From `rope_parameters` (new spelling) or `rope_theta` and `rope_scaling` (old spelling)."""
        scaling = self.get("rope_parameters") or self.get("rope_scaling") or {}
        theta = scaling.get("rope_theta") or self.get("rope_theta", default_theta)
        if scaling.get("partial_rotary_factor", self.get("partial_rotary_factor", 1.0)) != 1.0:
            self.problem("partial_rotary_factor other than 1 is not implemented for this architecture")
        try:
            return rope.from_config(width, theta, scaling, max_positions)
        except KeyError as missing:
            self.problem(f"RoPE scaling {dict(scaling)} lacks {missing}")
        except ValueError as error:
            self.problem(str(error))
        return rope.Rope(())

    def finish(self, architecture: str) -> None:
        """Raises ModelError with every problem found."""
        if self._problems:
            raise ModelError(f"config of {architecture} does not fit: " + "; ".join(self._problems))
