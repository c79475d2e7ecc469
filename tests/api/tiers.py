"""Engines with tiers behind the device's pages, and what their tests ask of them. A page has 8 tokens unless told."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from jaxinfer.api import LLM
from jaxinfer.types import SamplingParams
from tests.engine.drive import GOLDEN, compiled_once, save_with_context

OPTIONS = {"page_size": 8, "num_pages": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 256}
LONG = {"page_size": 16, "max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 1536}
PAGE_GIB = 8 * 1024 / 2**30  # 8 tokens, 2 layers, keys and values of 2 heads of 32 numbers
FILE_GIB = PAGE_GIB + 4096 / 2**30
VOCAB = 128
NUM_OUTPUT = 6
NUM_PAGES = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
DRAWN = SamplingParams(
    temperature=0.9,
    seed=11,
    max_tokens=NUM_OUTPUT,
    ignore_eos=True,
    logprobs=3,
    repetition_penalty=1.2,
    presence_penalty=0.4,
    frequency_penalty=0.2,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_with_context(GOLDEN / "qwen3", tmp_path_factory.mktemp("models") / "qwen3", 2048)


@pytest.fixture(scope="module", autouse=True)
def every_size_is_compiled_once():
    with compiled_once():
        yield


def make(model: Path, **options) -> LLM:
    """An engine that takes from the host whatever is there, however long it may take."""
    llm = LLM(str(model), compile_cache_dir="", show_progress=False, **(OPTIONS | options))
    set_speed(llm, restore_ms=0.0)
    return llm


def scheduler_of(llm: LLM):
    return llm._engine._engine._scheduler


def set_speed(llm: LLM, **limits: float) -> None:
    """What the start measured decides what is restored, and differs from run to run."""
    cache = scheduler_of(llm).cache
    cache.limits = dataclasses.replace(cache.limits, **limits)


def nodes_of(llm: LLM, tokens) -> list:
    """Of the tree, those that have these tokens."""
    return scheduler_of(llm).cache._tree.path("", tokens)


def check(llm: LLM) -> None:
    """What must hold when nothing runs."""
    stats = llm.stats()
    assert stats.num_pages_used == stats.num_running == stats.num_waiting == stats.num_restoring == 0
    assert stats.compilations_after_ready == stats.num_failed_steps == 0
    assert stats.num_host_pages_used <= stats.num_host_pages
    scheduler_of(llm).check_integrity()


@pytest.fixture(scope="module")
def plain(model):
    """No cache, and room for every request of this file."""
    with make(model, enable_prefix_caching=False, **{"max_model_len": 1536, "num_pages": 400}) as llm:
        yield llm


@pytest.fixture
def start(model, tmp_path):
    """Starts engines with a host tier of `host` pages and, if `disk` is not 0, a disk tier of that many."""
    started = []

    def start(host: int = 64, disk: int = 400, folder: str = "kv", name: Path = model):
        tiers = {"kv_disk_dir": str(tmp_path / folder), "kv_disk_gib": (disk + 0.5) * FILE_GIB} if disk else {}
        started.append(make(name, kv_host_gib=host * PAGE_GIB, **tiers))
        assert started[-1].info.num_host_pages == host
        return started[-1]

    yield start
    for llm in started:
        llm.close()


@pytest.fixture
def ids(request):
    """Random token ids, the same in every run. No two of a test begin with the same."""
    rng = random.Random(request.node.name)
    first = iter(rng.sample(range(3, VOCAB - 1), VOCAB - 4))
    return lambda count: [next(first), *rng.choices(range(3, VOCAB - 1), k=count - 1)]


def tokens_of(outputs) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


def same(llm, plain, prompts, sampling=GREEDY):
    """The numbers of cached tokens; the outputs are those of the engine without a cache."""
    found, expected = llm.generate(prompts, sampling), plain.generate(prompts, _plain(sampling))
    assert tokens_of(found) == tokens_of(expected)
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            assert (mine.logprobs is None) == (theirs.logprobs is None)
            if mine.logprobs is not None and theirs.logprobs is not None:
                pairs = zip(mine.logprobs, theirs.logprobs, strict=True)
                assert all(abs(a.logprob - b.logprob) < 1e-3 for a, b in pairs)
    check(llm)
    return [output.num_cached_tokens for output in found]


def _plain(sampling):
    if isinstance(sampling, SamplingParams):
        return dataclasses.replace(sampling, session_id=None)
    return [_plain(one) for one in sampling]


def one_after_another(llm, plain, prompts, sampling=GREEDY):
    return [cached for prompt in prompts for cached in same(llm, plain, [prompt], sampling)]


def session(name: str) -> SamplingParams:
    return dataclasses.replace(GREEDY, session_id=name)


def files(folder: Path, kind: str = "pages") -> set[str]:
    """Names of what is on disk."""
    return {path.name for path in folder.glob(f"*/{kind}/*")}
