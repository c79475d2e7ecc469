"""Rows of a benchmark: within their limits, and the same each time."""

from __future__ import annotations

from make_batch_rows import main, make_rows

from tests.batch.made import read_lines


def test_rows_keep_to_their_limits_and_reach_both(tmp_path, capsys):
    main([str(tmp_path / "rows.jsonl"), "--rows", "400", "--prompt", "3", "9", "--output", "2", "5"])
    rows = read_lines(tmp_path / "rows.jsonl")
    assert {len(row["body"]["prompt"]) for row in rows} == set(range(3, 10))
    assert {row["body"]["max_tokens"] for row in rows} == set(range(2, 6))
    assert len({row["custom_id"] for row in rows}) == 400
    total = sum(row["body"]["max_tokens"] for row in rows)
    assert capsys.readouterr().out == f"{tmp_path / 'rows.jsonl'}: 400 rows, {total} output tokens\n"


def test_a_seed_gives_the_same_rows():
    one, same, other = (list(make_rows(5, (3, 9), (2, 5), 1000, seed)) for seed in (1, 1, 2))
    assert one == same != other
