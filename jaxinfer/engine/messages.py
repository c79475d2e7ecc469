"""What the processes of one engine tell each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from jaxinfer.scheduler.plan import CachedPrefix, DecodeRow, KeptState, LastToken, PrefillChunk, StepPlan, TokenMask


class Hello(msgspec.Struct, tag=True):
    """To process 0, first of all: who comes, and what has to be the same in all processes, by name."""

    process_id: int
    facts: Mapping[str, str]


class Welcome(msgspec.Struct, tag=True):
    """From process 0 once all are there: the port of JAX's service, on the same host."""

    port: int


class Ping(msgspec.Struct, tag=True):
    """The sender lives."""


class Left(msgspec.Struct, tag=True):
    """The sender is about to end; without a reason, because all is done."""

    reason: str | None


class Agree(msgspec.Struct, tag=True):
    """To process 0: that the sender is there, and its number. From process 0: that all are, and the least of these."""

    name: str
    number: int


class Launch(msgspec.Struct, tag=True):
    """A StepPlan: launch it. Its fields but for those of tiers that only one process can have."""

    step: int
    decodes: Sequence[DecodeRow]
    prefills: Sequence[PrefillChunk]
    prefixes: Sequence[CachedPrefix]
    kept_states: Sequence[KeptState]
    constrained: bool

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        """The same plan, without what no runner reads. ValueError for one with what a process keeps for itself."""
        for name in UNSENT:
            if getattr(plan, name):
                raise ValueError(f"the plan has {name}, which one process alone can have")
        prefills = [dataclasses.replace(c, token_ids=list(c.token_ids), **_sent(c)) for c in plan.prefills]
        prefixes = [p if p.last is None else p._replace(last=p.last._replace(**_sent(p.last))) for p in plan.prefixes]
        return cls(plan.step, plan.decodes, prefills, prefixes, plan.kept_states, plan.constrained)

    def plan(self) -> StepPlan:
        """What it was made of."""
        return StepPlan(**{name: getattr(self, name) for name in self.__struct_fields__})


UNSENT = [field.name for field in dataclasses.fields(StepPlan) if field.name not in Launch.__struct_fields__]
"""Fields of a plan that are empty where there are several processes: what would fill them is refused at the start."""


def _sent(row: PrefillChunk | LastToken) -> dict[str, Any]:
    """The fields that are not sent as they are: prompts are long, and token ids of a front end are in an array."""
    request = row.request
    is_read = row.history is not None and (request.has_penalties or request.logit_bias)
    history = list(row.history or ()) if is_read or isinstance(row, LastToken) else None
    return {"request": dataclasses.replace(request, prompt_ids=()), "history": history}


class Sample(msgspec.Struct, tag=True):
    """Sample what was launched last under these masks."""

    masks: Sequence[TokenMask]


class Reset(msgspec.Struct, tag=True):
    """Make the state anew."""


ToDo = Launch | Sample | Reset
Message = Hello | Welcome | Ping | Left | Agree | ToDo
decode = msgspec.msgpack.Decoder(Message).decode
