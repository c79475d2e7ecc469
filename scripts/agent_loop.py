"""The mode of bench_agent.py that runs the agent's own loop, over an engine in this process.

Every agent is a thread with an Agent, all over one LLM. The replies are generated, but what is called and how often is
written down: a model with random weights calls nothing. A bias keeps the replies to words that are one token each, so
that their text is spelled again in the tokens that were generated, as that of a trained model nearly always is. The
markup of the calls, which is not generated, is what a next turn has to compute besides the output of the tool.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxinfer import LLM, Agent, SamplingParams
from jaxinfer.agent.history import Turn
from jaxinfer.agent.local import LocalModel
from jaxinfer.agent.model import Ending, Message, Part
from jaxinfer.agent.tools import Tool
from jaxinfer.text.message import Call
from jaxinfer.text.tool_calls.reading import new_call_id

MAX_WORDS = 256
"""Tokens that replies and made-up texts are of."""


class ScriptedPolicy(LocalModel):
    """Asks for one call after every reply but the last of a question."""

    def __init__(self, llm: LLM, sampling: SamplingParams, turns: int):
        super().__init__(llm, sampling)
        self._turns = turns
        self._number = 0

    @property
    def openings(self) -> Sequence[str]:
        """None: random weights may write anything."""
        return ()

    def reply(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
        """A reply of the engine, and the call that the policy has next."""
        self._number += 1
        for part in super().reply(messages, tools):
            if isinstance(part, Ending) and self._number % self._turns:
                yield Call(0, new_call_id(), "look", '{"at": "it"}')
                part = part._replace(finish_reason="tool_calls")
            yield part


def words_of(llm: LLM) -> list[tuple[int, str]]:
    """Token ids and texts of words that stay the tokens they are, whatever words are beside them."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    spaced, bare = [], []  # by whether a space begins them: those without one may join into another token
    for id in range(min(llm.info.vocab_size, tokenizer.vocab_size)):
        text = tokenizer.token_text(id)
        plain = text.removeprefix(" ")
        if plain.isascii() and plain.isalpha() and tokenizer.encode(text * 3, add_special_tokens=False) == [id] * 3:
            (spaced if text != plain else bare).append((id, text))
            if len(spaced) == MAX_WORDS:
                break
    found = spaced or bare[:MAX_WORDS]
    if len(found) < 2:
        raise SystemExit(f"{llm.info.model} has no words that are one token each")
    return found


def run(model: str, trace: Any, options: Mapping[str, Any], *, tool_s: float, caching: bool) -> dict[str, Any]:
    """Runs every agent of a trace to its answer, and sums up. Raises what an agent raised."""
    with LLM(model, enable_prefix_caching=caching, **options) as llm:
        words = words_of(llm)
        bias = {id: 100.0 for id, _ in words}
        sampling = SamplingParams(temperature=0, max_tokens=trace.answer_len, ignore_eos=True, logit_bias=bias)

        def text(what: str, count: int) -> str:
            return "".join(random.Random(f"{trace.seed}/{what}").choices([word for _, word in words], k=count))

        results: list[Any] = [None] * trace.agents

        def work(number: int) -> None:
            lengths = random.Random(f"{trace.seed}/length {number}")

            def look(_: dict[str, Any]) -> str:
                time.sleep(tool_s)
                return text(f"output {number} {lengths.random()}", lengths.randint(*trace.tool_len))

            schema = {"type": "object", "properties": {"at": {"type": "string"}}}
            agent = Agent(
                ScriptedPolicy(llm, sampling, trace.turns),
                [Tool("look", "Look.", schema, look)],
                system=text("system", trace.system_len),
                max_turns=trace.turns,
            )
            try:
                results[number] = agent.ask(text(f"task {number}", trace.task_len))
            except Exception as error:
                results[number] = error

        threads = [threading.Thread(target=work, args=(number,)) for number in range(trace.agents)]
        start_s = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        total_s = time.monotonic() - start_s
        compilations = llm.stats().compilations_after_ready
    for result in results:
        if isinstance(result, Exception):
            raise result
    head = {"prefix_caching": caching, "total_s": round(total_s, 4), "compilations_after_ready": compilations}
    notices = [notice for answer in results for notice in answer.notices]
    return head | {"notices": notices} | summary([answer.turns for answer in results])


def summary(agents: Sequence[Sequence[Turn]]) -> dict[str, Any]:
    """Sums over all agents, and a row for every turn. The hit rate is that of the turns after an agent's first."""
    turns = [turn for agent in agents for turn in agent]
    later = [turn for agent in agents for turn in agent[1:]]
    prompt, cached = (sum(getattr(turn, name) for turn in turns) for name in ("prompt_tokens", "cached_tokens"))
    hits = sum(turn.cached_tokens > 0 for turn in later)
    return {
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "completion_tokens": sum(turn.completion_tokens for turn in turns),
        "prefill_saved": round(cached / prompt, 4),
        "hit_rate": round(hits / len(later), 4) if later else None,
        "turns": [_row([agent[i] for agent in agents]) for i in range(len(agents[0]))],
    }


def _row(turns: Sequence[Turn]) -> dict[str, Any]:
    first_ms = [turn.first_token_s * 1e3 for turn in turns if turn.first_token_s is not None]
    return {
        "prompt_tokens": sum(turn.prompt_tokens or 0 for turn in turns),
        "cached_tokens": sum(turn.cached_tokens or 0 for turn in turns),
        "median_ttft_ms": round(statistics.median(first_ms), 3),
        "max_ttft_ms": round(max(first_ms), 3),
        "median_reply_ms": round(statistics.median(turn.reply_s for turn in turns) * 1e3, 3),
        "median_tool_ms": round(statistics.median(turn.tool_s for turn in turns) * 1e3, 3),
    }


def show(row: Mapping[str, Any]) -> None:
    """A run in a table."""
    kind = "with" if row["prefix_caching"] else "without"
    print(
        f"{kind} the prefix cache: {row['total_s']} s, {row['cached_tokens']} of {row['prompt_tokens']} tokens cached "
        f"({row['prefill_saved']:.1%}), hit rate {row['hit_rate']}"
    )
    print("turn  prompt tokens  cached tokens  TTFT p50/max ms  reply p50 ms  tool p50 ms")
    for number, turn in enumerate(row["turns"], 1):
        ttft = f"{turn['median_ttft_ms']}/{turn['max_ttft_ms']}"
        print(
            f"{number:>4} {turn['prompt_tokens']:>14} {turn['cached_tokens']:>14} {ttft:>16} "
            f"{turn['median_reply_ms']:>13} {turn['median_tool_ms']:>12}"
        )
    for notice in row["notices"]:
        print(notice)


def compare(model: str, trace: Any, options: Mapping[str, Any], *, tool_s: float) -> dict[str, Any]:
    """The trace with the prefix cache and without it, each in an engine of its own."""
    rows = []
    for caching in (True, False):
        rows.append(run(model, trace, options, tool_s=tool_s, caching=caching))
        show(rows[-1])
    speedup = round(rows[1]["total_s"] / rows[0]["total_s"], 3)
    print(f"the first is {speedup} times as fast")
    described = dataclasses.asdict(trace) | {"tool_seconds": tool_s}
    return {"loop": model, "engine": dict(options), "trace": described, "runs": rows, "speedup": speedup}
