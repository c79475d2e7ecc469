"""Steps an engine by hand and checks, after every step, what has to hold between steps."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import build as build_module
from jaxinfer.build import build_engine
from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.runner.step import StepBuilder
from jaxinfer.types import EngineStats, FinishReason, Request, TokenLogprobs

GOLDEN = Path(__file__).parents[1] / "golden"
TIE = 1e-4
"""Two tokens whose float32 logits differ by less than this may come out in either order."""


@dataclasses.dataclass(slots=True)
class Output:
    """What a request gave."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None


def build(model: str | Path, **options: Any) -> Engine:
    """An engine whose compiled steps are kept in the cache of the test run, if there is one."""
    return build_engine(EngineConfig(model=str(model), compile_cache_dir="", **options), show_progress=False)


def drive(
    engine: Engine,
    requests: Sequence[Request],
    *,
    arrivals: Sequence[int] | None = None,
    aborts: Mapping[str, int] | None = None,
) -> dict[str, Output]:
    """Runs requests to their ends: request i is submitted before step arrivals[i]; aborts by id, before that step."""
    arrivals = [0] * len(requests) if arrivals is None else arrivals
    aborts = aborts or {}
    outputs = {request.request_id: Output() for request in requests}
    compiled = engine.stats().compilations_after_ready
    step = 0
    while engine.has_work or step <= max([*arrivals, *aborts.values()], default=0):
        for request, arrival in zip(requests, arrivals, strict=True):
            if arrival == step:
                engine.submit(request)
        for request_id, when in aborts.items():
            if when == step and (event := engine.abort(request_id)):
                outputs[request_id].finish_reason = event.finish_reason
        for event in engine.step():
            output = outputs[event.request_id]
            assert output.finish_reason is None, f"{event.request_id} went on after its end"
            output.tokens += event.token_ids
            output.logprobs += event.logprobs or ()
            output.finish_reason = event.finish_reason
        engine._scheduler.check_integrity()
        step += 1
        assert step < 10_000, "the engine does not come to an end"
    check_idle(engine.stats(), compiled)
    assert all(output.finish_reason is not None for output in outputs.values())
    return outputs


def check_idle(stats: EngineStats, compiled: int = 0) -> None:
    """Every page came back, nobody waits, and nothing was compiled since there were `compiled` compilations."""
    assert stats.num_pages_used == stats.num_running == stats.num_waiting == 0
    assert stats.compilations_after_ready == compiled


def num_equal(tokens: Sequence[int], expected: Sequence[int], margins: Sequence[float]) -> tuple[int, bool]:
    """How many of the expected tokens came, and whether they end at a tie. AssertionError if they end anywhere else."""
    for i, (token, wanted) in enumerate(zip(tokens, expected, strict=True)):
        if token != wanted:
            assert margins[i] < TIE, f"token {i} is {token}, not {wanted}, with a margin of {margins[i]:.1e}"
            return i, True
    return len(expected), False


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """Engines of one model that are built meanwhile share the programs of their sizes, so that a restart is quick."""
    known: dict[Any, Any] = {}
    real = build_module.compile_programs

    def compile_programs(builder: StepBuilder, *args: Any) -> Any:
        key = (builder.shape, builder.buckets, builder.frame_pages, builder.long)
        if key not in known:
            known[key] = real(builder, *args)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "compile_programs", compile_programs)
        yield


def save_with_context(source: Path, folder: Path, max_model_len: int) -> Path:
    """A copy of a golden model whose context is longer: its rope has no scaling."""
    folder.mkdir()
    shutil.copy(source / "model.safetensors", folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": max_model_len}))
    return folder


def requests(num: int) -> list[Request]:
    """Of 20 tokens each, which begin alike."""
    prompt = [7 * i % 120 for i in range(18)]
    return [
        Request(request_id=f"r{i}", prompt_ids=(*prompt, i, i + 1), max_tokens=12, temperature=0.0) for i in range(num)
    ]
