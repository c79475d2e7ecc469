"""The first program inside the sandbox: sets the limits of the tool's process, drops root, and becomes the tool.

It runs from its source text, so it needs nothing but the standard library. Its argument is a JSON object: `rlimits`,
soft and hard limit by name, `uid`, None where the caller is no root, and `folder`. What follows is the command.
"""

import json
import os
import resource
import signal
import sys


def launch(settings: dict, command: list[str]) -> None:
    """Becomes `command`. OSError where a limit or the user cannot be set: then nothing runs."""
    for name, (soft, hard) in settings["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (soft, hard))
    uid = settings["uid"]
    if uid is not None:  # also takes away every capability, for good: bwrap has set no_new_privs
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what is ignored is inherited
        signal.signal(number, signal.SIG_DFL)
    os.chdir(settings["folder"])  # only now: root without capabilities may not enter another user's folder
    os.execv(command[0], command)


if __name__ == "__main__":
    launch(json.loads(sys.argv[1]), sys.argv[2:])
