"""Where an engine's memory would go, for `jaxinfer doctor --memory`."""

from __future__ import annotations

from typing import NamedTuple

from jaxinfer.build import find_devices, make_builder, open_executables, set_up_jax
from jaxinfer.config import EngineConfig
from jaxinfer.found import find_model
from jaxinfer.kv_tiers import size_memory
from jaxinfer.params import shard_bytes
from jaxinfer.runner import cache, peers
from jaxinfer.runner.compiled import largest_temp_bytes
from jaxinfer.runner.executables import Executables
from jaxinfer.runner.long_context import LongContext
from jaxinfer.runner.step import StepBuilder


class MemoryPart(NamedTuple):
    """Bytes that an engine takes, and what for."""

    name: str
    num_bytes: int
    detail: str = ""
    on_device: bool = True  # of each device; otherwise of the host, once


def plan_memory(config: EngineConfig) -> list[MemoryPart]:
    """Where the memory of each device would go, and of the host. Raises as `build_engine` does.

    On a GPU the largest step is compiled, unless a former start stored how much it needs.
    """
    set_up_jax(config)
    find_devices()
    checkpoint, tokenizer = find_model(config)
    builder = make_builder(config, checkpoint, tokenizer)
    model = builder.model
    executables = Executables(open_executables(config), checkpoint.config)
    params = builder.abstract_params

    found: dict[LongContext | None, int] = {}

    def temp_bytes(builder: StepBuilder) -> int:
        if builder.long not in found:
            found[builder.long] = largest_temp_bytes(builder, params, executables, lambda *_: None, lambda: None)
        return found[builder.long]

    sized, tiers = size_memory(config, builder, temp_bytes)
    shape = sized.shape
    state = builder.abstract_state
    recurrent = shard_bytes([a for a in (state.recurrent, state.conv) if a is not None])
    penalties = shard_bytes((state.output_counts, state.in_prompt, state.logit_bias))
    logits = shard_bytes(state.logits)
    page_bytes = cache.page_bytes(state)
    token_bytes, context_pages = page_bytes // shape.page_size, -(-shape.max_model_len // shape.page_size)
    parts = [
        MemoryPart("weights", shard_bytes(params), f"{model.architecture}, {shape.dtype}"),
        MemoryPart(
            "KV cache",
            (shape.num_pages + 1) * page_bytes,
            f"{shape.num_pages:,} pages of {shape.page_size} tokens of {token_bytes:,} bytes; a context of "
            f"{shape.max_model_len:,} takes {context_pages:,} pages",
        ),
        MemoryPart("logits", logits, f"of {shape.num_slots} sequences, {shape.vocab_rows:,} tokens, in float32"),
        MemoryPart("penalties and biases", penalties, f"of {shape.num_slots} sequences"),
        MemoryPart("page tables and sampling", cache.slot_bytes(state) - logits - penalties - recurrent),
    ]
    if builder.writes_to_peers:
        inboxes = peers.inbox_bytes(builder.mesh)
        parts.append(MemoryPart("inboxes", inboxes, f"that {builder.mesh.size} devices write to, for collectives"))
    if recurrent:
        detail = f"of {shape.num_slots} sequences, and {shape.num_states} copies for the prefix cache"
        parts.insert(2, MemoryPart("recurrent states", recurrent, detail))
    if builder.platform == "gpu":
        largest = f"of the largest step, {builder.buckets[-1]}"
        parts.append(MemoryPart("temporaries", temp_bytes(sized), largest))
        parts.append(MemoryPart("reserve", cache.GPU_RESERVE_BYTES, "left free for results and fragmentation"))
    if tiers.num_frames:
        detail = f"{tiers.num_frames * tiers.frame_pages:,} pages in frames of {tiers.frame_pages}"
        parts.append(MemoryPart("host: pages that left the device", tiers.frame_bytes, detail, on_device=False))
    if sized.long is not None:
        detail = f"of {sized.long.num_tokens:,} tokens that the device's pages do not hold"
        parts.append(MemoryPart("host: end of a long context", tiers.long_bytes, detail, on_device=False))
    return parts
