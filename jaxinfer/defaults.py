"""What a checkpoint says of generating: which tokens end a text, and how to sample where a request is silent."""

from __future__ import annotations

from collections.abc import Iterator

from checkpoints.resolve import Checkpoint
from checkpoints.source import CheckpointError
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import InvalidRequest, SamplingParams

SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What is taken from a model's generation_config."""


def eos_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Every id that ends a generation: what config, text_config, generation_config and tokenizer name, together.

    CheckpointError for one that is no id.
    """

    def named() -> Iterator[int]:
        text_config = checkpoint.config.get("text_config") or {}
        for source in (checkpoint.config, text_config, checkpoint.generation_config):
            value = source.get("eos_token_id")
            for token in value if isinstance(value, list) else [] if value is None else [value]:
                if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                    raise CheckpointError(f"{checkpoint.path}: eos_token_id is {value!r}; token ids are needed")
                yield token
        yield from tokenizer.eos_ids if tokenizer else ()

    return tuple(dict.fromkeys(named()))


def sampling_defaults(checkpoint: Checkpoint) -> dict[str, float]:
    """What the model's generation_config says of sampling. With `do_sample` false it asks for greedy decoding.

    CheckpointError for a value that a request could not ask for either.
    """
    given = checkpoint.generation_config
    defaults = {name: given[name] for name in SAMPLING_DEFAULTS if given.get(name) is not None}
    for name, value in defaults.items():
        try:
            SamplingParams(**{name: value})
        except (InvalidRequest, TypeError) as error:
            raise CheckpointError(f"{checkpoint.path}: generation_config's {name} is {value!r}: {error}") from None
    return {**defaults, "temperature": 0.0} if given.get("do_sample") is False else defaults
