"""What a start shows, and what it does in the background."""

from __future__ import annotations

import re
import sys
import threading
import types

import pytest

from jaxinfer import progress as module
from jaxinfer.background import Background, Stopped
from jaxinfer.progress import Progress

SHARES = {"loading": 1.0, "programs": 2.0, "warm-up": 1.0}


@pytest.fixture
def clock(monkeypatch):
    """The time, which the test sets."""
    now = types.SimpleNamespace(s=0.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: now.s)
    return now


def on_a_terminal(monkeypatch):
    """Standard error is one, as the test has it: not in a fixture, since pytest changes it once more after those."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)


def lines(capsys):
    """What stood on the bar's line, one after the other: percent and text."""
    found = re.findall(r"(\d+)% \|.{20}\| \d\d:\d\d ([^\r\n]*)", capsys.readouterr().err)
    return [(int(percent), text.strip()) for percent, text in found]


def test_one_bar_shows_all_that_goes_on_at_once(capsys, monkeypatch):
    on_a_terminal(monkeypatch)
    progress = Progress(True, SHARES)
    progress("loading m", 0, 8)
    progress("tracing decode 1 rows", 0, 2)
    progress("loading m", 4, 8)
    progress("compiling decode 1 rows", 1, 2)
    progress("loading m", 8, 8)
    progress("compiled", 2, 2)
    progress("warming up decode 1 rows", 0, 1)
    progress("warmed up", 1, 1)
    progress.close()
    shown = dict.fromkeys(lines(capsys))
    assert list(shown) == [
        (0, ""),
        (0, "loading m 0%"),
        (0, "loading m 0%; tracing decode 1 rows"),
        (12, "loading m 50%; tracing decode 1 rows"),
        (38, "loading m 50%; compiling decode 1 rows"),
        (50, "compiling decode 1 rows"),
        (75, "compiled"),
        (75, "warming up decode 1 rows"),
        (100, "warmed up"),
    ]


def test_bar_of_loading_alone_ends_at_100_percent_and_never_runs_backwards(capsys, monkeypatch):
    on_a_terminal(monkeypatch)
    progress = Progress()
    for done in (0, 5, 3, 8):
        progress("loading m", done, 8)
    progress.close()
    percents = [percent for percent, _ in lines(capsys)]
    assert percents == sorted(percents) and percents[-1] == 100


def test_file_gets_a_plain_line_for_every_tenth_of_the_way(capsys, clock):
    progress = Progress()
    for done in range(101):
        progress("loading m", done, 100)
        clock.s += 1 / 32
    progress.close()
    expected = [f"{percent:3}% 00:0{percent // 32} loading m {percent}%" for percent in range(0, 101, 10)]
    assert capsys.readouterr().err == "\n".join([*expected, ""])


def test_file_gets_a_line_every_5_s_where_little_moves(capsys, clock):
    progress = Progress(True, SHARES)
    for done in range(12):
        progress(f"tracing decode {done} rows", done, 1000)
        clock.s += 1
    progress.close()
    assert capsys.readouterr().err == (
        "  0% 00:00 tracing decode 0 rows\n  0% 00:05 tracing decode 5 rows\n  0% 00:10 tracing decode 10 rows\n"
    )


def test_file_is_told_the_end_once_however_soon_it_comes(capsys, clock):
    del clock
    progress = Progress()
    for stage, done in (("loading m", 95), ("loading m", 100), ("loading done", 100)):
        progress(stage, done, 100)
    progress.close()
    assert capsys.readouterr().err == " 95% 00:00 loading m 95%\n100% 00:00 loading m 100%\n"


def test_bar_that_is_not_wanted_says_nothing(capsys, monkeypatch):
    on_a_terminal(monkeypatch)
    progress = Progress(False, SHARES)
    progress("loading m", 1, 8)
    progress.close()
    assert capsys.readouterr().err == ""


def test_background_gives_its_result():
    with Background(lambda _: 5) as background:
        assert background.result() == 5
        background.check()


def test_background_says_its_error_when_asked_and_not_before():
    go = threading.Event()

    def fail(_):
        go.wait(10)
        raise ValueError("lost")

    with Background(fail) as background:
        background.check()
        go.set()
        with pytest.raises(ValueError, match="lost"):
            background.result()
        with pytest.raises(ValueError, match="lost"):
            background.check()


def test_background_has_ended_when_its_context_has():
    ended = []

    def work(raise_if_stopped):
        try:
            while True:
                raise_if_stopped()
        except Stopped:
            ended.append(None)
            raise

    with pytest.raises(KeyError), Background(work):
        raise KeyError("something else")
    assert ended == [None]
