"""Orbax stores: parameters in the layout that the step reads, so that a restore goes straight into shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from checkpoints.load import check_complete
from checkpoints.resolve import STORE_MARKER, Checkpoint
from checkpoints.source import CheckpointError
from jaxinfer.params import Params, ParamSpec, Specs

FORMAT_VERSION = 1
_PARAMS = "params"


def save(path: str | Path, params: Params, specs: Specs, checkpoint: Checkpoint) -> None:
    """Writes a new folder that `resolve` finds: the parameters, and the config and tokenizer files of `checkpoint`.

    A folder that exists and is not empty, or parameters that do not fit `specs`, raise CheckpointError. The marker is
    written last, so that an interrupted save is never taken for a store.
    """
    folder = Path(path).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: is not empty; a store is written to a new folder")
    check_complete(_shapes(specs), {name: array.shape for name, array in params.items()})
    folder.mkdir(parents=True, exist_ok=True)
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / _PARAMS, args=ocp.args.PyTreeSave(dict(params)))
    files = {
        "config.json": json.dumps(dict(checkpoint.config), indent=1),
        "generation_config.json": json.dumps(dict(checkpoint.generation_config), indent=1),
        "tokenizer_config.json": json.dumps(dict(checkpoint.tokenizer_config), indent=1, ensure_ascii=False),
        "tokenizer.json": checkpoint.tokenizer_json,
        STORE_MARKER: json.dumps({"version": FORMAT_VERSION, "params": _listing(params)}, indent=1),
    }
    for name, text in files.items():
        if text is not None:
            (folder / name).write_text(text, "utf-8")


def restore(path: str | Path, specs: Specs, dtype: jnp.dtype, shardings: Mapping[str, Sharding]) -> Params:
    """The parameters of a store on the devices of `shardings`, whatever mesh they were saved from.

    Each device reads its own part, or all of a parameter of which devices share parts. Parameters that are
    missing, extra or misshapen raise one CheckpointError.
    """
    import orbax.checkpoint as ocp

    folder = Path(path).absolute()
    check_complete(_shapes(specs), stored_shapes(folder))
    targets = {
        name: jax.ShapeDtypeStruct(spec.whole_shape, dtype, sharding=_stored_sharding(spec, shardings[name]))
        for name, spec in specs.items()
    }
    arguments = {
        name: ocp.ArrayRestoreArgs(sharding=target.sharding, global_shape=target.shape, dtype=target.dtype)
        for name, target in targets.items()
    }
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            request = ocp.args.PyTreeRestore(item=targets, restore_args=arguments)
            restored = checkpointer.restore(folder / _PARAMS, args=request)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder / _PARAMS}: cannot be restored ({type(error).__name__}: {error})") from error
    shared = {name for name, spec in specs.items() if spec.whole is not None}
    for name in shared:
        restored[name] = jax.jit(specs[name].spread, out_shardings=shardings[name])(restored[name])
    return restored


def _stored_sharding(spec: ParamSpec, sharding: Sharding) -> Sharding:
    """Of the array that is read: whole on every device where it is still to be spread."""
    if spec.whole is None:
        return sharding
    assert isinstance(sharding, NamedSharding)
    return NamedSharding(sharding.mesh, PartitionSpec())


def stored_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every stored parameter."""
    marker = Path(path) / STORE_MARKER
    try:
        content = json.loads(marker.read_text("utf-8"))
        if content["version"] != FORMAT_VERSION:
            raise CheckpointError(f"{marker}: version {content['version']!r} is not known; known: {FORMAT_VERSION}")
        return {name: tuple(entry["shape"]) for name, entry in content["params"].items()}
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{marker}: not the description of a store ({type(error).__name__}: {error})") from None


def _shapes(specs: Specs) -> dict[str, tuple[int, ...]]:
    return {name: spec.whole_shape for name, spec in specs.items()}


def _listing(params: Params) -> dict[str, dict[str, object]]:
    return {name: {"shape": list(array.shape), "dtype": str(array.dtype)} for name, array in params.items()}
