"""The program on a node, between launcher and job: it carries out requests, and ends the job with the connection.

The launcher sends this file to the node (see :mod:`ddp_callbacks.launcher.remote`), whose interpreter may lack this
package, so it imports only the standard library. Linux.

Standard input brings messages, each a line with a length and as many bytes of JSON: ``{"do": NAME, ...}`` calls the
method ``do_NAME``. Standard output takes :data:`GREETING`, then frames: a header (:data:`HEADER`: kind, rank, length),
as many bytes, and a newline, without which srun would hold them back.

=====  ==============================================================================================
``r``  the answer to a message, JSON; ``{"problem": TEXT}`` if it could not be done
``o``  standard output of a rank; rank -1 is the agent
``e``  the same for standard error
``m``  a report of the agent, JSON
``b``  an answer to ``beat``, empty
``x``  the job has ended, and all that it started: ``{"code": N}``, as in a shell (128 + signal)
=====  ==============================================================================================

Standard input is also the lifeline. If it ends for any reason (the launcher has ended or was killed, the connection
broke), or is silent for too long, every process of the job gets SIGTERM and a little later SIGKILL.

A job that is asked to stop is another matter: only the ranks, the children of the agent, get the signal, and everything
gets SIGKILL once their time is over.

[Note: every process]
A process group is not enough: torchrun puts each worker into a separate session, and a worker's children may do the
same. This process is a subreaper (prctl(2)), so everything that the job starts stays its descendant, however often it
forks.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import json
import os
import secrets
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

GREETING = b"\0ddprun\0\n"  # a login shell may print something before it
HEADER = struct.Struct("!ciI")
GRACE = 2.5  # seconds between SIGTERM and SIGKILL, unless the job says otherwise
GRACE_UNHEARD = 1.0  # the same after a silence, which has already taken time
_PR_SET_CHILD_SUBREAPER = 36
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
_ENOUGH = 1 << 20  # bytes waiting for the launcher; beyond that, the job's writes wait
_TICK = 0.02  # seconds between two checks for running processes while the job ends
_LOOK = 0.1  # seconds between two checks whether a rank handles the signal that it is to get
_REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # which ask the job to stop if a scheduler sends them here


def main() -> int:
    """Serve the launcher until the job or the launcher has ended; return the job's exit code."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP, *_REQUESTS):
        # Their sender ends the lifeline, or the launcher decides. Unlike SIG_IGN, the job does not inherit a handler.
        signal.signal(number, lambda *_: None)
    node = Node(_descriptor_of_signals())
    try:
        return node.serve()
    finally:
        node.close()


def _descriptor_of_signals() -> int:
    """A descriptor that receives the number of each signal, also when a child ends.

    (Older clusters' kernels lack pidfd_open(2).)
    """
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read


class Refusal(Exception):
    """This node cannot do what the launcher asked for."""


