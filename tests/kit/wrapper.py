"""The program behind ``python`` on the tests' PATH: a child of the fork server (:mod:`kit.warm`) takes its place.

It starts without ``site`` and imports little: 25 ms. It passes signals on to the child, and ends as the child does.
"""

from __future__ import annotations

import marshal
import os
import socket
import sys
from contextlib import suppress
from signal import NSIG, SIG_DFL, SIG_IGN, SIGKILL, Signals, getsignal, signal

COLD = "COLD_PYTHON"  # a variable that asks for the real interpreter
LARGEST = 200_000  # bytes of a message
PASSED_ON = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT")


def main(server: str, *words: str) -> None:
    """Run ``python WORDS``: by a child of the server if that can imitate it, else by the real interpreter."""
    ignored = [number for number in range(1, NSIG) if getsignal(number) == SIG_IGN]
    pid = None
    if COLD not in os.environ:
        with suppress(OSError):  # the folder is gone, or the tests have ended
            connection, pid = ask(server, list(words), os.getcwd(), dict(os.environ), _inherited(), ignored)
    if pid is None:
        os.execv(sys.executable, [sys.executable, *words])
    for name in PASSED_ON:
        if Signals[name] not in ignored:
            signal(Signals[name], lambda number, _: os.kill(pid, number))
    connection.send(b"go")
    _end(answer(connection).get("status", SIGKILL))


def ask(
    server: str,
    words: list[str],
    folder: str,
    environ: dict[str, str],
    descriptors: dict[int, int],
    ignored: list[int],
    is_whole: bool = False,
) -> tuple[socket.socket, int | None]:
    """Ask the server for ``python WORDS``.

    Args:
        descriptors: Descriptors to pass, by their numbers in the child.

    Returns:
        The connection, and the process id of the child, which waits for a word; ``None`` if it cannot imitate that.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(server)
    request = marshal.dumps((words, folder, environ, list(descriptors), ignored, place(), is_whole))
    socket.send_fds(connection, [request], list(descriptors.values()))
    return connection, answer(connection).get("pid")


def place() -> list[object]:
    """Return this process's user and namespaces, which a child shares with the server."""
    return [os.getuid(), *(os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid", "uts"))]


def answer(connection: socket.socket) -> dict[str, int]:
    """Wait for a message of the child or the server; empty if the server is gone, and all its children with it."""
    said = connection.recv(LARGEST)
    return marshal.loads(said) if said else {}


def _inherited() -> dict[int, int]:
    """Return the descriptors that this process has inherited; those that it opened itself are not inheritable."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    return {number: number for number in numbers if os.get_inheritable(number)}


def _end(status: int) -> None:
    """End this process as the child has ended."""
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != SIGKILL:
            signal(os.WTERMSIG(status), SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(*sys.argv[1:])
