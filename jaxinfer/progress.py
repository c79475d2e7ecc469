"""What a start shows on standard error: one bar, with everything that goes on at once."""

from __future__ import annotations

import sys
import threading
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


class Progress:
    """A bar of percent. Threads may share it.

    shares: what each part contributes, in any unit; a part beyond these shows its text and moves nothing.
    """

    def __init__(self, enabled: bool = True, shares: Mapping[str, float] | None = None):
        self._enabled = enabled
        self._shares = {"loading": 1.0} if shares is None else dict(shares)
        self._bar: tqdm | None = None
        self._texts: dict[str, str] = {}  # the last of each part
        self._text = ""
        self._shown: dict[str, float] = {}  # the greatest fraction of each part so far: no bar runs backwards
        self._lock = threading.Lock()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`stage` begins with what is being done; its first word tells the parts of a start apart."""
        part = PARTS[stage.split()[0]]
        with self._lock:
            if self._bar is None:
                self._bar = tqdm(total=100, disable=not self._enabled, file=sys.stderr, bar_format=FORMAT)
            fraction = max(done / total if total else 1.0, self._shown.get(part, 0.0))
            self._shown[part] = fraction
            self._texts[part] = f"{stage} {fraction:.0%}" if part == "loading" else stage
            going_on = [name for name in self._texts if self._shown[name] < 1]
            text = "; ".join(self._texts[name] for name in going_on or [part])
            if text == self._text:
                return
            self._text = text
            moved = sum(share * self._shown.get(name, 0.0) for name, share in self._shares.items())
            self._bar.n = 100 * moved / sum(self._shares.values())
            self._bar.set_description_str(text)

    def close(self) -> None:
        """Ends the bar, if one is shown."""
        with self._lock:
            if self._bar is not None:
                self._bar.close()
            self._bar = None