class Node:
    def __init__(self, signals: int) -> None:
        self._signals = signals  # a descriptor, see above
        self._inbox = b""
        self._outbox = bytearray(GREETING)
        self._streams: dict[int, tuple[bytes, int]] = {}  # descriptor: kind of frame, rank
        self._control: socket.socket | None = None  # to the agent
        self._listener: socket.socket | None = None
        self._folder: str | None = None
        self._agent: int | None = None  # its process id
        self._process: subprocess.Popen[bytes] | None = None
        self._agent_end_told = False
        self._codes: dict[int, int] = {}
        self._foreign: set[int] = set()  # processes that the job runs as another user (sudo): we cannot end them
        self._connected = True
        self._heard = time.monotonic()
        self._silence: float | None = None  # seconds
        self._kill_at: float | None = None  # set once the job must end
        self._terminated = False  # whether all processes have got SIGTERM
        self._grace: float | None = None  # seconds from a request to stop to SIGKILL; None: as for any other end
        self._request = signal.SIGTERM  # what the ranks get that are asked to stop
        self._is_patient = False  # whether to wait until a rank handles it
        self._to_ask: set[int] = set()  # process ids of ranks
        self._asked: set[int] = set()

    def serve(self) -> int:
        for descriptor in (0, 1):
            os.set_blocking(descriptor, False)
        self._hear()  # data that was read ahead with this program
        while not self._is_over():
            self._wait()
            self._watch_job()
        for descriptor in list(self._streams):
            while self._pass_on(descriptor):
                pass
        code = self._codes.get(self._agent or 0, 0)
        code = code if code >= 0 else 128 - code
        self._send(b"x", {"code": code})
        while self._connected and self._outbox:
            self._wait()
        return code

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- requests of the launcher -------------------------------------------------------------------------------------

    def do_hello(self, silence: float) -> dict[str, Any]:
        """Describe this node; ``address`` is the one that ssh reached. From now on, ``silence`` seconds end the job."""
        self._silence = silence
        connection = os.environ.get("SSH_CONNECTION", "").split()
        with open("/proc/sys/kernel/random/boot_id") as file:
            machine = [file.read().strip(), socket.gethostname(), os.readlink("/proc/self/ns/pid")]
        return {"machine": machine, "address": connection[2] if len(connection) == 4 else None}

    def do_enter(self, cwd: str) -> dict[str, Any]:
        """Change to the working directory."""
        folder = os.fsdecode(bytes.fromhex(cwd))
        try:
            os.chdir(folder)
        except OSError as error:
            raise Refusal(f"cannot enter the working directory {folder}: {error.strerror}") from None
        return {}

    def do_find(self, path: str) -> dict[str, Any]:
        """Check that a file exists."""
        name = os.fsdecode(bytes.fromhex(path))
        if not os.path.exists(name):
            raise Refusal(f"file not found: {name} (working directory {os.getcwd()})")
        return {}

    def do_route(self, address: str) -> dict[str, Any]:
        """This node's address on the route to another."""
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 1))  # sends nothing
            return {"address": probe.getsockname()[0]}

    def do_addresses(self) -> dict[str, Any]:
        """Addresses at which others may reach this node: its name's, the default route's, and all others."""
        found: list[str] = []
        with suppress(OSError):
            found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            with suppress(OSError):
                probe.connect(("192.0.2.1", 1))  # sends nothing
                found.append(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # an interface without an address
                    reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    found.append(socket.inet_ntoa(reply[20:24]))
        known = [(text, ipaddress.ip_address(text.partition("%")[0])) for text in dict.fromkeys(found)]
        usable = [text for text, address in known if not (address.is_loopback or address.is_link_local)]
        return {"addresses": usable or ["127.0.0.1"]}

    def do_listen(self, address: str, port: int) -> dict[str, Any]:
        """Hold a port for the rendezvous store; 0 finds a free one."""
        family, kind, proto, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        self._listener = socket.socket(family, kind, proto)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind(where)
        except OSError as error:
            raise Refusal(f"cannot listen on {address} port {port}: {error.strerror}") from None
        self._listener.listen(128)
        return {"port": self._listener.getsockname()[1]}

    def do_reach(self, addresses: list[tuple[str, int]], seconds: float) -> dict[str, Any]:
        """Connect to ports that other nodes hold; for each, why it cannot be reached, or ``null``."""
        with ThreadPoolExecutor(max(1, len(addresses))) as pool:
            return {"problems": list(pool.map(lambda at: _cannot_reach(at[0], at[1], seconds), addresses))}

    def do_clock(self) -> dict[str, Any]:
        """The time here, in seconds since the epoch."""
        return {"time": time.time()}

    def do_output(self, argv: list[str], seconds: float) -> dict[str, Any]:
        """The output of a short command."""
        words = [bytes.fromhex(word) for word in argv]
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            raise Refusal(f"{os.fsdecode(words[0])} took longer than {seconds:g} s") from None
        return {"code": done.returncode, "out": done.stdout.decode(), "err": done.stderr.decode(errors="replace")}

    def do_run(
        self, argv: list[str], environ: dict[str, str], job: dict[str, Any], listens: bool = True
    ) -> dict[str, Any]:
        """Start the agent; its standard input holds the job as JSON, with the descriptors that it inherits."""
        if not listens:
            self._listener = None
        self._grace = job.get("grace")
        # Made by the agent, and removed by both, as either may be killed.
        self._folder = os.path.join(tempfile.gettempdir(), f"ddprun-{secrets.token_hex(8)}")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        inherited = [theirs] if self._listener is None else [theirs, self._listener]
        job |= {
            "folder": self._folder,
            "control": theirs.fileno(),
            "listener": None if self._listener is None else self._listener.fileno(),
        }
        with os.fdopen(os.memfd_create("job"), "w+b") as stdin:
            stdin.write(json.dumps(job).encode())
            stdin.seek(0)
            words = [bytes.fromhex(word) for word in argv]
            # A scheduler may send these before the agent handles them.
            handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _REQUESTS[1:]}
            try:
                agent = subprocess.Popen(
                    words,
                    env={**os.environb, **{bytes.fromhex(k): bytes.fromhex(v) for k, v in environ.items()}},
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=[end.fileno() for end in inherited],
                    start_new_session=True,
                )
            except OSError as error:
                raise Refusal(f"cannot start {os.fsdecode(words[0])}: {error.strerror}") from None
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        for end in inherited:
            end.close()
        self._process, self._agent = agent, agent.pid
        for stream, kind in ((agent.stdout, b"o"), (agent.stderr, b"e")):
            assert stream is not None
            self._streams[os.dup(stream.fileno())] = (kind, -1)
            stream.close()
        return {}

    def do_round(self, number: int, members: list[int]) -> None:
        """Restart the workers; the agent checks for this each time it polls them."""
        if self._control is not None:
            with suppress(OSError):  # it has ended
                self._control.send(json.dumps([number, members]).encode(), socket.MSG_DONTWAIT)

    def do_beat(self) -> None:
        """Answer a heartbeat."""
        self._put(b"b", -1, b"")

    def do_ask(self, number: int) -> None:
        """Ask the ranks to stop, those that handle the signal; the agent may start them again."""
        self._ask(signal.Signals(number), patient=True)

    def do_stop(self, number: int) -> None:
        """Ask the ranks to stop, and end everything when their time is over."""
        self._stop(signal.Signals(number))

    def do_end(self, at_once: bool) -> None:
        """End the job."""
        self._end(0 if at_once else GRACE)

    # --- the event loop -----------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for an event, and pass on what has come meanwhile."""
        poll = select.poll()
        ready = self._what_may_come()
        for descriptor in ready:
            poll.register(descriptor, select.POLLOUT if descriptor == 1 else select.POLLIN)
        came = [descriptor for descriptor, _ in poll.poll(self._patience() * 1000)]
        if 0 not in came:
            self._watch_launcher()
        for descriptor in came:
            ready[descriptor]()

    def _what_may_come(self) -> dict[int, Callable[[], Any]]:
        """The handler of each descriptor."""
        ready: dict[int, Callable[[], Any]] = {}
        if self._connected:
            ready[0] = self._hear
            if self._outbox:
                ready[1] = self._speak
        if len(self._outbox) < _ENOUGH:
            ready |= {descriptor: partial(self._pass_on, descriptor) for descriptor in self._streams}
        if self._control is not None:
            ready[self._control.fileno()] = partial(self._listen_to_agent, self._control)
        ready[self._signals] = self._hear_signals
        return ready

    def _patience(self) -> float:
        if self._kill_at is not None:
            ends = self._agent is None or self._agent in self._codes
            return _TICK if ends else max(_TICK, min(_LOOK, self._kill_at - time.monotonic()))
        if self._to_ask:
            return _LOOK
        return 0.25 if self._silence is not None else 60

    def _hear_signals(self) -> None:
        """Tell the launcher of requests to stop; the children are checked in any case."""
        came = os.read(self._signals, 1 << 16)
        for number in _REQUESTS if self._agent is not None else ():
            if number in came:
                self._send(b"m", {"asked": number.name})

    def _hear(self) -> None:
        # None if there is no data. Not os.read: some may have been read ahead with this program.
        data: bytes | None = sys.stdin.buffer.read(1 << 16)
        if data == b"":
            self._lose_launcher(GRACE)
        if not data:
            return
        self._heard = time.monotonic()
        self._inbox += data
        while True:
            length, newline, rest = self._inbox.partition(b"\n")
            if not newline or len(rest) < int(length):
                return
            self._inbox = rest[int(length) :]
            self._obey(json.loads(rest[: int(length)]))

    def _obey(self, message: dict[str, Any]) -> None:
        try:
            answer = getattr(self, "do_" + message.pop("do"))(**message)
        except (Refusal, OSError) as error:
            answer = {"problem": str(error)}
        if answer is not None:
            self._send(b"r", answer)

    def _send(self, kind: bytes, message: dict[str, Any]) -> None:
        self._put(kind, -1, json.dumps(message).encode())

    def _put(self, kind: bytes, rank: int, data: bytes) -> None:
        self._outbox += HEADER.pack(kind, rank, len(data)) + data + b"\n"

    def _speak(self) -> None:
        try:
            del self._outbox[: os.write(1, self._outbox[: 1 << 16])]
        except BlockingIOError:
            pass
        except OSError:
            self._lose_launcher(GRACE)

    def _pass_on(self, descriptor: int) -> bool:
        """Pass on available output; return whether there was any."""
        kind, rank = self._streams[descriptor]
        os.set_blocking(descriptor, False)
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if data:
            self._put(kind, rank, data)
        else:
            os.close(descriptor)
            del self._streams[descriptor]
        return bool(data)

    def _listen_to_agent(self, control: socket.socket) -> None:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 18, 2)
        if not data:
            self._control = None
            return
        message = json.loads(data)
        for descriptor, kind in zip(descriptors, (b"o", b"e"), strict=False):
            self._streams[descriptor] = (kind, message["rank"])
        if not descriptors:
            self._send(b"m", message)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        if self._agent is None:
            return not self._connected or self._kill_at is not None
        return self._agent in self._codes and not set(_descendants()) - self._foreign

    def _watch_launcher(self) -> None:
        if self._connected and self._silence is not None and time.monotonic() - self._heard > self._silence:
            self._lose_launcher(GRACE_UNHEARD)

    def _lose_launcher(self, grace: float) -> None:
        self._connected = False
        self._outbox.clear()
        if self._grace is None:
            self._end(grace)
        else:
            self._stop(signal.SIGTERM)

    def _ask(self, number: signal.Signals, patient: bool) -> None:
        self._request, self._is_patient = number, patient
        self._to_ask |= set(_children().get(self._agent or 0, [])) - self._asked
        self._ask_ranks()

    def _ask_ranks(self) -> None:
        """Signal the ranks that handle it by now. A program that starts would only be ended by it."""
        for pid in list(self._to_ask):
            handled = _handled_by(pid)
            found = [number for number in (self._request, signal.SIGTERM) if number in (handled or ())]
            if not found and self._is_patient and handled is not None:
                continue
            self._to_ask.discard(pid)
            self._asked.add(pid)
            with suppress(OSError):  # it has ended, or belongs to another user
                os.kill(pid, found[0] if found else signal.SIGTERM)

    def _stop(self, number: signal.Signals) -> None:
        """Ask the ranks to stop. The agent gets SIGTERM: it waits for them, and starts no others."""
        self._ask(number, patient=self._grace is not None)
        if self._agent is not None and self._agent not in self._codes:
            os.kill(self._agent, signal.SIGTERM)
        end = time.monotonic() + (GRACE if self._grace is None else self._grace)
        self._kill_at = end if self._kill_at is None else min(self._kill_at, end)

    def _end(self, grace: float) -> None:
        """Send SIGTERM to every process of the job, and ``grace`` seconds later SIGKILL."""
        now = time.monotonic()
        if not self._terminated and grace:
            self._terminated = True
            self._signal(signal.SIGTERM)
        self._kill_at = now + grace if self._kill_at is None else min(self._kill_at, now + grace)

    def _watch_job(self) -> None:
        if not self._connected:
            self._outbox.clear()
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._signal(signal.SIGKILL)
        if self._to_ask:
            self._ask_ranks()
        self._reap()
        if self._agent in self._codes and not self._agent_end_told:
            self._agent_end_told = True
            self._send(b"m", {"agent_ended": self._codes[self._agent]})
            self._end(GRACE)  # processes that the job left behind

    def _signal(self, number: int) -> None:
        for pid in _descendants():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass  # it has ended
            except PermissionError:
                self._foreign.add(pid)

    def _reap(self) -> None:
        """Collect the exit codes of ended children, including orphans of the job."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self._codes[pid] = os.waitstatus_to_exitcode(status)


def _cannot_reach(address: str, port: int, seconds: float) -> str | None:
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except OSError as error:
        return f"cannot connect to {address} port {port}: {error.strerror or error}"
    return None


def _descendants() -> list[int]:
    """The process ids of all running descendants, parents first."""
    children = _children()
    found = list(children.get(os.getpid(), []))
    for pid in found:
        found += children.get(pid, [])
    return found


def _children() -> dict[int, list[int]]:
    """The running processes of each parent, by process id."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue  # it has ended
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(entry))
    return children


def _handled_by(pid: int) -> set[int] | None:
    """The signals for which a process has a handler; ``None`` if it has ended."""
    try:
        with open(f"/proc/{pid}/status") as file:
            (mask,) = (int(line.split()[1], 16) for line in file if line.startswith("SigCgt:"))
    except (OSError, ValueError):
        return None
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


if __name__ == "__main__":
    sys.exit(main())
