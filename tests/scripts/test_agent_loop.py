"""bench_agent.py --loop: the agent's own loop over a tiny model, with and without the prefix cache."""

from __future__ import annotations

import json

import pytest
from bench_agent import main

from tests.api.test_serve_process import save_tiny_model

TEMPLATE = (
    "{% if tools %}{{ tools | length }}<tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %} {{ c.function.name }}"
    "{% endfor %}\n{% endfor %}assistant: "
)
FLAGS = "--agents 2 --turns 3 --system-len 8 --task-len 4 --answer-len 3 --tool-len 5 5".split()
ENGINE = {"page_size": 8, "max_num_seqs": 2, "max_num_batched_tokens": 16, "compile_cache_dir": ""}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return str(folder)


def test_the_loop_computes_only_what_is_new_with_the_cache_and_all_of_it_without(model, capsys, tmp_path):
    file = tmp_path / "loop.json"
    options = json.dumps(ENGINE | {"show_progress": False})
    assert main(["--loop", model, "--engine", options, "--save-result", str(file), *FLAGS]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(file.read_text()) == result
    cached, plain = result["runs"]
    for run in (cached, plain):
        assert (run["completion_tokens"], run["compilations_after_ready"], run["notices"]) == (2 * 3 * 3, 0, [])
        assert [len(run["turns"]), run["prompt_tokens"]] == [3, plain["prompt_tokens"]]
    assert (plain["cached_tokens"], plain["hit_rate"], plain["prefill_saved"]) == (0, 0, 0)
    assert cached["hit_rate"] == 1
    for before, turn in zip(cached["turns"], cached["turns"][1:], strict=False):
        # Of each agent: the prompt before and its reply of three tokens, of which the last is not computed.
        assert before["prompt_tokens"] <= turn["cached_tokens"] - 2 * 2 < turn["prompt_tokens"]
    assert cached["prefill_saved"] == round(cached["cached_tokens"] / cached["prompt_tokens"], 4) > 0.3


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--loop", "x", "--compare", "http://a"], "--loop runs no server"),
        (["--engine", '{"page_size": 8}'], "--engine is for the engine of --loop"),
        (["--loop", "x", "--engine", "[1]"], "it must be a JSON object"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, told, capsys):
    with pytest.raises(SystemExit):
        main(flags)
    assert told in capsys.readouterr().err
