"""run_batch(): a model over the rows of a file, in this process. Joins engine, text and jobs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints.fingerprint import fingerprint
from checkpoints.resolve import Checkpoint
from jaxinfer.batch.config import BatchConfig
from jaxinfer.batch.errors import BatchError
from jaxinfer.batch.formats import finisher
from jaxinfer.batch.job import Job, RowReader, shard_range
from jaxinfer.batch.journal import Journal
from jaxinfer.batch.progress import JobProgress
from jaxinfer.batch.rows import JobFacts, RowMaker
from jaxinfer.batch.sources import Rows, find_duplicates, open_rows
from jaxinfer.build import REFUSALS as ENGINE_REFUSALS
from jaxinfer.build import build_engine
from jaxinfer.cluster.config import RayConfig
from jaxinfer.config import DEFAULT_MODEL, EngineConfig, ServerConfig
from jaxinfer.engine.driven import DrivenEngine
from jaxinfer.found import Found, find_model
from jaxinfer.http.counters import Counters
from jaxinfer.http.metrics import ServerMetrics
from jaxinfer.http.prompts import PromptMaker
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.types import EngineHandle, EngineInfo

REFUSALS = (*ENGINE_REFUSALS, BatchError)
"""What whoever calls `run_batch` can put right: the message says it all."""
JOB_OPTIONS: Mapping[str, Any] = {"max_step_ms": math.inf}
"""Fields of EngineConfig whose defaults are others in a job: nobody waits there for the next token of a row."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """What a job gave: `output` has a line for each of `num_rows`."""

    output: Path
    num_rows: int
    num_failed: int  # of these, with an error in place of a reply
    prompt_tokens: int
    cached_tokens: int  # of these, that were in the KV cache already
    output_tokens: int


def run_batch(
    input: Any,
    output: str | os.PathLike[str],
    model: str = DEFAULT_MODEL,
    *,
    job: Mapping[str, Any] | None = None,
    ray: Mapping[str, Any] | None = None,
    restart: bool = False,
    show_progress: bool = True,
    **options: Any,
) -> BatchResult:
    """Answers every row of `input` and writes a line for each, in the order of the input, to the new file `output`.

    input: a path (JSONL, also gzipped, Parquet, Arrow, or a folder of such), or a Grain source or any sequence of rows.
    A row is a request in the OpenAI API's batch format, or has a `prompt` or `messages` and fields of its body.
    output: JSONL (gzipped with the suffix .gz) in that API's format, or Parquet. A row that cannot be answered has its
    reason there, and ends nothing.

    An interrupted job, killed ones too, goes on when it is run again, and each row is written once. One that is done is
    not done again. restart: begin anew, and delete what there is. `job` are the fields of BatchConfig, `options` those
    of EngineConfig, where a job has defaults of its own for max_step_ms and max_num_seqs. ray: the fields of RayConfig;
    engines of a Ray cluster then run the rows, each of which finds model and input by the same names. A job may be gone
    on with on a cluster that was begun without one, and the reverse.

    Raises BatchError where input, model or parameters are not those that it began with, where another process is at
    work on it, where the output cannot be written, and where the cluster cannot go on.
    """
    config, batch_config = EngineConfig(model=model, **(JOB_OPTIONS | options)), BatchConfig(**(job or {}))
    cluster = None if ray is None else RayConfig.of(ray, num_processes=config.num_processes)
    path = _shard_path(Path(output), batch_config)
    finish = finisher(path)
    found = find_model(config)
    rows = open_rows(input)
    identity = batch_config.identity() | {
        "input": rows.digest,
        "num_rows": len(rows),
        "model": fingerprint(found.checkpoint, dtype=config.dtype, seed=config.seed),
        "model_name": config.model,
        "tokenizer": _text_digest(found.checkpoint),
    }
    with Journal.open(path, identity, int(time.time()), restart=restart, finish=finish) as journal:
        start, end = shard_range(len(rows), batch_config)
        if journal.counts.num_rows == end - start:
            journal.finish()
        else:
            facts = _facts(batch_config, rows, journal)
            progress = JobProgress(end - start, journal.counts, enabled=show_progress)
            with contextlib.closing(progress):
                if cluster is None:
                    engine = DrivenEngine(build_engine(config, found, show_progress=show_progress, for_job=True))
                    with contextlib.closing(engine):
                        _run_job(engine, batch_config, found, rows, facts, journal, progress)
                else:
                    from jaxinfer.cluster import job as cluster_job

                    cluster_job.run_rows(config, batch_config, cluster, input, len(rows), facts, journal, progress)
                    journal.finish()
                    progress.show(journal.counts, last=True)
        return BatchResult(output=path, **dataclasses.asdict(journal.counts))


def _facts(batch_config: BatchConfig, rows: Rows, journal: Journal) -> JobFacts:
    return JobFacts(
        key=uuid.uuid5(uuid.NAMESPACE_OID, repr(sorted(batch_config.identity().items())) + rows.digest).hex,
        created_s=journal.created_s,
        seed=batch_config.seed,
        defaults=batch_config.defaults,
        duplicates=find_duplicates(rows),
    )


def _run_job(
    engine: DrivenEngine,
    batch_config: BatchConfig,
    found: Found,
    rows: Rows,
    facts: JobFacts,
    journal: Journal,
    progress: JobProgress,
) -> None:
    journal.describe(engine_facts(engine.info))
    maker = make_maker(engine, found, batch_config, facts)
    reader = RowReader(rows, batch_config, maker, journal.iterator)
    asyncio.run(_drive(Job(reader, maker, journal, batch_config, progress), engine))


def engine_facts(info: EngineInfo) -> dict[str, Any]:
    """What of an engine decides the output, besides the model's own."""
    defaults = {"sampling_defaults": dict(info.sampling_defaults), "eos_ids": list(info.eos_ids)}
    return {"max_model_len": info.max_model_len} | defaults


def make_maker(engine: EngineHandle, found: Found, batch_config: BatchConfig, facts: JobFacts) -> RowMaker:
    """What makes requests for `engine` of a job's rows."""
    template = ChatTemplate.from_config(found.checkpoint.tokenizer_config, batch_config.chat_template)
    server_config = ServerConfig(
        served_model_names=batch_config.served_model_names,
        chat_template_kwargs=batch_config.chat_template_kwargs,
        tool_call_parser=batch_config.tool_call_parser,
        reasoning_parser=batch_config.reasoning_parser,
    )
    prompts = PromptMaker(engine, found.tokenizer, template, server_config)
    return RowMaker(prompts, ServerMetrics(prompts.model_names[0], Counters(), engine.info), facts)


async def _drive(job: Job, engine: DrivenEngine) -> None:
    driving = asyncio.create_task(engine.drive())
    try:
        await job.run(engine)
    finally:
        driving.cancel()


def _text_digest(checkpoint: Checkpoint) -> str:
    """Of what turns messages into token ids, and these into text."""
    parts = (checkpoint.tokenizer_json or "", json.dumps(dict(checkpoint.tokenizer_config), sort_keys=True))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _shard_path(output: Path, batch_config: BatchConfig) -> Path:
    """With the number of the shard before the suffixes, where there are several."""
    if batch_config.shard_count == 1:
        return output
    stem = output.name.split(".")[0]
    number = f"-{batch_config.shard_index:05d}-of-{batch_config.shard_count:05d}"
    return output.with_name(stem + number + output.name[len(stem) :])
