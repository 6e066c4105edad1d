"""What the program on a node reports to the launcher: the types that both ends know, as lines of JSON on the way."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Wrote(NamedTuple):
    """Output of a rank.

    Its stream is ``o`` (standard output), ``e`` (standard error, or both if they are one), ``s`` (the stacks of its
    threads, as Python's faulthandler writes them), ``f`` (the record of its failure, see
    :mod:`ddp_callbacks.launcher.hook`, or before it that a successor is ready) or ``r`` (where its time goes, see
    :mod:`ddp_callbacks.reporting`, and which of our warnings it has shown, see :func:`ddp_callbacks.errors.warn`).
    """

    rank: int
    stream: str
    data: str


class Started(NamedTuple):
    """The ranks of this node have started, after so many restarts of the job.

    Each has so many threads, and is bound as ``bound`` says.
    """

    ranks: list[int]
    restarts: int
    threads: str
    interface: str
    bound: str


class Ended(NamedTuple):
    """A rank has ended, perhaps by a signal, at a time on its host's monotonic clock. All its output came before.

    If it was ``stopped`` for so many seconds, this program has killed it.
    """

    rank: int
    code: int
    signal: str | None
    now: float
    stopped: float = 0.0


class Asked(NamedTuple):
    """A signal to this program asks the job to stop."""

    signal: str


class Problem(NamedTuple):
    """The job cannot continue."""

    text: str


class Beat(NamedTuple):
    """The answer to a heartbeat."""


class Done(NamedTuple):
    """Everything here has ended."""


# --- what the launcher reports to itself ------------------------------------------------------------------------------


class Closed(NamedTuple):
    """The connection has ended."""


class Request(NamedTuple):
    """A command asks for the stacks, or that these hosts join."""

    hosts: str


class Stacks(NamedTuple):
    """The ranks have had time to write their stacks."""


class Says(NamedTuple):
    """A line to print."""

    text: str


Report: TypeAlias = Wrote | Started | Ended | Asked | Problem | Beat | Done | Closed | Request | Stacks | Says
KINDS = {kind.__name__: kind for kind in (Wrote, Started, Ended, Asked, Problem, Done)}
