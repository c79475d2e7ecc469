"""Token ids to text as they arrive, such that the pieces joined are the text of the whole."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from jaxinfer.text.tokenizer import Tokenizer

_UTF8_BYTES = 4  # the longest sequence of one character
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one output. Each token is read once; what waits is at most 3 bytes of an unfinished character.

    The output continues the prompt: a leading space that a decoder drops at the start of a text is kept after a
    prompt that shows some text, and a character that the prompt began is shown whole by the output that ends it.
    `always_shown` are special tokens that are not left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        always_shown: Collection[int] = (),
    ):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._always_shown = always_shown
        self._utf8 = _Utf8Decoder("replace")
        self._strip = tokenizer.decoder.strip_count
        self._first = True
        self._settled = False
        """Nothing waits, and nothing is stripped: a token's text is then what it is anywhere."""
        self._prompt: Sequence[int] | None = prompt_ids  # until it is read

    def begin(self) -> None:
        """Reads the end of the prompt, which the first call of another method does otherwise."""
        if self._prompt is not None:
            prompt_ids, self._prompt = self._prompt, None
            self._follow(prompt_ids)
            self._settle()

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        if self._settled and len(token_ids) == 1:
            whole = self._tokenizer.whole_text(token_ids[0])
            if whole is not None:
                return whole
        self.begin()
        text = bytearray()
        for id in token_ids:
            skips = self._skip and id not in self._always_shown
            if self._tokenizer.shows(id, skip_special_tokens=skips):
                text += self._tokenizer.first_token_bytes(id) if self._first else self._tokenizer.token_bytes(id)
                self._first = False
        shown = self._strip_start(self._utf8.decode(bytes(text)))
        self._settle()
        return shown

    def flush(self) -> str:
        """What still waits, at the end of the output: U+FFFD for an unfinished character."""
        self.begin()
        text = self._utf8.decode(b"", final=True)
        return self._strip_start(text)

    def _follow(self, prompt_ids: Sequence[int]) -> None:
        """Takes up where the prompt ends, reading it from the end and no further than the last character."""
        tail = bytearray()
        shown = 0
        for id in reversed(prompt_ids):
            if self._tokenizer.shows(id, skip_special_tokens=self._skip):
                tail[:0] = self._tokenizer.token_bytes(id)
                shown += 1
            if len(tail) >= _UTF8_BYTES:
                break
        self._first = shown == 0
        # Only a prompt of less than 4 bytes can consist of nothing but what the decoder strips.
        if tail:
            whole = tail.decode("utf-8", "replace")
            strip_char = self._tokenizer.decoder.strip_char
            lead = len(whole) - len(whole.lstrip(strip_char)) if strip_char else 0
            self._strip = max(0, self._strip - lead) if lead == len(whole) else 0
        self._utf8.decode(bytes(tail))

    def _settle(self) -> None:
        self._settled = not (self._first or self._strip or self._utf8.getstate()[0])

    def _strip_start(self, text: str) -> str:
        strip_char = self._tokenizer.decoder.strip_char
        while self._strip and text:
            if not text.startswith(strip_char):
                self._strip = 0
            else:
                text, self._strip = text[len(strip_char) :], self._strip - 1
        return text
