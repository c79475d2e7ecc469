"""What a job shows: in a file a line now and then, and one at the end."""

from __future__ import annotations

import re

from jaxinfer.batch import progress as progress_module
from jaxinfer.batch.journal import Counts
from jaxinfer.batch.progress import JobProgress


def test_rates_and_the_time_left_are_of_this_run_and_not_of_the_one_before(monkeypatch, capsys):
    now_s = 100.0
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now_s)
    before = Counts(num_rows=50, output_tokens=5000)
    progress = JobProgress(100, before)
    now_s += progress_module.LINE_S
    progress.show(before + Counts(num_rows=10, num_failed=2, output_tokens=200))
    assert capsys.readouterr().err == "60/100 rows, 20 tokens/s, 2 failed, 00:40 left\n"
    now_s += progress_module.LINE_S / 2
    progress.show(before + Counts(num_rows=12, output_tokens=240))
    assert capsys.readouterr().err == "", "lines follow each other too soon"
    progress.show(before + Counts(num_rows=50, output_tokens=1500), last=True)
    assert re.fullmatch(r"100/100 rows, 100 tokens/s, 0 failed, 00:00 left\n", capsys.readouterr().err)
    progress.close()


def test_nothing_is_shown_where_nothing_is_wanted(capsys):
    progress = JobProgress(1, Counts(), enabled=False)
    progress.show(Counts(num_rows=1), last=True)
    progress.close()
    assert capsys.readouterr().err == ""
