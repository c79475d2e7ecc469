"""Compiled programs kept whole on disk: a later start neither traces, nor runs Triton, nor lowers, nor compiles.

JAX's own cache of compilations is asked only after tracing and lowering, which takes a second for a step on an H200.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable

from jaxinfer.runner.disk_cache import DiskCache
from jaxinfer.runner.step import StepBuilder
from pallas_kernels.dispatch import HOPPER

log = logging.getLogger(__name__)

FORMAT = 1
SOURCES = (
    "jaxinfer/models",
    "jaxinfer/params.py",
    "jaxinfer/quant",
    "jaxinfer/runner",
    "jaxinfer/sharding",
    "pallas_kernels",
)
"""All that programs are traced from, below the folder that holds the packages."""
SOURCE_ROOT = Path(__file__).parents[2]
PACKAGES = ("jax", "nvidia_", "triton")
"""What a package's name begins with if it may change a program: JAX with its plugins, CUDA's libraries, Triton."""
VARIABLES = ("XLA_FLAGS", "JAX_", "TRITON_", "TF_XLA", "CUBLAS", "CUDNN", "NVIDIA_TF32_OVERRIDE", "LD_LIBRARY_PATH")
"""What the name of an environment variable begins with if it may change a program."""
HARMLESS_SETTINGS = (
    "jax_compilation_cache",
    "jax_enable_compilation_cache",
    "jax_explain",
    "jax_log",
    "jax_persistent_cache",
    "jax_pprint",
    "jax_raise_persistent_cache",
    "jax_traceback_filtering",
    "jax_tracer_error",
)
"""What the name of a setting of JAX begins with if it changes no program: caches, and what is told of an error."""


class Program(NamedTuple):
    """What is compiled. Together with the builder, its name says which function it is."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]  # abstract: shapes, dtypes and shardings
    result: Any  # anything of the structure of its result
    donated: tuple[int, ...] = ()
    options: Mapping[str, Any] | None = None  # of XLA
    out_shardings: Any = None  # of the result, where parts of it are to be on the host; None: XLA's choice


class Executables:
    """The cache of one model's programs. Without a disk it has nothing and keeps nothing."""

    def __init__(self, disk: DiskCache | None, config: Mapping[str, Any]):
        """config: the model's whole published config."""
        changed = None if disk is None else changed_source(SOURCE_ROOT, process_start_s())
        if changed is not None:
            log.warning("compiled steps are neither kept nor read: %s changed after this process began", changed)
        self._disk = disk if changed is None else None
        self._config = config
        self._fetched: dict[str, str] = {}  # names by keys
        self._lock = threading.Lock()

    @property
    def enabled(self) -> bool:
        """Whether anything is kept."""
        return self._disk is not None

    def key(self, builder: StepBuilder, program: Program) -> str:
        """Says all that can change the compiled program; 64 hexadecimal digits."""
        facts = {**environment(builder.mesh), "config": self._config, **_described(builder, program)}
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()

    def fetch(self, key: str, builder: StepBuilder, program: Program) -> jax.stages.Compiled | None:
        """The program that was kept under `key`, ready to run; None if there is none that works."""
        if (disk := self._disk) is None or (data := disk.get(key)) is None:
            return None
        if builder.target.compute_capability == HOPPER and not self._load_runtime():
            return None
        devices = list(builder.mesh.devices.flat)
        in_tree, out_tree = jax.tree.structure((program.args, {})), jax.tree.structure(program.result)
        try:
            compiled = serialize_executable.deserialize_and_load(
                data, in_tree, out_tree, backend=devices[0].client, execution_devices=devices
            )
        except Exception as error:  # whatever XLA or pickle make of it, compiling is the way on
            disk.discard(key, f"{program.name} cannot be loaded ({type(error).__name__}: {error})")
            return None
        with self._lock:
            self._fetched[key] = program.name
        return compiled

    def _load_runtime(self) -> bool:
        """Whether programs with kernels of Mosaic's find its library. If not, nothing is read or kept, and it says so.

        Such a program is no worse for it: nothing is deleted.
        """
        with self._lock:
            if self._disk is None:
                return False
            try:
                importlib.import_module("jax.experimental.mosaic.gpu")  # sets the variable that names the library
            except Exception as error:  # whatever an import may raise, compiling is the way on
                self._disk = None
                log.warning(
                    "compiled steps are neither kept nor read, and all are compiled anew: Mosaic's runtime cannot be "
                    "imported (%s: %s)",
                    type(error).__name__,
                    error,
                )
            return self._disk is not None

    def store(self, key: str, compiled: jax.stages.Compiled, *, complete: bool = True) -> bool:
        """Keeps a program. False if it could be kept, but only once compiled anew.

        complete: it was compiled here. One that JAX's cache had may lack code when it is written again: XLA's CPU
        backend then says "Function ... not found" when it runs. Says once if the backend cannot write programs at all.
        """
        if (disk := self._disk) is None:
            return True
        try:
            data, _, _ = serialize_executable.serialize(compiled)
        except (ValueError, NotImplementedError, TypeError, jax.errors.JaxRuntimeError) as error:
            with self._lock:
                first, self._disk = self._disk is not None, None
            if first:
                log.warning(
                    "compiled steps cannot be kept whole on this backend (%s); JAX's cache of compilations is left, "
                    "and every start traces them anew",
                    error,
                )
            return True
        if complete:
            disk.put(key, data)
        return complete

    def fetch_number(self, key: str) -> int | None:
        """What `store_number` kept."""
        data = None if self._disk is None else self._disk.get(_number_key(key))
        return None if data is None else int(data)

    def store_number(self, key: str, number: int) -> None:
        """Keeps something that was measured on the program of `key`."""
        if self._disk is not None:
            self._disk.put(_number_key(key), str(number).encode())

    def discard_fetched(self, reason: str) -> bool:
        """Deletes every program that was fetched, since one of them does not run; whether there was any."""
        fetched, self._fetched = self._fetched, {}
        for key, name in fetched.items():
            if self._disk is not None:
                self._disk.discard(key, f"{name}, or a program beside it, fails: {reason}")
        return bool(fetched)


