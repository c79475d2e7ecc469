"""How many sequences a batch job runs at once, and how long its steps may be, where its user does not say."""

from __future__ import annotations

import dataclasses
import math

import pytest

from checkpoints.resolve import resolve
from jaxinfer import build, job_slots, offline
from jaxinfer.config import EngineConfig
from jaxinfer.kv_tiers import TierSizes
from jaxinfer.processes import OWN
from jaxinfer.runner.buckets import make_buckets
from jaxinfer.runner.cache import PoolError
from jaxinfer.runner.step import StepBuilder
from jaxinfer.step_times import cut_times
from pallas_kernels.dispatch import CPU, Target
from tests.engine.drive import GOLDEN

MODEL = str(GOLDEN / "llama")
GPU = Target("gpu", 90)
ENOUGH = 512 * 512  # tokens


def make_builder(config: EngineConfig, target: Target = GPU) -> StepBuilder:
    """As on such a device, before it is sized."""
    checkpoint = resolve(MODEL)
    mesh = build.choose_mesh(config)
    model = build.registry.for_mesh(checkpoint.config, (), mesh, build.choose_rules(config))
    shape = dataclasses.replace(build._state_shape(config, model, mesh), num_slots=config.max_num_seqs or 256)
    most = config.max_num_batched_tokens or 8192
    return StepBuilder(
        model=model,
        shape=shape,
        vocab_size=model.vocab_rows,
        mesh=mesh,
        buckets=tuple(make_buckets("gpu", shape.num_slots, most)),
        target_of_plan=target,
    )


def slots_of_job(monkeypatch, pool_tokens: int | None, target: Target = GPU, context: int = 256, **options) -> int:
    """pool_tokens: that the memory holds beside 512 slots; None: these alone are too many."""

    def size_memory(_config, builder, _temp_bytes):
        if builder.shape.num_slots == 512 and pool_tokens is None:
            raise PoolError("no room")
        num_pages = (pool_tokens or 0) // builder.shape.page_size
        shape = dataclasses.replace(builder.shape, num_pages=num_pages)
        return dataclasses.replace(builder, shape=shape), TierSizes(1)

    monkeypatch.setattr(job_slots, "size_memory", size_memory)
    config = EngineConfig(model=MODEL, **options)
    builder = make_builder(config, target)
    builder = dataclasses.replace(builder, shape=dataclasses.replace(builder.shape, max_model_len=context))
    sized, _ = job_slots.size_job(config, builder, lambda _: 0)
    assert sized.buckets[-1].rows == max(b.rows for b in sized.buckets if b.decode) == sized.shape.num_slots
    assert sized.buckets[-1].tokens == builder.buckets[-1].tokens
    return sized.shape.num_slots


def test_a_job_on_a_gpu_runs_512_sequences_where_the_pages_beside_them_are_enough(monkeypatch):
    assert slots_of_job(monkeypatch, ENOUGH) == 512
    assert slots_of_job(monkeypatch, ENOUGH, page_size=256, max_num_batched_tokens=1024) == 512


@pytest.mark.parametrize("pool_tokens", [None, 16, ENOUGH - 16])
def test_a_job_takes_no_memory_for_more_sequences_where_it_is_short(monkeypatch, pool_tokens):
    assert slots_of_job(monkeypatch, pool_tokens) == 256


def test_more_sequences_never_cost_a_job_a_part_of_its_context(monkeypatch):
    """A job is gone on with in the context alone that it began with."""
    assert slots_of_job(monkeypatch, 2 * ENOUGH, context=2 * ENOUGH) == 512
    assert slots_of_job(monkeypatch, 2 * ENOUGH, context=2 * ENOUGH + 1) == 256


@pytest.mark.parametrize(
    ("options", "num"),
    [
        ({"max_num_seqs": 7}, 7),
        ({"num_pages": 2**20}, 256),
        ({"max_num_batched_tokens": 1023}, 256),
        ({"num_processes": 2, "coordinator": "127.0.0.1:7"}, 256),
        ({"target": CPU}, 256),
    ],
    ids=str,
)
def test_what_the_user_said_stays_and_so_does_what_more_sequences_would_not_fit(monkeypatch, options, num):
    assert slots_of_job(monkeypatch, 4 * ENOUGH, **options) == num


def test_groups_of_devices_keep_their_sequences(monkeypatch):
    monkeypatch.setattr(StepBuilder, "num_groups", 2)
    assert slots_of_job(monkeypatch, 4 * ENOUGH) == 256


class Built(Exception):
    """In place of an engine."""


@pytest.mark.parametrize(("options", "max_step_ms"), [({}, math.inf), ({"max_step_ms": 7.5}, 7.5)])
def test_a_job_has_no_limit_of_a_steps_time_unless_it_is_given_one(monkeypatch, tmp_path, options, max_step_ms):
    def build_engine(config, found, *, show_progress, for_job):
        del found, show_progress
        assert for_job
        assert config.max_step_ms == max_step_ms
        raise Built

    monkeypatch.setattr(offline, "build_engine", build_engine)
    (tmp_path / "in.jsonl").write_text('{"prompt": "ab"}\n')
    for more in ({}, {"max_num_seqs": 3}, {"max_step_ms": max_step_ms, "max_num_seqs": 4}):  # the same job goes on
        with pytest.raises(Built):
            offline.run_batch(
                tmp_path / "in.jsonl", tmp_path / "out.jsonl", MODEL, show_progress=False, **options | more
            )


def test_a_server_keeps_its_limit_and_processes_may_have_others():
    assert EngineConfig().max_step_ms == 30.0
    assert "max_step_ms" in OWN  # the first process schedules, and the others do what it says


def times_of(builder: StepBuilder) -> dict:
    return {bucket: 1 + bucket.tokens / 100 + bucket.rows / 50 for bucket in builder.buckets}


def test_a_size_is_told_with_the_time_that_it_takes_with_all_its_rows():
    builder = make_builder(EngineConfig(model=MODEL))
    times = cut_times(builder, times_of(builder))
    assert times.mixed_ms == {
        b.tokens: 1 + b.tokens / 100 + min(b.tokens, 256) / 50 for b in builder.buckets if not b.decode
    }
    assert times.decode_ms == {b.rows: 1 + b.rows / 100 + b.rows / 50 for b in builder.buckets if b.decode}


def test_no_step_is_cut_on_a_cpu_nor_of_several_groups(monkeypatch):
    builder = make_builder(EngineConfig(model=MODEL), CPU)
    assert cut_times(builder, times_of(builder)) == ({}, {})
    builder = make_builder(EngineConfig(model=MODEL))
    monkeypatch.setattr(StepBuilder, "num_groups", 2)
    assert cut_times(builder, times_of(builder)) == ({}, {})
