"""How the launcher reaches a node, by ssh or another command, and what their error messages mean.

The command line holds only a fixed bootstrap, the same for every job. The job is sent on standard input, so that no
argument, path or variable is ever quoted for a shell, or visible in a process list. In this order:

=======================  =============================================================================
a line                   only with another command than ssh: the bootstrap, for ``/bin/sh``
a line                   the interpreter's path, each byte as ``\\0ooo``; ``/bin/sh`` reads it and starts it
a line, and as many      the length of the program for the node, and the program
bytes
messages                 for this program, see :mod:`ddp_callbacks.launcher.node`, as long as the job runs
=======================  =============================================================================
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ddp_callbacks.launcher import node
from ddp_callbacks.launcher.flags import PATIENCE
from ddp_callbacks.launcher.hosts import NodePlan

# ssh passes this to the user's login shell, which may be any; nothing in it is special to one of them.
BOOTSTRAP = (
    "exec /bin/sh -c '"
    'IFS= read -r p; p=$(printf "%bx" "$p"); exec "${p%x}" -I -c '
    '"import sys; f = sys.stdin.buffer; exec(f.read(int(f.readline())))"\''
)

_MODULES = ("processes", "binding", "link", "answers", "ending", "program")  # each imports only those before it

READY = b"\0ddprun is ready\0\n"
# The line for the shell of another command than ssh. It may read ahead, so nothing else is sent before it has printed
# READY.
FIRST_LINE = rb"printf '\000ddprun is ready\000\n'; " + BOOTSTRAP.encode() + b"\n"
TURNED_AWAY = (b"Connection closed by", b"Connection reset by", b"Exceeded MaxStartups")  # from a busy sshd
_CONNECT_TIMEOUT = 10  # seconds for ssh to connect


def opening(python: str) -> bytes:
    """The first input of :data:`BOOTSTRAP`: the interpreter, a path or a name in the PATH there, and the program."""
    path = "".join(f"\\0{byte:03o}" for byte in os.fsencode(python)).encode()
    program = _program()
    return b"%s\n%d\n%s" % (path, len(program), program)


def _program() -> bytes:
    """The modules of the node's program as one text, which needs no files there."""
    lines = ["import sys"]
    for name in _MODULES:
        text = (Path(node.__file__).parent / f"{name}.py").read_text()
        lines.append(f"module = sys.modules['{node.__name__}.{name}'] = type(sys)('{node.__name__}.{name}')")
        lines.append(f"exec(compile({text!r}, '{name}.py', 'exec'), module.__dict__)")
    return "\n".join([*lines, "module.main()"]).encode()


def message(do: str, **values: Any) -> bytes:
    """A message that calls ``do_...`` of the node's program."""
    data = json.dumps({"do": do, **values}).encode()
    return b"%d\n%s" % (len(data), data)


def as_hex(text: str) -> str:
    """Encode text with arbitrary bytes for JSON: an argument, a path, a value of the environment."""
    return os.fsencode(text).hex()


def ssh_command(host: str, patience: float = PATIENCE) -> list[str]:
    """The user's ssh: configuration, agent, jump hosts and known hosts apply, and host keys are checked.

    It never asks on the terminal. A connection that is silent for ``patience`` seconds ends. It uses a shared
    connection (ControlPath) if there is one, and leaves none behind.
    """
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(_CONNECT_TIMEOUT),
        "ServerAliveInterval": "1",
        "ServerAliveCountMax": str(max(1, round(patience) - 1)),
        "ControlMaster": "no",
        "ClearAllForwardings": "yes",
        "RemoteCommand": "none",
    }
    flags = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", "-T", "-x", "-a", *flags, "--", host, BOOTSTRAP]


def command_to(plan: NodePlan, patience: float = PATIENCE) -> list[str]:
    """The command that reaches a node: ssh, the user's command, or a shell for this machine."""
    if plan.is_here:
        return ["/bin/sh", "-c", BOOTSTRAP]
    # Other commands may run their argument directly, or pass it to a shell. A single word works for both.
    return ssh_command(plan.host, patience) if plan.rsh is None else [*plan.rsh, "/bin/sh"]


# The first match counts.
_SSH_SAYS = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "its host key has changed. If you expected that, remove "
    "the old key (ssh-keygen -R {host}) and accept the new one (ssh {host} true)",
    "Host key verification failed": "its host key is unknown. Check and accept it: ssh {host} true",
    "Permission denied": "login refused ({said}). This must work without a password: ssh {host} true. "
    "Try ssh-copy-id {host}, or ssh-add",
    "Could not resolve hostname": "unknown host ({said}). Check the name, or add it to ~/.ssh/config",
}


def explain(plan: NodePlan, code: int | None, said: list[str]) -> str:
    """What the error messages of the command mean that has not reached a node, and what to type."""
    last = said[-1].strip() if said else "no message"
    if plan.rsh is not None:
        last = f"{os.path.basename(plan.rsh[0])} cannot reach it (exit code {code}): {last}"
        return f"{last}. Try: {plan.shell}true"
    for words, meaning in _SSH_SAYS.items():
        if line := next((line.strip() for line in said if words in line), ""):
            return meaning.format(host=plan.host, said=line)
    return f"ssh cannot reach it: {last}. Try: {plan.shell}true"
