"""The sandbox under attack: each is contained, the model is told which limit it met, and the loop goes on."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxinfer import Agent
from jaxinfer.agent import seccomp
from jaxinfer.agent.sandbox import Limits, Sandbox, SandboxUnavailable
from jaxinfer.agent.supervise import MAX_OUTPUT_CHARS, OutputCut
from jaxinfer.agent.tools import sandbox_tools
from tests.agent.scripted import ScriptedModel, call

LIMITS = Limits(time_s=10.0, cpu_s=5, processes=32)


@pytest.fixture(scope="module")
def sandbox():
    box = Sandbox(limits=LIMITS)
    # No skip: without bubblewrap the tools' safety is untested, and that is a failure.
    assert box.refusal is None, f"no sandbox, install bubblewrap: {box.refusal}"
    yield box
    box.close()


@pytest.fixture
def quick(sandbox):
    """The same with a second for each command."""
    return Sandbox(sandbox.workspace, limits=Limits(time_s=1.0, processes=32))


def shell(box, command):
    return box.explain(box.shell(command))


def python(box, code):
    return box.explain(box.python(code))


def processes_of(box):
    """Command lines that name the workspace, and processes of the sandbox's user."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                owned = box._uid is not None and entry.stat().st_uid == box._uid
                if owned or str(box.workspace) in (entry / "cmdline").read_text():
                    found.append((entry / "cmdline").read_text())
            except OSError:
                pass
    return found


def nothing_is_left(box):
    end = time.monotonic() + 5
    while processes_of(box):
        assert time.monotonic() < end, processes_of(box)
        time.sleep(0.02)


