"""What the launcher sends to a node, over ssh or to a process of its own.

The command line holds a fixed bootstrap only, the same for every job: the job travels on standard input, so that no
argument, path or value of a variable is ever quoted for a shell, or seen in a list of processes. In this order:

=======================  =============================================================================
a line                   the interpreter's path, each byte as ``\\0ooo``; ``/bin/sh`` reads it and starts it
a line, and as many      the length of ``node.py``, and ``node.py``
bytes
a line, and as many      the length of the job, and the job as JSON, every byte string in hexadecimal
bytes
nothing more             the lifeline: the job ends when it is closed, or by ``T`` and ``K``
=======================  =============================================================================
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddp_callbacks.launcher import node

# ssh gives this to the user's login shell, which may be any; it holds nothing that one of them would change.
BOOTSTRAP = (
    "exec /bin/sh -c '"
    'IFS= read -r p; p=$(printf "%bx" "$p"); exec "${p%x}" -I -c '
    '"import sys; f = sys.stdin.buffer; exec(f.read(int(f.readline())))"\''
)


@dataclass(frozen=True)
class Job:
    """What a node is to run.

    Attributes:
        python: The interpreter there, as a path or a name that is in the PATH there.
        argv: The command and its arguments.
        cwd: The working directory.
        environ: Variables in addition to those that the node has.
    """

    python: str
    argv: Sequence[str]
    cwd: str
    environ: Mapping[str, str] = field(default_factory=dict)

    def message(self) -> bytes:
        """All that is written to the standard input of :data:`BOOTSTRAP`; what follows it is the lifeline."""
        python = "".join(f"\\0{byte:03o}" for byte in os.fsencode(self.python)).encode()
        program = Path(node.__file__).read_bytes()
        job = json.dumps(
            {
                "argv": [_hex(word) for word in self.argv],
                "cwd": _hex(self.cwd),
                "environ": {_hex(name): _hex(value) for name, value in self.environ.items()},
            }
        ).encode()
        return b"%s\n%d\n%s%d\n%s" % (python, len(program), program, len(job), job)


def _hex(text: str) -> str:
    return os.fsencode(text).hex()
