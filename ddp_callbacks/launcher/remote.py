"""How the launcher speaks to a node, over ssh or to a process of its own.

The command line holds a fixed bootstrap only, the same for every job: the job travels on standard input, so that no
argument, path or value of a variable is ever quoted for a shell, or seen in a list of processes. In this order:

=======================  =============================================================================
a line                   where not ssh but another command leads to the node: the bootstrap, for ``/bin/sh``
a line                   the interpreter's path, each byte as ``\\0ooo``; ``/bin/sh`` reads it and starts it
a line, and as many      the length of ``node.py``, and ``node.py``
bytes
messages                 for ``node.py``, see there, as long as the job is to run
=======================  =============================================================================
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ddp_callbacks.launcher import node

# ssh gives this to the user's login shell, which may be any; it holds nothing that one of them would change.
BOOTSTRAP = (
    "exec /bin/sh -c '"
    'IFS= read -r p; p=$(printf "%bx" "$p"); exec "${p%x}" -I -c '
    '"import sys; f = sys.stdin.buffer; exec(f.read(int(f.readline())))"\''
)

# Another command than ssh may start what it is given as it is, or give it to a shell. To both, one word is the same.
SHELL = "/bin/sh"
READY = b"\0ddprun is ready\0\n"
# What that shell is told. It may read more than this line at once, so nothing else is sent before it has said READY.
FIRST_LINE = rb"printf '\000ddprun is ready\000\n'; " + BOOTSTRAP.encode() + b"\n"


def opening(python: str) -> bytes:
    """What :data:`BOOTSTRAP` reads first: the interpreter, a path or a name in the PATH there, and the program."""
    path = "".join(f"\\0{byte:03o}" for byte in os.fsencode(python)).encode()
    program = Path(node.__file__).read_bytes()
    return b"%s\n%d\n%s" % (path, len(program), program)


def message(do: str, **values: Any) -> bytes:
    """A message that calls ``do_...`` of the node's program."""
    data = json.dumps({"do": do, **values}).encode()
    return b"%d\n%s" % (len(data), data)


def as_hex(text: str) -> str:
    """Text that may hold any bytes, for JSON: an argument, a path, a value of the environment."""
    return os.fsencode(text).hex()
