"""scripts/check_accuracy.py: its figures, and a run of the CPU against itself."""

import json

import check_accuracy
import numpy as np
import pytest


def test_figures_of_log_probabilities_are_differences_and_the_regret_of_the_choice():
    expected = np.array([[-1.0, -2.0], [-1.0, -3.0]])
    found = check_accuracy.figures(expected, expected + [[0.0, 0.5], [-2.5, 0.0]])
    assert found["mean"] == pytest.approx(0.75)
    assert (found["regret_mean"], found["same_choice"]) == (1.0, 0.5)


def test_accuracy_is_recorded_by_model_and_kind(tmp_path, monkeypatch):
    path = tmp_path / "gpu.json"
    monkeypatch.setattr("sys.argv", ["x", "--only", "llama_bias", "--record", "x", "--results", str(path)])
    monkeypatch.setattr(check_accuracy, "PROMPT", 5)
    monkeypatch.setattr(check_accuracy, "DECODED", 2)
    monkeypatch.setattr(check_accuracy, "CHUNKS", (4, 1))
    assert check_accuracy.main() == 0
    content = json.loads(path.read_text())
    (run,) = content["runs"].values()
    assert run["limits"] == check_accuracy.LIMITS and run["device"] == "cpu"
    rows = content["accuracy"]["x"]
    kinds = ("prefill", "decode, 1 row", "decode, 8 rows")
    assert [(row["model"], row["kind"]) for row in rows] == [("llama_bias", kind) for kind in kinds]
    assert all(0 < row["mean"] < 0.02 for row in rows)  # bfloat16 is not float32, but near


def test_a_name_that_no_model_has_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["x", "--only", "nothing"])
    with pytest.raises(SystemExit):
        check_accuracy.main()
    assert "no model's name contains 'nothing'; there are llama" in capsys.readouterr().err
