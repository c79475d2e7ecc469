"""Chat completions that other routes ask for, whose form is said in those routes' own words."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from jaxinfer.http import openai
from jaxinfer.structured import StructuredOutputs
from jaxinfer.types import SamplingParams


class FormedChat(openai.ChatRequest, kw_only=True, frozen=True):
    """A chat completion with a form that is already read; never a body itself."""

    form: Any = None  # StructuredOutputs, or None for any, which no decoder is to make

    @property
    def is_constrained(self) -> bool:
        return self.form is not None or super().is_constrained

    def to_sampling(self) -> SamplingParams:
        return dataclasses.replace(super().to_sampling(), structured_outputs=self.form)


def formed(chat: openai.ChatRequest, form: StructuredOutputs | None) -> openai.ChatRequest:
    """The chat completion with this form."""
    if form is None:
        return chat
    fields = {name: getattr(chat, name) for name in chat.__struct_fields__}
    return msgspec.structs.replace(FormedChat(**fields), form=form)
