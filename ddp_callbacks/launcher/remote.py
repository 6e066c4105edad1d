"""Reach a node by ssh or another command, and explain the command's error messages.

The command line holds only a shell. The job travels on standard input, so that no argument, path or variable is ever
quoted for a shell, or visible in a process list. In this order:

=======================  =============================================================================
a line                   :data:`FIRST_LINE`, the same for every job; nothing follows before its answer
a line                   a command that starts the interpreter, each byte as ``\\0ooo``; ``/bin/sh`` becomes it
a line, and as many      the length of the program for the node, and the program
bytes
messages                 for this program, see :mod:`ddp_callbacks.launcher.node`, as long as the job runs
=======================  =============================================================================
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from ddp_callbacks.launcher import node
from ddp_callbacks.launcher.flags import PATIENCE
from ddp_callbacks.launcher.hosts import NodePlan

# Each imports only those before it.
_MODULES = ("processes", "binding", "reports", "link", "answers", "ending", "stopped", "program")

SHELL = "/bin/sh"  # one word: it works as a program and as a command line of any login shell
READY = b"\0ddprun is ready\0"
UTF8 = "-Xutf8"  # for Python programs of ours: bytes keep their values in texts, whatever the node's language
# The shell may read ahead, so nothing else is sent before it has printed READY.
FIRST_LINE = (
    rb"printf '\000ddprun is ready\000\n'; "
    b'IFS= read -r c; c=$(printf "%bx" "$c"); eval "${c%x}"\n'
)
_READ = "import sys; f = sys.stdin.buffer; exec(f.read(int(f.readline())))"  # what the interpreter does first
# A login shell, which knows ``module``; some profiles leave the working directory. What the setup prints or leaves in
# the background gets no part of the messages.
_SETUP = 'cd "$1" 2>/dev/null; eval "$2" >&2 3<&- && shift 2 && exec "$@" <&3 3<&-'
# Becomes the parent of all that the setup leaves, see :func:`ddp_callbacks.launcher.node.processes.adopt_orphans`.
_ADOPT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0); os.execvp(sys.argv[1], sys.argv[1:])"
TURNED_AWAY = (b"Connection closed by", b"Connection reset by", b"Exceeded MaxStartups")  # from a busy sshd
_CONNECT_TIMEOUT = 10  # seconds for ssh to connect
# Variables that srun would take as flags, such as SLURM_LABELIO; others name the job, or lead to its controller.
_FLAGS_OF_SRUN = re.compile(r"(SLURM|SRUN)_(?!JOB|ARRAY|SUBMIT|CLUSTER|CONF|JWT|SACK)")


def opening(plan: NodePlan, environ: Mapping[str, str]) -> bytes:
    """Return what follows :data:`FIRST_LINE`: how to start the interpreter (a path, or a name in PATH), the program.

    Args:
        environ: Variables for the setup; LD_LIBRARY_PATH for the interpreter, too.
    """
    words = [plan.python, "-I", UTF8, "-c", _READ]
    start = _after_setup(plan, words) if plan.setup else f"exec {shlex.join(words)}"
    needed = [name for name in environ if name.isidentifier() and (plan.setup or name == "LD_LIBRARY_PATH")]
    export = "".join(f"export {name}={shlex.quote(environ[name])}; " for name in needed)
    command, program = os.fsencode(export + start), _program()
    return b"%s\n%d\n%s" % ("".join(f"\\0{byte:03o}" for byte in command).encode(), len(program), program)


def _after_setup(plan: NodePlan, words: list[str]) -> str:
    """Return a command that runs the setup, which reads nothing, and then these words, the parent of all it leaves."""
    setup = shlex.join(["bash", "-lc", _SETUP, "bash", plan.cwd, plan.setup, *words])
    adopt = shlex.join(["-I", UTF8, "-c", _ADOPT])
    finds = f'for p in {shlex.quote(plan.python)} python3; do "$p" -I -c "import ctypes" </dev/null >/dev/null 2>&1'
    return f'set -- {setup}; {finds} && set -- "$p" {adopt} "$@" && break; done; exec "$@" 3<&0 </dev/null'


def _program() -> bytes:
    """Return the modules of the node's program as one text, which needs no files there."""
    lines = ["import sys"]
    for name in _MODULES:
        text = (Path(node.__file__).parent / f"{name}.py").read_text()
        lines.append(f"module = sys.modules['{node.__name__}.{name}'] = type(sys)('{node.__name__}.{name}')")
        lines.append(f"exec(compile({text!r}, '{name}.py', 'exec'), module.__dict__)")
    return "\n".join([*lines, "module.main()"]).encode()


def ssh_command(host: str, patience: float = PATIENCE) -> list[str]:
    """Return a command of the user's ssh, with their configuration, agent, jump hosts, known hosts and host key checks.

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
    return ["ssh", "-T", "-x", "-a", *flags, "--", host]


def command_to(plan: NodePlan, patience: float = PATIENCE) -> list[str]:
    """Return the command that reaches a node: ssh, the user's command, or a shell for this machine."""
    if plan.is_here:
        return [SHELL]
    return [*(ssh_command(plan.host, patience) if plan.rsh is None else plan.rsh), SHELL]


def environ_to(plan: NodePlan) -> dict[str, str]:
    """Return the variables for the command that reaches a node: srun has its flags from the command line alone."""
    is_srun = os.path.basename(command_to(plan)[0]) == "srun"
    return {name: value for name, value in os.environ.items() if not (is_srun and _FLAGS_OF_SRUN.match(name))}


# The first match counts.
_SSH_SAYS = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "its host key has changed. If you expected that, remove "
    "the old key (ssh-keygen -R {host}) and accept the new one (ssh {host} true)",
    "Host key verification failed": "its host key is unknown. Check and accept it: ssh {host} true",
    "are too open": "ssh does not use your key: {said} Let nobody else read it (chmod 600)",
    "Permission denied": "login refused ({said}). This must work without a password: ssh {host} true. "
    "Try ssh-copy-id {host}, or ssh-add",
    "Could not resolve hostname": "unknown host ({said}). Check the name, or add it to ~/.ssh/config",
}


def explain(plan: NodePlan, code: int | None, said: list[str]) -> str:
    """Explain why the command has not reached a node, from its error messages, and say what to type."""
    last = said[-1].strip() if said else "no message"
    if plan.rsh is not None:
        last = f"{os.path.basename(plan.rsh[0])} cannot reach it (exit code {code}): {last}"
        return f"{last}. Try: {plan.shell}true"
    for words, meaning in _SSH_SAYS.items():
        if line := next((line.strip() for line in said if words in line), ""):
            return meaning.format(host=plan.host, said=line)
    if code is not None and 0 <= code < 255:  # ssh itself exits with 255
        ends = f"its login shell ended with exit code {code}, and ran nothing: {last}"
        return f"{ends}. Look for exit and exec in its start-up files, such as .bashrc"
    return f"ssh cannot reach it: {last}. Try: {plan.shell}true"
