"""What is compiled: one step of the model for a bucket, and what sets up a slot."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.models.model import Memory, Model, Placement
from jaxinfer.params import Params, abstract_params
from jaxinfer.runner import inputs, long_context, peers, pinned, sampling, scoring
from jaxinfer.runner.buckets import Bucket
from jaxinfer.runner.cache import DeviceState, StateShape
from jaxinfer.runner.long_context import HostContext, LongContext
from jaxinfer.runner.step_memory import TokenPart, paged_attend, paged_rows, slot_recur
from jaxinfer.sharding import rules
from pallas_kernels.delta_rule.api import DeltaPools, SlotRows
from pallas_kernels.dispatch import Target
from pallas_kernels.paged_attention.api import PagedRows

NUM_COUNTERS = 2**14
"""As many results as programs of one kernel can share: rows times KV heads in attention, blocks of a product. A kernel
that has more does not split them."""

MAX_MASK_ROWS = 16
"""Masks that are written at once."""

Step = Callable[[Params, DeviceState, jax.Array], DeviceState]
ScoredStep = Callable[[Params, DeviceState, jax.Array, jax.Array], tuple[DeviceState, jax.Array]]
LongStep = Callable[[Params, DeviceState, HostContext, jax.Array], tuple[DeviceState, HostContext]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBuilder:
    """Makes the function of each bucket. On several devices each runs it on its shard, with visible sums.

    Where sequences are split over groups of devices, each group runs the step on its own rows, slots and pages.
    """

    model: Model
    shape: StateShape
    vocab_size: int  # token ids from here on are padding, never sampled
    mesh: rules.AnyMesh
    buckets: tuple[Bucket, ...]
    axis_rules: rules.Rules = dataclasses.field(default_factory=lambda: rules.TENSOR_PARALLEL)
    frame_pages: int = 0  # G, pages that travel to the host and back at once; 0: there is no host tier
    scores: bool = False  # whether log-probabilities of prompts can be asked for
    long: LongContext | None = None  # None: no sequence outgrows the device's pages
    target_of_plan: Target | None = None  # what a mesh without devices stands for; None: the mesh has devices

    def __post_init__(self) -> None:
        """Raises NotImplementedError for long contexts on several devices, or of a model with a recurrent state.

        ShardingError where the largest step cannot be shared out by tokens.
        """
        rules.check_step(max((bucket.tokens for bucket in self.buckets), default=0), self.mesh, self.axis_rules)
        if self.long is not None and self.model.recurrent is not None:
            raise NotImplementedError(
                f"{self.model.architecture} has a recurrent state, which a long context needs whole"
            )
        if self.long is not None and self.mesh.size > 1:
            raise NotImplementedError(
                f"contexts beyond the device's pages run on one device, not on {self.mesh.size}: the host's part of a "
                "context is not split by heads"
            )

    @property
    def platform(self) -> str:
        """What the devices are: "cpu" or "gpu"."""
        return self.target.platform

    @functools.cached_property
    def target(self) -> Target:
        """What is compiled for."""
        if self.target_of_plan is not None:
            return self.target_of_plan
        return Target.of(self.mesh.devices.flat[0])

    @functools.cached_property
    def has_pinned(self) -> bool:
        """Whether what passes between host and device passes through pinned memory."""
        return self.target_of_plan is None and pinned.has_pinned(self.mesh)

    @functools.cached_property
    def writes_to_peers(self) -> bool:
        """Whether kernels write into the memory of other devices."""
        return self.target_of_plan is None and peers.reachable(self.mesh)

    @property
    def num_groups(self) -> int:
        """Groups of devices that have sequences of their own."""
        return rules.num_shards(rules.ROWS, self.mesh, self.axis_rules)

    @property
    def abstract_state(self) -> DeviceState:
        """Shapes, dtypes and shardings of the state."""
        state = self.shape.abstract(self.mesh, self.axis_rules)
        return state.replace(peers=peers.abstract(self.mesh)) if self.writes_to_peers else state

    @property
    def abstract_params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of the parameters."""
        specs = self.model.specs
        return abstract_params(specs, self.shape.dtype, rules.shardings(specs, self.mesh, self.axis_rules))

    @property
    def abstract_inputs(self) -> jax.ShapeDtypeStruct:
        """The buffer that inputs are staged in: as long as the largest bucket needs, or the largest long step."""
        sizes = [inputs.packed_size(bucket, self.shape.page_size) for bucket in self.buckets]
        if self.long is not None:
            sizes.append(inputs.long_size(self.long.chunk))
        return self.by_group((max(sizes),), jnp.int32)

    @property
    def abstract_rows(self) -> jax.ShapeDtypeStruct:
        """The one of decode steps, which are the most: 3 kB for 256 rows, of the 100 that others may need."""
        sizes = [inputs.packed_size(bucket, self.shape.page_size) for bucket in self.buckets if bucket.decode]
        return self.by_group((max(sizes),), jnp.int32)

    @property
    def mask_rows(self) -> tuple[int, ...]:
        """Masks that are written at once: one, or as many as keep their upload small (0.4 MB for 150,000 tokens)."""
        return tuple(sorted({1, min(MAX_MASK_ROWS, self.shape.num_slots)}))

    def abstract_context(self, num_tokens: int | None = None) -> HostContext:
        """Of what the host holds of a sequence; with `num_tokens`, of what a step of so many computes for it."""
        assert self.long is not None
        rows = self.long.num_rows if num_tokens is None else num_tokens
        on_host = num_tokens is None
        return long_context.abstract(self.shape.cache, rows, self.shape.dtype, self.mesh, on_host=on_host)

    @property
    def abstract_frame(self) -> jax.ShapeDtypeStruct:
        """A frame [2, L, G, S, K, E] on the device: keys and values of G pages."""
        pool = self.abstract_state.k_pages
        num_layers, _, *page = pool.shape
        assert isinstance(pool.sharding, NamedSharding)
        sharding = NamedSharding(self.mesh, PartitionSpec(None, *pool.sharding.spec))
        return jax.ShapeDtypeStruct((2, num_layers, self.frame_pages, *page), pool.dtype, sharding=sharding)

    def replicated(self, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        """An array of which every device has a copy."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, PartitionSpec()))

    def by_group(self, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        """An array of which every group has one of this shape: one behind the other, along the first dimension."""
        sharding = NamedSharding(self.mesh, rules.by_rows(self.mesh, self.axis_rules))
        return jax.ShapeDtypeStruct((self.num_groups * shape[0], *shape[1:]), dtype, sharding=sharding)

    def in_groups(self, function: Callable, args: Any, result: Any) -> Callable:
        """The function as each group runs it on what it has of arguments and result, which are abstract values."""
        if self.num_groups == 1:
            return function
        specs = jax.tree.map(lambda a: a.sharding.spec, (args, result))
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)

    def split_of(self, bucket: Bucket) -> dict[str, tuple[str, ...]]:
        """Mesh axes that logical axes are split over in a bucket's step.

        Tokens are not in a decode step, where to gather keys and values would cost more than it spares, nor where they
        are too few.
        """
        split = rules.split(self.mesh, self.axis_rules)
        if bucket.decode or bucket.tokens % rules.num_shards(rules.TOKENS, self.mesh, self.axis_rules):
            split.pop(rules.TOKENS, None)
        return split

    def step(self, bucket: Bucket) -> Step:
        """(params, state, packed inputs) -> state, which is donated and holds by slot what was sampled."""
        return self._step(bucket, scored=False)

    def scored_step(self, bucket: Bucket) -> ScoredStep:
        """(params, state, packed inputs, targets [T]) -> state, and the scores of the targets: see `scoring.score`.

        Neither sequences nor tokens may be split over devices.
        """
        return self._step(bucket, scored=True)

    def _step(self, bucket: Bucket, *, scored: bool) -> Callable[..., Any]:
        split = self.split_of(bucket)

        def run(params: Params, state: DeviceState, packed: jax.Array, *targets: jax.Array) -> Any:
            packed = packed[: inputs.packed_size(bucket, self.shape.page_size)]
            step = inputs.unpack(packed, bucket, page_size=self.shape.page_size, num_slots=self.shape.num_slots)
            state, hidden, place = self._run(params, state, step, split)
            if not scored:
                return state
            # The state is what it is after the step: nothing here may count collectives any more.
            logits = functools.partial(self.model.logits, params, place=place._replace(peers=None))
            return state, scoring.score(logits, hidden, *targets, self.vocab_size)

        if self.mesh.size == 1:
            return run
        state_specs = jax.tree.map(lambda a: a.sharding.spec, self.abstract_state)
        params_specs = rules.partitions(self.model.specs, self.mesh, self.axis_rules)
        specs = (params_specs, state_specs, rules.by_rows(self.mesh, self.axis_rules))
        return jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=(*specs, PartitionSpec()) if scored else specs,
            out_specs=(state_specs, PartitionSpec()) if scored else state_specs,
            check_vma=False,
        )

    def long_step(self, num_tokens: int) -> LongStep:
        """(params, state, host context, packed inputs) -> state, which is donated, and what to store on the host."""
        assert self.long is not None
        block = self.long.block

        def run(params: Params, state: DeviceState, host: HostContext, packed: jax.Array):
            step = inputs.unpack_long(packed, num_tokens)
            state = state.replace(sampling=state.sampling.at[step.slot].set(step.sampling))
            token = jnp.arange(num_tokens)
            position = jnp.where(token < step.num_tokens, step.start + token, -1)
            tokens = jnp.where(step.tokens < 0, state.last_token[step.slot], step.tokens)
            shapes = self.abstract_context(num_tokens)
            new = tuple(jax.new_ref(jnp.zeros(rows.shape, rows.dtype)) for rows in (shapes.k, shapes.v))
            row = long_context.LongRow(position, step.start, step.num_device_tokens, state.page_table[step.slot])
            attend = long_context.attend_long((state.k_pages, state.v_pages), host, new, row, block)
            memory = Memory(attend, position >= 0)
            place = Placement(self.target, counters=self._counters())
            hidden = self.model.forward(params, tokens, jnp.maximum(position, 0), memory, place)
            logits = self.model.logits(params, hidden[jnp.maximum(step.num_tokens - 1, 0)][None], place)
            slot = jnp.where(step.samples, step.slot, self.shape.num_slots)
            state = self._keep(state, slot[None], (step.start + step.num_tokens)[None], logits)
            return state, HostContext(*map(jax.freeze, new))

        return run

    def long_store(self, num_tokens: int) -> Callable[[HostContext, HostContext, jax.Array], HostContext]:
        """(host context, what a step of `num_tokens` computed, its packed inputs) -> host context, which is donated."""

        def run(host: HostContext, new: HostContext, packed: jax.Array) -> HostContext:
            step = inputs.unpack_long(packed, num_tokens)
            return long_context.store(host, new, step.start - step.num_device_tokens)

        return run

    def sampler(self, num_rows: int) -> Callable[[DeviceState], DeviceState]:
        """state -> state after a step of `num_rows`, its tokens now as their requests ask. The state is donated.

        A program of its own, because most steps need none of it.
        """

        def run(state: DeviceState) -> DeviceState:
            slot, position = state.sampled_slot[:num_rows], state.sampled_position[:num_rows]
            rows = sampling.SamplingRows.from_fields(state.sampling[slot])
            history = sampling.History(state.output_counts, state.in_prompt, state.logit_bias)
            # The step looked at its logits. Where they are not numbers, what any route would make of them is not said.
            is_bad = state.last_token[slot] == sampling.NO_TOKEN
            places = sampling.Places(slot, position, (slot < self.shape.num_slots) & ~is_bad)
            tokens, logprobs = sampling.sample(state.logits, rows, history, places, target=self.target)
            return state.replace(
                last_token=state.last_token.at[slot].set(jnp.where(is_bad, sampling.NO_TOKEN, tokens)),
                logprobs=state.logprobs.at[slot].set(logprobs.pack()),
                output_counts=state.output_counts.at[slot, tokens].add(1),
            )

        if self.mesh.size == 1:
            return run
        # Every device has all logits of its group, and samples all its rows: as one program, XLA would have to know how
        # to split it.
        specs = jax.tree.map(lambda a: a.sharding.spec, self.abstract_state)
        return jax.shard_map(run, mesh=self.mesh, in_specs=(specs,), out_specs=specs, check_vma=False)

    def set_up_slot(self, state: DeviceState, packed: jax.Array) -> DeviceState:
        """Writes the token history and the bias of a request that has penalties or a bias. The state is donated."""
        h = inputs.unpack_history(packed, self.shape.max_model_len)
        counts = jnp.zeros(self.shape.vocab_rows, jnp.int32).at[h.tokens].add(h.is_output.astype(jnp.int32))
        seen = jnp.zeros(self.shape.vocab_rows, jnp.bool_).at[h.tokens].max(h.is_prompt)
        bias = jnp.zeros(self.shape.vocab_rows, jnp.float32).at[h.bias_ids].add(h.bias, mode="drop")
        return state.replace(
            output_counts=state.output_counts.at[h.slot].set(counts),
            in_prompt=state.in_prompt.at[h.slot].set(seen),
            logit_bias=state.logit_bias.at[h.slot].set(bias),
        )

    def set_masks(self, state: DeviceState, packed: jax.Array) -> DeviceState:
        """Writes what slots may sample next as their bias: minus infinity for all other tokens. The state is donated.

        So a mask is added before all else, in whatever route samples, and log-probabilities are of the raw logits. Each
        mask replaces the one before; the slot's next request writes a bias of its own, or says that it has none.
        """
        masks = inputs.unpack_masks(packed, self.shape.vocab_rows)
        rows = jnp.arange(len(packed))[:, None]
        bias = jnp.zeros(masks.allowed.shape, jnp.float32).at[rows, masks.bias_ids].add(masks.bias, mode="drop")
        bias = jnp.where(masks.allowed, bias, -jnp.inf)
        return state.replace(logit_bias=state.logit_bias.at[masks.slot].set(bias))

    def set_up_prefix(self, state: DeviceState, packed: jax.Array) -> DeviceState:
        """Writes the page table of a sequence that begins in the cache, and copies the page that it does not share.

        Where a single token is left to compute, that is the slot's last one, and its sampling parameters come along.
        The state is donated, and the copy reads and writes one page of every layer.
        """
        prefix = inputs.unpack_prefix(packed)

        put = jax.lax.dynamic_update_slice_in_dim

        def copy(pool: jax.Array) -> jax.Array:
            return put(pool, jax.lax.dynamic_slice_in_dim(pool, prefix.source, 1, axis=1), prefix.target, axis=1)

        # A slot out of range: dropped.
        slot = jnp.where(prefix.has_last > 0, prefix.slot, self.shape.num_slots + 1)
        return state.replace(
            page_table=put(state.page_table, prefix.pages[None], prefix.slot, axis=0),
            k_pages=copy(state.k_pages),
            v_pages=copy(state.v_pages),
            last_token=state.last_token.at[slot].set(prefix.last_token, mode="drop"),
            sampling=state.sampling.at[slot].set(prefix.sampling, mode="drop"),
        )

    def copy_state(self, state: DeviceState, places: jax.Array) -> DeviceState:
        """Copies the recurrent state of one place, places[0], to another, places[1]. The state is donated."""

        def copy(pool: jax.Array) -> jax.Array:
            found = jax.lax.dynamic_slice_in_dim(pool, places[0], 1, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(pool, found, places[1], axis=1)

        assert state.recurrent is not None and state.conv is not None
        return state.replace(recurrent=copy(state.recurrent), conv=copy(state.conv))

    def gather_frame(self, k_pages: jax.Array, v_pages: jax.Array, pages: jax.Array) -> jax.Array:
        """A frame of pages [G]. The pools are not donated."""
        return jnp.stack([k_pages[:, pages], v_pages[:, pages]])

    def scatter_frame(self, state: DeviceState, frame: jax.Array, pages: jax.Array) -> DeviceState:
        """Puts the pages of a frame where `pages` [G] says, 0 for those that are not wanted. The state is donated."""

        def put(pool: jax.Array, found: jax.Array) -> jax.Array:
            # Unique but for page 0, in which nobody reads.
            return pool.at[:, pages].set(found, unique_indices=True, mode="promise_in_bounds")

        return state.replace(k_pages=put(state.k_pages, frame[0]), v_pages=put(state.v_pages, frame[1]))

    def _run(
        self, params: Params, state: DeviceState, step: inputs.StepInputs, split: Mapping[str, tuple[str, ...]]
    ) -> tuple[DeviceState, jax.Array, Placement]:
        """The state after the step, and its hidden states [T, D]."""
        state = self._update(state, step)
        rows = paged_rows(state, step, self.shape.page_size)
        tokens = state.last_token[step.slot[rows.token_row]]  # NO_TOKEN reads some row of the table: to no end
        if step.tokens is not None:
            tokens = jnp.where(step.tokens < 0, tokens, step.tokens)
        pools = jax.new_ref(state.k_pages), jax.new_ref(state.v_pages)
        max_query_len = 1 if step.tokens is None else step.tokens.shape[0]
        others = None if state.peers is None else state.peers.open(self.mesh)
        place = Placement(self.target, split, self._counters(), others)
        part = TokenPart.of(split.get(rules.TOKENS, ()), tokens.shape[0])

        num_heads = self.model.num_heads * state.k_pages.shape[3] // self.shape.cache.num_kv_heads
        states = None
        if state.recurrent is not None:
            states = DeltaPools(jax.new_ref(state.recurrent), jax.new_ref(state.conv))

        def memory_of(rows: PagedRows, slots: jax.Array) -> Memory:
            attend = paged_attend(pools, rows, place, num_heads=num_heads, max_query_len=max_query_len, part=part)
            memory = Memory(attend, part.take(rows.token_page > 0))
            if states is None:
                return memory
            of_slots = SlotRows(slots, *rows[1:-1])
            recur = slot_recur(states, of_slots, place, max_query_len=max_query_len, part=part)
            return memory._replace(recur=recur)

        def only(mine: jax.Array) -> Memory:
            lens, pages = (jnp.where(mine, array, 0) for array in (rows.query_len, rows.token_page))
            slots = jnp.where(mine, step.slot, self.shape.num_slots)
            return memory_of(rows._replace(query_len=lens, token_page=pages), slots)

        memory = memory_of(rows, step.slot)._replace(only=only)
        hidden = self.model.forward(params, part.take(tokens), rows.token_position, memory, place)
        state = state.replace(k_pages=jax.freeze(pools[0]), v_pages=jax.freeze(pools[1]))
        if states is not None:
            state = state.replace(recurrent=jax.freeze(states.state), conv=jax.freeze(states.conv))
        last = jnp.maximum(rows.query_start + rows.query_len - 1, 0)
        logits = self.model.logits(params, part.find(hidden, last, place), place)
        if others is not None:
            state = state.replace(peers=state.peers.close(others))
        slots = jnp.where(step.samples, step.slot, self.shape.num_slots)
        return self._keep(state, slots, step.context_len + step.query_len, logits), hidden, place

    def _counters(self) -> jax.Ref | None:
        return None if self.target.platform == "cpu" else jax.new_ref(jnp.zeros(NUM_COUNTERS, jnp.int32))

    def _update(self, state: DeviceState, step: inputs.StepInputs) -> DeviceState:
        """Applies what the host changed: page tables and sampling parameters."""
        slot, index, page = step.page_updates.T
        index = jnp.where(page > 0, index, self.shape.table_width)  # out of range: dropped
        state = state.replace(page_table=state.page_table.at[slot, index].set(page, mode="drop"))
        if step.sampling is not None:
            slots, fields = step.sampling
            state = state.replace(sampling=state.sampling.at[slots].set(fields))
        return state

    def _keep(self, state: DeviceState, slot: jax.Array, position: jax.Array, logits: jax.Array) -> DeviceState:
        """Writes the likeliest tokens to the slots of rows, and keeps what the sampler would need.

        slot [R]: N where the row does not sample; position [R]: of the token that it samples; logits [R, V].
        The token is NO_TOKEN where the logits are not numbers; whatever follows from it in that slot is void.
        """

        def put(kept: jax.Array, rows: jax.Array) -> jax.Array:
            # Not `at[:n].set`: of a whole array that is a scatter without indices, on which XLA's CPU compiler crashes
            # inside a shard_map.
            return jax.lax.dynamic_update_slice_in_dim(kept, rows, 0, axis=0)

        unused = jnp.full((logits.shape[0], logits.shape[1] - self.vocab_size), -jnp.inf)
        logits = jax.lax.dynamic_update_slice(logits, unused, (0, self.vocab_size))
        return state.replace(
            last_token=state.last_token.at[slot].set(sampling.likeliest(logits)),
            logits=put(state.logits, logits),
            sampled_slot=put(state.sampled_slot, slot),
            sampled_position=put(state.sampled_position, position),
        )
