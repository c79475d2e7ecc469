"""What the scheduler asks of a grammar. `text.grammar` has what answers, and the engine brings the two together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Matcher(Protocol):
    """One output on its way through its grammar."""

    end_ids: frozenset[int]
    """EOS ids, which are allowed wherever the grammar may end."""

    @property
    def may_end(self) -> bool:
        """Whether what has come so far matches as a whole."""
        ...

    @property
    def error(self) -> str:
        """Why it cannot go on; empty: it can."""
        ...

    def accept(self, token: int) -> bool:
        """Takes in a token that the last mask allowed. Whether the output ends here, since nothing may follow."""
        ...

    def mask(self, barred: Iterable[int] = ()) -> bytes | None:
        """The tokens that may come next without those barred, as in `TokenMask`. None: there are none."""
        ...
