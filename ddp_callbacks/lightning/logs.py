"""What ``self.log`` records becomes the value of the whole batch and of the whole epoch, on every rank.

Lightning keeps what each rank logs, or with ``sync_dist=True`` the mean over the ranks. Neither is what one process
logs where the ranks' parts differ in size. Here every value is recorded with the number of samples that it is the mean
of, and joined to the value of the whole batch before Lightning averages over batches, so ``sync_dist`` makes no
difference. When::

    end of training_step        the values of the step are sent, with the gradients where nobody reads before those are
                                there; they are taken behind backward, or when somebody reads
    end of a batch              the same for the steps of evaluations. What hooks have logged behind the step is sent
                                with the next one, unless somebody may read it before
    end of a pass               the values of the epoch and of torchmetrics, before any hook
    end of the epoch's hooks    the same for what they have logged; in training before EarlyStopping and checkpoints

What is on GPUs stays there, and no step waits for it: the values of a step travel between the GPUs, and joined values
are computed there, while keys and weights travel between the CPUs. Reading a value waits. A step also waits if the
ranks could not foresee what it logs: the first step, one with different keys on the ranks, and one with far more keys.

With local steps the values of a step are joined only where a window closes; in the other steps they are the rank's own.

These moments are the same on all ranks, whatever they log. Between them nothing is communicated: rank 0 alone may log,
or read what was logged. ``reduce_fx`` says how parts combine: the mean is weighted, a sum is the sum, a maximum the
maximum.
"""

from __future__ import annotations

import functools
import json
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchmetrics import Metric

from ddp_callbacks.comm.collectives import all_gather_json, all_gather_tensors
from ddp_callbacks.comm.device_scalars import DeviceExchange, DeviceVectors, to_device
from ddp_callbacks.comm.scalars import Carrier, ScalarExchange, ScalarWork, room_of
from ddp_callbacks.lightning._torchmetrics import is_computed, set_step_value, step_value
from ddp_callbacks.lightning.batches import Batches
from ddp_callbacks.lightning.combine import combine, combine_on_device
from ddp_callbacks.lightning.epoch_end import DifferingValues
from ddp_callbacks.lightning.history import NO_ROWS, SUMS, History, Parts, Record, join
from ddp_callbacks.lightning.hooks import Readers
from ddp_callbacks.lightning.metrics import SyncedMetrics
from ddp_callbacks.lightning.rows import SKIPPED, Part, Row, are_alike, checksum_of, encode_row, lengths

_OF_STEP = "the logged values of a step"
_OF_HOOKS = "the logged values of the hooks behind a step"


@dataclass
class Sent:
    """What was logged in a step, on its way.

    Attributes:
        numbers: This rank's, and under which keys; those on its GPU are the last.
        metrics: The same for torchmetrics.
        rows: Of all ranks.
        vectors: Of all ranks, of what is on their GPUs.
        doing: The purpose.
        is_taken: Whether they have their joined values already.
    """

    numbers: list[tuple[str, Record]]
    metrics: list[tuple[str, Metric]]
    rows: ScalarWork
    vectors: DeviceVectors
    doing: str
    is_taken: bool = False


_Lightnings: Any = object  # of either package: the class comes after this one


