"""Grammars of constrained output: written from what a user asks, checked by the front end, matched by the engine.

The package llguidance does the work, on the bytes of tokens: a token may come next if its bytes go on with something
that the grammar accepts. So any split of a text into tokens is allowed, also inside a character.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np

from jaxinfer.structured import MAX_GRAMMAR_CHARS, StructuredOutputs
from jaxinfer.types import InvalidRequest

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer

WHITESPACE = r"( |\n {0,32})"
"""What may stand between two parts of JSON, once: models that may write more white space can write it for ever."""
MAX_KEPT = 128
"""Compiled grammars that are kept: requests that ask for the same form share one."""
MAX_CHOICES = 1500
"""Options of a choice: llguidance gives up at 2,000 with a vocabulary, and not before it."""
NUM_THREADS = 2
"""Grammars that are compiled at once, without the interpreter's lock."""
MAX_MASK_THREADS = 8
"""That compute masks at once, while the device computes the logits that these are for."""
MIN_SIDE_BY_SIDE = 16
"""Masks for which it is worth it to wake threads: one takes 0.02 ms in the middle, so fewer take 0.3 ms."""
MAX_LEADING = 3
"""Tokens of a line break and of what a tokenizer puts before it."""
LIMITS = llguidance.LLParserLimits(verbose_errors=False)
"""Of the work that a grammar may make. Those of the package: 20 ms to build its lexer, 14 ms a token, for instance."""


def write(form: StructuredOutputs) -> str:
    """The grammar of a form, as llguidance reads it. InvalidRequest for what is no JSON Schema or no grammar at all."""
    grammar = _write(form)
    if form.thought_begun is not None:
        grammar = _behind_thought(grammar, begun=form.thought_begun)
    if len(grammar) > MAX_GRAMMAR_CHARS:
        problem = f"its grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are supported"
        raise _refusal(form.param, problem)
    return grammar


def _write(form: StructuredOutputs) -> str:
    if form.regex is not None:
        return llguidance.LLMatcher.grammar_from_regex(_whole(form.regex, form.param))
    if form.choice is not None:
        if len(form.choice) > MAX_CHOICES:
            raise _refusal(form.param, f"there are {len(form.choice)} options; at most {MAX_CHOICES} are supported")
        options = " | ".join(json.dumps(option, ensure_ascii=False) for option in form.choice)
        return llguidance.LLMatcher.grammar_from_lark(f"start: {options}")
    if form.grammar is not None:
        try:
            return llguidance.grammar_from("grammar", form.grammar)
        except ValueError as error:
            raise _refusal(form.param, f"the grammar cannot be read: {error}") from None
    schema = {"type": "object"} if form.json_object else _schema(form.json, form.param)
    return json_grammar(schema, form)


def _behind_thought(grammar: str, *, begun: bool) -> str:
    """The same behind a thought: it ends with the first closing tag, and white space may follow."""
    (form,) = json.loads(grammar)["grammars"] if grammar.startswith("{") else ({"lark_grammar": grammar},)
    thought = "thought" if begun else r"(/\s*<think>/ thought)?"
    lark = f"start: {thought} @form\nthought: closed /\\s*/\nclosed[lazy]: /(.|\\n)*<\\/think>/"
    return json.dumps({"grammars": [{"name": "all", "lark_grammar": lark}, form | {"name": "form"}]})


def json_grammar(schema: Mapping[str, Any], form: StructuredOutputs) -> str:
    """The grammar of a JSON Schema, with the white space that `form` allows."""
    text, options = json.dumps(schema, ensure_ascii=False, allow_nan=False), json_options(form)
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)
    except ValueError as error:
        raise _refusal(form.param, f"the schema cannot be read: {error}") from None


def json_options(form: StructuredOutputs | None = None) -> Any:
    """llguidance's own options for a JSON Schema, which win over what the schema says of them.

    A keyword that is not enforced is refused. Of white space, `form` says what may stand between two parts.
    """
    options: dict[str, Any] = {"lenient": False, "coerce_one_of": False}
    if form and form.disable_any_whitespace:
        return options | {"whitespace_flexible": False}
    return options | {"whitespace_pattern": (form.whitespace_pattern if form else None) or WHITESPACE}


def check(grammar: str, tokenizer: Tokenizer, param: str) -> None:
    """InvalidRequest, with what llguidance says of it, for a grammar that cannot be enforced or that nothing matches.

    Takes 1 ms for an ordinary schema and 0.5 s for one of MAX_GRAMMAR_CHARS; nothing for one that was checked lately.
    """
    if problem := tokenizer.grammar_checker.problem(grammar):
        raise _refusal(param, problem)


