"""LLM with tiers behind the device's pages: the same answers as without a cache, from wherever the pages came.

A page has 8 tokens (16 in the tests of long contexts). A request of 150 tokens and 6 of output leaves 155 in the cache,
as the last one was sampled and never computed: 19 full pages and one of 3 tokens.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from checkpoints import safetensors
from jaxinfer.api import LLM
from jaxinfer.config import ConfigError
from jaxinfer.runner.disk_pages import DiskPages
from jaxinfer.types import InvalidRequest, SamplingParams, UnknownSession
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


# Host memory


def test_prompts_that_the_device_does_not_hold_come_back_from_the_host(start, plain, ids):
    llm = start(host=320, disk=0)
    prompts = [ids(150) for _ in range(12)]
    assert same(llm, plain, prompts) == [0] * 12
    assert llm.stats().num_offloaded_pages >= 12 * NUM_PAGES - 64
    assert llm.stats().num_restored_pages == 0
    assert same(llm, plain, prompts) == [149] * 12
    stats = llm.stats()
    # Each shares 18 pages, and copies the next; of 12 at most 3 whole prompts can still be on the device.
    assert stats.num_restored_pages >= 9 * 19
    assert stats.cached_prompt_tokens == 12 * 149
    assert one_after_another(llm, plain, reversed(prompts)) == [149] * 12


def test_what_the_host_has_no_room_for_is_computed_again(start, plain, ids):
    llm = start(host=64, disk=0)
    prompts = [ids(150) for _ in range(12)]
    for _ in range(2):
        same(llm, plain, prompts)
    assert llm.stats().num_host_pages_used <= 64
    assert same(llm, plain, prompts[-1:]) == [149]


def test_samples_with_penalties_are_the_same_from_the_host(start, plain, ids):
    llm = start(host=320, disk=0)
    prompts = [ids(150) for _ in range(8)]
    assert same(llm, plain, prompts, DRAWN) == [0] * 8
    assert same(llm, plain, prompts, DRAWN) == [149] * 8
    assert llm.stats().num_restored_pages > 0


def test_what_takes_longer_to_restore_than_to_compute_is_computed(start, plain, ids):
    llm = start(host=320, disk=0)
    set_speed(llm, restore_ms=1e9)
    prompts = [ids(150) for _ in range(8)]
    for _ in range(2):
        same(llm, plain, prompts)
    assert llm.stats().num_offloaded_pages > 0
    assert llm.stats().num_restored_pages == 0


def test_prompts_that_part_on_a_page_of_the_host_copy_the_part_that_agrees(start, plain, ids):
    llm = start(host=320, disk=0)
    prompt = ids(150)
    same(llm, plain, [prompt])
    one_after_another(llm, plain, [ids(150) for _ in range(6)])
    assert not any(node.page for node in nodes_of(llm, prompt[:144]))
    branches = [[*prompt[:num], 1 + prompt[num] % 100, *ids(20)] for num in (100, 61, 8, 3)]
    assert one_after_another(llm, plain, branches) == [100, 61, 8, 3]
    assert same(llm, plain, [prompt]) == [149]


def computed(llm, plain, prompts, sampling, monkeypatch) -> int:
    """Tokens of chunks that the answers took, in however many pieces."""
    runner, num = llm._engine._engine._runner, 0
    real = runner.launch

    def launch(plan):
        nonlocal num
        num += sum(len(chunk.token_ids) for chunk in plan.prefills)
        return real(plan)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "launch", launch)
        same(llm, plain, prompts, sampling)
    return num


def test_a_preempted_sequence_comes_back_from_the_host_where_that_is_quicker(start, plain, ids, monkeypatch):
    llm = start(host=320, disk=0)
    sampling = dataclasses.replace(GREEDY, max_tokens=120)
    num_computed = {}
    for restore_ms in (0.0, 1e9):
        set_speed(llm, restore_ms=restore_ms)
        before = llm.stats()
        prompts = [ids(100) for _ in range(4)]  # 28 pages each in the end: four of them do not fit
        num_computed[restore_ms] = computed(llm, plain, prompts, sampling, monkeypatch)
        after = llm.stats()
        assert after.num_preemptions > before.num_preemptions
        assert (after.num_restored_pages > before.num_restored_pages) == (restore_ms == 0.0)
    assert 400 <= num_computed[0.0] < 400 + 4 * 8 < num_computed[1e9]


# Contexts beyond the pool


@pytest.fixture(scope="module")
def small(model):
    """A pool of 512 tokens."""
    with make(model, num_pages=32, kv_host_gib=400 * PAGE_GIB, **LONG) as llm:
        yield llm


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_context_twice_the_pool_is_answered_as_by_a_pool_that_holds_it(small, plain, ids, sampling):
    assert small.info.max_model_len == 1536
    sampling = dataclasses.replace(sampling, max_tokens=20)
    prompt = ids(1000)
    assert same(small, plain, [prompt], sampling) == [0]
    # What lies beyond the pages is not kept: all pages are a hit, as far as none was given up since.
    assert same(small, plain, [prompt], sampling) == [512]
    short = [ids(num) for num in (40, 200, 3)]
    mixed = [short[0], prompt, short[1], ids(900), short[2]]
    same(small, plain, mixed, sampling)


def test_a_context_that_outgrows_the_pool_while_it_decodes_is_answered_alike(small, plain, ids):
    sampling = dataclasses.replace(DRAWN, max_tokens=60)
    same(small, plain, [ids(num) for num in (500, 480, 460, 511, 512, 513)], sampling)


def test_an_aborted_long_context_leaves_the_pool_whole_and_the_others_right(small, plain, ids):
    prompt, others = ids(1000), [ids(num) for num in (50, 300, 20)]
    stream = small.stream(prompt, dataclasses.replace(GREEDY, max_tokens=200))
    for _ in range(3):
        next(stream)
    assert small.stats().num_pages_used == 32
    found = []
    thread = threading.Thread(target=lambda: found.extend(small.generate(others, GREEDY)))
    thread.start()
    next(stream)
    stream.close()
    thread.join(60)
    assert tokens_of(found) == tokens_of(plain.generate(others, GREEDY))
    check(small)
    same(small, plain, [ids(1000)])


def test_a_context_that_neither_pool_nor_host_holds_is_refused_with_both_numbers(small):
    with pytest.raises(InvalidRequest, match=r"1,?600 tokens.*1,?536"):
        small.generate([[5] * 1600], GREEDY)
    check(small)


# Disk


def test_what_leaves_the_host_comes_back_from_disk(start, plain, ids, tmp_path):
    llm = start(host=64)
    prompts = [ids(150) for _ in range(12)]
    for _ in range(3):
        one_after_another(llm, plain, prompts)
    stats = llm.stats()
    assert stats.num_disk_writes > 0 and stats.num_disk_reads > 0
    assert stats.num_disk_pages_used == len(files(tmp_path / "kv"))
    assert stats.cached_prompt_tokens >= 12 * 2 * 128  # at the least the full pages that half of the host holds


def test_a_restart_finds_what_is_on_disk(start, plain, ids):
    llm = start(host=64)
    prompts = [ids(150) for _ in range(12)]
    one_after_another(llm, plain, prompts)
    llm.close()
    llm = start(host=64)
    found = one_after_another(llm, plain, prompts)
    assert sum(num >= 128 for num in found[:4]) == 4
    assert llm.stats().num_disk_reads > 0


def test_a_disk_tier_that_is_full_deletes_what_was_used_least(start, plain, ids, tmp_path):
    llm = start(host=64, disk=50)
    for _ in range(2):
        one_after_another(llm, plain, [ids(150) for _ in range(8)])
    assert llm.stats().num_disk_writes > 50 >= llm.stats().num_disk_pages_used
    llm.close()
    assert 0 < len(files(tmp_path / "kv")) <= 50


def test_a_damaged_page_is_a_miss_that_the_log_tells_and_is_computed_again(start, plain, ids, tmp_path, caplog):
    llm, prompt = start(), ids(150)
    same(llm, plain, [prompt], session("a"))
    llm.save_session("a")
    key = nodes_of(llm, prompt[:144])[7].key
    llm.close()
    (path,) = (tmp_path / "kv").glob(f"*/pages/{key}")
    content = bytearray(path.read_bytes())
    content[4096 + 1000] ^= 1
    path.write_bytes(content)
    llm = start()
    assert same(llm, plain, [prompt]) == [7 * 8]  # the pages above it
    assert f"{path} is not read" in caplog.text
    assert same(llm, plain, [prompt]) == [149]


def test_pages_of_another_model_are_not_used(start, model, ids, tmp_path):
    llm, prompt = start(), ids(150)
    llm.generate([prompt], session("a"))
    llm.save_session("a")
    llm.close()
    other = tmp_path / "other"
    save_with_context(GOLDEN / "qwen3", other, 2048)
    source = safetensors.open_folder(model)
    rng = np.random.default_rng(1)
    tensors = {name: np.array(source.read(name)) for name in source.shapes()}
    for name, value in tensors.items():
        if "proj" in name:
            tensors[name] = rng.permutation(value.ravel()).reshape(value.shape)
    safetensors.write(other / "model.safetensors", tensors)
    before = files(tmp_path / "kv")
    second = start(name=other)
    assert second.generate([prompt], GREEDY)[0].num_cached_tokens == 0
    assert second.stats().num_disk_pages_used == second.stats().num_sessions == 0
    with pytest.raises(UnknownSession):
        second.load_session("a")
    assert files(tmp_path / "kv") == before
    second.close()
    assert start().load_session("a").num_cached_tokens == 155


def test_a_folder_that_another_engine_uses_is_refused_by_its_name(start, tmp_path):
    llm = start()
    with pytest.raises(ConfigError, match=f"another server of this model uses {tmp_path / 'kv'}"):
        start()
    llm.close()
    gc.collect()
    start()


# Sessions


def test_a_saved_session_goes_on_after_a_restart(start, plain, ids, tmp_path):
    llm, prompt = start(), ids(150)
    (output,) = llm.generate([prompt], session("chat"))
    history = [*prompt, *output.outputs[0].token_ids]
    assert llm.session_manifest("chat").saved is False
    info = llm.save_session("chat")
    assert (info.num_tokens, info.num_pages, info.num_cached_tokens, info.saved) == (155, NUM_PAGES, 155, True)
    assert info.num_bytes == NUM_PAGES * 8192
    assert llm.session_manifest("chat") == info
    assert len(files(tmp_path / "kv")) == NUM_PAGES
    assert files(tmp_path / "kv", "sessions") == {"chat.json"}
    llm.close()
    llm = start()
    assert llm.session_manifest("chat") == info
    assert llm.load_session("chat") == info
    assert same(llm, plain, [[*history, *ids(10)]], session("chat")) == [155]
    assert llm.session_manifest("chat").num_tokens == 155 + 1 + 10 + 5
    check(llm)


def test_a_session_that_is_not_loaded_is_found_too_but_for_its_last_page(start, plain, ids):
    llm, prompt = start(), ids(150)
    llm.generate([prompt], session("chat"))
    llm.save_session("chat")
    llm.close()
    assert same(start(), plain, [prompt]) == [144]


def test_deleting_a_session_leaves_the_files_that_another_one_shares(start, ids, tmp_path):
    llm, shared = start(), ids(80)
    for name in ("a", "b"):
        llm.generate([[*shared, *ids(70)]], session(name))
        llm.save_session(name)
    assert len(files(tmp_path / "kv")) == 10 + 2 * 10
    assert llm.delete_session("a").num_pages == NUM_PAGES
    llm.generate([ids(20)], GREEDY)  # by its end the files are gone
    info = llm.session_manifest("b")
    with pytest.raises(UnknownSession):
        llm.session_manifest("a")
    llm.close()
    assert len(files(tmp_path / "kv")) == NUM_PAGES
    assert files(tmp_path / "kv", "sessions") == {"b.json"}
    llm = start()
    assert llm.load_session("b") == info
    llm.delete_session("b")
    llm.close()
    assert not files(tmp_path / "kv") and not files(tmp_path / "kv", "sessions")


def test_unknown_sessions_are_told_apart_from_those_that_are_not_saved(start, ids):
    llm = start()
    for action in (llm.save_session, llm.load_session, llm.session_manifest, llm.delete_session):
        with pytest.raises(UnknownSession, match="there is no session 'nobody'"):
            action("nobody")
    llm.generate([ids(20)], session("a"))
    with pytest.raises(UnknownSession, match="'a' is not saved"):
        llm.load_session("a")
    llm.delete_session("a")
    with pytest.raises(UnknownSession):
        llm.session_manifest("a")


def test_without_a_disk_tier_a_session_is_kept_but_not_saved(start, plain, ids):
    llm = start(disk=0)
    same(llm, plain, [ids(30)], session("a"))
    assert llm.session_manifest("a").num_cached_tokens == 35
    with pytest.raises(InvalidRequest, match="there is no disk tier"):
        llm.save_session("a")


def test_a_session_is_saved_while_other_requests_run(start, plain, ids):
    llm, prompt = start(), ids(150)
    same(llm, plain, [prompt], session("a"))
    others, found = [ids(150) for _ in range(10)], []
    thread = threading.Thread(target=lambda: found.extend(llm.generate(others, GREEDY)))
    thread.start()
    infos = [llm.save_session("a") for _ in range(3)]
    thread.join(60)
    assert all(info.saved and info.num_bytes == NUM_PAGES * 8192 for info in infos)
    assert tokens_of(found) == tokens_of(plain.generate(others, GREEDY))
    check(llm)
    llm.close()
    llm = start()
    assert llm.load_session("a").num_cached_tokens == 155
    assert same(llm, plain, [prompt]) == [149]


def test_a_save_that_finds_the_disk_full_fails_alone(start, plain, ids, monkeypatch, tmp_path):
    llm, prompt = start(), ids(150)
    same(llm, plain, [prompt], session("a"))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(DiskPages, "write", full)
        with pytest.raises(RuntimeError, match="could not be written"):
            llm.save_session("a")
        one_after_another(llm, plain, [ids(150) for _ in range(10)])
    assert llm.session_manifest("a").saved is False
    assert llm.stats().num_disk_pages_used == 0 == len(files(tmp_path / "kv"))
    assert same(llm, plain, [prompt], session("a"))[0] > 0
    assert llm.save_session("a").num_bytes == NUM_PAGES * 8192


def test_a_session_larger_than_the_disk_tier_is_not_saved_and_says_why(start, plain, ids):
    llm, prompt = start(disk=10), ids(150)
    same(llm, plain, [prompt], session("a"))
    with pytest.raises(RuntimeError, match="holds 10 pages, not enough free for the 20 of the session"):
        llm.save_session("a")
    assert same(llm, plain, [prompt]) == [149]


def test_pages_of_a_session_leave_the_device_after_all_others_and_leave_it_when_nothing_else_is_left(start, plain, ids):
    llm, prompt, stranger = start(host=320, disk=0), ids(150), ids(150)
    same(llm, plain, [prompt], session("a"))
    same(llm, plain, [stranger])
    one_after_another(llm, plain, [ids(150) for _ in range(6)])
    assert [bool(node.page) for node in nodes_of(llm, prompt)] == [True] * 19
    assert [bool(node.page) for node in nodes_of(llm, stranger)] == [False] * 19
    assert same(llm, plain, [prompt], session("a")) == [149]
    same(llm, plain, [ids(120) for _ in range(4)], dataclasses.replace(GREEDY, max_tokens=80))  # 25 pages each
    assert not all(node.page for node in nodes_of(llm, prompt))