class JointResults(_Lightnings):  # type: ignore[misc]
    """Mixed into Lightning's ``_ResultCollection``, which the loops of a Trainer own.

    Every method but those of Lightning's side is called by the strategy at its fixed moments.
    """

    def __init__(
        self,
        training: bool,
        batches: Batches,
        metrics: SyncedMetrics,
        exchange: ScalarExchange,
        readers: Callable[[], Readers],
        is_read_by_user: Callable[[], bool],
    ) -> None:
        super().__init__(training)
        self._lightnings = tuple(vars(self))  # names of attributes
        self._batches = batches
        self._metrics = metrics
        self._exchange = exchange
        self._devices = DeviceExchange()
        self._readers_here, self._is_read_by_user = readers, is_read_by_user
        self._readers = Readers(True, True, True, True)  # on any rank
        self._given = False
        self._step: list[tuple[str, Record]] = []  # logged in this step, and not yet joined
        self._step_metrics: list[tuple[str, Metric, list[torch.Tensor]]] = []  # torchmetrics, and the batch's states
        self._late: set[str] = set()  # keys that hooks have logged behind the step before
        self._epoch: dict[str, History] = {}
        self._on_step: set[int] = set()  # ids of the torchmetrics whose value of each step is logged
        self._logged: set[str] = set()  # keys, since remember()
        self._sent: Sent | None = None
        self._last: list[Row] = []  # what came in the step before
        self._differing = DifferingValues()
        self._reads_between: bool | None = None  # whether any rank reads between steps; None: nobody knows yet
        self._is_reading, self._warned = False, False
        self._told: list[bool] = []  # flags that came with it
        self._joins_steps = True
        self._in_batch, self._position, self._samples = False, -1, 0
        self._first = 0  # position of the first batch that these processes have computed of the pass

    def __reduce__(self) -> Any:
        """A copy, or a pickle, is Lightning's own collection of what is joined already."""
        lightnings = type(self).__mro__[2]
        state = {name: getattr(self, name) for name in self._lightnings}
        return lightnings, (self.training,), state, None, iter(self.items())

    # --- Lightning's side ---------------------------------------------------------------------------------------------

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """As Lightning's; a value that is only for some ranks (``sync_dist_group``, ``rank_zero_only``) stays so."""
        if kwargs.get("sync_dist"):
            self._differing.expected.add(name)
        if kwargs.get("sync_dist_group") is None:
            kwargs["sync_dist"] = False
        self._given = kwargs.get("batch_size") is not None
        super().log(fx, name, value, *args, **kwargs)

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Record a number; Lightning's own accumulation gets it when it has been joined."""
        metric = self[key]
        self._logged.add(key)
        if not metric.is_tensor and metric.meta.on_step and self._joins_steps:
            self._on_step.add(id(value))
            states = [] if self._batches.is_padding else list(self._metrics.batch_states(value))
            self._step_metrics.append((key, value, states))
        if not metric.is_tensor or metric.meta.sync.should or metric.meta.sync.rank_zero_only:
            super().update_metrics(key, value, batch_size)
            return
        metric.has_reset = False
        value = value.detach().clone()
        value = value if value.dtype in (torch.float32, torch.float64) else value.to(metric.value.dtype)
        self._batches.settle()
        record = self._record(value, float(batch_size))
        if metric.meta.on_step:
            set_step_value(metric, value)
            if self._joins_steps:
                self._step.append((key, record))
        if metric.meta.on_epoch:
            self._epoch.setdefault(key, History(self._operation(key))).add(record)

    def _get_cache(self, result_metric: Any, on_step: bool) -> torch.Tensor | None:
        """As Lightning's, of what is joined; it communicates nothing."""
        if on_step:
            self._take_arrived()
            self._note_reading(result_metric)
        elif result_metric.meta.on_epoch and not is_computed(result_metric):
            return self._own_value(result_metric)
        value: torch.Tensor | None = super()._get_cache(result_metric, on_step)
        return value

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """As Lightning's; what was recorded for what is reset is forgotten."""
        super().reset(*args, **kwargs)
        reset = {key for key, metric in self.items() if metric.has_reset}
        self._epoch = {key: history for key, history in self._epoch.items() if key not in reset}

    # --- the strategy's moments ---------------------------------------------------------------------------------------

    def begin_batch(self, joins_steps: bool) -> None:
        """A batch of which the share is known begins.

        Args:
            joins_steps: Whether all ranks have as many batches, so that they can meet in each.
        """
        self._position += 1
        self._samples += self._batches.share.local
        self._in_batch, self._joins_steps = True, joins_steps
        # In the first batch nobody knows yet what will be logged.
        self._metrics.watch_steps(lambda metric: joins_steps and (self.is_first_batch or id(metric) in self._on_step))

    def end_batch(self) -> Sequence[bool]:
        """All hooks of the batch have run; the flags that any rank has sent with its values of the step, if any.

        A collective if steps join.
        """
        told: Sequence[bool] = ()
        self._late = {key for key, _ in self._step} | {key for key, *_ in self._step_metrics}
        if self._joins_steps:
            self.take_step()
            told, self._told = self._told, []
            if self.is_first_batch:
                self._agree_on_readers()
        self._in_batch = False
        return told

    def join_late(self, are_read: bool) -> None:
        """A batch has ended: join what hooks have logged behind its step, if somebody may read it before the next.

        A collective, if ``are_read`` says the same on all ranks.

        Args:
            are_read: Whether a logger writes now.
        """
        readers = self._readers
        reads = self._reads_between is not False or readers.schedulers or (readers.loggers and are_read)
        if self._joins_steps and readers.behind_step and reads:
            self.join_step()

    def join_rest(self) -> None:
        """Join what hooks have logged behind the last step: no step comes next. A collective."""
        if self._readers.behind_step:
            self.join_step()

    def end_pass(self) -> None:
        """An epoch or an evaluation has ended, with all its hooks."""
        self._in_batch, self._position, self._samples, self._first = False, -1, 0, 0
        self._step, self._step_metrics, self._late = [], [], set()

    @property
    def is_in_batch(self) -> bool:
        """Whether a batch is being computed."""
        return self._in_batch

    @property
    def is_first_batch(self) -> bool:
        """Whether it is the first of its pass, or the first that these processes compute of it."""
        return self._position == self._first

    @property
    def joins_steps(self) -> bool:
        """Whether the ranks meet in this batch."""
        return self._joins_steps

    def send_step(self, flags: Sequence[bool], skipped: bool = False, carrier: Carrier | None = None) -> bool:
        """Send what was logged in this step; :meth:`take_step` takes what the others send. Does not block.

        Args:
            flags: What this rank has decided so far.
            skipped: Whether ``training_step`` has returned nothing.
            carrier: Of the backward that comes next on every rank; ``None`` if there is none.

        Returns:
            Whether it travels with the carrier.
        """
        self.take_step()
        self._late = set()
        is_carried = self._may_be_carried(carrier)
        self._send([*flags, self._is_reading], _OF_STEP, skipped, carrier if is_carried else None)
        return is_carried

    def skipped_by(self) -> list[bool]:
        """For each rank, whether ``training_step`` has returned nothing there. Blocks until all have sent theirs."""
        assert self._sent is not None
        return [bool(row[SKIPPED]) for row in self._sent.rows.arrive()[0]]

    def remember(self) -> Callable[[], dict[str, Callable[[], None]]]:
        """What tells, for each key that is logged in this step from now on, how to forget what was logged under it."""
        before = {key: dict(vars(metric)) for key, metric in self.items()}
        histories = {key: history.remember() for key, history in self._epoch.items()}
        counts = len(self._step), len(self._step_metrics)
        self._logged = set()

        def logged() -> dict[str, Callable[[], None]]:
            return {
                key: functools.partial(self._forget, key, before.get(key), histories.get(key), counts)
                for key in self._logged
            }

        return logged

    def pass_state(self) -> dict[str, Any]:
        """Of the pass under way, between two batches: what Lightning's accumulation has not got yet. For a file."""
        epoch = {key: history.state_dict() for key, history in self._epoch.items()}
        return {"epoch": epoch, "position": self._position, "samples": self._samples}

    def load_pass_state(self, epoch: dict[str, History], position: int, samples: int) -> None:
        """Inverse of :meth:`pass_state`, after Lightning's own part; the next batch is the first of these processes."""
        self._epoch = epoch
        self._in_batch, self._position, self._samples, self._first = False, position, samples, position + 1
        self._step, self._step_metrics, self._late, self._sent = [], [], set(), None
        self._on_step = {id(metric.value) for metric in self.values() if not metric.is_tensor and metric.meta.on_step}

    def accumulate(self, key: str, value: torch.Tensor, size: float) -> None:
        """Give Lightning what is joined already: the value of one or more batches, which count ``size``."""
        metric = self[key]
        before = step_value(metric)
        super().update_metrics(key, value.to(metric.value.device), int(size) if size.is_integer() else size)
        set_step_value(metric, before)

    def take_step(self) -> None:
        """Take what was sent, if that has not been done. A collective."""
        if self._sent is not None:
            self._last = self._take()
            *self._told, reads = _raised(self._last)
            if not self.is_first_batch:
                self._reads_between = bool(self._reads_between) or reads

    def join_step(self) -> None:
        """Join what was logged in this step. A collective."""
        self.take_step()
        self._send((), _OF_HOOKS)
        self._take()

    def join_epoch(self, flags: Sequence[bool] = ()) -> list[bool]:
        """Give Lightning the joined records, and compute torchmetrics; the flags of any rank. A collective."""
        recorded, self._epoch = self._epoch, {}
        own = {key: history.parts() for key, history in recorded.items()}
        attributes = {
            key: metric.meta.metric_attribute
            for key, metric in self.items()
            if not metric.is_tensor and metric.meta.on_epoch and not metric.has_reset and not is_computed(metric)
        }
        rows = self._exchange_epoch(own, attributes, flags)
        by_rank, attributes_by_rank = self._parts_of_epoch(own, attributes, rows)
        for key, history in recorded.items():
            parts = [own[key] for own in by_rank if key in own]
            if self._operation(key) == "mean":
                self._differing.look(self[key].meta.name, torch.cat([rows for _, rows in parts]))
            value, size = join(parts, self._operation(key))
            self.accumulate(key, torch.tensor(value, dtype=history.dtype), size)
        for key, attribute in {key: name for names in attributes_by_rank for key, name in names.items()}.items():
            if key in attributes:
                self[key].compute()
            else:
                self._metrics.compute(attribute)  # only others have logged it
        for metric in self.values():
            if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset and not is_computed(metric):
                metric.compute()  # of the ranks that sync_dist_group names, if it does
        return [any(raised) for raised in zip(*(row[2 : 2 + len(flags)] for row in rows), strict=True)]

    # --- inside -------------------------------------------------------------------------------------------------------

    def _agree_on_readers(self) -> None:
        rows = self._exchange.exchange([*map(float, self._readers_here())], "who reads the logged values of a step")
        self._readers = Readers(*(any(column) for column in zip(*rows, strict=True)))

    def _note_reading(self, result_metric: Any) -> None:
        """Note whether somebody reads what was logged behind the step before, between that and this step's sum.

        From the end of this step on it is joined in time. In the first step of a run it always is, so only somebody who
        begins to read later gets the process's own value, and is told.
        """
        late = [key for key in self._late if self._in_batch and self[key] is result_metric]
        if not late or not self._is_read_by_user():
            return
        self._is_reading = True
        if self._reads_between is False and not self._warned:
            self._warned = True
            warnings.warn(
                f"{result_metric.meta.name!r} was logged by a hook behind the step before, and is read before the "
                "gradients of this step are summed for the first time in this run: it is the process's own value. From "
                "the next step on it is that of the whole batch.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _forget(
        self, key: str, before: dict[str, Any] | None, forget: Callable[[], None] | None, counts: tuple[int, int]
    ) -> None:
        """What was logged under a key since :meth:`remember`."""
        numbers, metrics = counts
        self._step[numbers:] = [each for each in self._step[numbers:] if each[0] != key]
        self._step_metrics[metrics:] = [each for each in self._step_metrics[metrics:] if each[0] != key]
        if forget is None:
            self._epoch.pop(key, None)
        else:
            forget()
        if before is None:
            del self[key]
        else:
            vars(self[key]).update(before)

    def _may_be_carried(self, carrier: Carrier | None) -> bool:
        """Whether what is sent may arrive with the gradients; in the step before there was room. Equal on all ranks."""
        if carrier is None or self._readers.before_gradients or not self._last:
            return False
        return max(row.length for row in self._last) <= room_of(carrier)

    def _exchange_epoch(
        self, own: dict[str, Parts], attributes: dict[str, str], flags: Sequence[bool]
    ) -> list[list[float]]:
        """A checksum of what there is to join, whether a rank has more than sums, flags, and sums."""
        checksum = zlib.crc32(json.dumps([list(own), list(attributes)]).encode())
        has_rows = any(len(rows) for _, rows in own.values())
        sums = [number for sums, _ in own.values() for number in sums.tolist()]
        row = [float(checksum), float(has_rows), *map(float, flags), *sums]
        return self._exchange.exchange(row, "the logged values of the epoch")

    def _parts_of_epoch(
        self, own: dict[str, Parts], attributes: dict[str, str], exchanged: list[list[float]]
    ) -> tuple[list[dict[str, Parts]], list[dict[str, str]]]:
        """What each rank has logged, and its torchmetrics. A collective where that is not the same, or not but sums."""
        if len({row[0] for row in exchanged}) == 1 and not any(row[1] for row in exchanged):
            by_rank = []
            for row in exchanged:
                sums = torch.tensor(row[len(row) - SUMS * len(own) :], dtype=torch.float64).view(len(own), SUMS)
                by_rank.append({key: (part, NO_ROWS) for key, part in zip(own, sums, strict=True)})
            return by_rank, [attributes]
        tensors = [part for parts in own.values() for part in parts]
        gathered = all_gather_tensors([list(own), attributes], tensors, "the logged values of the epoch")
        found = [
            dict(zip(keys, zip(parts[::2], parts[1::2], strict=True), strict=True)) for (keys, _), parts in gathered
        ]
        return found, [names for (_, names), _ in gathered]

    def _record(self, value: torch.Tensor, size: float) -> Record:
        batches = self._batches
        if not self._in_batch:
            return Record(-1, float(self._samples), None, size, None, self._given, False, value)
        weight, share, total = batches.weight, batches.share, batches.total
        counts = weight if weight == size and not batches.is_weighed else None
        if total is not None and share.total is not None and size == share.local:
            counts = weight * share.total / total if total else float(share.local)
        return Record(self._position, weight, total, size, counts, self._given, batches.is_padding, value)

    def _send(self, flags: Sequence[bool], doing: str, skipped: bool = False, carrier: Carrier | None = None) -> None:
        (numbers, self._step), (metrics, self._step_metrics) = (self._step, []), (self._step_metrics, [])
        takes = self._devices.takes
        numbers.sort(key=lambda each: takes(each[1].value))
        states = [(key, states) for key, _, states in metrics]
        row, on_device = encode_row(numbers, states, flags, skipped, takes)
        rows = self._exchange.launch(row, doing) if carrier is None else self._exchange.send_with(carrier, row, doing)
        self._sent = Sent(
            numbers, [(key, metric) for key, metric, _ in metrics], rows, self._devices.send(on_device, doing), doing
        )

    def _take_arrived(self) -> None:
        """What was sent, where that takes no other rank."""
        if self._sent is None or self._sent.is_taken or not self._sent.rows.are_here():
            return
        received, are_whole = self._sent.rows.arrive()
        if are_whole:
            rows = [*map(Row, received)]
            if are_alike(rows) and self._sent.vectors.hold(lengths(rows)):
                self._take_values(self._sent, rows)

    def _take(self) -> list[Row]:
        """What the ranks have sent. A collective."""
        assert self._sent is not None
        sent, self._sent = self._sent, None
        rows = [*map(Row, sent.rows.wait())]
        if not sent.is_taken:
            self._take_values(sent, rows)
        self._devices.note(lengths(rows), sent.doing)
        return rows

    def _take_values(self, sent: Sent, rows: list[Row]) -> None:
        """A collective where the ranks have logged different keys, or more on their GPUs than there was room for."""
        vectors = sent.vectors.arrive()
        parts: Sequence[Sequence[Part]]
        if are_alike(rows):
            if not sent.vectors.hold(lengths(rows)):
                vectors = self._read_vectors(sent, rows)
            parts, count = [*zip(*(row.parts for row in rows), strict=True)], rows[0].content[1]
        else:
            vectors, count = self._read_vectors(sent, rows), 0
            parts = self._parts_by_name([key for key, _ in sent.numbers], rows, vectors)
        here = len(sent.numbers) - count
        for (key, record), found in zip(sent.numbers[:here], parts, strict=False):
            joined = combine(self._weighted(key, record, found), self._operation(key))
            self._set_step(key, to_device(torch.tensor(joined, dtype=record.value.dtype), record.value.device))
        if count:
            self._take_numbers(sent.numbers[here:], parts[here:], vectors[:, :count])
        self._take_metrics(sent.metrics, rows, vectors)
        sent.is_taken = True

    def _take_numbers(
        self, numbers: list[tuple[str, Record]], parts: Sequence[Sequence[Part]], values: torch.Tensor
    ) -> None:
        """Those on the GPU, whose values have the shape ``[ranks, numbers]``."""
        kinds = [(self._operation(key), record.value.dtype) for key, record in numbers]
        weights = [
            [weight for weight, _ in self._weighted(key, record, found)]
            for (key, record), found in zip(numbers, parts, strict=True)
        ]
        for (key, record), value in zip(numbers, combine_on_device(values, weights, kinds), strict=True):
            self._set_step(key, to_device(value, record.value.device))

    def _take_metrics(self, metrics: list[tuple[str, Metric]], rows: list[Row], vectors: torch.Tensor) -> None:
        vectors_as = functools.cache(vectors.to)  # of a dtype
        for key, metric in dict(metrics).items():
            code = checksum_of(key)
            sent = [(rank, row.states[code]) for rank, row in enumerate(rows) if row.states.get(code)]
            if sent and len({len(states) for _, states in sent}) == 1:
                tensors = [[state.tensor(rank, vectors_as) for state in states] for rank, states in sent]
                set_step_value(self[key], self._metrics.value_of(metric, tensors))

    def _read_vectors(self, sent: Sent, rows: list[Row]) -> torch.Tensor:
        """Every rank's vector, on the CPU. A collective that waits for the GPUs, if there is something on one."""
        width = max(lengths(rows))
        if not width:
            return torch.zeros(len(rows), 0)
        vectors = self._exchange.exchange(sent.vectors.read(), "the logged values on the GPUs")
        return torch.tensor([own + [0.0] * (width - len(own)) for own in vectors], dtype=torch.float64)

    def _own_value(self, metric: Any) -> torch.Tensor | None:
        """Of an epoch, before the ranks have joined it: what this rank has logged; of what takes the others, none."""
        history = next((history for key, history in self._epoch.items() if self[key] is metric), None)
        if history is not None:
            sums, rows = history.parts()
            value, _ = join([(sums, rows)], self._operation_of(metric))
            return torch.tensor(value, dtype=history.dtype, device=metric.value.device)
        if not metric.is_tensor or metric.meta.sync.should:
            return None
        own: torch.Tensor = metric.compute()
        return own

    def _parts_by_name(self, keys: list[str], rows: list[Row], vectors: torch.Tensor) -> list[list[Part]]:
        """Where the ranks have logged different keys: the parts that each of this rank's keys has. A collective."""
        named = all_gather_json(keys, "the names of the logged values")
        found: dict[tuple[str, int], list[Part]] = {}
        for names, row, vector in zip(named, rows, vectors.tolist(), strict=True):
            for index, (name, part) in enumerate(zip(names, row.all_parts(vector), strict=True)):
                found.setdefault((name, names[:index].count(name)), []).append(part)
        return [found[key, keys[:index].count(key)] for index, key in enumerate(keys)]

    def _weighted(self, key: str, record: Record, parts: Sequence[Part]) -> list[tuple[float, float]]:
        """The weight and the value of each part."""
        operation = self._operation(key)
        varying = record.given and len({size for _, size, _ in parts if size}) > 1
        by_size = varying if operation == "mean" else record.position >= 0
        return [
            (size if by_size and (weight or operation != "mean") else weight, value) for weight, size, value in parts
        ]

    def _set_step(self, key: str, value: torch.Tensor) -> None:
        metric = self[key]
        set_step_value(metric, value)
        if not metric.meta.on_epoch:
            metric.value = value

    def _operation(self, key: str) -> str:
        return self._operation_of(self[key])

    @staticmethod
    def _operation_of(metric: Any) -> str:
        return "mean" if metric.meta.is_mean_reduction else str(metric.meta.reduce_fx.__name__)


def _raised(rows: list[Row]) -> list[bool]:
    """The flags that any rank has raised."""
    return [any(flags) for flags in zip(*(row.flags for row in rows), strict=True)]
