"""Configuration: frozen, checked when made, every field with its unit. No file below reads the environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

PAGE_SIZES = (8, 16, 32, 64, 128, 256)
DTYPES = ("auto", "bfloat16", "float16", "float32")
LOAD_FORMATS = ("auto", "dummy")
TOOL_CALL_PARSERS = ("auto", "none", "hermes", "qwen3_coder", "deepseek_v3", "mistral", "llama3_json")
REASONING_PARSERS = ("auto", "none", "qwen3", "deepseek_r1")
DEFAULT_MODEL = "smollm2-135m"
MAX_COUNT = 2**30
"""Most of anything that is counted: devices count in 32 bits."""
MAX_GIB = 2**20
"""Most memory or disk, in GiB: a pebibyte."""
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.01, 86400.0
"""Shortest and longest time limit, in seconds: less than many a step takes, and a day."""
MAX_PROCESSES = 2**12
"""Most processes of an engine."""
MAX_FRONT_ENDS = 64
"""Most front-end processes of a server."""
ACCESS_LOGS = ("off", "requests", "prompts")


class ConfigError(ValueError):
    """A configuration that cannot work; the message names the value and what would work."""


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What a user may say of an engine. None: decided from the model, the devices and their memory."""

    model: str = DEFAULT_MODEL
    """A folder, a GGUF file, a Hugging Face Hub id, or an alias."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    load_format: str = "auto"
    """auto: read the checkpoint. dummy: random weights for its config (a folder with config.json is enough)."""
    dtype: str = "auto"
    """Of weights, activations and KV cache. auto: bfloat16 on a GPU, float32 on a CPU."""
    max_model_len: int | None = None
    """Usable context in tokens, prompt and output together. None: the model's own limit."""
    page_size: int = 16
    """Tokens per page of the KV cache."""
    num_pages: int | None = None
    """Pages of the KV cache, of each group of devices that has sequences of its own (mesh axis data).

    None: from memory."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory for weights, temporaries and KV cache together."""
    max_num_seqs: int | None = None
    """Sequences that run at once (slots of device state), in each such group.

    None: 256 on a GPU, 8 on a CPU; in a batch job 512 on a GPU whose memory holds enough beside them."""
    max_num_batched_tokens: int | None = None
    """Most tokens in one step, of each such group. None: 8192 on a GPU, 512 on a CPU."""
    max_step_ms: float = 30.0
    """Longest step, in milliseconds, while sequences decode: prompts are cut into chunks that keep to it.

    Measured at warm-up on a GPU; on a CPU the chunk is 64 tokens. inf: any step may be as long as the largest. That is
    the default of a batch job."""
    max_waiting: int = 1024
    """Requests that may wait for a slot before further ones are refused."""
    step_timeout_s: float = 300.0
    """A step, or a wait without any progress, that takes longer fails the requests it holds. In seconds."""
    enable_prefix_caching: bool = True
    """Whether keys and values of earlier requests are used again by those that begin alike."""
    enable_prompt_logprobs: bool = False
    """Whether requests may ask for log-probabilities of their prompts, which takes a second set of compiled steps."""
    num_state_copies: int | None = None
    """Of models with a recurrent state: copies that the prefix cache keeps of it; without one no prefix is used again.

    0: it keeps nothing. None: 64 on a GPU, 16 on a CPU."""
    kv_host_gib: float = 0.0
    """GiB of pinned host memory for pages of the KV cache that leave the device. 0: none.

    Needs enable_prefix_caching."""
    kv_disk_dir: str | None = None
    """Folder for pages that leave the host's memory, and for sessions; it survives a restart. None: none.

    Needs kv_host_gib."""
    kv_disk_gib: float = 64.0
    """Most GiB in kv_disk_dir. Saved sessions are never deleted for it."""
    tensor_parallel_size: int = 1
    """Devices that the heads, the MLP and the vocabulary are split over: the same as mesh tensor=N."""
    enable_expert_parallel: bool = False
    """Whether these devices share out whole experts, rather than a slice of each. Nothing else of a model changes.

    The same as rules whole-experts."""
    mesh: Any = None
    """Devices by axis: "tensor=2,expert=4", the same as a mapping, or a jax.sharding.Mesh. The last axis is that of
    neighbouring devices. None: tensor_parallel_size of them."""
    rules: Any = None
    """What is split over which axis: the name of a preset, or a mapping from logical axes to mesh axes.

    None: tensor."""
    num_processes: int = 1
    """Processes that the mesh's devices belong to, one on each host: see process_id. They run the same code, and have
    the same model and options but for process_id."""
    process_id: int = 0
    """Which of them this is. Process 0 schedules, and alone takes requests; the others follow it."""
    coordinator: str | None = None
    """HOST:PORT of process 0, where it waits for the others, and by whose HOST they reach JAX's own service, too.

    Nothing that is said there is encrypted, and whoever reaches it can join in another's place: HOST is to be an
    address in a network of these hosts alone. Process 0 listens at that address and no other."""
    initialization_timeout_s: float = 300.0
    """How long processes wait until all of them are there, in seconds."""
    seed: int = 0
    """Of random weights, with load_format dummy."""
    compile_cache_dir: str | None = None
    """Folder in which compiled steps are kept between runs, whole ones in its folder `steps`, of 1 GiB at most.

    None: ~/.cache/jaxinfer/xla. Empty: none. What is in it is run as code: nobody else may write to it."""

    def __post_init__(self) -> None:
        def at_least(name: str, least: int) -> None:
            value = getattr(self, name)
            _check(value is None or value >= least, f"{name} is {value}; it must be at least {least}")
            _check(value is None or value <= MAX_COUNT, f"{name} is {value}; it must be at most {MAX_COUNT}")

        _check(bool(self.model), "model is empty; give a folder, a GGUF file, a Hub id or an alias")
        _check(
            self.load_format in LOAD_FORMATS, f"load_format is {self.load_format!r}; known: {', '.join(LOAD_FORMATS)}"
        )
        _check(self.dtype in DTYPES, f"dtype is {self.dtype!r}; known: {', '.join(DTYPES)}")
        _check(
            self.page_size in PAGE_SIZES,
            f"page_size is {self.page_size}; it must be a power of two from 8 to 256",
        )
        at_least("max_model_len", 2)
        at_least("num_pages", 1)
        at_least("max_num_seqs", 1)
        at_least("max_num_batched_tokens", 16)
        at_least("max_waiting", 1)
        at_least("num_state_copies", 0)
        at_least("tensor_parallel_size", 1)
        _check(
            0 < self.gpu_memory_utilization <= 1,
            f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be above 0 and at most 1",
        )
        _check(self.max_step_ms > 0, f"max_step_ms is {self.max_step_ms}; it must be above 0")
        _check(
            MIN_TIMEOUT_S <= self.step_timeout_s <= MAX_TIMEOUT_S,
            f"step_timeout_s is {self.step_timeout_s}; it must be from {MIN_TIMEOUT_S:g} to {MAX_TIMEOUT_S:g} seconds",
        )
        self._check_mesh()
        self._check_tiers()
        self._check_processes()

    def _check_mesh(self) -> None:
        size, whole = self.tensor_parallel_size, self.enable_expert_parallel
        _check(
            self.mesh is None or size == 1,
            f"mesh is {self.mesh!r} and tensor_parallel_size is {size}; give one: mesh tensor={size} is the same",
        )
        _check(
            self.rules is None or not whole,
            f"rules is {self.rules!r} and enable_expert_parallel is {whole}; give one: rules whole-experts is the same",
        )

    def _check_processes(self) -> None:
        count, which, limit_s = self.num_processes, self.process_id, self.initialization_timeout_s
        _check(1 <= count <= MAX_PROCESSES, f"num_processes is {count}; it must be from 1 to {MAX_PROCESSES}")
        _check(0 <= which < count, f"process_id is {which} of {count} processes; it must be from 0 to {count - 1}")
        _check(
            MIN_TIMEOUT_S <= limit_s <= MAX_TIMEOUT_S,
            f"initialization_timeout_s is {limit_s}; it must be from {MIN_TIMEOUT_S:g} to {MAX_TIMEOUT_S:g} seconds",
        )
        if count == 1:
            _check(
                self.coordinator is None,
                f"coordinator is {self.coordinator!r} and num_processes is 1; several processes meet there",
            )
            return
        host, _, port = (self.coordinator or "").rpartition(":")
        _check(
            bool(host) and port.isdecimal() and 0 < int(port) < 65536,
            f"coordinator is {self.coordinator!r} with {count} processes; HOST:PORT of process 0 is needed",
        )
        one_host = {"kv_host_gib": self.kv_host_gib, "kv_disk_dir": self.kv_disk_dir}
        for name, value in one_host.items():
            _check(
                not value,
                f"{name} is {value!r} with {count} processes; pages that leave the devices, and so sessions and "
                "contexts beyond these, are kept by one process for all of its devices: leave it out",
            )
        _check(
            not self.compile_cache_dir,
            f"compile_cache_dir is {self.compile_cache_dir!r} with {count} processes; these compile together in every "
            "start, and one that had steps already would not take part: leave it out",
        )
        _check(
            self.mesh is None or isinstance(self.mesh, str | Mapping),
            f"mesh is a {type(self.mesh).__name__} with {count} processes; its devices are known only once these have "
            "met: give the sizes of its axes",
        )

    def _check_tiers(self) -> None:
        host_gib, directory, disk_gib = self.kv_host_gib, self.kv_disk_dir, self.kv_disk_gib
        _check(0 <= host_gib <= MAX_GIB, f"kv_host_gib is {host_gib}; it must be from 0 to {MAX_GIB} GiB")
        _check(0 < disk_gib <= MAX_GIB, f"kv_disk_gib is {disk_gib}; it must be above 0 and at most {MAX_GIB} GiB")
        _check(
            host_gib == 0 or self.enable_prefix_caching,
            f"kv_host_gib is {host_gib} and enable_prefix_caching is {self.enable_prefix_caching}; only pages of the "
            "prefix cache leave the device, so it must be enabled",
        )
        _check(directory is None or bool(directory), "kv_disk_dir is empty; give a folder, or leave it out for none")
        _check(
            directory is None or host_gib > 0,
            f"kv_disk_dir is {directory!r} and kv_host_gib is {host_gib}; pages go to disk by way of the host's "
            "memory, so kv_host_gib must be above 0",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """What the scheduler may plan; resolved from EngineConfig, the model and the compiled buckets."""

    max_model_len: int  # tokens, prompt and output together
    page_size: int  # tokens
    num_pages: int  # pages that sequences may own; ids are 1..num_pages, since page 0 takes the writes of padding
    max_num_seqs: int  # slots, numbered from 0
    max_step_tokens: int  # tokens in a step while nothing decodes
    max_mixed_tokens: int  # tokens in a step with decode rows, these included
    calm_mixed_tokens: int | None = None  # the same while few sequences wait; None: no less than always
    max_waiting: int  # requests
    prefix_caching: bool = False  # whether pages are kept for requests that begin alike
    num_frames: int = 0  # of the host tier; with 0 there is none
    frame_pages: int = 1  # pages of a frame, which are copied at once
    restore_ms: float = 0.0  # to copy a frame from the host to the device
    compute_ms: float = 0.0  # to compute the keys and values of a token anew
    num_disk_pages: int = 0  # with 0 there is no disk tier
    fingerprint: str = ""  # of the model, in the names of pages on disk
    num_states: int = 0  # copies of recurrent states that are kept for requests that begin alike
    state_tokens: int = 0  # positions between them; with 0 sequences have no state but their pages
    long_tokens: int = 0  # that the host holds of a context which the pool does not; with 0 there is none longer
    long_chunk: int = 0  # most tokens of a step behind the pool
    # Milliseconds of full steps by size, for steps to be cut where padding would cost more; empty: none is.
    mixed_ms: Mapping[int, float] = dataclasses.field(default_factory=dict)  # by tokens
    decode_ms: Mapping[int, float] = dataclasses.field(default_factory=dict)  # by rows

    def __post_init__(self) -> None:
        _check(
            self.max_mixed_tokens >= self.max_num_seqs,
            f"max_mixed_tokens is {self.max_mixed_tokens}, less than max_num_seqs {self.max_num_seqs}: a step must "
            "hold a row of every sequence",
        )
        _check(self.max_step_tokens >= 1, f"max_step_tokens is {self.max_step_tokens}; it must be at least 1")
        if self.mixed_ms:
            for name, times, most in (
                ("mixed_ms", self.mixed_ms, max(self.max_step_tokens, self.max_mixed_tokens)),
                ("decode_ms", self.decode_ms, self.max_num_seqs),
            ):
                largest = max(times, default=0)
                _check(largest >= most, f"{name} is of sizes up to {largest}; a step may have {most}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP face."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    served_model_names: Sequence[str] = ()
    """Names that clients may use; the first is reported. Empty: the name that was loaded."""
    chat_template: str | None = None
    """Jinja template in place of the model's own."""
    chat_template_kwargs: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Passed to every rendering; a request's own override them."""
    batch_dir: str | None = None
    """Folder for /v1/files and /v1/batches, which go on after a restart. None: the server has neither."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls. auto: as its chat template shows them. none: requests with tools are refused."""
    reasoning_parser: str = "auto"
    """How the model marks its thought. auto: qwen3 if the chat template has <think> or </think>. none: not at all.

    deepseek_r1 takes the output for a thought from its start on, though neither prompt nor model has opened one."""
    api_server_count: int | None = None
    """Front-end processes that read HTTP and write streams, behind one port. Each loads the tokenizer.

    None: 1 where the process may use fewer than 8 cores, 2 from 8 on, 4 from 16 on. With 1, HTTP is served in the
    process that was started."""
    api_keys: Sequence[str] = dataclasses.field(default=(), repr=False)
    """Keys of which a client must show one. Empty: all may ask.

    /health, /ping, /ready, /metrics and the files of the page at / ask for none."""
    allow_public_without_key: bool = False
    """Whether an address that other machines reach may be served without api_keys."""
    allowed_origins: Sequence[str] = ()
    """Origins of web pages that may read replies (CORS), such as https://chat.example; "*": of any. Empty: of none."""
    allowed_methods: Sequence[str] = ("*",)
    """Methods that these pages may use."""
    allowed_headers: Sequence[str] = ("*",)
    """Request headers that these pages may send."""
    allow_credentials: bool = False
    """Whether these pages' requests may carry cookies and the like."""
    ssl_certfile: str | None = None
    """PEM file with the certificate, and those that vouch for it, to serve HTTPS with. None: HTTP."""
    ssl_keyfile: str | None = None
    """PEM file with the certificate's private key, not encrypted. None: it is in ssl_certfile."""
    strict_max_tokens: bool = False
    """Whether a request is refused whose prompt and max_tokens together are more than the context. False: it is cut."""
    request_timeout_s: float | None = None
    """A request that takes longer, in seconds, ends with an error, streamed or not. None: it may take any time."""
    drain_timeout_s: float = 5.0
    """What requests in progress get to finish, in seconds, once the server is told to stop."""
    access_log: str = "off"
    """requests: a line for each request on standard error. prompts: with the beginning of its body, too."""

    def __post_init__(self) -> None:
        count = self.api_server_count
        _check(
            count is None or 1 <= count <= MAX_FRONT_ENDS,
            f"api_server_count is {count}; it must be from 1 to {MAX_FRONT_ENDS}",
        )
        _check(self.batch_dir != "", "batch_dir is empty; give a folder, or leave it out for none")
        for name, known in (("tool_call_parser", TOOL_CALL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            value = getattr(self, name)
            _check(value in known, f"{name} is {value!r}; known: {', '.join(known)}")
        _check(0 <= self.port < 65536, f"port is {self.port}; it must be from 0 to 65535")
        _check(bool(self.host), "host is empty; 127.0.0.1 serves this machine alone, 0.0.0.0 every interface")
        self._check_access()
        for name, least_s in (("request_timeout_s", MIN_TIMEOUT_S), ("drain_timeout_s", 0.0)):
            value = getattr(self, name)
            _check(
                value is None or least_s <= value <= MAX_TIMEOUT_S,
                f"{name} is {value}; it must be from {least_s:g} to {MAX_TIMEOUT_S:g} seconds",
            )
        _check(self.access_log in ACCESS_LOGS, f"access_log is {self.access_log!r}; known: {', '.join(ACCESS_LOGS)}")

    def _check_access(self) -> None:
        for name in ("api_keys", "allowed_origins", "allowed_methods", "allowed_headers"):
            value = getattr(self, name)
            _check(not isinstance(value, str), f"{name} is one string; give a list of them")
        for number, key in enumerate(self.api_keys, 1):  # the key itself is shown to nobody
            fits = bool(key) and key.isascii() and key.isprintable() and " " not in key
            _check(fits, f"API key {number} is empty or has what no header carries; give printable ASCII, no spaces")
        for origin in self.allowed_origins:
            scheme, separator, host = origin.partition("://")
            ok = origin == "*" or bool(scheme and separator and host and "/" not in host)
            _check(ok, f"allowed_origins has {origin!r}; give scheme://host, with a port if it has one, or *")
        _check(
            not (self.allow_credentials and "*" in self.allowed_origins),
            "allow_credentials is True and allowed_origins has '*': any page could act for a user; name the origins",
        )
        _check(
            self.ssl_keyfile is None or self.ssl_certfile is not None,
            f"ssl_keyfile is {self.ssl_keyfile!r} and there is no ssl_certfile; HTTPS needs the certificate, too",
        )
