"""A model of the time of a step by the number of machines, whose parameters short runs give.

[Note: the model]
A message takes ``latency + bytes / bandwidth`` (Hockney, 1994, doi:10.1016/S0167-8191(06)80021-9). The cost of a sum is
its number of messages, one after the other, and its bytes, as in Thakur, Rabenseifner and Gropp (2005,
doi:10.1177/1094342005051521)::

    S bytes, M machines           messages in a row                bytes that a machine sends
    gloo's ring                   2 (M - 1), for each two chunks   2 (M - 1) / M * S
    few bytes: all are gathered   M - 1                            (M - 1) * S

The sum of a bucket begins when backward has filled the bucket and the sum before it is done.

[Note: what the model assumes]
All machines are equal and have one link each, and the network carries all of them at full rate at the same time. Part
of a step is divided with the samples, and part is not: computing a whole and a divided batch tells how much.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

GATHERED, EXTRA, CHUNK, FIRST_BUCKET, BUCKET = 768 << 10, 16 << 10, 4 << 20, 1 << 20, 25 << 20
"""Bytes, as in comm and gradients."""

SIZES = 1 << 10, 4 << 20  # bytes of sums that tell the latency and the bandwidth
_AT_A_TIME = 2  # chunks: gloo works with two threads


@dataclass(frozen=True)
class Network:
    """Seconds for an empty message between two machines, and bytes per second that a machine sends."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Way:
    """How gradients are summed: in half precision, or not in each step but the parameters in every n-th."""

    name: str
    half: bool = False
    every: int = 1


EXACT = Way("exact")
INEXACT = (Way("bf16", half=True), Way("DiLoCo(every=50)", every=50))


@dataclass(frozen=True)
class Step:
    """The step of one machine with the whole batch.

    Attributes:
        fixed: Seconds that do not depend on the number of samples.
        divided: Seconds that do.
        backward: The share of a step's computing during which gradients are sent.
        nbytes: Bytes of gradients.
        processes: On each machine; they share its link.
        samples: Of the whole batch; 0 if unknown. A process cannot have less than one.
        loading: Seconds of the fixed ones in which each process loads the whole batch, so that they grow with it.
    """

    fixed: float
    divided: float
    backward: float
    nbytes: float
    processes: int = 1
    samples: int = 0
    loading: float = 0.0

    def seconds(self, machines: int, network: Network, way: Way = EXACT, batch: float = 1.0) -> float:
        """Return the time of a step in which ``machines`` divide a batch of ``batch`` times the samples."""
        share = part_of(self.samples * batch, machines * self.processes) / part_of(self.samples, self.processes)
        divided, fixed = self.divided * batch * share, self.fixed + self.loading * (batch - 1)
        if machines == 1:
            return fixed + divided
        buckets = list(self._buckets())
        sums = [self._wire(each, machines, network, way.half) for each in buckets]
        if way.every > 1:  # nothing hides them
            return fixed + divided + sum(sums) / way.every
        backward = self.backward * divided
        filled = done = 0.0
        for nbytes, seconds in zip(buckets, sums, strict=True):
            filled += nbytes
            done = max(done, backward * filled / self.nbytes) + seconds
        return fixed + divided - backward + done

    def times_as_fast(self, machines: int, network: Network, way: Way, grows: bool) -> float:
        """Return how many times as many samples per second so many machines compute as one."""
        batch = machines if grows else 1
        return batch * self.seconds(1, network) / self.seconds(machines, network, way, batch)

    def _buckets(self) -> Iterator[float]:
        left, size = self.nbytes, FIRST_BUCKET
        while left > 0:
            yield min(left, size)
            left, size = left - size, BUCKET

    def _wire(self, nbytes: float, machines: int, network: Network, half: bool) -> float:
        """Return the seconds to sum ``nbytes`` of each machine over the machines."""
        others, sent = machines - 1, nbytes / 2 if half else nbytes
        if is_gathered(sent / self.processes, machines):
            return others * (network.latency + sent / network.bandwidth)
        rounds = math.ceil(nbytes / self.processes / (_AT_A_TIME * CHUNK))
        return 2 * others * (rounds * network.latency + sent / machines / network.bandwidth)


def part_of(samples: float, processes: int) -> float:
    """Return the largest part of a batch that a process gets, as a share; ``samples`` may be 0, unknown."""
    return math.ceil(samples / processes) / samples if samples else 1 / processes


def is_gathered(nbytes: float, machines: int) -> bool:
    """Whether a sum of so many bytes of each machine is an all-gather, as in comm."""
    return nbytes * machines <= GATHERED and nbytes * (machines - 2) <= EXTRA * machines


def network_of(sums: Sequence[float], machines: int) -> Network:
    """Return the network on which sums of :data:`SIZES` take so many seconds, for one process on each machine."""
    few, many = (seconds / (machines - 1) for seconds in sums)  # M - 1 messages; 2 (M - 1), each with a part
    bandwidth = (SIZES[1] / machines - SIZES[0]) / max(many / 2 - few, 1e-6)
    return Network(max(few - SIZES[0] / bandwidth, 0.0), bandwidth)
