"""LLM with tiers behind the device's pages: the same answers as without a cache, from wherever the pages came.

A page has 8 tokens (16 in the tests of long contexts). A request of 150 tokens and 6 of output leaves 155 in the cache,
as the last one was sampled and never computed: 19 full pages and one of 3 tokens.
"""

from __future__ import annotations

import dataclasses
import gc
import threading

import numpy as np
import pytest

from checkpoints import safetensors
from jaxinfer.config import ConfigError
from jaxinfer.types import InvalidRequest, UnknownSession
from tests.api.tiers import (
    DRAWN,
    GREEDY,
    LONG,
    NUM_PAGES,
    PAGE_GIB,
    check,
    every_size_is_compiled_once,
    files,
    ids,
    make,
    model,
    nodes_of,
    one_after_another,
    plain,
    same,
    session,
    set_speed,
    start,
    tokens_of,
)
from tests.engine.drive import GOLDEN, save_with_context

FIXTURES = (every_size_is_compiled_once, model, plain, start, ids)  # that this file uses by name


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
