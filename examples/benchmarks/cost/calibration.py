"""Measure, in a minute, the parameters of :mod:`.cost` for a model and the machines that train it.

``predict.py`` runs this in every process. It measures each part of a step separately: the step without
synchronization, the times at which buckets are full, sums within a host and sums between hosts. It also measures whole
synchronized steps, to check the prediction.

The measurements take turns, several times, so that other load on the machines affects all parts. Each run starts at a
barrier and counts as long as on its slowest rank; the result is the median of the runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cost import Calibration, FilledBucket, Job, Layout, Machine, Sample, fit
from torch import nn

from ddp_callbacks.comm.collectives import all_gather_object, all_reduce
from ddp_callbacks.comm.compression import Compress
from ddp_callbacks.comm.group_sums import ProcessGroupWork
from ddp_callbacks.comm.hierarchical import CHUNK_NBYTES
from ddp_callbacks.comm.hooks import GradBucket
from ddp_callbacks.comm.hosts import hosts_of
from ddp_callbacks.comm.shared_memory import SharedMemoryAllReduce
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.gradients import GradientSynchronizer
from ddp_callbacks.process_group import resolve_group
from ddp_callbacks.process_group.failures import wait

DOING = "the calibration"
SIZES = (1 << 20, 1 << 22, 1 << 24)  # bytes
_RING = 4096  # bytes so few that only latency matters
_LONG = 0.4  # seconds; after a sum this slow, no sum four times as large is measured
_ROUNDS = 4
_MOST = 50  # maximum number of runs per round

Loss = Callable[[], torch.Tensor]
Measured = list[float]
Task = Callable[[], AbstractContextManager[Callable[[], Measured]]]


@dataclass(frozen=True)
class Training:
    """The parts of a training step."""

    module: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer


def calibrate(training: Training, seconds: float, report: Callable[[float, str], None]) -> Calibration:
    """Measure. A collective on the default group, which needs at least two ranks; blocks for about ``seconds``.

    Args:
        training: The same on every rank. The model is trained.
        seconds: How long to measure; longer if a single run of each part takes longer.
        report: Called with the fraction that is done, and the next part.

    Raises:
        ConfigurationError: The hosts have different numbers of ranks, or there is only one rank.
    """
    group = resolve_group(None)
    if group.size() == 1:
        raise ConfigurationError(
            "a prediction needs at least two processes. Name more hosts, or pass --nproc-per-node 2."
        )
    hosts = hosts_of(group)
    sizes = set(map(len, hosts.ranks))
    if len(sizes) > 1:
        counts = ", ".join(str(len(ranks)) for ranks in hosts.ranks)
        raise ConfigurationError(f"the cost model needs the same number of ranks on every host, got {counts}.")
    layout = Layout(len(hosts.ranks), sizes.pop())
    leaders = hosts.between[0] if layout.hosts > 1 else None
    recorder = _Recorder()
    steps: dict[str, Task] = {
        "compute": partial(_timed, _step_of(training)),
        "buckets": partial(recorder.record, training),
        "exact": partial(_synchronized, training, None),
    }
    sums: dict[tuple[str, int], Task] = {}
    if layout.hosts > 1:
        steps["bf16"] = partial(_synchronized, training, "bf16")
    if layout.ranks_per_host > 1:
        sums |= {
            ("memory", nbytes): partial(_timed, _sum_in_memory(hosts.memory, nbytes)) for nbytes in (_RING, *SIZES)
        }
    if layout.hosts > 1:
        sums["ring", _RING] = partial(_timed, _ring(leaders))
        for nbytes in SIZES:
            part = nbytes // layout.ranks_per_host
            sums["wire", nbytes] = partial(_timed, _sum_between_nodes(leaders, part, None))
            sums["half", nbytes] = partial(_timed, _sum_between_nodes(leaders, part, torch.bfloat16))
    found = _measure({**steps, **sums}, seconds, report)
    job = _job(recorder, found, training)
    samples = tuple(Sample(*key, found[key][0]) for key in sums if key in found)
    machine = fit(samples, layout, Machine(latency=0.0, bandwidth=float("inf")))
    return Calibration(layout, machine, job, {key: found[key][0] for key in ("exact", "bf16") if key in found}, samples)


def _job(recorder: _Recorder, found: dict[Any, Measured], training: Training) -> Job:
    *full, after = found["buckets"]
    # Times of one pipeline, but separate medians: noise must not put them out of order.
    full = list(itertools.accumulate(full, max))
    buckets = tuple(FilledBucket(nbytes, at) for nbytes, at in zip(recorder.nbytes, full, strict=True))
    itemsize = next(p.dtype.itemsize for p in training.module.parameters() if p.requires_grad)
    return Job(found["compute"][0], buckets, after, itemsize)


# --- measuring --------------------------------------------------------------------------------------------------------


def _measure(tasks: dict[Any, Task], seconds: float, report: Callable[[float, str], None]) -> dict[Any, Measured]:
    """For each task, the median over all runs of the slowest rank's numbers."""
    found: dict[Any, list[Measured]] = {key: [] for key in tasks}
    share = seconds / _ROUNDS / len(tasks)
    for round_, (index, (key, task)) in itertools.product(range(_ROUNDS), enumerate(tasks.items())):
        if found[key] is None:
            continue
        report((round_ + index / len(tasks)) / _ROUNDS, _describe(key))
        if not _too_long(key, found):
            found[key] += _run(task, share)
    report(1.0, "")
    return {
        key: [statistics.median(groups) for groups in zip(*rows, strict=True)] for key, rows in found.items() if rows
    }


