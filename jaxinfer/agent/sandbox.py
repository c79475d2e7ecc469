"""Runs commands of a model under bubblewrap: no network, nothing of the user's to read, one folder to write to.

Visible are /usr, /lib*, /bin and the Python interpreter, read-only, a private /tmp in memory and the workspace. Memory,
CPU, processes and time are limited by means that hold for root as well: root becomes a user of its own before the tool
runs, since the kernel counts no processes of root. Whether all of it holds here is tried out before the first command
(`Sandbox.refusal`); where anything does not, there is no sandbox.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jaxinfer.agent import seccomp, supervise
from jaxinfer.agent.supervise import Outcome

_PYTHON_AT = "/python"
"""Where an interpreter outside of /usr is seen: its own path may lead through a home directory."""
_WORKSPACE_AT = "/workspace"
_FIRST_UID, _NUM_UIDS = 62000, 3000
"""Of the users that root becomes, by process: below 65536, as containers map no more, and above what systems assign."""
_TRIAL_S = 20.0
_MAX_COMMAND_BYTES = 100_000
"""The kernel takes 128 KiB in one argument."""


# Words of the system, and the limit that they speak of. A shell goes on after the first kind and reports success.
_SILENT = {
    "Resource temporarily unavailable|annot fork": "the limit of {processes} processes",
    "Read-only file system": "only {folder} and /tmp can be written to",
}
_SAID = _SILENT | {
    "MemoryError|annot allocate memory|out of memory": "the memory limit of {memory} MiB",
    "BlockingIOError|can't start new thread": "the limit of {processes} processes",
    "File too large|No space left": "the file size limit of {file} MiB",
    "Network is unreachable|ould not resolve|name resolution": "there is no network",
    "Too many open files": "the limit of {files} open files",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one command may take."""

    time_s: float = 30.0
    """Wall clock; then all its processes are ended."""
    cpu_s: int = 30
    """Of each process."""
    memory_bytes: int = 512 << 20
    """Address space of each process, and resident memory of all together; see `supervise.run`."""
    processes: int = 64
    """Processes and threads at once."""
    file_bytes: int = 64 << 20
    """Of each file that it writes, and of /tmp as a whole."""
    open_files: int = 256

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not (value := getattr(self, field.name)) > 0:
                raise ValueError(f"{field.name} is {value}; a limit must be above 0")

    def rlimits(self) -> dict[str, tuple[int, int]]:
        """Soft and hard resource limits, by name. A process that ignores the CPU limit's signal is ended 1 s later."""
        same = {
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
        }
        return {"RLIMIT_CPU": (self.cpu_s, self.cpu_s + 1)} | {name: (value, value) for name, value in same.items()}


class SandboxUnavailable(RuntimeError):
    """There is no sandbox here; the message says why."""


