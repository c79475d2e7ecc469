"""What a model's name stands for: its files, and its tokenizer. Never loads JAX."""

from __future__ import annotations

from typing import NamedTuple

from checkpoints.resolve import Checkpoint, resolve
from checkpoints.source import CheckpointError
from jaxinfer.config import EngineConfig
from jaxinfer.text.tokenizer import Tokenizer


class Found(NamedTuple):
    """What a model's name stands for."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer | None  # None if the checkpoint has none, and then only token ids can be served


def find_model(config: EngineConfig) -> Found:
    """The checkpoint that `config` names, and its tokenizer. CheckpointError for what is not there or not supported."""
    checkpoint = find_checkpoint(config)
    return Found(checkpoint, load_tokenizer(checkpoint))


def find_checkpoint(config: EngineConfig) -> Checkpoint:
    """The checkpoint that `config` names. CheckpointError if there is none."""
    return resolve(config.model, revision=config.revision, load_format=config.load_format)


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """Its tokenizer, if it has one; 0.6 s for Qwen3's. CheckpointError if it is not supported."""
    if checkpoint.tokenizer_json is None:
        return None
    try:
        return Tokenizer(checkpoint.tokenizer_json, checkpoint.tokenizer_config)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