def _too_long(key: Any, found: dict[Any, list[Measured]]) -> bool:
    """Whether a smaller sum has already taken long."""
    if not isinstance(key, tuple):
        return False
    smaller = [rows for other, rows in found.items() if isinstance(other, tuple) and other[0] == key[0]]
    smaller = smaller[: [other for other in found if isinstance(other, tuple) and other[0] == key[0]].index(key)]
    return any(not rows or rows[0][0] > _LONG for rows in smaller)


def _run(task: Task, share: float) -> list[Measured]:
    """The slowest rank's numbers in each run, for about ``share`` seconds, after a warm-up run."""
    with task() as run:
        first = _slowest([[sum(_from_barrier(run))]])[0][0]
        repeats = max(1, min(_MOST, int(share / first) - 1))
        return _slowest([_from_barrier(run) for _ in range(repeats)])


def _from_barrier(run: Callable[[], Measured]) -> Measured:
    all_reduce(torch.zeros(1), DOING)
    return run()


def _slowest(rows: list[Measured]) -> list[Measured]:
    """The maximum over all ranks of each number. A collective."""
    everybody = all_gather_object(rows, DOING)
    return [[max(values) for values in zip(*row, strict=True)] for row in zip(*everybody, strict=True)]


def _describe(key: Any) -> str:
    if isinstance(key, tuple):
        level = {"memory": "within each host", "half": "between hosts, in half precision"}.get(key[0], "between hosts")
        return f"sums of {key[1] / 1e6:.3g} MB {level}"
    names = {"compute": "steps without synchronization", "buckets": "when gradients are there"}
    return names.get(key, f"steps with {key} synchronization")


@contextmanager
def _timed(run: Callable[[], None]) -> Iterator[Callable[[], Measured]]:
    def timed() -> Measured:
        begin = time.perf_counter()
        run()
        return [time.perf_counter() - begin]

    yield timed


# --- the measurements -------------------------------------------------------------------------------------------------


def _step_of(training: Training) -> Callable[[], None]:
    def step() -> None:
        training.optimizer.zero_grad()
        training.loss().backward()
        training.optimizer.step()

    return step


@contextmanager
def _synchronized(training: Training, compress: Compress) -> Iterator[Callable[[], Measured]]:
    synchronizer = GradientSynchronizer(training.module, compress=compress)
    try:
        with _timed(_step_of(training)) as run:
            run()  # allocates the memory
            yield run
    finally:
        synchronizer.close()


