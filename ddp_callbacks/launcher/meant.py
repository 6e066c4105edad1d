"""What a user of other launchers means by a command line that names no script."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import dropwhile, takewhile

from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.launcher.flags import GROUPS

_COUNTS = ("--hosts", "--hostfile", "--nnodes", "--nproc-per-node")
_COMMANDS = ("doctor", "join", "stacks", "status")
_PYTHON = re.compile(r"(.*/)?python[\d.]*")
_STREAM = re.compile(r"/dev/(stdin$|fd/)|/proc/self/fd/")  # <(...) in a shell is one, too
_SHELL = re.compile(r".*\.(ba|z|c|tc|k)?sh")


def refuse_script(words: Sequence[str]) -> None:
    """Raise for what is no Python script, if we can tell what was meant.

    A file that this machine lacks may be there on the nodes, which look for it themselves.

    Args:
        words: The script and its arguments.

    Raises:
        ConfigurationError: Names what to type instead.
    """
    if instead := next(_meant(words[0], words[1:]), None):
        raise ConfigurationError(instead)


def misplaced(arguments: Sequence[str], most: bool = True) -> str:
    """Say which flag of ``ddprun`` is among the arguments of a script, which gets it; empty if none is.

    Args:
        arguments: Those of the script; all that follow ``--`` are its own.
        most: Whether to look for all long flags, and not only for those that say how many processes run.
    """
    long = {word for flags in GROUPS.values() for flag in flags for word in flag.spellings.split() if word[:2] == "--"}
    ours = long if most else _COUNTS
    found = [word for word in takewhile("--".__ne__, arguments) if word.partition("=")[0].replace("_", "-") in ours]
    return f"the script gets {found[0]}, as it stands after the script. Put ddprun's flags before it" if found else ""


def _meant(script: str, arguments: Sequence[str]) -> Iterator[str]:
    typed = shlex.join([script, *arguments])
    if _SHELL.fullmatch(script):
        here = "" if "/" in script else "./"  # as in a shell, a bare name is that of a program in PATH
        yield f"{script} is a shell script. For each process to run it, type: ddprun --no-python {here}{typed}"
    if _PYTHON.fullmatch(script) and not os.path.isdir(script):
        rest = [*dropwhile(lambda word: word.startswith("-") and word != "-m", arguments)] or ["train.py"]
        yield f"ddprun starts Python itself. Leave {script} out: ddprun {shlex.join(rest)}"
    if script == "-" or _STREAM.match(script):
        yield f"each process reads the script from a file: name one, not {script}."
    if os.path.exists(script):
        return
    if os.path.exists(f"{script}.py"):
        yield f"there is no file {script}. Did you mean ddprun {shlex.join([f'{script}.py', *arguments])}?"
    if " " in script and os.path.exists(script.split()[0]):
        yield f"{script!r} is one word, and no file of this name is there. Leave the quotes out: ddprun {script}"
    if arguments and arguments[0].endswith(".py") and os.path.exists(arguments[0]):
        yield f"there is no script {script}, but {arguments[0]}. Commas separate hosts: -H a,b. Each variable has an -x"
    if script and script == os.path.basename(script) and (close := get_close_matches(script, _COMMANDS, 1, 0.7)):
        yield f"there is no file and no command {script}. Did you mean ddprun {close[0]}?"
