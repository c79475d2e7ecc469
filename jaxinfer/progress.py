"""What a start shows on standard error: how far it is, with everything that goes on at once."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping

from tqdm import tqdm

PARTS = {
    "loading": "loading",
    "loaded": "loading",
    "fetched": "programs",
    "tracing": "programs",
    "compiling": "programs",
    "compiled": "programs",
    "warming": "warm-up",
    "warmed": "warm-up",
}
"""Part of a start that a stage belongs to, by its first word."""
FORMAT = "{percentage:3.0f}% |{bar:20}| {elapsed} {desc}"
"""The text last: where a terminal is narrow, its end is cut off."""
LINE_PERCENT, LINE_S = 10.0, 5.0
"""What is no terminal gets a further line whenever this much more is done, or after this long."""


class Progress:
    """Percent: a bar on a terminal, and a line now and then in a file. Threads may share it.

    shares: what each part contributes, in any unit; a part beyond these shows its text and moves nothing.
    """

    def __init__(self, enabled: bool = True, shares: Mapping[str, float] | None = None):
        self._enabled = enabled
        self._shares = {"loading": 1.0} if shares is None else dict(shares)
        self._shows: _Bar | _Lines | None = None
        self._texts: dict[str, str] = {}  # the last of each part
        self._text = ""
        self._shown: dict[str, float] = {}  # the greatest fraction of each part so far: no bar runs backwards
        self._lock = threading.Lock()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`stage` begins with what is being done; its first word tells the parts of a start apart."""
        part = PARTS[stage.split()[0]]
        with self._lock:
            if self._shows is None and self._enabled:
                self._shows = _Bar() if sys.stderr.isatty() else _Lines()
            fraction = max(done / total if total else 1.0, self._shown.get(part, 0.0))
            self._shown[part] = fraction
            self._texts[part] = f"{stage} {fraction:.0%}" if part == "loading" else stage
            going_on = [name for name in self._texts if self._shown[name] < 1]
            text = "; ".join(self._texts[name] for name in going_on or [part])
            if text == self._text or self._shows is None:
                return
            self._text = text
            moved = sum(share * self._shown.get(name, 0.0) for name, share in self._shares.items())
            self._shows.show(100 * moved / sum(self._shares.values()), text)

    def close(self) -> None:
        """Ends the bar, if one is shown."""
        with self._lock:
            if self._shows is not None:
                self._shows.close()
            self._shows = None


class _Bar:
    """One line of a terminal, drawn again and again."""

    def __init__(self) -> None:
        self._bar = tqdm(total=100, file=sys.stderr, bar_format=FORMAT)

    def show(self, percent: float, text: str) -> None:
        self._bar.n = percent
        self._bar.set_description_str(text)

    def close(self) -> None:
        self._bar.close()


class _Lines:
    """Lines of a file, as few as still tell that something goes on."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._said_s = -LINE_S  # when the last line was written, since the start
        self._percent = 0.0  # of the last line

    def show(self, percent: float, text: str) -> None:
        elapsed_s = time.monotonic() - self._start_s
        if percent // LINE_PERCENT > self._percent // LINE_PERCENT or elapsed_s >= self._said_s + LINE_S:
            self._said_s, self._percent = elapsed_s, percent
            print(f"{percent:3.0f}% {tqdm.format_interval(elapsed_s)} {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        pass
