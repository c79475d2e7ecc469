import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from checkpoints import gguf, gguf_tokenizer
from checkpoints.source import CheckpointError

DATA = Path(__file__).parent.parent / "data" / "checkpoints"


def changed(path, **metadata):
    """The file with other tokenizer metadata ("_" for "."); None drops a key."""
    full = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    merged = gguf.open_gguf(path).metadata | full
    return SimpleNamespace(path=path, metadata={k: v for k, v in merged.items() if v is not None})


def tokenizer(file):
    return Tokenizer.from_str(gguf_tokenizer.tokenizer_json(file))


def test_smollm2_gives_the_ids_of_transformers(smollm2):
    # Recorded from transformers 5.24, AutoTokenizer.from_pretrained(folder, gguf_file=...).
    ours = Tokenizer.from_str(smollm2.tokenizer_json)
    cases = json.loads((DATA / "smollm2_tokens.json").read_text("utf-8"))
    assert len(cases) == 45
    for case in cases:
        assert ours.encode(case["text"]).ids == case["ids"], case["text"]
        assert ours.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_smollm2_splits_every_number_character_alone(smollm2):
    # The published tokenizer cuts at each character of category N before anything else; transformers' GGUF reader
    # leaves that step out, and so joins a space with the first byte of "²".
    ours = Tokenizer.from_str(smollm2.tokenizer_json)
    assert ours.encode("in 2024").tokens == ["in", "Ġ", "2", "0", "2", "4"]
    assert ours.encode("x ²").tokens == ["x", "Ġ", "Â²"]


def test_smollm2_keeps_its_special_tokens_and_template(smollm2):
    config = smollm2.tokenizer_config
    assert {key: config[key] for key in ("bos_token", "eos_token", "unk_token", "pad_token", "add_bos_token")} == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "add_bos_token": False,
    }
    assert "<|im_start|>assistant" in config["chat_template"]
    ours = Tokenizer.from_str(smollm2.tokenizer_json)
    assert ours.encode("<|im_start|>user\nHi<|im_end|>").ids[0] == 1
    assert ours.decode([1, 2], skip_special_tokens=True) == ""


