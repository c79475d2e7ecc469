"""Programs kept whole on disk: they do what freshly compiled ones do, and only for what they were compiled for."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxinfer.models import registry
from jaxinfer.params import abstract_params, random_params
from jaxinfer.runner import cache, compiled, executables, inputs, long_context
from jaxinfer.runner.disk_cache import DiskCache
from jaxinfer.runner.executables import Executables
from jaxinfer.runner.long_context import LongContext
from jaxinfer.runner.small_programs import small_programs
from jaxinfer.sharding import rules
from pallas_kernels.dispatch import HOPPER
from tests.runner.test_step import BUCKETS, make_builder

CONFIG = {"made": "up"}


@pytest.fixture(autouse=True, scope="module")
def settled_sources():
    """What others change in the sources while the tests run is none of theirs."""
    with pytest.MonkeyPatch.context() as patch:
        start_s = executables.process_start_s
        patch.setattr(executables, "process_start_s", lambda: start_s() + 3600)
        yield start_s


def params_of(builder, make=abstract_params, **options):
    shardings = rules.shardings(builder.model.specs, builder.mesh)
    return make(builder.model.specs, jnp.dtype(jnp.float32), shardings, **options)


@pytest.fixture(scope="module")
def config(golden):
    return {**golden("llama").config, "num_key_value_heads": 4, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def builder(config):
    return make_builder(registry.from_config(config))


@pytest.fixture(scope="module", params=[1, 4], ids=lambda n: f"{n} devices")
def kept(request, config, tmp_path_factory):
    """A builder, the programs compiled for it, and the folder that has them."""
    if jax.device_count() < request.param:
        pytest.skip(f"{jax.device_count()} devices; {request.param} are needed")
    builder = make_builder(registry.from_config(config), request.param)
    if request.param == 1:
        builder = dataclasses.replace(builder, long=LongContext(num_tokens=64, chunk=16, block=8))
    folder = tmp_path_factory.mktemp("kept") / "steps"
    return builder, compile_all(builder, Executables(DiskCache.open(folder), CONFIG)), folder


def compile_all(builder, kept, check=lambda: None, progress=lambda *_: None):
    return compiled.compile_programs(builder, params_of(builder), kept, progress, check)


@pytest.fixture
def no_tracing(monkeypatch):
    def lower(program, _key=""):
        raise AssertionError(f"{program.name} is traced")

    monkeypatch.setattr(compiled, "lower", lower)


def addresses(tree):
    return [[s.data.unsafe_buffer_pointer() for s in leaf.addressable_shards] for leaf in jax.tree.leaves(tree)]


def run_all(builder, programs):
    """The state after every program, with what was read; every buffer of it must stay where it is."""
    state = cache.zeros(builder.abstract_state)
    staged = jnp.zeros_like(builder.abstract_inputs, device=builder.abstract_inputs.sharding)
    params = params_of(builder, random_params, seed=3)
    where, reads = addresses(state), []
    history = np.zeros(inputs.history_size(builder.shape.max_model_len), np.int32)
    state = programs.set_up_slot(state, history)
    packed = np.ones(inputs.prefix_size(builder.shape.table_width) + staged.size, np.int32)
    was = addresses(staged)
    state, staged = programs.set_up_prefix(state, staged, packed)
    assert addresses(staged) == was
    rows = jnp.zeros_like(builder.abstract_rows, device=builder.abstract_rows.sharding)
    packed, was = packed[: inputs.prefix_size(builder.shape.table_width) + rows.size], addresses(rows)
    state, rows = programs.set_up_prefix_rows(state, rows, packed)
    assert addresses(rows) == was
    for bucket in BUCKETS:
        was = addresses((staged, rows))
        if bucket.decode:
            rows = programs.stage_rows(rows, np.arange(rows.size, dtype=np.int32) % 2)
        else:
            staged = programs.stage(staged, np.arange(staged.size, dtype=np.int32) % 2)
        assert addresses((staged, rows)) == was
        state = programs.steps[bucket](params, state, rows if bucket.decode else staged)
        state = programs.samplers[bucket.rows](state)
        reads += [programs.read_tokens(state.last_token), programs.read_logprobs(state.logprobs)]
    if builder.long:
        host = long_context.zeros(builder.abstract_context())
        host_where = addresses(host)
        for size in builder.long.sizes:
            state, new = programs.long[size](params, state, host, staged)
            host = programs.long_stores[size](host, new, staged)
        assert addresses(host) == host_where
        reads.append(host)
    assert addresses(state) == where
    return state, reads


@pytest.mark.usefixtures("no_tracing")
def test_fetched_programs_do_the_same_in_place_and_nothing_is_traced(kept):
    builder, fresh, folder = kept
    fetched = compile_all(builder, Executables(DiskCache.open(folder), CONFIG))
    expected, got = run_all(builder, fresh), run_all(builder, fetched)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    for step in fetched.steps.values():
        assert step.as_text() and step.memory_analysis().temp_size_in_bytes > 0


@pytest.mark.usefixtures("no_tracing")
def test_what_is_shown_says_that_programs_are_fetched(kept):
    builder, _, folder = kept
    shown = []
    compile_all(builder, Executables(DiskCache.open(folder), CONFIG), progress=lambda stage, *_: shown.append(stage))
    count = len(list(folder.iterdir()))
    assert shown == [*(f"fetched {i} of {count} steps from the cache" for i in range(1, count + 1)), "compiled"]


def changed_shape(**changes):
    def change(builder, program):
        return dataclasses.replace(builder, shape=dataclasses.replace(builder.shape, **changes)), program

    return change


def changed_program(**changes):
    return lambda builder, program: (builder, program._replace(**changes))


def narrower_weights(builder, program):
    narrow = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16, sharding=a.sharding), program.args[0])
    return builder, program._replace(args=(narrow, *program.args[1:]))


def on_device_1(builder, program):
    return dataclasses.replace(builder, mesh=Mesh(np.asarray(jax.devices()[1:2]), ("tensor",))), program


CHANGES = {
    "pages": changed_shape(num_pages=14),
    "page size": changed_shape(page_size=16),
    "slots": changed_shape(num_slots=3),
    "context": changed_shape(max_model_len=96),
    "vocabulary rows": changed_shape(vocab_rows=100),
    "dtype": changed_shape(dtype=jnp.dtype(jnp.bfloat16)),
    "layers": changed_shape(cache=cache.CacheShape(9, 4, 16)),
    "tokens that may be sampled": lambda b, p: (dataclasses.replace(b, vocab_size=99), p),
    "rules": lambda b, p: (dataclasses.replace(b, axis_rules={"mlp": "tensor"}), p),
    "architecture": lambda b, p: (dataclasses.replace(b, model=b.model._replace(architecture="other")), p),
    "bucket": changed_program(name=str(BUCKETS[0])),
    "options": changed_program(options={"xla_cpu_enable_fast_math": True}),
    "donation": changed_program(donated=()),
    "weights": narrower_weights,
    "device": on_device_1,
}


def key_of(builder, change=lambda *both: both, config=CONFIG):
    program = compiled.step_program(builder, params_of(builder), BUCKETS[1])
    return Executables(None, config).key(*change(builder, program))


@pytest.mark.parametrize("change", CHANGES)
def test_key_tells_of(builder, change):
    assert key_of(builder, CHANGES[change]) != key_of(builder) == key_of(builder)


def test_key_tells_of_the_whole_config_of_the_model(builder):
    assert key_of(builder, config={**CONFIG, "unknown_field": [1]}) != key_of(builder)


@pytest.mark.parametrize(
    ("name", "value"), [("XLA_FLAGS", "--xla_x=1"), ("JAX_ANYTHING", "1"), ("TRITON_F32_DEFAULT", "ieee")]
)
def test_key_tells_of_environment_variables(builder, monkeypatch, name, value):
    before = key_of(builder)
    monkeypatch.setenv(name, value)
    assert key_of(builder) != before


def test_key_tells_of_settings_of_jax_in_a_context_too(builder):
    before = key_of(builder)
    with jax.default_matmul_precision("bfloat16"):
        assert key_of(builder) != before
    assert key_of(builder) == before


@pytest.mark.parametrize("part", ["source_digest", "_versions", "_device", "FORMAT"])
def test_key_tells_of_sources_versions_and_devices(builder, monkeypatch, part):
    before = key_of(builder)
    monkeypatch.setattr(executables, part, "2" if part == "FORMAT" else lambda _=None: "changed")
    assert key_of(builder) != before


def test_key_does_not_tell_of_where_the_cache_is(builder, monkeypatch):
    before = key_of(builder)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("SOMETHING", "else")
    assert key_of(builder) == before


def test_digest_of_the_sources_tells_of_every_file(tmp_path):
    def digest():
        return executables.source_digest.__wrapped__(tmp_path)

    found = {digest()}
    for name in ("jaxinfer/models/a.py", "jaxinfer/runner/b.py", "jaxinfer/params.py", "pallas_kernels/op/c.py"):
        for content in ("", "x"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
            found.add(digest())
    (tmp_path / "jaxinfer/models/a.py").rename(tmp_path / "jaxinfer/models/d.py")
    assert len(found | {digest()}) == 10
    root = Path(__file__).parents[2]
    assert all((root / source).exists() for source in executables.SOURCES if source != "jaxinfer/quant")


def test_source_that_changed_after_the_process_began_keeps_it_from_the_cache(
    settled_sources, tmp_path, monkeypatch, caplog
):
    (tmp_path / "jaxinfer/models").mkdir(parents=True)
    source = tmp_path / "jaxinfer/models/a.py"
    source.write_text("")
    assert executables.changed_source(tmp_path, source.stat().st_ctime) is None
    monkeypatch.setattr(executables, "SOURCE_ROOT", tmp_path)
    monkeypatch.setattr(executables, "process_start_s", settled_sources)
    assert source.stat().st_ctime - 3600 < settled_sources() < source.stat().st_ctime
    with caplog.at_level(logging.WARNING):
        assert not Executables(DiskCache.open(tmp_path / "steps"), CONFIG).enabled
    assert f"{source} changed after this process began" in caplog.text


def test_versions_are_of_jax_and_triton_and_all_that_comes_with_cuda():
    packages = executables._versions()["packages"]
    assert any(name.startswith("jaxlib-") for name in packages)
    assert all(name.lower().startswith(executables.PACKAGES) for name in packages)


KEY = """
from tests.runner.test_executables import key_of, make_builder, registry
import json, pathlib
config = json.loads(pathlib.Path("tests/golden/llama/config.json").read_text())
print(key_of(make_builder(registry.from_config(config))))
"""


def test_key_is_the_same_in_every_process():
    def key(seed):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        root = Path(__file__).parents[2]
        return subprocess.check_output([sys.executable, "-c", KEY], env=environment, cwd=root, text=True)

    assert key("1") == key("2") != ""


def test_entry_that_is_no_program_is_discarded_with_a_word_and_compiled_afresh(kept, caplog):
    builder, fresh, folder = kept
    disk = DiskCache.open(folder)
    program = compiled.step_program(builder, params_of(builder), BUCKETS[0])
    key = Executables(None, CONFIG).key(builder, program)
    disk.put(key, b"not a program")
    with caplog.at_level(logging.WARNING):
        programs = compile_all(builder, Executables(disk, CONFIG))
    assert f"{key} is discarded: decode 2 rows cannot be loaded (" in caplog.text
    np.testing.assert_array_equal(run_all(builder, programs)[0].logits, run_all(builder, fresh)[0].logits)
    assert len(disk.get(key)) > 1000


def on_hopper(builder):
    """As much of a builder as fetching looks at."""
    return types.SimpleNamespace(mesh=builder.mesh, target=types.SimpleNamespace(compute_capability=HOPPER))


def fetch_all(builder, kept):
    programs = list(small_programs(builder, None).values())
    return [kept.fetch(kept.key(builder, program), on_hopper(builder), program) for program in programs]


def test_runtime_of_mosaic_is_imported_before_a_program_for_hopper_is_loaded(kept, monkeypatch):
    builder, _, folder = kept
    load, done = executables.serialize_executable.deserialize_and_load, []

    def load_and_tell(*args, **options):
        done.append("loaded")
        return load(*args, **options)

    monkeypatch.setattr(executables.serialize_executable, "deserialize_and_load", load_and_tell)
    monkeypatch.setattr(executables.importlib, "import_module", done.append)
    assert all(fetch_all(builder, Executables(DiskCache.open(folder), CONFIG)))
    assert done == ["jax.experimental.mosaic.gpu", "loaded"] * len(small_programs(builder, None))


def test_without_the_runtime_of_mosaic_nothing_is_fetched_or_deleted_and_it_is_said_once(kept, monkeypatch, caplog):
    builder, _, folder = kept
    monkeypatch.setitem(sys.modules, "jax.experimental.mosaic.gpu", None)  # so that importing it fails
    before = set(folder.iterdir())
    disk = Executables(DiskCache.open(folder), CONFIG)
    with caplog.at_level(logging.WARNING):
        assert not any(fetch_all(builder, disk))
    assert caplog.text.count("compiled steps are neither kept nor read, and all are compiled anew") == 1
    assert "Mosaic's runtime cannot be imported (ModuleNotFoundError: " in caplog.text
    assert not disk.enabled and set(folder.iterdir()) == before
    monkeypatch.undo()
    run_all(builder, compile_all(builder, disk))


def test_backend_that_cannot_write_programs_is_told_of_once_and_they_are_compiled(
    builder, tmp_path, monkeypatch, caplog
):
    def refuse(_):
        raise ValueError("Compilation does not support serialization")

    monkeypatch.setattr(executables.serialize_executable, "serialize", refuse)
    kept = Executables(DiskCache.open(tmp_path / "steps"), CONFIG)
    with caplog.at_level(logging.WARNING):
        programs = compile_all(builder, kept)
    assert caplog.text.count("cannot be kept whole on this backend (Compilation does not support serialization)") == 1
    run_all(builder, programs)
    assert not kept.enabled and not list((tmp_path / "steps").iterdir())


def test_temporaries_are_measured_once(builder, tmp_path, monkeypatch):
    disk = DiskCache.open(tmp_path / "steps")

    def measure():
        kept = Executables(disk, CONFIG)
        return compiled.largest_temp_bytes(builder, params_of(builder), kept, lambda *_: None, lambda: None)

    first = measure()
    monkeypatch.setattr(compiled, "lower", None)
    assert measure() == first > 0


def test_error_elsewhere_ends_the_compiling(builder):
    class Elsewhere(Exception):
        pass

    calls = []

    def check():
        calls.append(None)
        if len(calls) == 3:
            raise Elsewhere

    with pytest.raises(Elsewhere):
        compile_all(builder, Executables(None, CONFIG), check)
    assert len(calls) == 3


HITS = """
import json, sys
from jaxinfer.build import build_engine
from jaxinfer.config import EngineConfig
from jaxinfer.runner import compiled
from jaxinfer.types import Request
from tests.engine.drive import drive
traced, lower = [], compiled.lower
compiled.lower = lambda program, key="": traced.append(program.name) or lower(program, key)
options = dict(max_num_seqs=1, max_num_batched_tokens=16, page_size=8, compile_cache_dir=sys.argv[2])
engine = build_engine(EngineConfig(model=sys.argv[1], **options), show_progress=False)
output = drive(engine, [Request(request_id="r", prompt_ids=[4] * 5, max_tokens=5, temperature=0.0)])["r"]
print(json.dumps([len(traced), output.tokens, engine.stats().compilations_after_ready]))
"""


def test_what_jaxs_own_cache_had_is_compiled_again_before_it_is_kept(golden, tmp_path):
    """XLA's CPU backend forgets code when it writes a program that it has read: "Function ... not found" at its run."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "true"}

    def start():
        args = [sys.executable, "-c", HITS, str(golden("llama").folder), str(tmp_path)]
        done = subprocess.run(args, env=environment, cwd=root, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    traced, tokens, compilations = start()
    assert traced > 0 == compilations and len(tokens) == 5
    assert start() == [0, tokens, 0]
    for entry in (tmp_path / "steps").iterdir():
        entry.unlink()
    assert start() == [2 * traced, tokens, 0]
    assert start() == [0, tokens, 0]


def test_what_the_temporaries_of_a_step_take_is_known_of_stored_programs_too(kept):
    builder, fresh, folder = kept
    sizes = compiled.temp_bytes(fresh)
    assert len(sizes) == len(BUCKETS) and min(sizes) > 0
    assert compiled.temp_bytes(compile_all(builder, Executables(DiskCache.open(folder), CONFIG))) == sizes
