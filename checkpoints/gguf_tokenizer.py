"""The tokenizer that a GGUF file carries, as tokenizer.json (for the tokenizers library) and tokenizer_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from checkpoints.gguf_file import GgufFile
from checkpoints.source import CheckpointError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "▁"


class _PreTokenizer(NamedTuple):
    """How text is cut before merging: at every digit first (split_digits), then by `pattern` (None: GPT-2's own).

    whole_words: a word that is a token is taken as it is, without its merges.
    """

    pattern: str | None = None
    split_digits: bool = False
    normal_form: str | None = None
    whole_words: bool = False
    add_bos: bool = False


# The published patterns of Llama 3 and Qwen 2 differ in how many digits stay together.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = _PreTokenizer()
_DIGITS = _PreTokenizer(split_digits=True)
_LLAMA3 = _PreTokenizer(pattern=_WORDS + r"\p{N}{1,3}" + _REST, whole_words=True, add_bos=True)
_QWEN2 = _PreTokenizer(pattern=_WORDS + r"\p{N}" + _REST, normal_form="NFC")

PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
"""By tokenizer.ggml.pre. "default" and an absent key mean Qwen 2's for the Qwen architectures, else GPT-2's."""


def is_present(file: GgufFile) -> bool:
    """Whether the file carries a tokenizer at all."""
    return file.metadata.get("tokenizer.ggml.model") not in (None, "none", "no_vocab")


def tokenizer_json(file: GgufFile) -> str:
    """The text of tokenizer.json. A tokenizer that cannot be expressed raises CheckpointError."""
    kind = file.metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise CheckpointError(f"{file.path}: tokenizer {kind!r} is not supported; known: {', '.join(builders)}")
    tokens = _strings(file, "tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        repeated = sorted({t for i, t in enumerate(tokens) if vocab[t] != i})[:20]
        raise CheckpointError(f"{file.path}: {len(tokens) - len(vocab)} tokens occur twice, among them {repeated}")
    types = _list(file, "token_type", len(tokens)) or [_NORMAL] * len(tokens)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(index, token, special=types[index] != _USER_DEFINED)
            for index, token in enumerate(tokens)
            if types[index] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ],
        "post_processor": _template(file, tokens),
        **builders[str(kind)](file, vocab, types),
    }
    return json.dumps(content, ensure_ascii=False)


def tokenizer_config(file: GgufFile) -> dict[str, object]:
    """tokenizer_config.json: special tokens by their text, what is added to a prompt, and the chat templates."""
    tokens = _strings(file, "tokens")
    result: dict[str, object] = {
        "add_bos_token": _adds(file, "bos"),
        "add_eos_token": _adds(file, "eos"),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        index = _token_id(file, key, tokens)
        if index is not None:
            result[f"{name}_token"] = tokens[index]
    templates = {
        key.removeprefix("tokenizer.chat_template").lstrip(".") or "default": value
        for key, value in file.metadata.items()
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")
    }
    if set(templates) == {"default"}:
        result["chat_template"] = templates["default"]
    elif templates:
        result["chat_template"] = [{"name": name, "template": value} for name, value in templates.items()]
    return result


def _list(file: GgufFile, key: str, length: int | None = None) -> list | None:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if not isinstance(value, list) or (length is not None and len(value) != length):
        size = len(value) if isinstance(value, list) else repr(value)
        raise CheckpointError(f"{file.path}: tokenizer.ggml.{key} has {size} items; {length} are expected")
    return value


def _strings(file: GgufFile, key: str) -> list[str]:
    value = _list(file, key)
    if not value or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.{key} is missing or is not a list of strings")
    return value


def _token_id(file: GgufFile, key: str, tokens: Sequence[str]) -> int | None:
    index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.{key}_token_id is {index!r}; there are {len(tokens)} tokens"
        )
    return index


def _pre_tokenizer(file: GgufFile) -> _PreTokenizer:
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if name == "default":
        return _QWEN2 if str(file.metadata.get("general.architecture")).startswith("qwen") else _GPT2
    if name not in PRE_TOKENIZERS:
        known = ", ".join(["default", *PRE_TOKENIZERS])
        raise CheckpointError(f"{file.path}: pre-tokenizer {name!r} is not supported; known: {known}")
    return PRE_TOKENIZERS[str(name)]


def _adds(file: GgufFile, which: str) -> bool:
    """Whether a prompt gets a BOS or EOS: as the file says, else as the tokenizer's kind does."""
    stated = file.metadata.get(f"tokenizer.ggml.add_{which}_token")
    if stated is not None or which == "eos":
        return bool(stated)
    return file.metadata.get("tokenizer.ggml.model") == "llama" or _pre_tokenizer(file).add_bos


def _added_token(index: int, content: str, *, special: bool) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, **flags, "special": special}