TEXT = "It's 12345 DON'T  \r\n\n x"
SPLITS = {
    # Llama 3: contractions in either case, up to three digits together, line ends with the space before them.
    "llama-bpe": ["It", "'s", "Ġ", "123", "45", "ĠDON", "'T", "ĠĠčĊĊ", "Ġx"],
    "qwen2": ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠDON", "'T", "ĠĠčĊĊ", "Ġx"],
    "gpt-2": ["It", "'s", "Ġ12345", "ĠDON", "'", "T", "ĠĠčĊĊ", "Ġx"],
    "smollm": ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠDON", "'", "T", "ĠĠčĊĊ", "Ġx"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_text_is_cut_as_the_pre_tokenizer_says(pre, write_gguf):
    ours = tokenizer(changed(write_gguf(), pre=pre))
    assert [word for word, _ in ours.pre_tokenizer.pre_tokenize_str(TEXT)] == SPLITS[pre]


def test_qwen_text_is_composed_first_and_llama_text_is_not(write_gguf):
    path = write_gguf()
    assert tokenizer(changed(path, pre="qwen2")).normalizer.normalize_str("e\u0301") == "\u00e9"
    assert tokenizer(changed(path, pre="llama-bpe")).normalizer is None


def test_the_default_pre_tokenizer_is_that_of_the_architecture(write_gguf):
    qwen = changed(write_gguf(architecture="qwen3"), pre="default")
    assert tokenizer(qwen).normalizer is not None
    assert tokenizer(changed(write_gguf("b.gguf"), pre=None)).normalizer is None


def test_a_word_that_is_a_token_needs_no_merges_with_llama3_alone(write_gguf):
    path = write_gguf()
    for pre, expected in {"llama-bpe": ["abc"], "gpt-2": ["ab", "c"]}.items():
        ours = tokenizer(changed(path, pre=pre, merges=["a b"], add_bos_token=False))
        assert ours.encode("abc").tokens == expected


def test_bos_and_eos_are_added_where_the_file_asks_for_them(write_gguf):
    path = write_gguf()
    assert tokenizer(changed(path)).encode("ab").tokens == ["ab"]
    both = tokenizer(changed(path, add_bos_token=True, add_eos_token=True))
    assert both.encode("ab").tokens == ["<s>", "ab", "</s>"]
    assert both.encode("ab", add_special_tokens=False).tokens == ["ab"]
    assert tokenizer(changed(path, pre="llama-bpe")).encode("ab").tokens == ["<s>", "ab"]


def test_user_defined_tokens_are_matched_whole_but_are_not_special(write_gguf):
    path = write_gguf()
    types = gguf.open_gguf(path).metadata["tokenizer.ggml.token_type"]
    ours = tokenizer(changed(path, token_type=[*types[:31], 4, *types[32:]]))
    ids = ours.encode("a[0]</s>").ids
    assert ids == [3, 31, 2]
    assert ours.decode(ids, skip_special_tokens=True) == "a[0]"


def test_several_chat_templates_stay_apart_by_name(write_gguf):
    file = changed(write_gguf())
    file.metadata |= {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B"}
    assert gguf_tokenizer.tokenizer_config(file)["chat_template"] == [
        {"name": "default", "template": "A"},
        {"name": "tool_use", "template": "B"},
    ]


def sentencepiece(write_gguf, **metadata):
    recorded = json.loads((DATA / "sentencepiece.json").read_text("utf-8"))
    fields = {"tokens": "tokens", "scores": "scores", "token_type": "types"}
    file = changed(
        write_gguf(), model="llama", **{key: recorded[name] for key, name in fields.items()} | metadata, merges=None
    )
    return tokenizer(file), recorded


def test_sentencepiece_vocabularies_give_the_ids_of_sentencepiece(write_gguf):
    # Recorded from sentencepiece 0.2.3: a BPE model of 480 pieces with byte fallback and BOS.
    ours, recorded = sentencepiece(write_gguf)
    assert len(recorded["texts"]) > 50
    for case in recorded["texts"]:
        assert ours.encode(case["text"]).ids == case["ids"], case["text"]
        assert ours.decode(case["ids"]) == case["text"].replace("▁", " ")


def test_without_a_space_prefix_text_starts_as_it_is(write_gguf):
    ours, _ = sentencepiece(write_gguf, add_space_prefix=False)
    assert ours.encode("the", add_special_tokens=False).tokens[0] == "t"
    assert ours.decode(ours.encode(" the").ids) == " the"


REFUSALS = {
    "model": ({"model": "t5"}, r"tokenizer 't5' is not supported; known: gpt2, llama"),
    "pre": ({"pre": "bloom"}, r"pre-tokenizer 'bloom' is not supported; known: default, gpt-2, smollm"),
    "tokens": ({"tokens": None}, r"tokenizer\.ggml\.tokens is missing or is not a list of strings"),
    "twice": ({"tokens": ["a", "b", "a"]}, r"1 tokens occur twice, among them \['a'\]"),
    "types": ({"token_type": [1]}, r"tokenizer\.ggml\.token_type has 1 items; 40 are expected"),
    "merge": ({"merges": ["a z", "q q"]}, r"merge 'a z' makes or needs a token that the vocabulary lacks"),
    "no merges": ({"merges": None}, r"tokenizer\.ggml\.merges is missing or is not a list of strings"),
    "id": (
        {"add_bos_token": True, "bos_token_id": 99},
        r"tokenizer\.ggml\.bos_token_id is 99; there are 40 tokens",
    ),
    "scores": ({"model": "llama"}, r"tokenizer\.ggml\.scores is missing"),
    "bytes": (
        {"model": "llama", "scores": [0.0] * 40, "token_type": [2, 3, 3, 6] + [1] * 36},
        r"the vocabulary has 1 byte tokens; it must have none or 256",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_tokenizer_that_cannot_be_expressed_is_refused(case, write_gguf):
    metadata, message = REFUSALS[case]
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: " + message):
        gguf_tokenizer.tokenizer_json(changed(write_gguf(), **metadata))
