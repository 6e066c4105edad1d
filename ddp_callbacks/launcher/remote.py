"""How the launcher talks to a node, over ssh or to a local process.

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

# ssh passes this to the user's login shell, which may be any; nothing in it is special to one of them.
BOOTSTRAP = (
    "exec /bin/sh -c '"
    'IFS= read -r p; p=$(printf "%bx" "$p"); exec "${p%x}" -I -c '
    '"import sys; f = sys.stdin.buffer; exec(f.read(int(f.readline())))"\''
)

_MODULES = ("processes", "binding", "link", "answers", "ending", "program")  # each imports only those before it

# Other commands than ssh may run their argument directly, or pass it to a shell. A single word works for both.
SHELL = "/bin/sh"
READY = b"\0ddprun is ready\0\n"
# The line for that shell. It may read ahead, so nothing else is sent before it has printed READY.
FIRST_LINE = rb"printf '\000ddprun is ready\000\n'; " + BOOTSTRAP.encode() + b"\n"


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
