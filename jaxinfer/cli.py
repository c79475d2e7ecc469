"""The command line: a thin face over api.py."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxinfer import access_flags, agent_flags, batch_flags, plan_flags, process_flags, ray_flags
from jaxinfer.agent_flags import API_KEY_VARIABLE
from jaxinfer.config import (
    DEFAULT_MODEL,
    DTYPES,
    LOAD_FORMATS,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    ConfigError,
    EngineConfig,
    ServerConfig,
)
from jaxinfer.types import EngineDead, InvalidRequest, SamplingParams

if TYPE_CHECKING:  # what loads JAX is imported where a command needs it: it takes 1.5 s
    from jaxinfer.api import LLM

EXIT_FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status says whether it succeeded."""
    args = _parser().parse_args(argv)
    try:
        return (_follow if getattr(args, "process_id", None) else args.run)(args) or 0
    except KeyboardInterrupt:
        print(f"jaxinfer {args.command}: interrupted", file=sys.stderr)
        return EXIT_FAILED
    except (*_refusals(args), InvalidRequest, EngineDead, OSError) as error:
        print(f"jaxinfer {args.command}: {error}", file=sys.stderr)
        return EXIT_FAILED


def _installed_version() -> str:
    try:
        return importlib.metadata.version("jaxinfer")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a source tree


