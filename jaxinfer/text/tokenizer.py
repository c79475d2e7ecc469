"""Text to token ids and back, from the tokenizer.json and tokenizer_config.json of a checkpoint."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from jaxinfer.text.grammar import Checker
from jaxinfer.text.pieces import PieceDecoder
from jaxinfer.types import InvalidRequest

TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
"""Tokens that end a turn in every chat template that writes them. `<|end|>` does not: some write it inside a turn."""


def token_string(value: Any) -> str | None:
    """The text of a special token as tokenizer_config.json writes it: a string, or a mapping with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


class Tokenizer:
    """One checkpoint's tokenizer. Immutable once made, and safe to share between threads.

    Raises UnsupportedTokenizer where its decoder is not a plain concatenation of tokens, and ValueError where
    `tokenizer_json` is not a tokenizer.
    """

    def __init__(self, tokenizer_json: str, tokenizer_config: Mapping[str, Any]):
        try:
            parsed = json.loads(tokenizer_json)
            self._library = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"tokenizer.json cannot be read: {error}") from error
        self._library.no_truncation()
        self._library.no_padding()
        self._config = tokenizer_config
        self._pieces = PieceDecoder.parse(parsed.get("decoder"))
        self._mark_special_tokens()

        added = self._library.get_added_tokens_decoder()
        self._added = {token.content: id for id, token in added.items()}
        self._special = frozenset(id for id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._whole_texts: dict[int, str | None] = {}
        self.vocab_size: int = max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """The highest id with a text, plus one. A model may have more rows."""
        self.bos_id: int | None = self._id_of(token_string(tokenizer_config.get("bos_token")))
        """The id of bos_token, if the configuration names one."""
        self.eos_ids: tuple[int, ...] = self._find_eos_ids()
        """Ids that end an output: eos_token, eot_token, and the turn end that the chat template writes."""

    @property
    def decoder(self) -> PieceDecoder:
        """How the bytes of an output follow from its tokens."""
        return self._pieces

    @functools.cached_property
    def grammar_checker(self) -> Checker:
        """Tells what is wrong with a grammar; made when that is first asked."""
        return Checker(self)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Special tokens written in the text become their ids.

        With `add_special_tokens`, a beginning-of-sequence token goes in front if the tokenizer adds one:
        `add_bos_token` of the configuration decides, else the post-processor. Never a second one where the text
        already starts with it. An end token is not added by `add_eos_token`: the prompt is to be continued.
        """
        ids = self._encode(text, add_special_tokens)
        if not add_special_tokens or self.bos_id is None:
            return ids
        leading = self._count_leading_bos(ids)
        plain = self._encode(text, False) if leading else []
        written = self._count_leading_bos(plain)
        wants_bos = self._config.get("add_bos_token")
        if wants_bos is None:
            wants_bos = leading > written
        return [self.bos_id] * max(written, int(wants_bos)) + ids[leading:]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids without a text are left out, and bytes that are not UTF-8 read as U+FFFD.

        A run of byte tokens that is not valid UTF-8 keeps its valid characters (the library gives them up): only
        then can a stream show a character before the run ends.
        """
        text, first = bytearray(), True
        for id in ids:
            if self.shows(id, skip_special_tokens=skip_special_tokens):
                text += self.token_bytes(id) if not first else self.first_token_bytes(id)
                first = False
        decoded = text.decode("utf-8", "replace")
        strip = self._pieces.strip_count
        while strip and decoded.startswith(self._pieces.strip_char):
            decoded, strip = decoded[len(self._pieces.strip_char) :], strip - 1
        return decoded

    def token_bytes(self, id: int) -> bytes:
        """The raw bytes that one token adds to a text; may be part of a UTF-8 sequence. Empty: no such token."""
        known = self._bytes.get(id)
        if known is None:
            piece = self._piece(id)
            known = self._bytes[id] = b"" if piece is None else self._pieces.to_bytes(piece)
        return known

    def whole_text(self, id: int) -> str | None:
        """The text that one token adds after others, whatever they are. None: it has none of its own.

        That is a special token, which may be left out, and part of a UTF-8 sequence.
        """
        try:
            return self._whole_texts[id]
        except KeyError:
            try:
                text = None if id in self._special else self.token_bytes(id).decode()
            except UnicodeDecodeError:
                text = None
            self._whole_texts[id] = text
            return text

    def first_token_bytes(self, id: int) -> bytes:
        """As `token_bytes`, for the first token of a text, where Metaspace decoders drop the space mark."""
        piece = self._piece(id)
        return b"" if piece is None else self._pieces.to_bytes(piece, first=True)

    def token_text(self, id: int) -> str:
        """The text of one token alone, as log-probabilities show it: U+FFFD for part of a UTF-8 sequence."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def special_id(self, text: str) -> int | None:
        """The id of the added or special token whose text is exactly `text`."""
        return self._added.get(text)

    @property
    def added_texts(self) -> Sequence[str]:
        """The texts of all added and special tokens, each of which `encode` makes one token wherever it stands."""
        return tuple(self._added)

    def is_special(self, id: int) -> bool:
        """Whether `skip_special_tokens` leaves this token out."""
        return id in self._special

    def shows(self, id: int, *, skip_special_tokens: bool) -> bool:
        """Whether a token is part of the decoded text at all."""
        return not (skip_special_tokens and id in self._special) and self._piece(id) is not None

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # As a batch of one: a text alone is read with the GIL held, and all streams stand still for 0.8 s a megabyte.
        try:
            return self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:  # of a lone surrogate, which UTF-8 cannot hold
            raise InvalidRequest(f"the prompt is not valid Unicode text: {error}", param="prompt") from None

    def _piece(self, id: int) -> str | None:
        return self._library.id_to_token(id) if 0 <= id < 2**32 else None

    def _id_of(self, text: str | None) -> int | None:
        return None if text is None else self._library.token_to_id(text)

    def _count_leading_bos(self, ids: list[int]) -> int:
        return next((i for i, id in enumerate(ids) if id != self.bos_id), len(ids))

    def _mark_special_tokens(self) -> None:
        """Tells the library of special tokens that only tokenizer_config.json names; none gets a new id."""
        config = self._config
        entries: Mapping[str, Any] = config.get("added_tokens_decoder") or {}
        for id, entry in sorted(entries.items(), key=lambda item: int(item[0])):
            if self._library.token_to_id(entry["content"]) is None and self._library.get_vocab_size() == int(id):
                flags = {key: bool(entry.get(key)) for key in ("lstrip", "rstrip", "single_word", "normalized")}
                token = tokenizers.AddedToken(entry["content"], special=bool(entry.get("special")), **flags)
                (self._library.add_special_tokens if entry.get("special") else self._library.add_tokens)([token])
        named = [config.get(f"{name}_token") for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")]
        listed = config.get("additional_special_tokens")
        known = {token.content for token in self._library.get_added_tokens_decoder().values() if token.special}
        for value in named + list(listed if isinstance(listed, list) else []):
            text = token_string(value)
            if text is not None and text not in known and self._library.token_to_id(text) is not None:
                self._library.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])

    def _find_eos_ids(self) -> tuple[int, ...]:
        config = self._config
        eos = config.get("eos_token")
        names = [token_string(value) for value in (eos if isinstance(eos, list) else [eos])]
        names.append(token_string(config.get("eot_token")))
        template = json.dumps(config.get("chat_template"), ensure_ascii=False)
        names += [name for name in TURN_ENDS if name in template and name in self._added]
        return tuple(dict.fromkeys(id for name in names if (id := self._id_of(name)) is not None))
