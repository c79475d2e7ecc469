"""scripts/plot_results.py: which figures it draws, and that a picture comes of them."""

import json

import plot_results
import pytest


def row(clients, **fields):
    keys = {"input_len": 16, "output_len": 128, "max_concurrency": clients, "request_rate": None}
    return keys | {"output_throughput": 100.0 * clients, "median_tpot_ms": 4.0, "median_ttft_ms": 10.0} | fields


def write(path, rows):
    path.write_text(json.dumps({"serve": {"qwen3-4b-dummy": rows}}))
    return str(path)


def test_a_line_has_the_closed_loop_rows_of_its_lengths_by_clients(tmp_path):
    rows = [row(8), row(1), row(4, input_len=1024), row(2, request_rate=3.0), row(16, median_tpot_ms=None)]
    rows = plot_results.load_rows(tmp_path / write(tmp_path / "x.json", rows), "qwen3-4b-dummy")
    assert plot_results.series(rows, (16, 128), "output_throughput") == [(1, 100.0), (8, 800.0), (16, 1600.0)]
    assert plot_results.series(rows, (16, 128), "median_tpot_ms") == [(1, 4.0), (8, 4.0)]
    assert plot_results.series(rows, (1024, 128), "median_tpot_ms") == [(4, 4.0)]


def test_a_label_that_was_not_measured_is_named_with_those_that_were(tmp_path, capsys):
    path = write(tmp_path / "x.json", [row(1)])
    assert plot_results.main(["--results", path, "--label", "other", "--out", str(tmp_path / "x.png")]) == 1
    assert "no rows of 'other'; known: qwen3-4b-dummy" in capsys.readouterr().err
    assert plot_results.main(["--results", str(tmp_path / "none.json")]) == 1


def test_the_committed_figures_of_vllm_have_what_is_drawn():
    rows = plot_results.load_rows(plot_results.RESULTS / "vllm_h200.json", "qwen3-4b-dummy")
    for lengths, clients in (((16, 128), [1, 8, 32, 64, 128, 256]), ((1024, 128), [1, 8, 32, 64])):
        for key, *_ in plot_results.PANELS:
            assert [at for at, _ in plot_results.series(rows, lengths, key)] == clients


def test_the_same_figures_give_the_same_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = write(tmp_path / "x.json", [row(1), row(8), row(8, input_len=1024)])
    pictures = []
    for name in ("a.png", "b.png"):
        assert plot_results.main(["--results", path, "--out", str(tmp_path / name)]) == 0
        pictures.append((tmp_path / name).read_bytes())
    assert pictures[0] == pictures[1] and pictures[0].startswith(b"\x89PNG")


def test_the_table_has_our_rows_beside_those_of_vllm_that_there_are():
    ours = [row(8, p99_ttft_ms=120.4), row(1, p99_ttft_ms=10.25), row(1, input_len=7, p99_ttft_ms=1.0)]
    lines = plot_results.table(ours, [row(8, output_throughput=2071.4, median_tpot_ms=3.654)]).splitlines()
    assert lines[2:] == [
        "| 1, 16 / 128 | 100 | - | 10.0 / 10.2 | 4.00 | - |",
        "| 8, 16 / 128 | 800 | 2,071 | 10.0 / 120 | 4.00 | 3.65 |",
    ]


def test_the_table_of_the_readme_is_that_of_the_committed_figures(capsys):
    assert plot_results.main(["--table"]) == 0
    readme = plot_results.RESULTS.parents[1] / "README.md"
    assert capsys.readouterr().out in readme.read_text()
