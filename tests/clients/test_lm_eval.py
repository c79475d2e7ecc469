"""The Language Model Evaluation Harness by its local-completions, on small tasks from local files."""

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


CHOICES = """
task: choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{choices.index(capital)}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
CITIES = ["Paris", "Rome", "Tokyo"]


@pytest.fixture
def evaluate(model, tmp_path, monkeypatch):
    """Runs a task on a local file of rows against the server."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))

    def run(name, task, rows, **options):
        (tmp_path / f"{name}.json").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / f"{name}.yaml").write_text(task.format(path=tmp_path / f"{name}.json"))
        address = {"model": MODEL, "base_url": f"{model.url}/v1/completions", "num_concurrent": 2, "max_retries": 1}
        return lm_eval.simple_evaluate(
            model="local-completions",
            model_args=address | options,
            tasks=[name],
            task_manager=tasks.TaskManager(include_path=str(tmp_path), include_defaults=False),
            bootstrap_iters=0,
        )

    return run


def test_multiple_choice_is_scored_by_the_log_probabilities_of_the_prompt(model, evaluate):
    """Its tokenizer is the server's, which it finds by itself."""
    capitals = {country: city for country, city in CAPITALS.items() if city in CITIES}
    rows = [{"country": country, "capital": city, "choices": CITIES} for country, city in capitals.items()]
    found = evaluate("choices", CHOICES, rows)
    for sample in found["samples"]["choices"]:
        country = sample["doc"]["country"]
        for city, (score, is_greedy) in zip(CITIES, sample["filtered_resps"], strict=True):
            assert score == pytest.approx(logprob_of(model, f"The capital of {country} is", f" {city}"), abs=1e-3)
            assert is_greedy in (False, True)
        assert max(range(3), key=lambda i: sample["filtered_resps"][i][0]) == CITIES.index(capitals[country])
    assert found["results"]["choices"]["acc,none"] == 1


def logprob_of(model, prompt, answer):
    """Of an answer, token by token: each is the only one that its bias leaves to the model."""
    ids = [model.http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in (prompt, prompt + answer)]
    total = 0.0
    for end in range(len(ids[0]), len(ids[1])):
        token = ids[1][end]
        body = {"model": MODEL, "prompt": ids[1][:end], "max_tokens": 1, "temperature": 0, "logprobs": 0}
        reply = model.http.post("/v1/completions", json=body | {"logit_bias": {str(token): 100}}).json()
        total += reply["choices"][0]["logprobs"]["token_logprobs"][0]
    return total


def test_task_is_scored_by_what_plain_http_gives(model, evaluate):
    rows = [{"country": country, "capital": capital} for country, capital in CAPITALS.items()]
    found = evaluate("capitals", TASK, rows, tokenizer_backend=None, tokenized_requests=False)
    answers = {row["doc"]["country"]: row["filtered_resps"][0] for row in found["samples"]["capitals"]}
    ask = {"model": MODEL, "temperature": 0, "max_tokens": 8, "stop": [".", ",", "\n"]}
    for country, answer in answers.items():
        body = ask | {"prompt": f"The capital of {country} is"}
        plain = model.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert answer == plain.strip()
    assert answers.keys() == CAPITALS.keys() and answers["France"] == "Paris"
    right = sum(answers[country] == capital for country, capital in CAPITALS.items())
    assert found["results"]["capitals"]["exact_match,trimmed"] == right / len(CAPITALS)
