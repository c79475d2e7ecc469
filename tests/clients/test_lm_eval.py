"""The Language Model Evaluation Harness by its local-completions, on a small task from a local file."""

import importlib.util
import json
import os

import pytest

from tests.api.test_serve import MODEL
from tests.clients import installed

if importlib.util.find_spec("lm_eval"):  # else it would be of the tests that follow
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the task is on disk
lm_eval = installed.client("lm_eval")
tasks = installed.client("lm_eval.tasks")

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Atlantis": "no such city"}
TASK = """
task: capitals
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: generate_until
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_target: "{{{{capital}}}}"
generation_kwargs:
  until: [".", ",", "\\n"]
  max_gen_toks: 8
  temperature: 0
filter_list:
  - name: trimmed
    filter:
      - function: remove_whitespace
      - function: take_first
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


def test_task_is_scored_by_what_plain_http_gives(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = [{"country": country, "capital": capital} for country, capital in CAPITALS.items()]
    (tmp_path / "capitals.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "capitals.yaml").write_text(TASK.format(path=tmp_path / "capitals.json"))
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": MODEL,
            "base_url": f"{model.url}/v1/completions",
            "tokenizer_backend": None,
            "tokenized_requests": False,
            "num_concurrent": 2,
            "max_retries": 1,
        },
        tasks=["capitals"],
        task_manager=tasks.TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    answers = {row["doc"]["country"]: row["filtered_resps"][0] for row in found["samples"]["capitals"]}
    ask = {"model": MODEL, "temperature": 0, "max_tokens": 8, "stop": [".", ",", "\n"]}
    for country, answer in answers.items():
        body = ask | {"prompt": f"The capital of {country} is"}
        plain = model.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert answer == plain.strip()
    assert answers.keys() == CAPITALS.keys() and answers["France"] == "Paris"
    right = sum(answers[country] == capital for country, capital in CAPITALS.items())
    assert found["results"]["capitals"]["exact_match,trimmed"] == right / len(CAPITALS)
