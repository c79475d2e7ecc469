"""Grammars for the golden models, which have no tokenizer: token i is the byte i, for the 128 ids of ASCII."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxinfer.engine.engine import Engine
from jaxinfer.structured import StructuredOutputs
from jaxinfer.text.grammar import Grammars, write

VOCAB, EOS = 128, 3


class Ascii:
    """As much of a tokenizer as a grammar needs."""

    vocab_size = VOCAB

    def token_bytes(self, id: int) -> bytes:
        return bytes([id])

    def is_special(self, id: int) -> bool:
        return id == EOS

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(text.encode())


def give_grammars(engine: Engine) -> Iterator[Engine]:
    """The engine with grammars, closed in the end."""
    tokenizer: Any = Ascii()
    engine._grammars = Grammars(tokenizer, VOCAB, (EOS,))
    yield engine
    engine.close()


def grammar(**form: Any) -> str:
    return write(StructuredOutputs(**form))


def text(tokens: list[int]) -> str:
    """Of an output, without the EOS that ended it."""
    return bytes(token for token in tokens if token != EOS).decode()