class Checker:
    """Tells what is wrong with grammars, for a tokenizer. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer):
        """Compiles for as many ids as the tokenizer has, of which 256 more are bytes and the special tokens are
        themselves: made in 0.05 s for 150,000 ids, it compiles what the tokenizer does.
        """
        num = tokenizer.vocab_size
        special = {id: tokenizer.token_bytes(id) for id in range(num) if tokenizer.is_special(id)}
        tokens = [special.get(id, b"") for id in range(num)] + [bytes([byte]) for byte in range(256)]
        self._library = _library(tokens, list(special), (), lambda text: [num + byte for byte in text.encode()])
        self.problem = functools.lru_cache(MAX_KEPT)(self._problem)
        """What is wrong with a grammar; empty: nothing."""

    def _problem(self, grammar: str) -> str:
        matcher = _compile(self._library, grammar)
        if error := matcher.get_error():
            if error.startswith("oneOf"):
                error = "oneOf whose options do not exclude each other by a type or by a property's const"
            return f"is not supported: {_short(error)}"
        matcher.compute_bitmask()
        return "cannot be met: no output matches it, not even an empty one" if matcher.is_error() else ""


class Matcher:
    """One output on its way through its grammar."""

    def __init__(self, library: llguidance.LLMatcher, vocab_size: int, end_ids: Collection[int]):
        self.end_ids = frozenset(end_ids)
        """EOS ids, which are allowed wherever the grammar may end."""
        self._library = library
        self._num_words = -(-(vocab_size + 1) // 32)
        self._vocab_size = vocab_size
        self._prepared: np.ndarray | None = None  # the next mask

    @property
    def may_end(self) -> bool:
        """Whether what has come so far matches the grammar as a whole."""
        return not self._library.is_error() and self._library.is_accepting()

    @property
    def error(self) -> str:
        """Why it cannot go on; empty: it can."""
        return _short(self._library.get_error())

    def accept(self, token: int) -> bool:
        """Takes in a token that the last mask allowed. Whether the output ends here, since nothing may follow."""
        self._prepared = None
        return self._library.consume_token(token) and self._library.is_stopped()

    def mask(self, barred: Iterable[int] = ()) -> bytes | None:
        """The tokens that may come next without those barred: bit i % 32 of word i // 32, little-endian, is token i.

        None: there are none.
        """
        words, self._prepared = self._prepared, None
        if words is None:
            words = np.zeros(self._num_words, np.uint32)
            self._library.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._library.is_error():
            return None
        for token in (*barred, self._vocab_size):  # the last: see `_library`
            words[token // 32] &= ~np.uint32(1 << token % 32)
        return words.tobytes() if words.any() else None

    @staticmethod
    def prepare(matchers: Sequence[Matcher], threads: llguidance.LLExecutor) -> None:
        """Computes the next masks of several at once: 0.01 to 0.3 ms each, if one thread does it."""
        words = np.zeros((len(matchers), matchers[0]._num_words), np.uint32)
        places = [(matcher._library, i) for i, matcher in enumerate(matchers)]
        threads.unsafe_compute_mask_ptr(places, words.ctypes.data, words[0].nbytes, len(words))
        for matcher, row in zip(matchers, words, strict=True):
            matcher._prepared = row


class Compiled:
    """A grammar that can be matched any number of times."""

    def __init__(self, library: llguidance.LLMatcher, vocab_size: int, end_ids: Collection[int]):
        self._library, self._vocab_size, self._end_ids = library, vocab_size, end_ids

    def matcher(self) -> Matcher:
        """For an output that begins."""
        return Matcher(self._library.deep_copy(), self._vocab_size, self._end_ids)


class Grammars:
    """Compiles grammars for a tokenizer in threads of its own, for the engine. One thread calls it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]):
        """vocab_size: ids from here on are never sampled; end_ids: those below it are EOS ids.

        The first thread begins with the vocabulary at once: 0.1 s for 49,000 tokens.
        """
        self._vocab_size = vocab_size
        self._end_ids = [id for id in end_ids if id < vocab_size]
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammars")
        self._library = self._threads.submit(self._vocabulary, tokenizer)
        self._executor = llguidance.LLExecutor(min(MAX_MASK_THREADS, len(os.sched_getaffinity(0))))
        self._kept: collections.OrderedDict[str, Future[Compiled]] = collections.OrderedDict()

    def compile(self, grammar: str) -> Future[Compiled]:
        """The grammar, once it is compiled, or InvalidRequest with the reason why it cannot be."""
        kept = self._kept.get(grammar)
        if kept is None:
            kept = self._kept[grammar] = self._threads.submit(self._compile, grammar)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(grammar)
        return kept

    def prepare(self, matchers: Sequence[Matcher]) -> None:
        """Computes the next masks of these side by side, if they are many."""
        if len(matchers) >= MIN_SIDE_BY_SIDE:
            Matcher.prepare(matchers, self._executor)

    def close(self) -> None:
        """Ends the threads once they are done with what they do."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _vocabulary(self, tokenizer: Tokenizer) -> llguidance.LLTokenizer:
        ids = range(min(self._vocab_size, tokenizer.vocab_size))
        tokens = [tokenizer.token_bytes(id) for id in ids]
        tokens += [b""] * (self._vocab_size - len(tokens))
        special = [id for id in ids if tokenizer.is_special(id)]

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        return _library(tokens, special, self._end_ids, encode)

    def _compile(self, grammar: str) -> Compiled:
        matcher = _compile(self._library.result(), grammar)
        matcher.compute_bitmask()  # the first of a grammar is slow: all copies share what it makes
        if matcher.is_error():
            reason = f"the grammar is not supported: {_short(matcher.get_error())}"
            raise InvalidRequest(reason, param="structured_outputs")
        return Compiled(matcher, self._vocab_size, self._end_ids)


class _Vocabulary:
    """What llguidance wants to know of a tokenizer.

    Where the grammar leaves no choice of text, it allows the next token of that text alone: so `encode` is to split it
    as the model has learned it.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], encode: Callable[[str], list[int]]):
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = len(tokens) - 1
        self.library: llguidance.LLTokenizer | None = None
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text as it stands behind others: some tokenizers put a space before all that they read."""
        wanted = text.encode()
        for before in ("", "\n"):
            ids = self._encode(before + text)
            pieces = [self.tokens[id] for id in ids]
            for start in range(min(len(ids), MAX_LEADING) + 1):
                if b"".join(pieces[start:]) == wanted:
                    return ids[start:]
        assert self.library is not None
        return self.library.greedy_tokenize(text)


def _library(
    tokens: list[bytes], special_ids: list[int], end_ids: Collection[int], encode: Callable[[str], list[int]]
) -> llguidance.LLTokenizer:
    """With one id more than there are tokens: the end of an output where the model has no id for it."""
    vocabulary = _Vocabulary([*tokens, b""], [*special_ids, len(tokens)], encode)
    wrapper: Any = vocabulary
    ends = list(end_ids) or [len(tokens)]
    vocabulary.library = llguidance.LLTokenizer(wrapper, n_vocab=len(tokens) + 1, eos_token=ends)
    return vocabulary.library


def _compile(library: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(library, grammar, log_level=0, limits=LIMITS)


def _schema(given: str | Mapping[str, Any] | bool | None, param: str) -> Mapping[str, Any]:
    try:
        schema = json.loads(given) if isinstance(given, str) else given
        json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise _refusal(param, f"the JSON Schema is no JSON: {error}") from None
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise _refusal(param, f"the JSON Schema is {given!r:.60}; it must be an object")
    return schema


def _whole(regex: str, param: str) -> str:
    """Without the anchors at its ends and around its alternatives, which say what holds anyway: all is to match.

    llguidance takes any other for something that nothing matches.
    """
    pieces: list[str] = []
    groups, classes, at_start = 0, 0, True
    tokens = re.findall(r"\[\^?\]|\\.|.", regex, re.DOTALL)  # the first: a class that begins with its own bracket
    for i, token in enumerate(tokens):
        at_end = i + 1 == len(tokens) or tokens[i + 1] == "|"
        if token in ("^", "$") and not classes:
            if groups or not (at_start if token == "^" else at_end):
                raise _refusal(param, f"the regex {regex!r:.60} has {token!r} inside it, which is not supported")
            continue
        classes += token.startswith("[") - (classes > 0 and token == "]")
        groups += (token == "(") - (token == ")") if not classes else 0
        at_start = token == "|" and not classes and not groups
        pieces.append(token)
    return "".join(pieces)


def _refusal(param: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {problem}", param=param, code="invalid_grammar")


def _short(error: str) -> str:
    """The first line, and of a report on a regex the last one, which says what is wrong with it."""
    lines = [line.strip() for line in error.strip().splitlines()]
    said = [line for line in lines if line.startswith("error:")]
    return " ".join([*lines[:1], *said])[:400]
