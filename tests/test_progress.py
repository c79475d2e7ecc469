"""What a start shows, and what it does in the background."""

from __future__ import annotations

import re
import threading

import pytest

from jaxinfer.background import Background, Stopped
from jaxinfer.progress import Progress

SHARES = {"loading": 1.0, "programs": 2.0, "warm-up": 1.0}


def lines(capsys):
    """What stood on the bar's line, one after the other: percent and text."""
    found = re.findall(r"(\d+)% \|.{20}\| \d\d:\d\d ([^\r\n]*)", capsys.readouterr().err)
    return [(int(percent), text.strip()) for percent, text in found]


def test_one_bar_shows_all_that_goes_on_at_once(capsys):
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


def test_bar_of_loading_alone_ends_at_100_percent_and_never_runs_backwards(capsys):
    progress = Progress()
    for done in (0, 5, 3, 8):
        progress("loading m", done, 8)
    progress.close()
    percents = [percent for percent, _ in lines(capsys)]
    assert percents == sorted(percents) and percents[-1] == 100


def test_bar_that_is_not_wanted_says_nothing(capsys):
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
