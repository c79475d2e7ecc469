"""What a user may say of a batch job: frozen, checked when made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.config import REASONING_PARSERS, TOOL_CALL_PARSERS, ConfigError

MAX_SHARDS = 2**20
"""Most processes that may share a job."""
MAX_INTERVAL_S = 3600.0
"""Longest time between two checkpoints, in seconds: what is lost with a process is computed again."""


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """A job. The fields up to `served_model_names` decide its output: a job is not resumed with others."""

    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the OpenAI API for every row that does not give them: max_tokens, temperature, ..."""
    seed: int = 0
    """Each row that samples and gives no seed has its own, made of this and of its place in the input."""
    shuffle_seed: int | None = None
    """Rows are read, and written, in a random order. None: in that of the input."""
    shard_index: int = 0
    """Which part of the rows this process takes, of `shard_count` parts that lie one after the other."""
    shard_count: int = 1
    """Processes that share the input. Each writes a file of its own; joined by number they are the whole output."""
    chat_template: str | None = None
    """Jinja template in place of the model's own."""
    chat_template_kwargs: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Passed to every rendering; a row's own override them."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls: see ServerConfig."""
    reasoning_parser: str = "auto"
    """How the model marks its thought: see ServerConfig."""
    served_model_names: Sequence[str] = ()
    """Names of the model that rows may give. Empty: the name that was loaded."""
    arrange_rows: bool = True
    """Whether rows run out of turn, those together whose prompts begin alike and long ones before short ones; the order
    of the output stays. See `arranging.arrange`."""
    max_rows_ahead: int | None = None
    """Rows that may be read before the first of them is done: more let long rows hold up nothing, and take memory.

    None: 16 for each sequence that the engine runs at once."""
    checkpoint_s: float = 2.0
    """Time between two checkpoints, in seconds: a process that is killed loses no more than that, and what runs."""

    def __post_init__(self) -> None:
        _check(
            1 <= self.shard_count <= MAX_SHARDS,
            f"shard_count is {self.shard_count}; it must be from 1 to {MAX_SHARDS}",
        )
        _check(
            0 <= self.shard_index < self.shard_count,
            f"shard_index is {self.shard_index}; with shard_count {self.shard_count} it must be from 0 to "
            f"{self.shard_count - 1}",
        )
        ahead = self.max_rows_ahead
        _check(ahead is None or ahead >= 1, f"max_rows_ahead is {ahead}; it must be at least 1")
        _check(
            0 <= self.checkpoint_s <= MAX_INTERVAL_S,
            f"checkpoint_s is {self.checkpoint_s}; it must be from 0 to {MAX_INTERVAL_S:g} seconds",
        )
        shuffle = self.shuffle_seed
        _check(shuffle is None or 0 <= shuffle < 2**32, f"shuffle_seed is {shuffle}; it must be from 0 to {2**32 - 1}")
        _check(-(2**63) <= self.seed < 2**64, f"seed is {self.seed}; it must be of 64 bits")
        for name, known in (("tool_call_parser", TOOL_CALL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            value = getattr(self, name)
            _check(value in known, f"{name} is {value!r}; known: {', '.join(known)}")
        for name in ("messages", "prompt", "stream", "custom_id"):
            _check(name not in self.defaults, f"defaults has {name!r}, which each row must say for itself")

    def identity(self) -> dict[str, Any]:
        """What decides the output, for the checkpoint."""
        return {
            "defaults": dict(self.defaults),
            "seed": self.seed,
            "shuffle_seed": self.shuffle_seed,
            "shard_index": self.shard_index,
            "shard_count": self.shard_count,
            "chat_template": self.chat_template,
            "chat_template_kwargs": dict(self.chat_template_kwargs),
            "tool_call_parser": self.tool_call_parser,
            "reasoning_parser": self.reasoning_parser,
            "served_model_names": list(self.served_model_names),
        }
