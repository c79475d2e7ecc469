"""scripts/check_greedy.py: its figures, and a run of the CPU against itself."""

import json

import check_greedy
import numpy as np


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def test_answers_are_the_same_until_the_first_token_that_float32_would_not_choose():
    logprobs = log_softmax(np.array([[3.0, 1.0, 0.0], [2.0, 2.01, 0.0], [0.0, 1.0, 4.0]]))
    same = check_greedy.compare(logprobs, [0, 1, 2], tie=0.05)
    assert same == {"num_tokens": 3, "first_difference": None, "num_different": 0, "largest_gap_nats": 0.0}
    tie = check_greedy.compare(logprobs, [0, 0, 2], tie=0.05)
    assert (tie["first_difference"], tie["chosen"], tie["float32_chooses"]) == (1, 0, 1)
    assert (tie["gap_nats"], tie["is_tie"], tie["largest_gap_nats"]) == (0.01, True, 0.01)
    other = check_greedy.compare(logprobs, [0, 0, 1], tie=0.05)  # a tie first, but then no tie
    assert (other["is_tie"], other["num_different"], other["largest_gap_nats"]) == (True, 2, 3.0)
    assert not check_greedy.compare(logprobs, [2, 1, 2], tie=0.05)["is_tie"]


def test_float32_answers_of_the_default_model_are_those_of_float32(tmp_path, capsys, monkeypatch):
    path = tmp_path / "gpu.json"
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 64}
    monkeypatch.setattr(check_greedy, "PROMPTS", {"What is a page table?": True, "Water boils at": False})
    monkeypatch.setattr(check_greedy, "MAX_LEN", 64)
    monkeypatch.setattr(check_greedy, "ENGINE", check_greedy.ENGINE | sizes)
    flags = ["--dtypes", "float32", "--max-tokens", "6", "--record", "x", "--results", str(path)]
    assert check_greedy.main(flags) == 0
    rows = json.loads(path.read_text())["greedy"]["x"]
    assert [(row["prompt"], row["batch"]) for row in rows] == [
        (prompt, batch) for batch in ("alone", "together") for prompt in check_greedy.PROMPTS
    ]
    assert all((row["num_tokens"], row["first_difference"]) == (6, None) for row in rows)
    assert rows[0]["text"].startswith("A page table is")
    assert "'Water boils at': all 6 tokens are float32's" in capsys.readouterr().out


def test_a_wrong_answer_is_told_and_fails(monkeypatch, capsys):
    answer = check_greedy.Answer("p", "alone", [1, 2], [0, 2], "text")
    logprobs = log_softmax(np.array([[3.0, 1.0, 0.0], [4.0, 0.0, 1.0]]))
    monkeypatch.setattr(check_greedy, "answers", lambda *_: [answer])
    monkeypatch.setattr(check_greedy, "float32_reader", lambda _: lambda _: logprobs)
    assert check_greedy.main(["--dtypes", "bfloat16"]) == 1
    assert "'p': 1 of 2 tokens until the first difference, 3.0000 nats (no tie)" in capsys.readouterr().out


def test_a_dtype_that_the_device_refuses_is_named_and_the_others_are_compared(monkeypatch, capsys):
    def answers(_, dtype, *__):
        if dtype == "float32":
            raise NotImplementedError("no kernel takes float32")
        return [check_greedy.Answer("p", "alone", [1], [0], "text")]

    monkeypatch.setattr(check_greedy, "answers", answers)
    monkeypatch.setattr(check_greedy, "float32_reader", lambda _: lambda _: np.array([[-0.1, -3.0]]))
    assert check_greedy.main([]) == 0
    assert "float32 is not compared: no kernel takes float32" in capsys.readouterr().err
    assert check_greedy.main(["--dtypes", "float32"]) == 1


def test_a_model_that_is_not_there_is_an_error_that_names_it(tmp_path, capsys):
    assert check_greedy.main(["--model", str(tmp_path), "--dtypes", "float32"]) == 1
    assert str(tmp_path) in capsys.readouterr().err
