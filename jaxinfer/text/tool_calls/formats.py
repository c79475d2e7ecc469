"""The known formats of tool calls, and which one a model writes."""

from __future__ import annotations

from jaxinfer.text.tool_calls.deepseek import DeepSeekV3
from jaxinfer.text.tool_calls.hermes import Hermes
from jaxinfer.text.tool_calls.llama3_json import Llama3Json
from jaxinfer.text.tool_calls.mistral import Mistral
from jaxinfer.text.tool_calls.qwen3_coder import Qwen3Coder
from jaxinfer.text.tool_calls.reading import ToolCallFormat

_KNOWN: tuple[ToolCallFormat, ...] = (Qwen3Coder(), Hermes(), DeepSeekV3(), Mistral(), Llama3Json())
"""In the order in which templates are asked: one that writes functions in XML has Hermes' tag, too."""

FORMATS = {known.name: known for known in _KNOWN}


def choose(name: str, template_source: str) -> ToolCallFormat | None:
    """The format of that name; with `auto`, the first whose own markup stands in the chat template.

    None: calls are not told from other text. That is so with the name `none`, and where no format is recognised.
    """
    if name == "auto":
        return next((known for known in _KNOWN if known.is_written_by(template_source)), None)
    return None if name == "none" else FORMATS[name]
