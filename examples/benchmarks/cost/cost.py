"""A cost model: how long a training step takes on how many hosts. It is fitted to measurements.

Nothing is measured here (see :mod:`calibration`), and no process group is needed.

[Note: the model]
A message takes ``latency + bytes / bandwidth`` (Hockney, 1994, doi:10.1016/S0167-8191(06)80021-9). The cost of a sum is
its number of messages, one after the other, and its bytes, as in Thakur, Rabenseifner and Gropp (2005,
doi:10.1177/1094342005051521)::

    S bytes, H hosts                          messages in a row               bytes that a host sends
    exact, gloo's ring                        2 (H - 1), for each two chunks  2 (H - 1) / H * S
    exact, few bytes: gathered in a ring      H - 1                           (H - 1) * S
    half precision: exchanged, then gathered  1, and H - 1 for each chunk     2 (H - 1) / H * S / 2

The number of bytes is minimal (Patarasuk and Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002). On a host with k processes,
each leader's part of a sum passes through memory: it adds k - 1 shards of S / k bytes to its own (two reads and a write
each), and copies the sum to k - 1 others (a read and a write each).

A step is a pipeline: the sum of a bucket begins when backward has filled the bucket and the host's last sum is done; it
then takes its turn on the network, and is finally delivered. On a single host, the sums follow backward.

[Note: what the model assumes]
All hosts are equal and have one link each, and the network carries all of them at full rate at the same time (full
bisection bandwidth). No process is late: a step takes equally long on each. Computing takes as long as it has samples:
a batch that is divided among twice as many processes takes half as long. The model ignores the processor time that sums
take from backward. The latency of the rings grows with the number of hosts; that of a tree would grow with its
logarithm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ddp_callbacks.comm.group_sums import GATHERED_NBYTES
from ddp_callbacks.comm.hierarchical import CHUNK_NBYTES
from ddp_callbacks.errors import ConfigurationError

_AT_A_TIME = 2  # chunks of an exact sum: gloo works with two threads
_ADD, _COPY = 3, 2  # memory accesses per byte
_NOISE = 0.02  # relative differences that a fit treats as noise
_GOOD_ENOUGH = 1.1  # times the fastest step


@dataclass(frozen=True)
class Machine:
    """The performance of hosts and network.

    Attributes:
        latency: Seconds for an empty message between two hosts, including software overhead.
        bandwidth: Bytes per second that a host sends while it receives as many, over all its processes.
        rounding: Seconds per byte of gradients that half precision costs a process, apart from sending.
        memory_overhead: Seconds per sum in a host's memory, whatever its size.
        memory_bandwidth: Bytes per second that one process reads or writes, while the others of its host do so too.
        cores: Processes per host that compute at full speed at the same time; more processes share them.
    """

    latency: float
    bandwidth: float
    rounding: float = 0.0
    memory_overhead: float = 0.0
    memory_bandwidth: float = math.inf
    cores: float = math.inf


@dataclass(frozen=True)
class Layout:
    """A number of hosts with a number of ranks each.

    Raises:
        ConfigurationError: One of them is less than 1.
    """

    hosts: int
    ranks_per_host: int = 1

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.ranks_per_host < 1:
            raise ConfigurationError(f"a layout has at least one host with one rank, got {self}.")

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True)
class FilledBucket:
    """A bucket of gradients: its bytes, and the seconds from the start of a step until it is full."""

    nbytes: float
    full: float


@dataclass(frozen=True)
class Job:
    """A training step of one process with a dedicated core.

    Attributes:
        compute: Seconds of a step without synchronization.
        buckets: In the order in which backward fills them; the last is full when backward ends.
        after: Seconds from the end of backward to the end of the step.
        itemsize: Bytes per gradient element.
    """

    compute: float
    buckets: tuple[FilledBucket, ...]
    after: float
    itemsize: int = 4

    @property
    def nbytes(self) -> float:
        return sum(bucket.nbytes for bucket in self.buckets)


@dataclass(frozen=True)
class Sync:
    """A synchronization method.

    Attributes:
        name: Its name in the output.
        half: Whether gradients are sent between hosts in half precision.
        every: Steps from one synchronization to the next. If it is more than one, the parameters are summed, exactly,
            while nothing else runs (LocalSGD; DiLoCo, arXiv:2311.08105).
    """

    name: str
    half: bool = False
    every: int = 1


EXACT = Sync("exact")
BF16 = Sync("bf16", half=True)


def diloco(every: int) -> Sync:
    return Sync(f"DiLoCo({every})", every=every)


# --- what a step takes ------------------------------------------------------------------------------------------------


def step_time(machine: Machine, job: Job, layout: Layout, sync: Sync) -> float:
    """Seconds per step; the mean over a window if not every step synchronizes."""
    if layout.ranks == 1:
        return compute_time(machine, job, layout)
    if sync.every > 1:
        return compute_time(machine, job, layout) + sum_time(machine, job, layout) / sync.every
    crowd = _crowd(machine, layout)
    ready = [bucket.full * crowd for bucket in job.buckets]
    if layout.hosts == 1:  # in shared memory, sums wait for the end of backward
        ready = ready[-1:] * len(ready)
    return _pipeline(machine, job, layout, sync, ready) + job.after * crowd


def compute_time(machine: Machine, job: Job, layout: Layout) -> float:
    """Seconds per step without synchronization."""
    return job.compute * _crowd(machine, layout)


def efficiency(machine: Machine, job: Job, layout: Layout, sync: Sync) -> float:
    """The fraction of a step that is not lost to synchronization. 1 is linear weak scaling."""
    return compute_time(machine, job, layout) / step_time(machine, job, layout, sync)


def shared(job: Job, share: float) -> Job:
    """The step of a process that has ``share`` times as many samples. What follows backward takes as long as before."""
    buckets = tuple(FilledBucket(bucket.nbytes, bucket.full * share) for bucket in job.buckets)
    return replace(job, compute=(job.compute - job.after) * share + job.after, buckets=buckets)


def times_as_fast(machine: Machine, job: Job, here: Layout, hosts: int, sync: Sync, *, grows: bool) -> float:
    """How many times as many samples per second ``hosts`` compute as one host does.

    Args:
        here: Where ``job`` was measured; all its processes together have the whole batch.
        grows: Whether the batch grows with the hosts; otherwise it is divided among them.
    """
    layout = replace(here, hosts=hosts)
    alone = step_time(machine, shared(job, here.hosts), replace(here, hosts=1), EXACT)
    if grows:
        return hosts * alone / step_time(machine, shared(job, here.hosts), layout, sync)
    return alone / step_time(machine, shared(job, here.hosts / hosts), layout, sync)


def sum_time(machine: Machine, job: Job, layout: Layout) -> float:
    """Seconds for the exact sum of all buckets, while nothing else runs."""
    return _pipeline(machine, job, layout, EXACT, [0.0] * len(job.buckets))


def choose(machine: Machine, job: Job, layout: Layout, syncs: Sequence[Sync]) -> Sync:
    """The first of ``syncs`` that takes at most a tenth longer than the fastest; list the mildest first."""
    times = [step_time(machine, job, layout, sync) for sync in syncs]
    good = (sync for sync, time in zip(syncs, times, strict=True) if time <= _GOOD_ENOUGH * min(times))
    return next(good)


def _pipeline(machine: Machine, job: Job, layout: Layout, sync: Sync, ready: Sequence[float]) -> float:
    """Seconds until the last bucket is delivered."""
    summed = sent = delivered = 0.0
    for bucket, full in zip(job.buckets, ready, strict=True):
        add, copy = memory_times(machine, layout, bucket.nbytes)
        summed = max(full, summed) + add
        sent = max(summed, sent) + wire_time(machine, layout, bucket.nbytes, sync.half, job.itemsize)
        delivered = max(sent, delivered) + copy
    if sync.half and layout.hosts > 1:  # the exact metadata of the gradients
        delivered += sum(memory_times(machine, layout, 0)) + wire_time(machine, layout, 0)
    return delivered


def memory_times(machine: Machine, layout: Layout, nbytes: float) -> tuple[float, float]:
    """Seconds to sum ``nbytes`` of each rank within every host, and to deliver the sum."""
    if layout.ranks_per_host == 1:
        return 0.0, 0.0
    add, copy = memory_traffic(layout, nbytes)
    crowd = _crowd(machine, layout)
    return crowd * (machine.memory_overhead + add / machine.memory_bandwidth), crowd * copy / machine.memory_bandwidth


def memory_traffic(layout: Layout, nbytes: float) -> tuple[float, float]:
    """Bytes that each process reads and writes to sum its shard, and to deliver it."""
    others = (layout.ranks_per_host - 1) / layout.ranks_per_host * nbytes
    return _ADD * others, _COPY * others


def wire_time(machine: Machine, layout: Layout, nbytes: float, half: bool = False, itemsize: int = 4) -> float:
    """Seconds to sum ``nbytes``, of elements of ``itemsize`` bytes, over the hosts."""
    if layout.hosts == 1:
        return 0.0
    messages, sent = wire_traffic(layout, nbytes, half, itemsize)
    rounding = machine.rounding * nbytes / layout.ranks_per_host if half else 0.0
    return _crowd(machine, layout) * (messages * machine.latency + rounding) + sent / machine.bandwidth


def wire_traffic(layout: Layout, nbytes: float, half: bool = False, itemsize: int = 4) -> tuple[int, float]:
    """Number of consecutive messages, and bytes that each host sends; see :mod:`ddp_callbacks.comm.group_sums`."""
    others, hosts = layout.hosts - 1, layout.hosts
    rounded = nbytes * 2 / itemsize if half else nbytes
    if rounded / layout.ranks_per_host * hosts <= GATHERED_NBYTES:
        return others, others * rounded
    messages, sent = ring_traffic(layout, nbytes)  # a sum is cut before it is rounded
    return messages, sent * rounded / nbytes


def ring_traffic(layout: Layout, nbytes: float) -> tuple[int, float]:
    """The same for gloo's ring."""
    others = layout.hosts - 1
    turns = math.ceil(nbytes / layout.ranks_per_host / (CHUNK_NBYTES * _AT_A_TIME))
    return 2 * others * turns, 2 * others / layout.hosts * nbytes