def _number_key(key: str) -> str:
    return f"{key}.number"


def _described(builder: StepBuilder, program: Program) -> dict[str, Any]:
    """What the program computes, on what."""
    shape = dataclasses.asdict(builder.shape) | {"dtype": str(builder.shape.dtype)}
    args = [
        (jax.tree_util.keystr(path), arg.shape, str(arg.dtype), str(arg.sharding.spec), arg.sharding.memory_kind)
        for path, arg in jax.tree_util.tree_leaves_with_path(program.args)
    ]
    return {
        "architecture": builder.model.architecture,
        "vocab_size": builder.vocab_size,
        "shape": shape,
        "axis_rules": dict(builder.axis_rules),
        "program": program.name,
        "args": args,
        "donated": program.donated,
        "options": program.options,
    }


def environment(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """What the program is compiled by and for: sources, versions, settings and devices."""
    return {
        "format": FORMAT,
        "sources": source_digest(SOURCE_ROOT),
        "versions": _versions(),
        "settings": settings(),
        "variables": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(VARIABLES) and not name.lower().startswith(HARMLESS_SETTINGS)
        },
        "mesh": [mesh.axis_names, mesh.devices.shape, str(mesh.axis_types)],
        "devices": [_device(device) for device in mesh.devices.flat],
    }


def _source_files(root: Path) -> Iterator[Path]:
    for source in SOURCES:
        path = root / source
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else []


@functools.cache
def source_digest(root: Path) -> str:
    """Of the files that programs are traced from."""
    digest = hashlib.sha256()
    for file in _source_files(root):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def changed_source(root: Path, since_s: float) -> Path | None:
    """A source that changed since then: the digest of what is on disk would not be of what this process has loaded."""
    return next((file for file in _source_files(root) if file.stat().st_ctime > since_s), None)


def process_start_s() -> float:
    """When this process began, in seconds of time.time(); to 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since boot: man 5 proc
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


@functools.cache
def _versions() -> dict[str, Any]:
    """Of what is installed, by the names of its folders: reading its metadata would take 40 ms."""
    installed = {
        entry.name
        for folder in map(Path, sys.path)
        if folder.is_dir()
        for entry in folder.glob("*.dist-info")
        if entry.name.lower().startswith(PACKAGES)
    }
    driver = Path("/proc/driver/nvidia/version")
    return {
        "python": sys.version,
        "packages": sorted(installed),
        "jax": jax.__version__,
        "driver": driver.read_text() if driver.exists() else None,
    }


def settings() -> dict[str, Any]:
    """JAX's settings as they are on this thread."""
    return {
        name: getattr(jax.config, name, value)  # the attribute knows of contexts, the value is the process's
        for name, value in jax.config.values.items()
        if not name.startswith(HARMLESS_SETTINGS)
    }


def _device(device: jax.Device) -> list[Any]:
    about = [device.id, device.platform, device.device_kind, device.client.platform_version]
    if device.platform == "cpu":  # compiled for the very processor
        return [*about, *_processor()]
    return [*about, device.compute_capability, getattr(device, "core_count", None)]


@functools.cache
def _processor() -> tuple[str, ...]:
    """Kind and abilities of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return (platform.machine(), platform.processor())
    told = [line for line in lines if line.startswith(("model", "flags", "Features", "CPU"))]
    return (platform.machine(), *told)


@contextlib.contextmanager
def hits_of_jax() -> Iterator[list[str]]:
    """The events by which JAX says that its own cache of compilations had what this thread compiles meanwhile."""
    hits, thread = [], threading.get_ident()

    def on_event(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits" and threading.get_ident() == thread:
            hits.append(event)

    jax.monitoring.register_event_listener(on_event)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(on_event)