class _Recorder:
    """Records when buckets are full, instead of sending them."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []
        self._full: list[float] = []

    @contextmanager
    def record(self, training: Training) -> Iterator[Callable[[], Measured]]:
        """Each run returns the seconds from its start until each bucket is full, and from backward to its end."""

        def run() -> Measured:
            self.nbytes, self._full = [], []
            begin = time.perf_counter()
            training.optimizer.zero_grad()
            training.loss().backward()
            end = time.perf_counter()
            training.optimizer.step()
            return [*(at - begin for at in self._full), time.perf_counter() - end]

        synchronizer = GradientSynchronizer(training.module, comm_hook=self._hook)
        try:
            run()
            yield run
        finally:
            synchronizer.close()

    def _hook(self, _: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._full.append(time.perf_counter())
        self.nbytes.append(bucket.buffer().nbytes)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future


def _sum_in_memory(node: SharedMemoryAllReduce | None, nbytes: int) -> Callable[[], None]:
    assert node is not None  # several ranks are on each host
    tensor = node.allocate(nbytes // 4, torch.float32, torch.device("cpu")).zero_()

    def run() -> None:
        node.launch(tensor, DOING).wait()

    return run


def _sum_between_nodes(leaders: dist.ProcessGroup | None, nbytes: int, dtype: torch.dtype | None) -> Callable[[], None]:
    assert leaders is not None  # with equally many ranks on each host, every rank is a leader
    chunks = torch.zeros(nbytes // 4).split(CHUNK_NBYTES // 4)

    def run() -> None:
        for work in [ProcessGroupWork(chunk, leaders, "", dtype) for chunk in chunks]:
            work.wait()

    return run


def _ring(leaders: dist.ProcessGroup | None) -> Callable[[], None]:
    assert leaders is not None
    group, tensor = leaders, torch.zeros(_RING // 4)
    return lambda: wait(group.allreduce([tensor]), DOING, group)


# --- the user's model -------------------------------------------------------------------------------------------------


def default_training() -> Any:
    """A perceptron with 5.8 million parameters, and 32 random samples."""
    sizes = (784, 1600, 1600, 1200, 10)
    layers = [layer for first, second in itertools.pairwise(sizes) for layer in (nn.Linear(first, second), nn.ReLU())]
    module = nn.Sequential(*layers[:-1])
    inputs, targets = torch.randn(32, sizes[0]), torch.randint(0, sizes[-1], (32,))
    return module, lambda: nn.functional.cross_entropy(module(inputs), targets)


def load_training(name: str | None) -> Training:
    """Load the ``--model``: ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``; ``None`` is :func:`default_training`.

    The function takes no arguments. It returns a module, a function that computes its loss on a batch, and optionally
    an optimizer; the default is plain SGD.

    Raises:
        ConfigurationError: It cannot be imported, or returns something else.
    """
    made = (default_training if name is None else _find(name))()
    module, loss, *rest = made if isinstance(made, tuple) and len(made) > 1 else (None, None)
    if not isinstance(module, nn.Module) or not callable(loss) or len(rest) > 1:
        raise ConfigurationError(
            f"--model {name}: the function must return (module, loss) or (module, loss, optimizer), where loss() is "
            f"computed by the module on a batch; it returned {made!r}."
        )
    optimizer = rest[0] if rest else torch.optim.SGD(module.parameters(), lr=0.0)
    return Training(module, loss, optimizer)


def _find(name: str) -> Callable[[], Any]:
    place, _, function = name.rpartition(":")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        found: Callable[[], Any] = getattr(module, function)
    except (ImportError, OSError, AttributeError) as error:
        raise ConfigurationError(f"--model {name} cannot be imported: {error}.") from error
    return found


def _import_file(path: Path) -> Any:
    sys.path.insert(0, str(path.parent.absolute()))  # as in python PATH
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