def _crowd(machine: Machine, layout: Layout) -> float:
    """How much slower a process computes than one with a dedicated core."""
    return max(1.0, layout.ranks_per_host / machine.cores)


# --- the fit ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """The time for sums of one size: the median of several.

    Attributes:
        level: ``"memory"`` within each host; ``"wire"`` between the hosts, ``"half"`` there in half precision;
            ``"ring"`` for few bytes that gloo's ring sums between the hosts, for which a gather would be faster.
        nbytes: Bytes of gradients (float32) of each rank.
    """

    level: str
    nbytes: int
    seconds: float


def fit(samples: Iterable[Sample], layout: Layout, assumed: Machine) -> Machine:
    """Fit a machine to the measured sums.

    This is least squares of the relative errors, robust against a few outliers. Only the ratio of two sizes separates
    latency from bandwidth: pass some small samples and some large ones.

    Args:
        layout: The layout of all measurements.
        assumed: Values for parameters that were not measured.
    """
    of: dict[str, list[Sample]] = {"memory": [], "wire": [], "half": [], "ring": []}
    for sample in samples:
        of[sample.level].append(sample)
    values = dict(vars(assumed))
    if of["memory"]:
        rows = [[1.0, sum(memory_traffic(layout, sample.nbytes))] for sample in of["memory"]]
        values["memory_overhead"], inverse = _least_squares(rows, of["memory"])
        values["memory_bandwidth"] = _inverse(inverse)
    if between := of["wire"] + of["ring"]:
        rows = [list(map(float, wire_traffic(layout, sample.nbytes))) for sample in of["wire"]]
        rows += [list(map(float, ring_traffic(layout, sample.nbytes))) for sample in of["ring"]]
        values["latency"], inverse = _least_squares(rows, between)
        values["bandwidth"] = _inverse(inverse)
    if of["half"]:
        # Fit the rest with these results.
        machine = Machine(**{**values, "rounding": 0.0})
        rows = [[sample.nbytes / layout.ranks_per_host] for sample in of["half"]]
        known = [wire_time(machine, layout, sample.nbytes, half=True) for sample in of["half"]]
        (values["rounding"],) = _least_squares(rows, of["half"], known)
    return Machine(**values)


def _least_squares(
    rows: list[list[float]], samples: Sequence[Sample], known: Sequence[float] | None = None
) -> list[float]:
    """Non-negative coefficients, fitted to what the known part leaves of the samples."""
    seconds = torch.tensor([sample.seconds for sample in samples], dtype=torch.float64)
    matrix = torch.tensor(rows, dtype=torch.float64) / seconds[:, None]
    goal = torch.ones_like(seconds) - torch.tensor(known or [0.0] * len(samples), dtype=torch.float64) / seconds
    columns = list(range(matrix.shape[1]))
    result = [0.0] * len(columns)
    while columns:
        solution = _solve(matrix[:, columns], goal)
        if (solution >= 0).all():
            for column, value in zip(columns, solution.tolist(), strict=True):
                result[column] = value
            break
        del columns[int(solution.argmin())]
    return result


def _solve(matrix: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """Iteratively reweighted least squares, which approximates least absolute errors."""
    scale = matrix.abs().amax(0).clamp(min=1e-300)
    matrix = matrix / scale
    weights, solution = torch.ones_like(goal), torch.zeros_like(scale)
    for _ in range(10):
        root = weights.sqrt()
        solution = torch.linalg.lstsq(matrix * root[:, None], (goal * root)[:, None], driver="gelsd").solution[:, 0]
        weights = 1 / (goal - matrix @ solution).abs().clamp(min=_NOISE)
    return solution / scale


def _inverse(value: float) -> float:
    return 1 / value if value else math.inf


# --- what a calibration has found -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration.

    Attributes:
        layout: The measured hosts and ranks. Ranks that share no memory count as separate hosts.
        machine, job: Fitted to the parts of a step. With a single host, the network is unknown: latency 0 and bandwidth
            infinite.
        steps: Seconds of whole steps by the name of the :class:`Sync`, to check the model.
        samples: The sums that the machine was fitted to.
    """

    layout: Layout
    machine: Machine
    job: Job
    steps: dict[str, float]
    samples: tuple[Sample, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Calibration:
        """Inverse of :meth:`to_json`."""
        values: dict[str, Any] = json.loads(text)
        job = values["job"]
        buckets = tuple(FilledBucket(**bucket) for bucket in job.pop("buckets"))
        return Calibration(
            Layout(**values["layout"]),
            Machine(**values["machine"]),
            Job(buckets=buckets, **job),
            values["steps"],
            tuple(Sample(**sample) for sample in values["samples"]),
        )