def _template(file: GgufFile, tokens: Sequence[str]) -> dict[str, object] | None:
    """Puts BOS before and EOS after a text, where the file asks for it."""
    ids = {which: _token_id(file, which, tokens) for which in ("bos", "eos") if _adds(file, which)}
    ends = {which: index for which, index in ids.items() if index is not None}
    if not ends:
        return None

    def around(sequence: str, type_id: int) -> list[dict[str, object]]:
        def end(which: str) -> list[dict[str, object]]:
            return [{"SpecialToken": {"id": tokens[ends[which]], "type_id": type_id}}] if which in ends else []

        return [*end("bos"), {"Sequence": {"id": sequence, "type_id": type_id}}, *end("eos")]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in ends.values()},
    }


def _byte_level(file: GgufFile, vocab: Mapping[str, int], _types: Sequence[int]) -> dict[str, object]:
    pre = _pre_tokenizer(file)
    steps: list[dict[str, object]] = []
    if pre.split_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if pre.pattern is not None:
        steps.append({"type": "Split", "pattern": {"Regex": pre.pattern}, "behavior": "Isolated", "invert": False})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append({**byte_level, "use_regex": pre.pattern is None})
    merges = []
    for merge in _strings(file, "merges"):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise CheckpointError(f"{file.path}: merge {merge!r} makes or needs a token that the vocabulary lacks")
        merges.append([left, right])
    return {
        "normalizer": pre.normal_form and {"type": pre.normal_form},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**byte_level, "use_regex": False},
        "model": {"type": "BPE", "ignore_merges": pre.whole_words, "vocab": vocab, "merges": merges},
    }


def _sentencepiece(file: GgufFile, vocab: Mapping[str, int], types: Sequence[int]) -> dict[str, object]:
    scores = _list(file, "scores", len(vocab))
    if scores is None:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.scores is missing, without which pieces have no order")
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    pieces = list(vocab)
    unknown = _token_id(file, "unknown", pieces)
    if unknown is None and _UNKNOWN in types:
        unknown = types.index(_UNKNOWN)
    num_bytes = sum(kind == _BYTE for kind in types)
    if num_bytes not in (0, 256):
        raise CheckpointError(f"{file.path}: the vocabulary has {num_bytes} byte tokens; it must have none or 256")
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, _replace(" ", _SPACE)]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [_replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else pieces[unknown],
            "fuse_unk": True,
            "byte_fallback": num_bytes == 256,
            "vocab": vocab,
            "merges": _merges_from_scores(vocab, types, scores),
        },
    }


def _replace(old: str, new: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _merges_from_scores(
    vocab: Mapping[str, int], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the best score first: the order in which SentencePiece joins them."""
    ranked = []
    for piece, index in vocab.items():
        if types[index] != _NORMAL:
            continue
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None and types[left] == types[right] == _NORMAL:
                ranked.append((-scores[index], left, right, piece[:cut], piece[cut:]))
    ranked.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in ranked]
