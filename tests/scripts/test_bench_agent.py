"""scripts/bench_agent.py: the trace, and what is told of a server that runs it."""

import json

import pytest
from bench_agent import Trace, main, parse

from tests.http.conftest import Server
from tests.http.fake_engine import FakeEngine
from tests.http.tiny_tokenizer import make_tokenizer

TRACE = Trace(agents=3, turns=4, system_len=20, task_len=5, answer_len=3, tool_len=(2, 9), vocab_size=300, seed=0)
FLAGS = "--agents 2 --turns 3 --system-len 8 --task-len 4 --answer-len 3 --tool-len 5 5 --vocab-size 300".split()


@pytest.fixture
def make_server():
    made = []

    def make(**settings):
        tokenizer, _ = make_tokenizer()
        made.append(Server(FakeEngine(tokenizer, **settings), tokenizer, None, grace_s=0.2))
        return made[-1]

    yield make
    for server in made:
        server.close()


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_every_turn_begins_with_the_one_before_and_grows_by_an_answer_and_an_output():
    for agent in range(TRACE.agents):
        prompts = TRACE.prompts(agent)
        assert [len(prompts), len(prompts[0])] == [4, 25]
        for before, after in zip(prompts, prompts[1:], strict=False):
            assert after[: len(before)] == before
            assert 3 + 2 <= len(after) - len(before) <= 3 + 9


def test_agents_share_the_system_prompt_alone_and_a_seed_gives_the_same_trace():
    first, second = TRACE.prompts(0), TRACE.prompts(1)
    assert first[0][:20] == second[0][:20] and first[0][20:] != second[0][20:]
    assert TRACE.prompts(0) == first
    other = Trace(**{name: getattr(TRACE, name) for name in TRACE.__dataclass_fields__} | {"seed": 1})
    assert other.prompts(0)[0][:20] != first[0][:20]


def test_a_run_sums_up_tokens_and_times_by_turn(make_server, capsys, tmp_path):
    server = make_server(prefix_caching=True, cached_tokens={"-0": 7}, step_s=0.01)
    file = tmp_path / "agent.json"
    assert main(["--base-url", server.url, "--save-result", str(file), *FLAGS]) == 0
    result = last_line(capsys)
    (row,) = result["runs"]
    assert json.loads(file.read_text()) == result
    assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == (2 * (12 + 20 + 28), 6 * 7, 18)
    assert [turn["prompt_tokens"] for turn in row["turns"]] == [24, 40, 56]
    assert all(10 <= turn["median_ttft_ms"] <= turn["max_ttft_ms"] < 1000 for turn in row["turns"])
    assert 3 * 3 * 0.01 <= row["total_s"] < 5
    prompts = sorted((list(request.prompt_ids) for request in server.engine.requests), key=len)
    assert prompts[0][:8] == prompts[-1][:8]


def test_a_second_server_runs_the_same_trace(make_server, capsys):
    servers = make_server(prefix_caching=True), make_server(step_s=0.02)
    assert main(["--base-url", servers[0].url, "--compare", servers[1].url, *FLAGS]) == 0
    first, second = ({tuple(request.prompt_ids) for request in server.engine.requests} for server in servers)
    assert first == second and len(first) == 6
    result = last_line(capsys)
    assert [row["cached_tokens"] for row in result["runs"]] == [0, None]
    assert result["speedup"] > 1


def test_requests_that_fail_are_told_of_and_end_their_agent(make_server, capsys):
    server = make_server(max_model_len=25)
    assert main(["--base-url", server.url, *FLAGS]) == 1
    (row,) = last_line(capsys)["runs"]
    assert row["failed"] == 2
    ((error, count),) = row["error_counts"].items()
    assert "prompt has 28 tokens; the limit is 25" in error and count == 2
    assert row["turns"][2] == {"prompt_tokens": 0, "cached_tokens": 0, "median_ttft_ms": None, "max_ttft_ms": None}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--turns", "0"], "--turns is 0; it must be at least 1"),
        (["--tool-len", "9", "2"], "--tool-len is 9 2; give the least, then the most"),
        (["--tool-seconds", "-1"], "--tool-seconds is -1.0; it must be at least 0"),
        (["--compare", "127.0.0.1:8000"], "'127.0.0.1:8000' is no base URL; it must begin with http://"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit):
        parse(flags)
    assert message in capsys.readouterr().err