def _refusals(args: argparse.Namespace) -> tuple[type[Exception], ...]:
    """The errors of a command whose message says it all. Asked for once there is one: until then nothing is loaded."""
    command = args.command
    if command == "serve" or getattr(args, "process_id", None):  # see `_follow`
        from jaxinfer import serving

        return serving.REFUSALS
    if command == "agent" and "jaxinfer.api" not in sys.modules:  # with a URL it loads no JAX
        return agent_flags.refusals()
    if command == "batch":
        from jaxinfer import offline

        return offline.REFUSALS
    from jaxinfer import api

    return (*api.REFUSALS, *(agent_flags.refusals() if command == "agent" else ()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxinfer", description="Large language models on NVIDIA GPUs, from JAX.")
    parser.add_argument("--version", action="version", version=f"jaxinfer {_installed_version()}")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    serve = command("serve", _serve, "Serve a model as OpenAI's HTTP API.")
    _add_engine(serve)
    _add_server(serve)
    ray_flags.add(serve)
    generate = command("generate", _generate, "Complete a prompt, or answer it as a chat message.")
    _add_engine(generate)
    _add_sampling(generate)
    generate.add_argument("--prompt", required=True)
    generate.add_argument("--chat", action="store_true", help="send the prompt through the model's chat template")
    generate.add_argument("--stats", action="store_true", help="print time to first token and tokens per second")
    chat = command("chat", _chat, "Talk to a model in the terminal.")
    _add_engine(chat)
    _add_sampling(chat)
    chat.add_argument("--system", help="system message")
    agent = command("agent", _agent, "Let a model answer with tools, in the terminal or once.")
    _add_engine(agent)
    _add_sampling(agent)
    agent_flags.add(agent)
    batch = command("batch", _batch, "Answer every row of a file; run again, an interrupted job goes on.")
    _add_engine(batch)
    batch_flags.add(batch)
    ray_flags.add(batch)
    _add_sampling(batch)
    convert = command("convert", _convert, "Write a checkpoint as an Orbax store, which loads into any sharding.")
    convert.add_argument("model", help="folder, GGUF file, Hub id or alias")
    convert.add_argument("out", help="new folder")
    convert.add_argument("--revision")
    convert.add_argument("--dtype", choices=DTYPES, default="auto", help="of the stored weights; auto: as they are")
    check = command("doctor", _doctor, "Report on Python, JAX, devices, memory and whether a model fits.")
    _add_engine(check)
    check.add_argument("--memory", action="store_true", help="say where the bytes of each device go, part by part")
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    plan = command("shard-report", _shard_report, "Say what a model would take on a mesh of GPUs, without any.")
    plan_flags.add(plan)
    return parser


def _add_engine(parser: argparse.ArgumentParser) -> None:
    """Flags of EngineConfig, under the names that users of vLLM know."""
    group = parser.add_argument_group("engine")
    group.add_argument("model_name", nargs="?", metavar="MODEL", help="the same as --model")
    group.add_argument(
        "--model", "--model-path", default=None, help=f"folder, GGUF file, Hub id or alias (default {DEFAULT_MODEL})"
    )
    group.add_argument("--revision", help="branch, tag or commit of a Hub id")
    group.add_argument("--load-format", choices=LOAD_FORMATS, help="dummy: random weights for a config")
    group.add_argument("--dtype", choices=DTYPES, help="auto: bfloat16 on a GPU, float32 on a CPU")
    group.add_argument("--max-model-len", "--max-seq-len", type=int, help="usable context in tokens")
    group.add_argument("--page-size", "--block-size", type=int, help="tokens per page of the KV cache")
    group.add_argument("--num-pages", type=int, help="pages of the KV cache (default: what memory holds)")
    group.add_argument("--gpu-memory-utilization", type=float, help="share of the device's memory to use")
    group.add_argument(
        "--max-num-seqs",
        "--num-slots",
        type=int,
        help="sequences that run at once (default: 256 on a GPU, 512 in a batch job where memory allows; 8 on a CPU)",
    )
    group.add_argument("--max-num-batched-tokens", type=int, help="most tokens in one step")
    group.add_argument(
        "--max-step-ms",
        type=float,
        help="longest step while sequences decode, in ms; inf: no limit (default 30, in a batch job inf)",
    )
    group.add_argument("--max-waiting", type=int, help="requests that may wait before others are refused")
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="use keys and values of earlier requests again where prompts begin alike (default: yes)",
    )
    group.add_argument(
        "--kv-host-gib",
        "--kv-offloading-size",
        type=float,
        help="GiB of pinned host memory for pages that leave the device (default 0: none)",
    )
    group.add_argument("--kv-disk-dir", help="folder for pages that leave the host's memory, and for sessions")
    group.add_argument("--kv-disk-gib", type=float, help="most GiB in that folder (default 64)")
    group.add_argument("--step-timeout-s", type=float, help="a step that takes longer fails its requests (default 300)")
    group.add_argument(
        "--enable-prompt-logprobs", action="store_true", default=None, help="compile steps for echo with logprobs, too"
    )
    group.add_argument("--tensor-parallel-size", "-tp", type=int, help="devices that the model is split over")
    group.add_argument(
        "--enable-expert-parallel",
        action=argparse.BooleanOptionalAction,
        help="each of these devices holds whole experts instead of a slice of every one (default: no)",
    )
    group.add_argument("--mesh", help="devices by axis, as in tensor=2,expert=4")
    group.add_argument("--rules", help="what goes over which axis: tensor (default), whole-experts, data-attention")
    group.add_argument(
        "--num-state-copies",
        type=int,
        help="recurrent states that the prefix cache keeps (default: 64 on a GPU, 16 on a CPU)",
    )
    group.add_argument("--seed", type=int, help="of random weights")
    group.add_argument("--compile-cache-dir", help="folder for compiled steps; empty: none")
    process_flags.add(parser)


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", default=ServerConfig.host)
    group.add_argument("--port", type=int, default=ServerConfig.port)
    group.add_argument("--served-model-name", nargs="+", default=(), help="names that clients may use")
    group.add_argument("--api-server-count", type=int, help="front-end processes (default: by the number of cores)")
    group.add_argument("--batch-dir", help="folder for /v1/files and /v1/batches (default: the server has neither)")
    group.add_argument("--chat-template", help="file with a Jinja template, in place of the model's own")
    group.add_argument(
        "--tool-call-parser",
        choices=TOOL_CALL_PARSERS,
        default=ServerConfig.tool_call_parser,
        help="how the model writes tool calls (auto: as its chat template shows; none: tools are refused)",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default=ServerConfig.reasoning_parser,
        help="how the model marks its thought (auto: by tags in its chat template; none: it is part of the answer)",
    )
    access_flags.add(parser, API_KEY_VARIABLE)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--temperature", type=float)
    group.add_argument("--top-k", type=int)
    group.add_argument("--top-p", type=float)
    group.add_argument("--min-p", type=float)
    group.add_argument("--sampling-seed", type=int, help="the same seed gives the same output")


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The EngineConfig fields that the command line gave."""
    if args.model is not None and args.model_name is not None and args.model != args.model_name:
        raise ConfigError(f"two models are named: {args.model_name!r} and --model {args.model!r}; give one")
    options = {field.name: getattr(args, field.name) for field in dataclasses.fields(EngineConfig)}
    options["model"] = next((name for name in (args.model, args.model_name) if name is not None), DEFAULT_MODEL)
    return {name: value for name, value in options.items() if value is not None}


def _sampling(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.sampling_seed,
    )


def _serve(args: argparse.Namespace) -> None:
    server: dict[str, Any] = {
        "served_model_names": tuple(args.served_model_name),
        "api_server_count": args.api_server_count,
        "batch_dir": args.batch_dir,
        "allow_public_without_key": args.allow_public_without_key,
        "allow_credentials": args.allow_credentials,
        "strict_max_tokens": args.strict_max_tokens,
        "api_keys": tuple(args.api_key or filter(None, [os.environ.get(API_KEY_VARIABLE)])),
        "tool_call_parser": args.tool_call_parser,
        "reasoning_parser": args.reasoning_parser,
    }
    given = {name: getattr(args, name) for name in access_flags.FIELDS}
    server |= {name: value for name, value in given.items() if value is not None}
    if args.chat_template is not None:
        with open(args.chat_template, encoding="utf-8") as file:
            server["chat_template"] = file.read()
    from jaxinfer import serving

    cluster = ray_flags.given(args)
    serving.serve(host=args.host, port=args.port, server=server, ray=cluster, **_engine_options(args))


def _follow(args: argparse.Namespace) -> None:
    """Whatever process 0 does, the others do the steps of."""
    from jaxinfer import serving

    if args.command == "doctor":
        raise ConfigError(f"process_id is {args.process_id}; doctor reports on one process")
    if getattr(args, "ray", False):
        raise ConfigError(f"--ray is given, and process_id is {args.process_id}; an engine of a cluster is one process")
    serving.follow(EngineConfig(**_engine_options(args)))


def _batch(args: argparse.Namespace) -> None:
    batch_flags.run(args, _engine_options(args))


def _generate(args: argparse.Namespace) -> None:
    from jaxinfer import api

    sampling = _sampling(args)
    with api.LLM(**_engine_options(args)) as llm:
        prompt: Any = llm.chat_prompt([{"role": "user", "content": args.prompt}]) if args.chat else args.prompt
        stats = _print_stream(llm, prompt, sampling, before="" if args.chat else args.prompt)
    if args.stats:
        print(f"\n{stats}")


def _chat(args: argparse.Namespace) -> None:
    from jaxinfer import api

    sampling = _sampling(args)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    with api.LLM(**_engine_options(args)) as llm:
        print("An empty line, 'exit' or end of file ends the chat; Ctrl-C stops an answer.")
        while (line := _read_line()) not in ("", "exit", "quit"):
            messages.append({"role": "user", "content": line})
            stats = _print_stream(llm, llm.chat_prompt(messages), sampling)
            messages.append({"role": "assistant", "content": stats.text})


def _agent(args: argparse.Namespace) -> int:
    return agent_flags.run(args, _engine_options(args), _sampling(args))


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


@dataclasses.dataclass(slots=True)
class _Stats:
    """What a stream took."""

    text: str = ""
    num_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0

    def __str__(self) -> str:
        decode_s = self.total_s - self.first_token_s
        rate = f"{(self.num_tokens - 1) / decode_s:.1f} tokens/s" if self.num_tokens > 1 and decode_s > 0 else "n/a"
        return f"time to first token {self.first_token_s * 1e3:.0f} ms, {self.num_tokens} tokens, {rate}"


def _print_stream(llm: LLM, prompt: Any, sampling: SamplingParams, *, before: str = "") -> _Stats:
    """Prints an answer as it comes, after `before` once the request is accepted. Ctrl-C ends it, not the program."""
    stats = _Stats()
    start_s = time.perf_counter()
    stream = llm.stream(prompt, sampling)
    print(before, end="", flush=True)
    try:
        for delta in stream:
            if stats.num_tokens == 0:
                stats.first_token_s = time.perf_counter() - start_s
            stats.num_tokens += len(delta.token_ids)
            stats.text += delta.text
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        stream.close()
    stats.total_s = time.perf_counter() - start_s
    print()
    return stats


def _convert(args: argparse.Namespace) -> None:
    from jaxinfer import api

    api.convert(args.model, args.out, revision=args.revision, dtype=args.dtype)


def _doctor(args: argparse.Namespace) -> int:
    from jaxinfer import doctor

    config = EngineConfig(**_engine_options(args))
    if config.num_processes > 1:
        raise ConfigError(f"num_processes is {config.num_processes}; doctor reports on one process")
    report = doctor.examine(config, memory=args.memory)
    print(report.to_json() if args.json else report)
    return 0 if report.healthy else EXIT_FAILED


def _shard_report(args: argparse.Namespace) -> int:
    from jaxinfer import shard_report

    return shard_report.run(args)


if __name__ == "__main__":
    sys.exit(main())