def test_files_outside_cannot_be_read(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the password")
    secret.chmod(0o644)
    for path in (secret, Path.home(), "/etc/passwd", "/root", "/home", Path(__file__), "/var", "/sys"):
        told = shell(sandbox, f"cat {path}; ls {path}")
        assert "No such file or directory" in told and "password" not in told, path
    assert "Permission denied" in shell(sandbox, "cat /proc/1/environ")


def test_the_environment_is_clean(sandbox, monkeypatch):
    monkeypatch.setenv("JAXINFER_API_KEY", "the password")
    told = python(sandbox, "import os; print(sorted(os.environ)); print(open('/proc/self/environ').read())")
    assert "API_KEY" not in told and "the password" not in told and "'HOME'" in told


def test_no_socket_reaches_anything(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = "import socket; socket.create_connection(('{}', {}), 2)"
        assert "refused" in python(sandbox, code.format("127.0.0.1", port))
        told = python(sandbox, code.format("1.1.1.1", 80))
    assert "Network is unreachable" in told and told.endswith("the output points to: there is no network]")
    assert "Address family not supported" in python(sandbox, "import socket; socket.socket(socket.AF_VSOCK)")


def test_a_fork_bomb_meets_the_limit_on_processes_and_leaves_none(sandbox):
    told = shell(sandbox, "b() { b | b & }; b; sleep 1")
    assert "the limit of 32 processes" in told
    nothing_is_left(sandbox)
    told = python(sandbox, "import os\nwhile True: os.fork()")
    assert "the limit of 32 processes" in told
    nothing_is_left(sandbox)


def test_processes_are_counted_for_root_too(sandbox):
    code = "import os\nn = 0\ntry:\n  while os.fork(): n += 1\n  import time; time.sleep(2)\nexcept OSError: print(n)"
    assert 20 < int(python(sandbox, code)) < 32
    assert python(sandbox, "import os; print(os.getuid() != 0, os.geteuid() != 0)") == "True True\n"
    assert "CapEff:\t0000000000000000" in shell(sandbox, "cat /proc/self/status")


def test_four_gigabytes_meet_the_memory_limit(sandbox):
    told = python(sandbox, "x = bytearray(4 << 30)")
    assert told.endswith("[error: exit status 1; the output points to: the memory limit of 512 MiB]")


def test_many_processes_together_meet_the_memory_limit(sandbox):
    code = "import os, time\nfor _ in range(8): os.fork() or (b'x' * (150 << 20), time.sleep(9))\ntime.sleep(9)"
    started_s = time.monotonic()
    assert python(sandbox, code) == "[error: ended by the memory limit of 512 MiB]"
    assert time.monotonic() - started_s < 8
    nothing_is_left(sandbox)


def test_memory_that_belongs_to_no_process_is_refused(sandbox):
    assert "Operation not permitted" in python(sandbox, "import os; os.memfd_create('x')")
    assert "Operation not permitted" in python(sandbox, "import os; os.unshare(os.CLONE_NEWUSER)")
    assert "No space left" in shell(sandbox, "for i in 1 2 3; do head -c 40000000 /dev/zero > /tmp/$i; done")
    assert "No space left" in shell(sandbox, "for i in 1 2 3; do head -c 40000000 /dev/zero > /dev/shm/$i; done")


def test_sleeping_past_the_time_limit_is_ended_with_all_its_processes(quick):
    started_s = time.monotonic()
    told = shell(quick, "echo begun; (setsid sleep 77 &); nohup sleep 77 & sleep 77")
    assert told == "begun\n[error: ended by the time limit of 1 s]"
    assert time.monotonic() - started_s < 4
    nothing_is_left(quick)


def test_a_process_left_behind_ends_with_the_command(sandbox):
    assert shell(sandbox, "setsid sleep 77 > /dev/null 2>&1 & echo gone") == "gone\n"
    nothing_is_left(sandbox)


def test_computing_past_the_cpu_limit_is_ended(sandbox):
    box = Sandbox(sandbox.workspace, limits=Limits(cpu_s=1, time_s=20.0))
    assert python(box, "while True: pass") == "[error: ended by the CPU limit of 1 s]"
    ignored = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert "exit status 137" in python(box, ignored)


def test_only_the_workspace_and_tmp_can_be_written(sandbox):
    told = shell(sandbox, "for f in /x /usr/x /python/x /dev/x /proc/sys/kernel/hostname; do echo 1 > $f; done")
    assert told.count("Read-only file system") + told.count("Permission denied") >= 4
    assert "only /workspace and /tmp can be written to" in told
    assert shell(sandbox, "echo kept > note; echo 1 > /tmp/note; cat note") == "kept\n"
    assert (sandbox.workspace / "note").read_text() == "kept\n"
    assert shell(sandbox, "cat note; ls /tmp") == "kept\n"
    assert not Path("/tmp/note").exists()


def test_a_file_cannot_grow_past_its_limit(sandbox):
    told = python(sandbox, "open('big', 'wb').write(bytes(100 << 20))")
    assert "the file size limit of 64 MiB" in told
    (sandbox.workspace / "big").unlink()


def test_ten_megabytes_of_output_are_cut_on_a_character(sandbox):
    told = python(sandbox, "print('é' * 5_000_000)")
    assert told == "é" * 8000 + "\n[output cut: the first 8000 of 5000001 characters are shown]"


def test_half_a_character_is_shown_as_one_that_is_unknown(sandbox):
    assert shell(sandbox, "printf 'a\\xe2\\x82'") == "a\ufffd"
    assert shell(sandbox, "printf 'a\\xe2\\x82'; sleep 0.2; printf '\\xacb'") == "a€b"


def test_output_is_cut_the_same_however_it_arrives():
    data = "aé€😀".encode() * 5
    for size in range(1, 12):
        cut = OutputCut(7)
        for at in range(0, len(data), size):
            cut.push(data[at : at + size])
        cut.push(b"", last=True)
        assert (cut.text, cut.num_chars) == ("aé€😀aé€", 20)
    assert MAX_OUTPUT_CHARS == 8000


def test_the_loop_goes_on_after_every_attack(quick):
    tools = sandbox_tools(quick)
    attacks = [
        ("shell", '{"command": "cat /etc/shadow"}', "No such file"),
        ("python", '{"code": "import socket; socket.create_connection((\'1.1.1.1\', 80), 1)"}', "there is no network"),
        ("shell", '{"command": "b() { b | b & }; b; sleep 0.5"}', "the limit of 32 processes"),
        ("python", '{"code": "bytearray(4 << 30)"}', "the memory limit of 512 MiB"),
        ("shell", '{"command": "sleep 60"}', "the time limit of 1 s"),
        ("shell", '{"command": "echo 1 > /usr/x"}', "only /workspace and /tmp"),
        ("shell", '{"command": "yes | head -c 10000000"}', "output cut: the first 8000 of 10000000"),
        ("shell", '{"command": "printf \'\\\\xe2\\\\x82\'"}', "\ufffd"),
    ]
    model = ScriptedModel(*[[call(name, arguments)] for name, arguments, _ in attacks], "still here")
    answer = Agent(model, tools).ask("Break out.")
    assert (answer.text, answer.finish, len(answer.calls)) == ("still here", "answer", len(attacks))
    for ended, (_, _, told) in zip(answer.calls, attacks, strict=True):
        assert told in ended.result.text


def test_an_interrupt_ends_the_command(sandbox):
    def interrupt():
        time.sleep(1)
        os.kill(os.getpid(), 2)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        sandbox.shell("sleep 77")
    nothing_is_left(sandbox)


def test_a_command_that_is_too_long_or_holds_a_nul_is_refused_and_told(sandbox):
    (tool, _) = sandbox_tools(sandbox)
    for command in ("x" * 100_001, "a\0b"):
        answer = Agent(ScriptedModel([call("shell", f'{{"command": {command!r}}}'.replace("'", '"'))], "ok"), [tool])
        assert answer.ask("Run.").calls[0].result.failed


def test_without_bubblewrap_the_tools_are_off_and_say_why(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    box = Sandbox()
    with pytest.raises(SandboxUnavailable, match=r"shell and python are off: bubblewrap \(bwrap\) is not installed"):
        sandbox_tools(box)
    with pytest.raises(SandboxUnavailable):
        box.shell("id")
    box.close()


def test_a_limit_that_does_not_hold_makes_the_sandbox_unavailable(monkeypatch):
    for name, told in (("RLIMIT_NPROC", "processes does not hold"), ("RLIMIT_AS", "memory limit does not hold")):
        box = Sandbox(limits=Limits(processes=500, memory_bytes=256 << 20))
        kept = {key: value for key, value in box.limits.rlimits().items() if key != name}
        with monkeypatch.context() as patch:
            patch.setattr(Limits, "rlimits", lambda _, kept=kept: kept)
            assert box.refusal is not None and told in box.refusal
        box.close()


def test_without_the_filter_of_system_calls_the_sandbox_is_unavailable(monkeypatch):
    allow_all = seccomp._op(seccomp._RETURN, seccomp._ALLOW)
    monkeypatch.setattr(seccomp, "program", lambda _: allow_all)
    box = Sandbox()
    assert box.refusal is not None and "the filter of system calls does not hold" in box.refusal
    box.close()
    monkeypatch.undo()
    with pytest.raises(LookupError, match="no filter of system calls for 'sparc'; there are filters for x86_64"):
        seccomp.program("sparc")


def test_bare_commands_run_as_the_user_under_the_time_limit(tmp_path):
    box = Sandbox(tmp_path, limits=Limits(time_s=0.5), bare=True)
    (tool, _) = sandbox_tools(box)
    assert "without a sandbox" in tool.description
    assert tool.run({"command": "id -u; pwd"}) == f"{os.getuid()}\n{tmp_path}\n"
    assert shell(box, "sleep 9") == "[error: ended by the time limit of 0.5 s]"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_workspace_of_root_with_files_is_refused_and_an_empty_one_given_away(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(SandboxUnavailable, match=r"belongs to root and is not empty; tools do not run as root"):
        Sandbox(tmp_path / "full")
    (tmp_path / "empty").mkdir()
    assert Sandbox(tmp_path / "empty")._uid == (tmp_path / "empty").stat().st_uid != 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user to test as")
def test_the_sandbox_holds_for_a_user_who_is_not_root_as_well():
    code = (
        "import os; os.setgroups([]); os.setgid(64999); os.setuid(64999); os.chdir('/')\n"
        "from jaxinfer.agent.sandbox import Sandbox, Limits\n"
        "box = Sandbox(limits=Limits(processes=32, time_s=5))\n"
        "print(box.refusal)\n"
        "print(box.explain(box.shell('b() { b | b & }; b; sleep 0.5'))[-200:])\n"
        "print(box.explain(box.python('bytearray(4 << 30)')))\n"
        "box.close()"
    )
    root = Path(__file__).parents[2]
    paths = [Path(sys.base_prefix), root]
    python = sys.executable
    if not all(parent.stat().st_mode & 0o001 for path in paths for parent in [path, *path.parents]):
        python = "/usr/bin/python3"  # the tests' own is in a folder that only root may enter
    if not Path(python).exists() or not all(parent.stat().st_mode & 0o001 for parent in [root, *root.parents]):
        pytest.skip("no interpreter, or no repository, that a user who is not root can read")
    variables = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, env=variables)
    assert done.stdout.startswith("None\n"), done.stdout + done.stderr
    assert "the limit of 32 processes" in done.stdout and "the memory limit of 512 MiB" in done.stdout


def test_limits_must_be_above_zero():
    with pytest.raises(ValueError, match="processes is 0; a limit must be above 0"):
        Limits(processes=0)
    with pytest.raises(SandboxUnavailable, match="'/no/such/folder' is not a folder"):
        Sandbox("/no/such/folder")
