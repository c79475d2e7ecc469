"""Tokenizers to test with: two published ones, if their files are at hand, and three made here."""

import json
import os
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxinfer.text.tokenizer import Tokenizer

CORPUS = [
    "the cat sat on the mat",
    "Hello world! Hello you.",
    "naïve café für 한국어",
    "the the then they 1234 5678",
] * 4


def asset(name):
    """A folder of a published tokenizer."""
    root = os.environ.get("JAXINFER_TEST_ASSETS")
    if root is None:
        pytest.skip("JAXINFER_TEST_ASSETS is not set: the published tokenizers are not at hand")
    for folder in ("assets/tokenizers", "tokenizers"):
        if (path := Path(root) / folder / name).is_dir():
            return path
    pytest.skip(f"{name} is not under {root}")


def published(name):
    folder = asset(name)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    return Tokenizer((folder / "tokenizer.json").read_text(), config), config


def sentencepiece_json():
    """BPE over words marked with a low line, bytes for unknown characters, one leading space dropped in decoding."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    library = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"]
    library.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=special + byte_tokens))
    state = json.loads(library.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in byte_tokens]
    return json.dumps(state)


def metaspace_json():
    """Unigram with the older decoder that turns the mark of the first token into nothing."""
    vocab = [("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("▁cat", -3.0), ("▁▁", -4.0)]
    vocab += [(char, -5.0) for char in "abcdefghijklmnopqrstuvwxyz한국어é"]
    library = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.add_special_tokens(["<s>", "</s>"])
    return library.to_str()


def byte_level_json():
    """Byte-level BPE with a beginning-of-sequence token put there by the post-processor."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|bos|>", "<|eos|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special)
    library.train_from_iterator(CORPUS, trainer)
    library.add_tokens(["<think>", "</think>"])
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    return library.to_str()


MADE = {
    "byte_level": (byte_level_json, {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}),
    "sentencepiece": (sentencepiece_json, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}),
    "metaspace": (metaspace_json, {"eos_token": "</s>"}),
}


@pytest.fixture(scope="session")
def made():
    """The tokenizers made here, by name: their JSON, their configuration and the Tokenizer."""
    texts = {name: (make(), config) for name, (make, config) in MADE.items()}
    return {name: (text, config, Tokenizer(text, config)) for name, (text, config) in texts.items()}


@pytest.fixture(scope="session")
def byte_level(made):
    return made["byte_level"][2]


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece", "metaspace", "qwen3", "deepseek_v3"])
def any_tokenizer(request, made):
    """Every tokenizer in turn, with the library's own object for the same file."""
    if request.param in made:
        text, _, tokenizer = made[request.param]
    else:
        tokenizer, _ = request.getfixturevalue(request.param)
        text = (asset(request.param) / "tokenizer.json").read_text()
    return tokenizer, tokenizers.Tokenizer.from_str(text)


@pytest.fixture(scope="session")
def qwen3():
    return published("qwen3")


@pytest.fixture(scope="session")
def deepseek_v3():
    return published("deepseek_v3")
