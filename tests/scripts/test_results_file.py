"""scripts/results_file.py: what is kept, what stays, and which commit a run names."""

import argparse
import json
import operator
import subprocess

import pytest
import results_file
from results_file import ROOT, Results

CLIENTS = operator.itemgetter("max_concurrency")


def row(clients, **fields):
    return {"max_concurrency": clients} | fields


def test_results_keep_one_row_per_measurement_only_runs_that_figures_name_and_what_no_script_writes(tmp_path):
    path = tmp_path / "gpu.json"
    kept = {"attempts": [{"goal": "x", "attempts": [{"what": "y", "figure": "z"}]}]}
    path.write_text(json.dumps(kept | {"serve": {"x": [row(1, mark="old"), row(8, mark="old")]}}))
    for date, clients in (("2026-01-01", (1,)), ("2026-01-02", (1, 8))):
        results = Results(path, "x", {"commit": date})
        results._date = date
        for count in clients:
            results.row("serve", row(count, mark=date), CLIENTS)
            assert json.loads(path.read_text())["serve"]["x"][0]["mark"] == date  # on disk at once
    results.start(cold_s=12.34, warm_s=5.0)
    content = json.loads(path.read_text())
    assert content["attempts"] == kept["attempts"]
    assert [(one["max_concurrency"], one["mark"]) for one in content["serve"]["x"]] == [
        (1, "2026-01-02"),
        (8, "2026-01-02"),
    ]
    assert content["runs"] == {"2026-01-02": {"commit": "2026-01-02"}}
    assert content["start"]["x"] == {
        "cold_s": 12.3,
        "warm_s": 5.0,
        "cold_run": "2026-01-02",
        "warm_run": "2026-01-02",
    }


def test_a_run_stays_while_a_figure_of_any_section_or_label_names_it(tmp_path):
    path = tmp_path / "gpu.json"
    for date, section, label in (
        ("1", "kernels", "a"),
        ("2", "steps", "a"),
        ("3", "kernels", "b"),
        ("4", "steps", "a"),
    ):
        results = Results(path, label, {"commit": date})
        results._date = date
        results.row(section, {"step": "1x16"}, operator.itemgetter("step"))
    content = json.loads(path.read_text())
    assert sorted(content["runs"]) == ["1", "3", "4"]
    assert content["kernels"] == {"a": [{"step": "1x16", "run": "1"}], "b": [{"step": "1x16", "run": "3"}]}


def git(folder, *command):
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *command], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A repository with a module and results, of which all is committed."""
    monkeypatch.delenv("JAXINFER_COMMIT", raising=False)
    (tmp_path / "scripts" / "results").mkdir(parents=True)
    for name in ("module.py", "scripts/results/h200.json"):
        (tmp_path / name).write_text("1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "x")
    return tmp_path


def test_the_commit_is_dirty_where_the_code_differs_from_it_but_not_for_the_results(tree, monkeypatch):
    monkeypatch.delenv("JAXINFER_COMMIT", raising=False)
    head = git(tree, "rev-parse", "--short=12", "HEAD")
    assert results_file.commit(tree) == head
    (tree / "scripts" / "results" / "h200.json").write_text("2\n")
    assert results_file.commit(tree) == head
    (tree / "module.py").write_text("2\n")
    assert results_file.commit(tree) == f"{head}-dirty"
    git(tree, "add", ".")
    assert results_file.commit(tree) == f"{head}-dirty"


@pytest.mark.parametrize("missing", ["repository", "commits", "git"])
def test_without_git_the_commit_is_what_the_environment_says_or_not_known(tree, monkeypatch, missing):
    folder = tree / "scripts"  # also in a repository of something else around it
    if missing == "commits":
        git(folder, "init", "-q")
    elif missing == "git":
        folder = tree
        monkeypatch.setenv("PATH", str(tree))
    assert results_file.commit(folder) is None
    monkeypatch.setenv("JAXINFER_COMMIT", "0123abc-dirty")
    assert results_file.commit(folder) == "0123abc-dirty"


def test_a_run_says_versions_and_commit_but_not_for_a_server_that_was_there_before():
    run = results_file.describe()
    assert {"card", "driver", "cores", "commit", "command"} < set(run)
    assert {"python", "jax", "jaxlib"} <= set(run["versions"])
    other = results_file.describe("http://127.0.0.1:1")
    assert other["server"] == "http://127.0.0.1:1" and other["commit"] is None and "versions" not in other


def test_figures_are_kept_only_under_a_label(tmp_path):
    parser = argparse.ArgumentParser()
    results_file.add_flags(parser)
    assert results_file.from_flags(parser.parse_args([])) is None
    path = tmp_path / "gpu.json"
    results = results_file.from_flags(parser.parse_args(["--record", "x", "--results", str(path)]), limits={"a": 1})
    results.row("kernels", {"case": "c"}, operator.itemgetter("case"))
    content = json.loads(path.read_text())
    (run,) = content["runs"].values()
    assert run["limits"] == {"a": 1} and content["kernels"]["x"][0]["case"] == "c"


def test_results_are_named_by_the_card(monkeypatch):
    monkeypatch.setattr(results_file, "gpu", lambda: ("NVIDIA H200", "580"))
    assert results_file.default_path() == ROOT / "scripts" / "results" / "h200.json"
    monkeypatch.setattr(results_file, "gpu", lambda: None)
    assert results_file.default_path().name == "cpu.json"


@pytest.mark.parametrize("path", sorted((ROOT / "scripts" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_every_figure_of_a_committed_file_names_a_run_that_is_there(path):
    content = json.loads(path.read_text())
    if "run" in content:  # what one run of a script wrote, and nothing else did
        assert {"card", "commit", "versions", "command"} <= set(content["run"]) and "runs" not in content
        return
    assert set(results_file._runs_named(content)) == set(content.get("runs", {}))
    for missed in content.get("attempts", []):
        assert set(missed) == {"goal", "got", "profile_says", "attempts"}
        assert all(set(attempt) == {"what", "figure"} for attempt in missed["attempts"])
