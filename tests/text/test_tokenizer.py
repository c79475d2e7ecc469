import json
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.text.pieces import PieceDecoder, UnsupportedTokenizer
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import InvalidRequest

examples = settings(deadline=None, max_examples=60)


@examples
@given(data=st.data())
def test_decoded_ids_equal_the_librarys_text_wherever_byte_runs_are_utf8(any_tokenizer, data):
    tokenizer, library = any_tokenizer
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    ours = tokenizer.decode(ids)
    theirs = library.decode(ids, skip_special_tokens=True)
    if "\ufffd" in ours and tokenizer.decoder.byte_fallback:
        assert theirs.count("\ufffd") >= ours.count("\ufffd")
    else:
        assert ours == theirs


@examples
@given(data=st.data())
def test_decoding_undoes_encoding(any_tokenizer, data):
    tokenizer, library = any_tokenizer
    text = data.draw(st.text(st.sampled_from("the cat Hello é한국어😀👩‍🚀 \n!1"), max_size=30))
    ids = library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == library.decode(ids)


def test_special_tokens_are_shown_only_when_asked_for(byte_level):
    ids = byte_level.encode("<|bos|>the<think>", add_special_tokens=False)
    assert byte_level.decode(ids) == "the<think>"
    assert byte_level.decode(ids, skip_special_tokens=False) == "<|bos|>the<think>"


def test_bytes_of_tokens_join_to_the_text(any_tokenizer):
    tokenizer, _ = any_tokenizer
    text = " the cat"
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(tokenizer.token_bytes(id) for id in ids).decode()
    assert joined.strip() == text.strip()


def test_part_of_a_character_has_its_bytes_and_shows_a_replacement_character(byte_level, made):
    for tokenizer in (byte_level, made["sentencepiece"][2]):
        ids = tokenizer.encode("😀", add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == "😀"
        assert "\ufffd" in tokenizer.token_text(ids[-1])


def test_vocab_size_is_one_more_than_the_highest_id(any_tokenizer):
    tokenizer, library = any_tokenizer
    assert library.id_to_token(tokenizer.vocab_size - 1) is not None
    assert library.id_to_token(tokenizer.vocab_size) is None
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_completions_get_the_bos_of_the_post_processor_once(made):
    text, config, tokenizer = made["byte_level"]
    bos = tokenizer.special_id("<|bos|>")
    plain = tokenizer.encode("the cat", add_special_tokens=False)
    assert bos not in plain
    assert tokenizer.encode("the cat", add_special_tokens=True) == [bos, *plain]
    assert tokenizer.encode("<|bos|>the cat", add_special_tokens=True) == [bos, *plain]
    assert tokenizer.encode("<|bos|>the cat", add_special_tokens=False) == [bos, *plain]
    without = Tokenizer(text, {**config, "add_bos_token": False})
    assert without.encode("the cat", add_special_tokens=True) == plain
    assert without.encode("<|bos|>the cat", add_special_tokens=True) == [bos, *plain]


@pytest.mark.parametrize("name", ["sentencepiece", "deepseek_v3"])
def test_completions_get_the_bos_of_the_configuration_once(made, name, request):
    tokenizer = made[name][2] if name in made else request.getfixturevalue(name)[0]
    plain = tokenizer.encode("the cat", add_special_tokens=False)
    assert tokenizer.bos_id not in plain
    assert tokenizer.encode("the cat", add_special_tokens=True) == [tokenizer.bos_id, *plain]
    bos = tokenizer.token_bytes(tokenizer.bos_id).decode()
    ids = tokenizer.encode(bos + "the cat", add_special_tokens=True)
    assert ids.count(tokenizer.bos_id) == 1 and ids[0] == tokenizer.bos_id


def test_a_tokenizer_without_bos_adds_none(qwen3):
    assert qwen3[0].bos_id is None
    assert qwen3[0].encode("Hello", add_special_tokens=True) == qwen3[0].encode("Hello", add_special_tokens=False)


def test_eos_ids_are_the_eos_token_and_the_turn_end_that_the_template_writes(made):
    text, config, tokenizer = made["byte_level"]
    assert tokenizer.eos_ids == (tokenizer.special_id("<|eos|>"),)
    chat = Tokenizer(text, {**config, "chat_template": "{{ messages }}<|im_end|>"})
    assert chat.eos_ids == (tokenizer.special_id("<|eos|>"), tokenizer.special_id("<|im_end|>"))
    assert Tokenizer(text, {"eos_token": {"content": "<|im_end|>"}}).eos_ids == (tokenizer.special_id("<|im_end|>"),)
    assert Tokenizer(text, {"eos_token": "<absent>"}).eos_ids == ()


def test_eos_ids_of_published_tokenizers(qwen3, deepseek_v3):
    assert qwen3[0].eos_ids == (151645,)
    assert deepseek_v3[0].eos_ids == (1,)


def test_special_id_knows_added_tokens_and_no_ordinary_ones(byte_level):
    assert byte_level.token_text(byte_level.special_id("</think>")) == "</think>"
    assert byte_level.special_id("the") is None
    assert byte_level.special_id("<|im_end|> ") is None
    assert byte_level.is_special(byte_level.special_id("<|im_end|>"))
    assert not byte_level.is_special(byte_level.special_id("</think>"))


def test_special_tokens_named_only_by_the_configuration_are_special_and_keep_their_id(made):
    state = json.loads(made["byte_level"][0])
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] != "<|eos|>"]
    bare = Tokenizer(json.dumps(state), {})
    named = Tokenizer(json.dumps(state), {"eos_token": "<|eos|>"})
    assert bare.decode([1]) == "<|eos|>"
    assert named.decode([1]) == "" and named.eos_ids == (1,) and named.vocab_size == bare.vocab_size


def test_added_tokens_that_only_the_configuration_lists_take_the_next_ids(made):
    text, _, tokenizer = made["byte_level"]
    size = tokenizer.vocab_size
    added = {str(size): {"content": "<tool>", "special": False}, str(size + 9): {"content": "<gap>", "special": True}}
    extended = Tokenizer(text, {"added_tokens_decoder": added})
    assert extended.special_id("<tool>") == size
    assert extended.special_id("<gap>") is None


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
    ],
)
def test_a_decoder_that_is_not_a_concatenation_is_refused_by_name(decoder):
    name = decoder["decoders"][1]["type"] if decoder["type"] == "Sequence" else decoder["type"]
    with pytest.raises(UnsupportedTokenizer, match=name):
        PieceDecoder.parse(decoder)


def test_without_a_decoder_tokens_are_joined_by_spaces(made):
    state = json.loads(made["metaspace"][0])
    state["decoder"] = None
    tokenizer = Tokenizer(json.dumps(state), {})
    assert tokenizer.decode([2, 3]) == "▁the ▁cat"


def test_what_is_not_a_tokenizer_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="tokenizer.json cannot be read"):
        Tokenizer("{}", {})


def test_a_long_text_is_read_without_holding_up_other_threads(qwen3):
    tokenizer, _ = qwen3
    done = threading.Event()
    threading.Thread(
        target=lambda: (tokenizer.encode("the cat sat " * 40_000, add_special_tokens=True), done.set())
    ).start()
    turns = 0
    while not done.is_set():
        time.sleep(0.001)
        turns += 1
    assert turns > 20


def test_half_of_a_surrogate_pair_is_refused_as_no_text(byte_level):
    with pytest.raises(InvalidRequest, match="the prompt is not valid Unicode text"):
        byte_level.encode("a\ud800b", add_special_tokens=False)
