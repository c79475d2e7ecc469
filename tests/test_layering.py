"""Who may import whom, by parsing the imports of every file."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxinfer", "pallas_kernels", "checkpoints")

# Layer -> the layers that it may import, besides itself. A file belongs to the longest layer that its module begins
# with; a file that belongs to none fails, so that a new layer is a decision.
MAY_IMPORT = {
    "pallas_kernels": (),
    "jaxinfer.structured": (),
    "jaxinfer.types": ("jaxinfer.structured",),
    "jaxinfer.config": (),
    "jaxinfer.params": (),
    "jaxinfer.progress": (),
    "jaxinfer.background": (),
    "jaxinfer.allocator": (),
    "jaxinfer.timer_slack": (),
    "jaxinfer.text": ("jaxinfer.types", "jaxinfer.structured"),
    "jaxinfer.scheduler": ("jaxinfer.types", "jaxinfer.config"),
    "jaxinfer.http": ("jaxinfer.types", "jaxinfer.structured", "jaxinfer.config", "jaxinfer.text"),
    # Batches of the server are jobs like any other.
    "jaxinfer.http.batches": ("jaxinfer.types", "jaxinfer.config", "jaxinfer.text", "jaxinfer.http", "jaxinfer.batch"),
    "jaxinfer.agent": ("jaxinfer.types", "jaxinfer.text"),
    # What a row means is what the same body means to the server: see jaxinfer.batch.rows.
    "jaxinfer.batch": (
        "jaxinfer.types",
        "jaxinfer.config",
        "jaxinfer.text",
        "jaxinfer.http.counters",
        "jaxinfer.http.errors",
        "jaxinfer.http.known_fields",
        "jaxinfer.http.metrics",
        "jaxinfer.http.openai",
        "jaxinfer.http.prompts",
        "jaxinfer.http.streams",
    ),
    "jaxinfer.sharding": ("jaxinfer.params",),
    "jaxinfer.quant": ("jaxinfer.params", "pallas_kernels"),
    "jaxinfer.models": ("jaxinfer.params", "jaxinfer.sharding", "jaxinfer.quant", "pallas_kernels"),
    "checkpoints": ("jaxinfer.params", "jaxinfer.sharding", "jaxinfer.quant"),
    "jaxinfer.runner": (
        "jaxinfer.types",
        "jaxinfer.config",
        "jaxinfer.params",
        "jaxinfer.sharding",
        "jaxinfer.quant",
        "jaxinfer.models",
        "jaxinfer.scheduler.plan",
        "pallas_kernels",
    ),
    "jaxinfer.engine": ("jaxinfer.types", "jaxinfer.config", "jaxinfer.scheduler", "jaxinfer.runner"),
    "jaxinfer.frontend": (
        "jaxinfer.types",
        "jaxinfer.config",
        "jaxinfer.allocator",
        "jaxinfer.text",
        "jaxinfer.http",
        "jaxinfer.engine",
    ),
    "jaxinfer.found": ("checkpoints", "jaxinfer.config", "jaxinfer.text"),
    "jaxinfer.defaults": ("checkpoints", "jaxinfer.types", "jaxinfer.text"),
    "jaxinfer.serving": (
        "checkpoints",
        "jaxinfer.types",
        "jaxinfer.config",
        "jaxinfer.found",
        "jaxinfer.text",
        "jaxinfer.http",
        "jaxinfer.engine",
        "jaxinfer.frontend",
        "jaxinfer.cluster",
    ),
    "jaxinfer.kv_tiers": ("checkpoints", "jaxinfer.config", "jaxinfer.models", "jaxinfer.params", "jaxinfer.runner"),
    "jaxinfer.jax_settings": ("jaxinfer.config", "jaxinfer.runner"),
    "jaxinfer.processes": ("checkpoints", "jaxinfer.config", "jaxinfer.found", "jaxinfer.engine", "jaxinfer.runner"),
    "jaxinfer.job_slots": ("jaxinfer.config", "jaxinfer.kv_tiers", "jaxinfer.runner"),
    "jaxinfer.step_times": ("jaxinfer.runner",),
    "jaxinfer.build": PACKAGES,  # the half of api that makes the parts
    "jaxinfer.engine_process": PACKAGES,  # the program around build
    "jaxinfer.memory_plan": PACKAGES,  # what build would make, in bytes
    "jaxinfer.api": PACKAGES,
    "jaxinfer.offline": PACKAGES,  # the part of api that runs batch jobs
    "jaxinfer.cluster": ("jaxinfer.config",),
    # Engines of Ray: each is what offline and serving make alone.
    "jaxinfer.cluster.job": (
        "checkpoints",
        "jaxinfer.batch",
        "jaxinfer.build",
        "jaxinfer.config",
        "jaxinfer.cluster",
        "jaxinfer.engine",
        "jaxinfer.found",
        "jaxinfer.job_slots",
        "jaxinfer.offline",
        "jaxinfer.types",
    ),
    "jaxinfer.cluster.calls": ("jaxinfer.http",),
    "jaxinfer.cluster.connection": ("jaxinfer.config", "jaxinfer.cluster", "jaxinfer.sharding.mesh"),
    "jaxinfer.cluster.replicas": (
        "jaxinfer.config",
        "jaxinfer.cluster",
        "jaxinfer.engine.process",
        "jaxinfer.found",
        "jaxinfer.http",
        "jaxinfer.serving",
        "jaxinfer.text",
        "jaxinfer.types",
    ),
    "jaxinfer.cluster.serving": (
        "jaxinfer.config",
        "jaxinfer.cluster",
        "jaxinfer.found",
        "jaxinfer.http",
        "jaxinfer.types",
    ),
    "jaxinfer.doctor": PACKAGES,  # reports on every part
    "jaxinfer.sharding.report": PACKAGES,  # on what would be
    "jaxinfer.sharding.report_output": PACKAGES,
    "jaxinfer.shard_report": PACKAGES,
    "jaxinfer.plan_flags": ("jaxinfer.config",),
    "jaxinfer.ray_flags": ("jaxinfer.config",),
    "jaxinfer.batch_flags": ("jaxinfer.config", "jaxinfer.offline", "jaxinfer.ray_flags"),
    "jaxinfer.access_flags": ("jaxinfer.config",),
    "jaxinfer.process_flags": (),
    "jaxinfer.agent_flags": ("jaxinfer.agent", "jaxinfer.api", "jaxinfer.config", "jaxinfer.types"),
    "jaxinfer.cli": (
        "jaxinfer.plan_flags",
        "jaxinfer.access_flags",
        "jaxinfer.process_flags",
        "jaxinfer.agent_flags",
        "jaxinfer.batch_flags",
        "jaxinfer.ray_flags",
        "jaxinfer.api",
        "jaxinfer.offline",
        "jaxinfer.serving",
        "jaxinfer.doctor",
        "jaxinfer.shard_report",
        "jaxinfer.config",
        "jaxinfer.types",
    ),
    "jaxinfer.__main__": ("jaxinfer.cli",),
    # __init__: the public names
    "jaxinfer": (
        "jaxinfer.api",
        "jaxinfer.offline",
        "jaxinfer.serving",
        "jaxinfer.config",
        "jaxinfer.types",
        "jaxinfer.structured",
        "jaxinfer.agent",
    ),
}
ABOVE_ALL = (
    "jaxinfer.api",
    "jaxinfer.offline",
    "jaxinfer.serving",
    "jaxinfer.build",
    "jaxinfer.engine_process",
    "jaxinfer.memory_plan",
    "jaxinfer.doctor",
    "jaxinfer.shard_report",
    "jaxinfer.cli",
    "jaxinfer.__main__",
    "jaxinfer",
)
"""What `PACKAGES` leaves out, save that api and doctor know of build."""
BELOW_DOCTOR = ("jaxinfer.build", "jaxinfer.memory_plan")
"""The second knows the first."""

WITHOUT_JAX = (
    "jaxinfer.structured",
    "jaxinfer.types",
    "jaxinfer.config",
    "jaxinfer.text",
    "jaxinfer.scheduler",
    "jaxinfer.http",
    "jaxinfer.agent",
    "jaxinfer.batch",
    "jaxinfer.found",
    "jaxinfer.frontend",
    "jaxinfer.serving",
)
JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "jax_triton"}
"""JAX and what imports it."""

# Optional dependencies, which may be imported where they are used: (layer, module) -> why it is optional.
INSIDE_FUNCTIONS = {
    ("pallas_kernels", "a module that is computed"): "a GPU's routes need packages that only its extras install",
    ("jaxinfer.runner", "jax"): "Mosaic's half of Pallas takes 1.5 s to import, and only programs for Hopper need it",
    ("checkpoints", "orbax"): "takes 4 s to import, and only Orbax stores need it",
    ("jaxinfer.batch", "grain"): "only batch jobs need it",
    ("jaxinfer.agent", "mcp"): "only MCP servers need it, and the extra agent installs it",
    ("jaxinfer.agent", "prompt_toolkit"): "only terminals need it, and the extra agent installs it",
    ("jaxinfer.sharding.report_output", "matplotlib"): "only charts need it",
    ("jaxinfer.batch", "pyarrow"): "only tables need it",
    ("jaxinfer.agent_flags", "jaxinfer"): "as for the command line",
    ("jaxinfer.batch_flags", "jaxinfer"): "as for the command line",
    ("jaxinfer.offline", "jaxinfer"): "only jobs on a cluster need it, and the extra ray installs what it needs",
    ("jaxinfer.serving", "jaxinfer"): "as for jobs",
    ("jaxinfer.cli", "jaxinfer"): "takes 1.5 s with JAX, for which --help, wrong usage and serve need not wait",
}


class Import(NamedTuple):
    module: str
    line: int
    inside_function: bool
    for_types: bool  # under `if TYPE_CHECKING`: known, but not loaded
    relative: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def walk(node: ast.AST, *, inside: bool = False, for_types: bool = False) -> Iterator[Import]:
    """Imports, and importlib.import_module of a literal, below a node."""
    for child in ast.iter_child_nodes(node):
        function = inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for part in child.body:
                yield from walk(ast.Module([part], []), inside=inside, for_types=True)
            for part in child.orelse:
                yield from walk(ast.Module([part], []), inside=inside, for_types=for_types)
        elif isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, inside, for_types, False)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                # `from package import name`: the module of that name, where there is one.
                name = f"{child.module}.{alias.name}" if child.module else alias.name
                module = name if name in FILES else child.module or alias.name
                yield Import(module, child.lineno, inside, for_types, child.level > 0)
        else:
            if isinstance(child, ast.Call) and ast.unparse(child.func).endswith(("import_module", "__import__")):
                argument = child.args[0] if child.args else None
                name = argument.value if isinstance(argument, ast.Constant) else "a module that is computed"
                yield Import(str(name), child.lineno, inside, for_types, False)
            yield from walk(child, inside=function, for_types=for_types)


@functools.cache
def imports(module: str) -> Sequence[Import]:
    return tuple(walk(ast.parse(FILES[module].read_text())))


def is_within(module: str, layer: str) -> bool:
    return module == layer or module.startswith(layer + ".")


def layer_of(module: str) -> str | None:
    if module == "jaxinfer":
        return module
    layers = [layer for layer in MAY_IMPORT if layer != "jaxinfer" and is_within(module, layer)]
    return max(layers, key=len, default=None)


def is_ours(module: str) -> bool:
    return module.split(".")[0] in PACKAGES


def is_allowed(layer: str, target: str) -> bool:
    if layer != "jaxinfer" and is_within(target, layer):
        return True
    allowed = MAY_IMPORT[layer]
    if allowed is PACKAGES:
        return layer_of(target) not in ABOVE_ALL or (
            target in BELOW_DOCTOR and layer not in BELOW_DOCTOR[: 1 + BELOW_DOCTOR.index(target)]
        )
    return any(is_within(target, other) for other in allowed)


def at(module: str, found: Import) -> str:
    return f"{FILES[module].relative_to(ROOT)}:{found.line} imports {found.module}"


def listed(wrong: list[str]) -> str:
    return "\n  ".join(["", *wrong])


def test_every_file_belongs_to_a_layer():
    wrong = [module for module in FILES if layer_of(module) is None]
    assert not wrong, listed(wrong)


def test_no_layer_imports_one_that_it_may_not_know():
    wrong = [
        at(module, found)
        for module in FILES
        for found in imports(module)
        if (layer := layer_of(module)) and is_ours(found.module) and not is_allowed(layer, found.module)
    ]
    assert not wrong, listed(wrong)


def test_imports_are_absolute():
    wrong = [at(module, found) for module in FILES for found in imports(module) if found.relative]
    assert not wrong, listed(wrong)


def test_only_optional_dependencies_are_imported_inside_functions():
    wrong = [
        at(module, found)
        for module in FILES
        for found in imports(module)
        if found.inside_function
        and (layer_of(module), found.module.split(".")[0]) not in INSIDE_FUNCTIONS
        and module != "jaxinfer"  # its public names are loaded when they are asked for: see the tests below
    ]
    assert not wrong, listed(wrong)


def test_types_need_only_the_standard_library():
    wrong = [
        at(module, found)
        for module in ("jaxinfer.types", "jaxinfer.structured")
        for found in imports(module)
        if found.module.split(".")[0] not in sys.stdlib_module_names and found.module != "jaxinfer.structured"
    ]
    assert not wrong, listed(wrong)


def path_to_jax(module: str, seen: set[str]) -> list[str] | None:
    """The chain of imports by which loading a module loads JAX, the packages that hold it included."""
    if module.split(".")[0] in JAX:
        return [module]
    if not is_ours(module) or module in seen:
        return None
    seen.add(module)
    parts = module.split(".")
    parents = [".".join(parts[:n]) for n in range(1, len(parts))]
    loaded = [found.module for found in imports(module) if not (found.inside_function or found.for_types)]
    for target in [*(p for p in parents if p in FILES), *loaded]:
        if chain := path_to_jax(target, seen):
            return [module, *chain]
    return None


@pytest.mark.parametrize("layer", WITHOUT_JAX)
def test_nothing_that_the_host_only_layers_import_imports_jax(layer):
    chains = [path_to_jax(module, set()) for module in FILES if is_within(module, layer)]
    wrong = [" > ".join(chain) for chain in chains if chain]
    assert not wrong, listed(wrong)


def test_the_host_only_layers_do_not_load_jax():
    modules = [module for module in FILES if any(is_within(module, layer) for layer in WITHOUT_JAX)]
    code = f"import sys, {', '.join(modules)}; print(sorted({JAX!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
