"""What ``python`` on the tests' PATH runs: a child of the fork server (:mod:`kit.warm`) takes its place.

It starts without ``site`` and imports next to nothing: 15 ms. Signals go on to the child, with whose end it ends.
"""

from __future__ import annotations

import _signal
import _socket
import marshal
import os
import sys

COLD = "COLD_PYTHON"  # a variable that asks for the real interpreter
LARGEST = 200  # descriptors; the kernel sends no more than 253 at once
# What the server says, each with a number.
REFUSED, STARTED, ENDED = b"R", b"S", b"E"
PASSED_ON = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT")


def main(server: str, *words: str) -> None:
    """Be ``python WORDS``: warm if the server can do it, else the real interpreter."""
    connection = connect(server)
    try:
        folder = os.getcwd()
    except OSError:  # it is gone
        connection = None
    kind, number = b"", 0
    if connection and COLD not in os.environ:
        descriptors = {number: number for number in _inherited()}
        kind, number = ask(connection, list(words), folder, dict(os.environ), descriptors, _ignored())
    if connection is None or kind not in (STARTED, ENDED):
        os.execv(sys.executable, [sys.executable, *words])
    for name in PASSED_ON:
        if getattr(_signal, name) not in _ignored():
            _signal.signal(getattr(_signal, name), lambda signal, _: os.kill(number, signal))
    connection.sendall(b"\n")
    _end(answer(connection)[1])


def connect(server: str) -> _socket.socket | None:
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connection.connect(server)
    except OSError:
        return None
    return connection


def ask(
    connection: _socket.socket,
    words: list[str],
    folder: str,
    environ: dict[str, str],
    descriptors: dict[int, int],
    ignored: list[int],
    whole_end: bool = False,
) -> tuple[bytes, int]:
    """Ask for ``python WORDS`` with these descriptors, by their numbers there; it waits for a line. What came of it."""
    data = marshal.dumps((words, folder, environ, list(descriptors), ignored, place(), whole_end))
    numbers = b"".join(number.to_bytes(4, "little") for number in descriptors.values())
    connection.sendmsg([len(data).to_bytes(4, "little")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)])
    connection.sendall(data)
    return answer(connection)


def place() -> list[object]:
    """A child is in the server's namespaces, and the same user."""
    return [os.getuid(), *(os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid", "uts"))]


def answer(connection: _socket.socket) -> tuple[bytes, int]:
    """If there is none, the server is gone, and all its children with it."""
    said = connection.recv(5, _socket.MSG_WAITALL)
    return (said[:1], int.from_bytes(said[1:], "little")) if len(said) == 5 else (b"", _signal.SIGKILL)


def _inherited() -> list[int]:
    """What this interpreter has opened itself is not inheritable."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:
            pass  # that of the listing
    return found


def _ignored() -> list[int]:
    return [number for number in range(1, _signal.NSIG) if _signal.getsignal(number) == _signal.SIG_IGN]


def _end(status: int) -> None:
    """As the child has."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != _signal.SIGKILL:
            _signal.signal(number, _signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(*sys.argv[1:])
