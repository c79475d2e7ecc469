"""Jobs over an engine without a model, in the process of the test."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from jaxinfer.batch.config import BatchConfig
from jaxinfer.batch.formats import finisher
from jaxinfer.batch.job import Job, RowReader
from jaxinfer.batch.journal import Journal
from jaxinfer.batch.progress import JobProgress
from jaxinfer.batch.rows import JobFacts, RowMaker
from jaxinfer.batch.sources import find_duplicates, open_rows
from jaxinfer.config import ServerConfig
from jaxinfer.http.counters import Counters
from jaxinfer.http.metrics import ServerMetrics
from jaxinfer.http.prompts import PromptMaker
from jaxinfer.text.chat_template import ChatTemplate
from tests.http.fake_engine import FakeEngine
from tests.http.tiny_tokenizer import make_tokenizer

CREATED_S = 1_700_000_000
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def make_engine(**behaviour):
    """A FakeEngine that makes a token whenever it is its turn."""
    tokenizer, _ = make_tokenizer()
    return FakeEngine(tokenizer, **behaviour)


def make_maker(rows, engine, **facts) -> RowMaker:
    tokenizer, tokenizer_config = make_tokenizer()
    prompts = PromptMaker(engine, tokenizer, ChatTemplate.from_config(tokenizer_config), ServerConfig())
    metrics = ServerMetrics("fake", Counters(), engine.info)
    known = {"key": "job", "created_s": CREATED_S, "seed": 0, "defaults": {}, "duplicates": find_duplicates(rows)}
    return RowMaker(prompts, metrics, JobFacts(**known | facts))


def run_job(source, output: Path, engine=None, *, options=None, deadline_s=None, restart=False, **facts) -> Journal:
    """Runs a job to its end, as `run_batch` does."""
    config = BatchConfig(**{"checkpoint_s": 0.0} | (options or {}))
    rows = open_rows(source)
    identity = config.identity() | {"input": rows.digest}
    with Journal.open(output, identity, CREATED_S, restart=restart, finish=finisher(output)) as journal:

        async def run():
            used = engine or make_engine()
            maker = make_maker(rows, used, defaults=config.defaults, seed=config.seed, **facts)
            reader = RowReader(rows, config, maker, journal.iterator)
            progress = JobProgress(len(rows), journal.counts, enabled=False)
            await Job(reader, maker, journal, config, progress).run(used, deadline_s)

        asyncio.run(run())
    return journal


def batch_row(custom_id: str, url: str = COMPLETIONS, **body) -> dict:
    """A row in the OpenAI API's batch format."""
    body = {"prompt": "the cat", "max_tokens": 3} | body if url == COMPLETIONS else body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write_lines(path: Path, rows) -> Path:
    """Objects as JSON; text as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def text_of(line: dict) -> str:
    """What the first choice of an answered row says."""
    choice = line["response"]["body"]["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]
