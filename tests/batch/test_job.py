"""A job: every row once, in order, whatever happens to it or to another."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxinfer.batch import job as job_module
from jaxinfer.batch import journal as journal_module
from jaxinfer.batch import running
from jaxinfer.batch.errors import BatchError
from jaxinfer.types import EngineDead
from tests.batch.made import (
    CHAT,
    batch_row,
    make_engine,
    read_lines,
    run_job,
    text_of,
    write_lines,
)

ROOT = Path(__file__).parents[2]


def rows(count, **body):
    return [batch_row(f"row-{i}", **{"prompt": f"the cat {i}", "max_tokens": 1 + i % 5} | body) for i in range(count)]


def ids(path):
    return [line["custom_id"] for line in read_lines(path)]


def test_output_has_every_row_once_in_the_order_of_the_input(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", rows(150))
    journal = run_job(source, tmp_path / "out.jsonl")
    assert ids(tmp_path / "out.jsonl") == [f"row-{i}" for i in range(150)]
    assert journal.counts.num_rows == 150
    assert journal.counts.num_failed == 0
    assert journal.counts.output_tokens == sum(1 + i % 5 for i in range(150))


def test_no_more_sequences_run_than_twice_what_the_engine_holds(tmp_path):
    engine, most = make_engine(), 0
    submit = engine.submit

    def counted(request, receiver):
        nonlocal most
        submit(request, receiver)
        most = max(most, len(engine.running))

    engine.submit = counted
    run_job(rows(60, n=2), tmp_path / "out.jsonl", engine)
    assert 2 <= most <= 2 * engine.info.max_num_seqs
    assert most >= engine.info.max_num_seqs, "the engine was not full"


def test_a_killed_job_goes_on_where_it_was_and_writes_what_an_uninterrupted_one_does(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", rows(120, temperature=1.0))
    run_job(source, tmp_path / "whole.jsonl")
    num_runs = 0
    while True:
        engine = make_engine()
        submitted = 0
        submit = engine.submit

        def dying(request, receiver, submit=submit):
            nonlocal submitted
            submitted += 1
            if submitted > 40:
                raise EngineDead("killed")
            submit(request, receiver)

        engine.submit = dying
        num_runs += 1
        try:
            run_job(source, tmp_path / "out.jsonl", engine)
            break
        except EngineDead:
            assert not (tmp_path / "out.jsonl").exists()
    assert num_runs >= 3
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_what_was_written_behind_the_last_checkpoint_is_written_once(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", rows(30))
    run_job(source, tmp_path / "whole.jsonl")
    engine = make_engine()
    engine.die_after = 3
    with pytest.raises(EngineDead):
        run_job(source, tmp_path / "out.jsonl", engine)
    with (tmp_path / "out.jsonl.partial").open("ab") as file:
        file.write(b'{"id": "half a li')
    run_job(source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_job_that_is_done_is_not_done_again(tmp_path):
    run_job(rows(5), tmp_path / "out.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()
    engine = make_engine()
    run_job(rows(5), tmp_path / "out.jsonl", engine)
    assert engine.requests == []
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.state"]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"source": rows(5, top_p=0.5)}, "input was"),
        ({"options": {"defaults": {"temperature": 0.5}}}, "defaults was {} and is {'temperature': 0.5}"),
        ({"options": {"seed": 7}}, "seed was 0 and is 7"),
        ({"options": {"shuffle_seed": 7}}, "shuffle_seed was None and is 7"),
    ],
)
def test_a_job_is_not_resumed_with_other_rows_or_parameters_unless_it_is_restarted(tmp_path, changed, named):
    output = tmp_path / "out.jsonl"
    run_job(rows(5), output)
    before = output.read_bytes()
    changed = {"source": rows(5)} | changed
    with pytest.raises(BatchError, match="was begun otherwise") as refused:
        run_job(**changed, output=output)
    assert named in str(refused.value)
    assert output.read_bytes() == before
    run_job(**changed, output=output, restart=True)
    assert len(read_lines(output)) == 5


def test_a_shuffled_job_has_the_same_rows_in_another_order_and_resumes_in_it(tmp_path):
    source, options = rows(60), {"shuffle_seed": 3}
    run_job(source, tmp_path / "whole.jsonl", options=options)
    order = ids(tmp_path / "whole.jsonl")
    assert sorted(order) == sorted(f"row-{i}" for i in range(60))
    assert order != [f"row-{i}" for i in range(60)]
    engine = make_engine(die_after=4)
    with pytest.raises(EngineDead):
        run_job(source, tmp_path / "out.jsonl", engine, options=options)
    run_job(source, tmp_path / "out.jsonl", options=options)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_the_outputs_of_the_shards_joined_are_the_whole_output(tmp_path):
    source = rows(50, temperature=1.0)
    run_job(source, tmp_path / "whole.jsonl")
    for index in range(3):
        run_job(source, tmp_path / f"{index}.jsonl", options={"shard_index": index, "shard_count": 3})
    joined = b"".join((tmp_path / f"{index}.jsonl").read_bytes() for index in range(3))
    assert joined == (tmp_path / "whole.jsonl").read_bytes()


def test_rows_run_in_their_arrangement_and_keep_their_places_in_the_output(tmp_path):
    source = [batch_row(f"row-{i}", prompt="cat " * (i % 5 + 1), max_tokens=1 + i % 7, priority=i) for i in range(60)]
    ran = {}
    for arranged in (True, False):
        engine, path = make_engine(), tmp_path / f"{arranged}.jsonl"
        run_job(source, path, engine, options={"arrange_rows": arranged})
        assert ids(path) == [f"row-{i}" for i in range(60)]
        ran[arranged] = engine.requests
    assert [request.priority for request in ran[False]] == list(range(60))
    assert sorted(request.priority for request in ran[True]) == list(range(60))
    lengths = [len(request.prompt_ids) + request.max_tokens for request in ran[True]][: job_module.READ_ROWS]
    assert lengths == sorted(lengths, reverse=True)


def test_the_row_that_its_arrangement_puts_last_runs_before_the_rows_of_the_next_chunk(tmp_path):
    source = [batch_row(f"row-{i}", prompt="cat", max_tokens=1 + i % 9, priority=i) for i in range(96)]
    source[5]["body"]["max_tokens"] = 1
    engine = make_engine()
    run_job(source, tmp_path / "out.jsonl", engine, options={"max_rows_ahead": 16})
    assert ids(tmp_path / "out.jsonl") == [f"row-{i}" for i in range(96)]
    ran = [request.priority for request in engine.requests]
    assert ran != sorted(ran)
    assert all(abs(place - priority) < 16 for place, priority in enumerate(ran))


def test_no_more_rows_are_read_than_may_be_ahead_of_the_first_that_is_not_done(tmp_path):
    source = rows(200, max_tokens=1)
    source[0]["body"]["max_tokens"] = 20
    engine = make_engine(step_s=0.001)
    seen = []
    done_first = False
    submit = engine.submit

    def watching(request, receiver):
        if request.max_tokens == 20:
            push = receiver.push

            def pushed(event):
                nonlocal done_first
                done_first = done_first or event.finish_reason is not None
                push(event)

            receiver.push = pushed
        if not done_first:
            seen.append(request.request_id)
        submit(request, receiver)

    engine.submit = watching
    run_job(source, tmp_path / "out.jsonl", engine, options={"max_rows_ahead": 12})
    assert 2 <= len(seen) <= 12
    assert ids(tmp_path / "out.jsonl") == [f"row-{i}" for i in range(200)]


def test_a_job_leaves_the_log_of_the_program_as_it_was_and_starts_no_device():
    code = (
        "import logging; from jaxinfer.batch import job; job._load_grain(); from jax._src import xla_bridge; "
        "print(logging.root.handlers, xla_bridge._backends)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("[] {}\n", "")


def test_an_empty_input_gives_an_empty_output(tmp_path):
    (tmp_path / "in.jsonl").write_text("\n\n")
    run_job(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_row_that_is_refused_for_a_full_queue_waits_and_is_answered(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "REFUSED_S", 0.001)
    engine = make_engine(refuse_by_event=True)
    count = 0
    events = engine._events

    async def refusing_at_first(request):
        nonlocal count
        count += 1
        engine.refuse_by_event = count <= 30
        async for event in events(request):
            yield event

    engine._events = refusing_at_first
    journal = run_job(rows(20), tmp_path / "out.jsonl", engine)
    assert journal.counts.num_failed == 0
    assert ids(tmp_path / "out.jsonl") == [f"row-{i}" for i in range(20)]


def test_a_row_for_which_there_is_never_room_fails_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "REFUSED_S", 0.0001)
    monkeypatch.setattr(running, "MAX_REFUSED_S", 0.001)
    engine = make_engine(refuse=True, fail_only="-0-3")
    source = [*rows(3), batch_row("wide", n=4)]
    journal = run_job(source, tmp_path / "out.jsonl", engine)
    *good, wide = read_lines(tmp_path / "out.jsonl")
    assert [line["response"]["status_code"] for line in good] == [200, 200, 200]
    assert wide["response"]["status_code"] == 503
    assert journal.counts.num_failed == 1


def test_a_row_whose_step_fails_is_tried_again_and_then_fails_alone(tmp_path):
    engine = make_engine(fail_after=1, fail_only="-0-1")  # the second choice of its row
    journal = run_job([batch_row("bad", n=2), *rows(3)], tmp_path / "out.jsonl", engine)
    bad, *good = read_lines(tmp_path / "out.jsonl")
    assert bad["response"]["status_code"] == 500
    assert bad["response"]["body"]["error"]["code"] == "engine_error"
    assert sum(request.request_id.endswith("-0-1") for request in engine.requests) == running.MAX_ATTEMPTS
    assert all(line["response"]["status_code"] == 200 for line in good)
    assert journal.counts.num_failed == 1


def test_rows_that_are_not_begun_in_time_get_an_error_that_says_so(tmp_path):
    run_job(rows(4), tmp_path / "out.jsonl", deadline_s=time.time() - 1)
    assert [line["error"]["code"] for line in read_lines(tmp_path / "out.jsonl")] == ["batch_expired"] * 4


def test_a_row_without_a_seed_draws_as_the_seed_of_the_job_and_its_place_say(tmp_path):
    source = [batch_row(f"row-{i}", prompt="the cat", temperature=1.0, max_tokens=5) for i in range(12)]
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        run_job(source, tmp_path / f"{name}.jsonl", options={"seed": seed})
    texts = {
        name: [text_of(line) for line in read_lines(tmp_path / f"{name}.jsonl")] for name in ("one", "same", "other")
    }
    assert texts["one"] == texts["same"] != texts["other"]
    assert len(set(texts["one"])) > 1


def test_defaults_are_for_the_rows_that_do_not_say_otherwise(tmp_path):
    source = [
        {"prompt": "cat"},
        {"prompt": "cat", "max_tokens": 2},
        {"messages": [{"role": "user", "content": "cat"}], "max_completion_tokens": 4},
        batch_row("chat", CHAT, messages=[{"role": "user", "content": "cat"}]),
    ]
    run_job(source, tmp_path / "out.jsonl", options={"defaults": {"max_tokens": 3}})
    used = [line["response"]["body"]["usage"]["completion_tokens"] for line in read_lines(tmp_path / "out.jsonl")]
    assert used == [3, 2, 4, 3]


def test_an_output_that_cannot_be_written_ends_the_job_and_loses_no_row(tmp_path, monkeypatch):
    source = rows(80)
    run_job(source, tmp_path / "whole.jsonl")
    real, calls = journal_module._replace, 0

    def full(path, data):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise OSError(28, "No space left on device")
        real(path, data)

    monkeypatch.setattr(journal_module, "_replace", full)
    with pytest.raises(BatchError, match=r"cannot be written \(No space left on device\); \d+ rows are safe"):
        run_job(source, tmp_path / "out.jsonl")
    assert calls == 4, "it went on writing after the disk was full"
    monkeypatch.setattr(journal_module, "_replace", real)
    run_job(source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_cancelled_job_keeps_what_is_done(tmp_path):
    source = rows(60)
    run_job(source, tmp_path / "whole.jsonl")
    engine = make_engine()
    submit, count = engine.submit, 0

    def cancelling(request, receiver):
        nonlocal count
        count += 1
        if count == 30:
            asyncio.get_running_loop().call_soon(main_task.cancel)
        submit(request, receiver)

    engine.submit = cancelling
    main_task = None
    real = job_module.Job.run

    async def run(self, *args):
        nonlocal main_task
        main_task = asyncio.current_task()
        await real(self, *args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(asyncio.CancelledError):
        patch.setattr(job_module.Job, "run", run)
        run_job(source, tmp_path / "out.jsonl", engine)
    run_job(source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