class Sandbox:
    """Where the commands of one agent run.

    workspace: the folder they may write to; None: a new one, which `close` removes. Raises SandboxUnavailable where it
    cannot be used. `bare` runs commands without any sandbox: as the user, with the network, under the time limit alone.
    """

    def __init__(self, workspace: str | Path | None = None, *, limits: Limits | None = None, bare: bool = False):
        self.limits = limits or Limits()
        self.bare = bare
        self._own_folder = None
        if workspace is None:
            self._own_folder = tempfile.TemporaryDirectory(prefix="jaxinfer-agent-", ignore_cleanup_errors=True)
            workspace = self._own_folder.name
        self.workspace = Path(workspace).resolve()
        if not self.workspace.is_dir():
            raise SandboxUnavailable(f"the workspace {str(workspace)!r} is not a folder; make it first")
        self._uid = None if bare or os.geteuid() != 0 else _owner(self.workspace)

    @functools.cached_property
    def refusal(self) -> str | None:
        """Why commands cannot run here; None: they can. Found by running one that tries to break out."""
        if self.bare:
            return None
        if shutil.which("bwrap") is None:
            return "bubblewrap (bwrap) is not installed"
        try:
            seccomp.program(platform.machine())
        except LookupError as error:
            return str(error)
        outcome = self._run([*self._python(), "-c", _PROBE, json.dumps(dataclasses.asdict(self.limits))], is_trial=True)
        lines = outcome.output.strip().splitlines()
        if outcome.status == 0 and lines and lines[-1] == "holds":
            return None
        return f"bubblewrap cannot confine commands here: {lines[-1] if lines else f'exit status {outcome.status}'}"

    def shell(self, command: str) -> Outcome:
        """Runs a shell command in the workspace. Raises SandboxUnavailable, and ValueError for what is no command."""
        shell = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"
        return self._checked([shell, "-c", command], command)

    def python(self, code: str) -> Outcome:
        """Runs a Python program in the workspace, with the standard library. Raises as `shell` does."""
        return self._checked([*self._python(), "-c", code], code)

    def close(self) -> None:
        """Removes the workspace if it was made here."""
        if self._own_folder is not None:
            self._own_folder.cleanup()

    def explain(self, outcome: Outcome) -> str:
        """What a model is told: the output, what was cut off, how it ended, and which limit it met."""
        text = outcome.output
        if outcome.num_chars > len(text):
            text += f"\n[output cut: the first {len(text)} of {outcome.num_chars} characters are shown]"
        ending = self._ending(outcome) if outcome.ended_by or outcome.status else self._met(outcome, _SILENT)
        if ending:
            text += "" if not text or text.endswith("\n") else "\n"
            text += f"[{ending}]"
        return text or "[no output]"

    def _ending(self, outcome: Outcome) -> str:
        limits = self.limits
        if outcome.ended_by == "time":
            return f"error: ended by the time limit of {limits.time_s:g} s" + self._hints(outcome)
        memory = f"the memory limit of {limits.memory_bytes >> 20} MiB"
        if outcome.ended_by == "memory":
            return f"error: ended by {memory}"
        by_signal = {
            128 + 24: f"ended by the CPU limit of {limits.cpu_s} s",
            128 + 25: f"ended by the file size limit of {limits.file_bytes >> 20} MiB",
        }
        return f"error: {by_signal.get(outcome.status, f'exit status {outcome.status}')}" + self._hints(outcome)

    def _hints(self, outcome: Outcome) -> str:
        met = self._met(outcome, _SAID)
        return f"; {met}" if met else ""

    def _met(self, outcome: Outcome, said: Mapping[str, str]) -> str:
        """The limits that the output speaks of in the system's own words."""
        limits = self.limits
        met = [
            limit.format(
                memory=limits.memory_bytes >> 20,
                processes=limits.processes,
                file=limits.file_bytes >> 20,
                files=limits.open_files,
                folder=_WORKSPACE_AT,
            )
            for words, limit in said.items()
            if any(word in outcome.output for word in words.split("|"))
        ]
        return f"the output points to: {', '.join(met)}" if met and not self.bare else ""

    def _checked(self, command: list[str], text: str) -> Outcome:
        if "\0" in text or len(text.encode(errors="replace")) > _MAX_COMMAND_BYTES:
            raise ValueError(
                f"a command of {len(text)} characters is too long, or holds a NUL; write at most {_MAX_COMMAND_BYTES} "
                f"bytes, or put it into a file first"
            )
        if self.refusal is not None:
            raise SandboxUnavailable(self.refusal)
        return self._run(command)

    def _python(self) -> list[str]:
        return [sys.executable if self.bare else _interpreter()[0], "-I"]

    def _run(self, command: Sequence[str], *, is_trial: bool = False) -> Outcome:
        """The trial has a time of its own, and its memory is not watched: what it tries is what each process gets."""
        limits = self.limits
        if self.bare:
            return supervise.run(command, timeout_s=limits.time_s, memory_bytes=None, cwd=self.workspace)
        with _filter() as fd:
            confined = [*self._bwrap(fd), "--", *self._launch(), *command]
            return supervise.run(
                confined,
                timeout_s=_TRIAL_S if is_trial else limits.time_s,
                memory_bytes=None if is_trial else limits.memory_bytes,
                pass_fds=[fd],
                env={"PATH": "/usr/bin:/bin"},
            )

    def _launch(self) -> list[str]:
        spec = importlib.util.find_spec("jaxinfer.agent.launcher")
        assert spec is not None and spec.origin is not None
        settings = json.dumps({"rlimits": self.limits.rlimits(), "uid": self._uid, "folder": _WORKSPACE_AT})
        return [_interpreter()[0], "-I", "-S", "-c", Path(spec.origin).read_text(), settings]

    def _bwrap(self, seccomp_fd: int) -> list[str]:
        bwrap = shutil.which("bwrap")
        assert bwrap is not None
        command = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        command += ["--die-with-parent", "--new-session", "--seccomp", str(seccomp_fd), "--clearenv"]
        if self._uid is None:
            command += ["--unshare-user"]
        else:  # the launcher becomes another user, and has no capability from then on
            command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        command += ["--ro-bind", "/usr", "/usr"]
        for name in sorted(name for name in os.listdir("/") if name == "bin" or name.startswith("lib")):
            path = Path("/", name)
            kind = ["--symlink", os.readlink(path)] if path.is_symlink() else ["--ro-bind", str(path)]
            command += [*kind, str(path)]
        if (prefix := _interpreter()[1]) is not None:
            command += ["--ro-bind", prefix, _PYTHON_AT, "--setenv", "LD_LIBRARY_PATH", f"{_PYTHON_AT}/lib"]
        size = str(self.limits.file_bytes)
        command += ["--proc", "/proc", "--dev", "/dev"]
        for folder in ("/dev/shm", "/tmp"):
            command += ["--perms", "1777", "--size", size, "--tmpfs", folder]
        command += ["--bind", str(self.workspace), _WORKSPACE_AT]
        command += ["--remount-ro", "/dev", "--remount-ro", "/"]
        variables = {"PATH": f"{_PYTHON_AT}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": _WORKSPACE_AT, "TMPDIR": "/tmp"}
        variables |= {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        for name, value in variables.items():
            command += ["--setenv", name, value]
        return command


def _interpreter() -> tuple[str, str | None]:
    """Path of this Python inside the sandbox, and its folder outside if that is not in /usr anyway.

    It is the interpreter that virtual environments are made from: their own packages are not shown.
    """
    prefix = Path(sys.base_prefix).resolve()
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if prefix.is_relative_to("/usr"):
        return str(prefix / "bin" / name), None
    return f"{_PYTHON_AT}/bin/{name}", str(prefix)


def _owner(workspace: Path) -> int:
    """The user that root becomes: the owner of the workspace. A new folder gets a user of its own."""
    owner = workspace.stat().st_uid
    if owner != 0:
        return owner
    if any(workspace.iterdir()):
        raise SandboxUnavailable(
            f"the workspace {str(workspace)!r} belongs to root and is not empty; tools do not run as root: give it to "
            f"another user (chown -R {_FIRST_UID} ...), or name an empty folder"
        )
    uid = _FIRST_UID + os.getpid() % _NUM_UIDS
    os.chown(workspace, uid, uid)
    workspace.chmod(0o700)
    return uid


@contextlib.contextmanager
def _filter() -> Iterator[int]:
    """A descriptor from which bwrap reads the filter of system calls."""
    with tempfile.TemporaryFile() as file:
        file.write(seccomp.program(platform.machine()))
        file.seek(0)
        yield file.fileno()


_PROBE = """
import json, mmap, os, resource, sys
limits = json.loads(sys.argv[1])
def fail(what):
    print(what)
    sys.exit(1)
if os.getuid() == 0 or os.geteuid() == 0:
    fail("commands would run as root")
for path in ("/home", "/root", "/etc", "/var", "/sys"):
    if os.path.lexists(path):
        fail(path + " can be seen")
for path in ("/x", "/usr/x", "/dev/x"):
    try:
        open(path, "w")
        fail(path + " can be written")
    except OSError:
        pass
try:
    open("/workspace/.probe", "w").close()
    os.unlink("/workspace/.probe")
except OSError as error:
    fail("the workspace cannot be written: " + str(error))
names = [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]]
if names != ["lo"]:
    fail("it has the network interfaces " + ", ".join(names))
try:
    mmap.mmap(-1, limits["memory_bytes"])
    fail("the memory limit does not hold")
except (OSError, MemoryError):
    pass
try:
    os.memfd_create("x")
    fail("the filter of system calls does not hold")
except OSError:
    pass
wanted = (limits["cpu_s"], limits["cpu_s"] + 1)
if resource.getrlimit(resource.RLIMIT_CPU) != wanted:
    fail("the CPU limit does not hold")
read, write = os.pipe()
children = []
while len(children) <= limits["processes"]:
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    children.append(pid)
else:
    fail("the limit on processes does not hold")
os.close(write)
for pid in children:
    os.waitpid(pid, 0)
if not children and limits["processes"] > 2:
    fail("no process can be started")
print("holds")
"""
"""Tries what must not be possible, and says what is."""
