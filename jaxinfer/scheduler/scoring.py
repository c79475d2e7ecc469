"""Log-probabilities of prompts: which chunks of a plan are to tell them, and to whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxinfer.scheduler.plan import PrefillChunk, StepResult
from jaxinfer.scheduler.sequence import Sequence as Seq


class Scored(NamedTuple):
    """A chunk whose scores are not read yet, and the sequence that had its slot when it was planned."""

    seq: Seq
    chunk: PrefillChunk


def scored_chunks(chunks: Iterable[PrefillChunk], running: Iterable[Seq]) -> list[Scored]:
    """Those of a plan that are to be scored."""
    chunk_of = {chunk.slot: chunk for chunk in chunks if chunk.scored}
    return [Scored(seq, chunk_of[seq.slot]) for seq in running if seq.slot in chunk_of] if chunk_of else []


def tell(scored: Sequence[Scored], result: StepResult) -> None:
    """Gives the sequences what the step says of their prompts."""
    for seq, chunk in scored:
        seq.score(chunk.start, result.scores[chunk.slot])
