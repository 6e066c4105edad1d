"""The command that reaches a node, ssh or the user's, and what its error messages mean."""

from __future__ import annotations

import os

from ddp_callbacks.launcher.flags import PATIENCE
from ddp_callbacks.launcher.plan import NodePlan
from ddp_callbacks.launcher.remote import BOOTSTRAP, SHELL

CONNECT_TIMEOUT = 10  # seconds for ssh to connect
TURNED_AWAY = (b"Connection closed by", b"Connection reset by", b"Exceeded MaxStartups")  # from a busy sshd


def ssh_command(host: str, patience: float = PATIENCE) -> list[str]:
    """The user's ssh: configuration, agent, jump hosts and known hosts apply, and host keys are checked.

    It never asks on the terminal. A connection that is silent for ``patience`` seconds ends. It uses a shared
    connection (ControlPath) if there is one, and leaves none behind.
    """
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(CONNECT_TIMEOUT),
        "ServerAliveInterval": "1",
        "ServerAliveCountMax": str(max(1, round(patience) - 1)),
        "ControlMaster": "no",
        "ClearAllForwardings": "yes",
        "RemoteCommand": "none",
    }
    flags = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", "-T", "-x", "-a", *flags, "--", host, BOOTSTRAP]


def command_to(node: NodePlan, patience: float = PATIENCE) -> list[str]:
    """The command that reaches a node: ssh, the user's command, or a shell for this machine."""
    if node.host is None:
        return ["/bin/sh", "-c", BOOTSTRAP]
    return ssh_command(node.host, patience) if node.rsh is None else [*node.rsh, SHELL]


def explain_command(plan: NodePlan, code: int, said: list[str]) -> str:
    """Why the command used instead of ssh ended before a shell was there."""
    assert plan.rsh is not None
    last = said[-1].strip() if said else "no message"
    return f"{os.path.basename(plan.rsh[0])} cannot reach it (exit code {code}): {last}. Try: {plan.shell}true"


# The first match counts.
_SSH_SAYS = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "its host key has changed. If you expected that, remove "
    "the old key (ssh-keygen -R {host}) and accept the new one (ssh {host} true)",
    "Host key verification failed": "its host key is unknown. Check and accept it: ssh {host} true",
    "Permission denied": "login refused ({said}). This must work without a password: ssh {host} true. "
    "Try ssh-copy-id {host}, or ssh-add",
    "Could not resolve hostname": "unknown host ({said}). Check the name, or add it to ~/.ssh/config",
}


def explain_ssh(host: str, said: list[str]) -> str:
    """What ssh's error message means, and what to type."""
    text = "\n".join(said)
    for words, meaning in _SSH_SAYS.items():
        if words in text:
            line = next(line.strip() for line in said if words in line)
            return meaning.format(host=host, said=line)
    last = said[-1].strip() if said else "no message"
    return f"ssh cannot reach it: {last}. Try: ssh {host} true"
