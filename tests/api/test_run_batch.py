"""run_batch() with a model: what it returns, and what it does not do twice."""

from __future__ import annotations

import gzip
import json
import shutil

import pytest

import jaxinfer
from jaxinfer import offline
from jaxinfer.batch.errors import BatchError
from jaxinfer.config import ConfigError
from tests.api.test_serve_process import save_tiny_model
from tests.batch.made import CHAT, batch_row, read_lines, text_of, write_lines

TINY = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "page_size": 8, "show_progress": False}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def options(model, tmp_path_factory):
    return TINY | {"model": model, "compile_cache_dir": str(tmp_path_factory.mktemp("cache"))}


def test_a_batch_says_what_a_model_alone_does(options, tmp_path):
    rows = [batch_row(f"row-{i}", prompt="ab" * (i + 1), max_tokens=5, temperature=0) for i in range(6)]
    rows.append(batch_row("chat", CHAT, messages=MESSAGES, max_tokens=4, temperature=0))
    rows.append(batch_row("bad", n=0))
    result = jaxinfer.run_batch(write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", **options)
    assert (result.num_rows, result.num_failed, result.output) == (8, 1, tmp_path / "out.jsonl")
    lines = read_lines(tmp_path / "out.jsonl")
    with jaxinfer.LLM(**options) as llm:
        greedy = jaxinfer.SamplingParams(max_tokens=5, temperature=0)
        alone = [llm.generate(row["body"]["prompt"], greedy)[0] for row in rows[:6]]
        chat = llm.chat(MESSAGES, jaxinfer.SamplingParams(max_tokens=4, temperature=0))[0]
    assert [text_of(line) for line in lines[:7]] == [one.outputs[0].text for one in [*alone, chat]]
    assert result.output_tokens == sum(len(one.outputs[0].token_ids) for one in [*alone, chat])
    assert result.prompt_tokens == sum(len(one.prompt_token_ids) for one in [*alone, chat])


def test_a_job_that_is_done_needs_no_engine(options, tmp_path, monkeypatch):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "ab", "max_tokens": 2}])
    first = jaxinfer.run_batch(source, tmp_path / "out.jsonl", **options)
    monkeypatch.setattr(offline, "build_engine", None)
    assert jaxinfer.run_batch(source, tmp_path / "out.jsonl", **options) == first


def test_an_empty_input_needs_no_engine(options, tmp_path, monkeypatch):
    monkeypatch.setattr(offline, "build_engine", None)
    (tmp_path / "in.jsonl").write_text("")
    result = jaxinfer.run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl.gz", **options)
    assert result.num_rows == 0
    assert gzip.decompress((tmp_path / "out.jsonl.gz").read_bytes()) == b""
    assert (tmp_path / "out.jsonl.gz").stat().st_size > 0


def test_a_job_is_not_resumed_with_another_model_or_another_chat_template(options, model, tmp_path, monkeypatch):
    monkeypatch.setattr(offline, "build_engine", None)
    (tmp_path / "in.jsonl").write_text("")

    def run(**changes):
        return jaxinfer.run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", **options | changes)

    run()
    with pytest.raises(BatchError, match="model was .* and is "):
        run(dtype="bfloat16")
    shutil.copytree(model, tmp_path / "other")
    path = tmp_path / "other" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "{{ messages }}"}))
    with pytest.raises(BatchError, match="tokenizer was .* and is "):
        run(model=str(tmp_path / "other"))
    run()


def test_each_shard_has_a_file_of_its_own(options, tmp_path, monkeypatch):
    monkeypatch.setattr(offline, "build_engine", None)
    (tmp_path / "in.jsonl").write_text("")
    shard = {"shard_index": 1, "shard_count": 3}
    result = jaxinfer.run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl.gz", job=shard, **options)
    assert result.output == tmp_path / "out-00001-of-00003.jsonl.gz"


WRONG_JOBS = [
    ({"shard_index": 3, "shard_count": 3}, "shard_index is 3; with shard_count 3 it must be from 0 to 2"),
    ({"shard_count": 0}, "shard_count is 0; it must be from 1"),
    ({"checkpoint_s": -1}, "checkpoint_s is -1; it must be from 0"),
    ({"max_rows_ahead": 0}, "max_rows_ahead is 0; it must be at least 1"),
    ({"shuffle_seed": -1}, "shuffle_seed is -1; it must be from 0"),
    ({"seed": 2**64}, "it must be of 64 bits"),
    ({"defaults": {"stream": True}}, "defaults has 'stream', which each row must say for itself"),
]


@pytest.mark.parametrize(("job", "message"), WRONG_JOBS)
def test_a_job_that_cannot_be_is_refused_before_anything_is_read(tmp_path, job, message):
    with pytest.raises(ConfigError, match=message):
        jaxinfer.run_batch(tmp_path / "none.jsonl", tmp_path / "out.jsonl", job=job)


@pytest.mark.long
def test_rows_that_share_a_prefix_find_it_in_the_cache_however_far_apart_they_lie(options, tmp_path):
    """Twelve prefixes of 8 pages each, in turn; the cache holds four of them beside what runs."""
    prefixes = [letter * 64 for letter in "abcdefghijkl"]
    rows = [batch_row(f"row-{i}", prompt=prefixes[i % 12] + str(i), max_tokens=2, temperature=0) for i in range(96)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    cached, lines = {}, {}
    for arranged in (True, False):
        output = tmp_path / f"{arranged}.jsonl"
        job = {"arrange_rows": arranged, "max_rows_ahead": 200}
        result = jaxinfer.run_batch(source, output, job=job, **options | {"num_pages": 48, "max_model_len": 96})
        cached[arranged] = result.cached_tokens / result.prompt_tokens
        lines[arranged] = [text_of(line) for line in read_lines(output)]
    assert lines[True] == lines[False]
    assert cached[False] < 0.1
    assert cached[True] > 0.6
