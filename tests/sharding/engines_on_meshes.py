"""Whole engines of golden models on meshes, against transformers. As a program, with as many devices as needed:

    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 python engines_on_meshes.py CASES

CASES is JSON, a list of {"family": a folder of tests/golden, "mesh": sizes, "rules": name or mapping}. Prints for each
what `run` returns.
"""

import json
import sys
from typing import Any

from jaxinfer.types import Request
from tests.conftest import read_golden
from tests.engine.drive import build, drive, num_equal

OPTIONS = {"page_size": 8, "num_pages": 8, "max_num_seqs": 2, "max_num_batched_tokens": 16}
"""Pages for either of the two prompts of a group with its answer, and not for both."""
PROMPTS, SECOND_TURN = (2, 1), 60


def run(family: str, mesh: Any, rules: Any) -> dict[str, Any]:
    """Gives each group of devices both prompts, and both again when the first are done. AssertionError for a token that
    is neither transformers' nor at a tie. Returns how many sequences were preempted, how many tokens of prompts came
    from the cache, whether there are recurrent states, and how many requests each group had."""
    expected = read_golden(family)
    engine = build(expected.folder, mesh=mesh, rules=rules, **OPTIONS)
    num_groups = len(engine._groups)
    requests = [
        Request(
            request_id=f"{prompt} {turn} {i}", prompt_ids=expected.prompts[prompt].tolist(), max_tokens=16,
            temperature=0.0,
        )
        for turn in range(2)
        for prompt in PROMPTS
        for i in range(num_groups)
    ]  # fmt: skip
    arrivals = [SECOND_TURN * int(request.request_id.split()[1]) for request in requests]
    outputs = drive(engine, requests, arrivals=arrivals)
    stats, has_states = engine.stats(), engine._runner._builder.model.recurrent is not None
    found = {
        "num_preemptions": stats.num_preemptions,
        "cached_prompt_tokens": stats.cached_prompt_tokens,
        "has_states": has_states,
        "prompt_tokens": [group.prompt_tokens for group in engine._groups],
    }
    engine.close()
    for request in requests:
        prompt = int(request.request_id.split()[0])
        tokens, margins = expected.tokens[prompt].tolist(), expected.margins[prompt]
        num_equal(outputs[request.request_id].tokens, tokens, margins)
    return found


def check(found: dict[str, Any]) -> None:
    """AssertionError unless the cache and preemption had their part in what `run` returned."""
    assert found["num_preemptions"] > 0
    # These prompts are shorter than what lies between two copies of recurrent states.
    assert (found["cached_prompt_tokens"] > 0) != found["has_states"]
    assert len(set(found["prompt_tokens"])) == 1, "the groups had not the same to do"


if __name__ == "__main__":
    print(json.dumps([run(**case) for case in json.loads(sys.argv[1])]))
