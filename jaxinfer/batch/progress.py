"""What a job shows on standard error: rows, tokens per second, and the time that is left."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

from jaxinfer.batch.journal import Counts

LINE_S = 10.0
"""What is no terminal gets a line as often as this."""
FORMAT = "{percentage:3.0f}% |{bar:20}| {n_fmt}/{total_fmt} rows {elapsed}<{remaining} {desc}"


class JobProgress:
    """A bar on a terminal, a line now and then in a file.

    counts: of what was done before; rates are of this run alone.
    """

    def __init__(self, total: int, counts: Counts, *, enabled: bool = True):
        self._total = total
        self._before = counts
        self._enabled = enabled
        self._start_s = time.monotonic()
        self._said_s = 0.0
        self._bar: tqdm | None = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=counts.num_rows, file=sys.stderr, bar_format=FORMAT, mininterval=0.5)

    def show(self, counts: Counts, *, last: bool = False) -> None:
        """Where the job stands."""
        elapsed_s = time.monotonic() - self._start_s
        rate = (counts.output_tokens - self._before.output_tokens) / max(elapsed_s, 1e-9)
        text = f"{rate:.0f} tokens/s, {counts.num_failed} failed"
        if self._bar is not None:
            self._bar.set_description_str(text, refresh=False)
            self._bar.update(counts.num_rows - self._bar.n)
            if last:
                self._bar.refresh()
        elif self._enabled and (last or elapsed_s >= self._said_s + LINE_S):
            self._said_s = elapsed_s
            done = counts.num_rows - self._before.num_rows
            left_s = (self._total - counts.num_rows) * elapsed_s / done if done else 0.0
            left = f", {tqdm.format_interval(left_s)} left" if done else ""
            print(f"{counts.num_rows}/{self._total} rows, {text}{left}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the bar, if one is shown."""
        if self._bar is not None:
            self._bar.close()
