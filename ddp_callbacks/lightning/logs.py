"""What ``self.log`` records becomes the value of the whole batch and of the whole epoch, on every rank.

Lightning keeps what each rank logs, or with ``sync_dist=True`` the mean over the ranks. Neither is what one process
logs where the ranks' parts differ in size. Here each call of ``self.log`` is kept as a row, until the ranks join their
rows: the value and the size of each whole batch then go to Lightning's own accumulation, which so is the same on all
ranks. Between two joins a reader gets the rank's own value of the step. The ranks join

- before a logger writes, and before a scheduler, ``ModelCheckpoint`` or ``EarlyStopping`` reads;
- behind each batch of an evaluation in which some rank has logged a value of the step;
- before a validation, at the end of the data, and behind the hooks at the end of an epoch;
- behind so many batches that the rows do not fill the memory, and before a file of ``Resume`` is written.

These moments are the same on all ranks, whatever they log. Between them nothing is communicated: rank 0 alone may log,
or read what was logged. With local steps the ranks join only in steps in which a window closes.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchmetrics import Metric

from ddp_callbacks.comm.codec import pack, unpack
from ddp_callbacks.comm.collectives import all_gather_tensors
from ddp_callbacks.lightning import _logged
from ddp_callbacks.lightning._torchmetrics import is_computed, set_step_value
from ddp_callbacks.lightning.batches import Batches
from ddp_callbacks.lightning.metrics import SyncedMetrics
from ddp_callbacks.lightning.rows import Joined, Row, join, plain
from ddp_callbacks.process_group import get_rank

_MOST = 64  # batches whose rows are kept

_Lightnings: Any = object  # of either package: the class comes after this one


class JointResults(_Lightnings):  # type: ignore[misc]
    """Mixed into Lightning's ``_ResultCollection``, which the loops of a Trainer own.

    Every method but those of Lightning's side is called by the run at its fixed moments.

    Attributes:
        synced: The keys that were logged with ``sync_dist=True``, which makes no difference here.
        joins_steps: Whether the ranks meet in this batch.
        is_in_batch: Whether a batch is being computed.
        logs_step: Whether a value of this step was logged for a logger.
    """

    def __init__(self, training: bool, batches: Batches, metrics: SyncedMetrics) -> None:
        super().__init__(training)
        self._lightnings = tuple(vars(self))  # names of attributes
        self._batches, self._metrics = batches, metrics
        self.synced: set[str] = set()
        self.joins_steps, self.is_in_batch, self.logs_step = True, False, False
        self._is_given, self._is_synced = False, False  # the arguments of the call of self.log
        self._rows: list[Row] = []
        self._states: dict[str, tuple[Metric, list[torch.Tensor]]] = {}  # of the last step that has logged it
        self._on_step: set[int] = set()  # ids of the torchmetrics whose value of each step is logged
        self._dtypes: dict[str, torch.dtype] = {}  # of the values that were logged
        self._logged: set[str] = set()  # keys, since remember()
        self._warned: set[str] = set()  # names
        self._position, self._first, self._samples = -1, 0, 0
        self._joined = -1  # the position of the last join

    def __reduce__(self) -> Any:
        """A copy, or a pickle, is Lightning's own collection of what is joined already."""
        lightnings = type(self).__mro__[2]
        state = {name: getattr(self, name) for name in self._lightnings}
        return lightnings, (self.training,), state, None, iter(self.items())

    # --- Lightning's side ---------------------------------------------------------------------------------------------

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """As Lightning's; a value that is only for some ranks (``sync_dist_group``, ``rank_zero_only``) stays so."""
        self._is_synced = bool(kwargs.get("sync_dist"))
        if kwargs.get("sync_dist_group") is None:
            kwargs["sync_dist"] = False
        self._is_given = kwargs.get("batch_size") is not None
        super().log(fx, name, value, *args, **kwargs)

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Record a number; Lightning's own accumulation gets it when it has been joined."""
        metric = self[key]
        self._logged.add(key)
        if self._is_synced:
            self.synced.add(key)
        self.logs_step = self.logs_step or (metric.meta.on_step and metric.meta.logger)
        if not metric.is_tensor and metric.meta.on_step and self.joins_steps:
            self._on_step.add(id(value))
            self._states[key] = value, [] if self._batches.is_padding else list(self._metrics.batch_states(value))
        if not metric.is_tensor or metric.meta.sync.should or metric.meta.sync.rank_zero_only:
            super().update_metrics(key, value, batch_size)
            return
        metric.has_reset = False
        value = value.detach().clone()
        value = value if value.dtype in (torch.float32, torch.float64) else value.to(metric.value.dtype)
        self._dtypes[key] = value.dtype
        self._rows.append(self._row(key, value, float(batch_size)))
        if metric.meta.on_step:
            set_step_value(metric, value)

    def _get_cache(self, result_metric: Any, on_step: bool) -> torch.Tensor | None:
        """As Lightning's; of an epoch that is not joined yet, what this rank has logged. It communicates nothing."""
        if on_step or not result_metric.meta.on_epoch or is_computed(result_metric):
            value: torch.Tensor | None = super()._get_cache(result_metric, on_step)
            return value
        rows = [row for row in self._rows if self[row.key] is result_metric]
        if rows:
            (*_, joined) = join([rows], self._operation)
            return self._tensor(joined)
        if not result_metric.is_tensor or result_metric.meta.sync.should:
            return None
        own: torch.Tensor = result_metric.compute()
        return own

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """As Lightning's; what was recorded for what is reset is forgotten."""
        super().reset(*args, **kwargs)
        self._rows = [row for row in self._rows if not self[row.key].has_reset]

    # --- the run's moments --------------------------------------------------------------------------------------------

    def begin_batch(self, joins_steps: bool) -> None:
        """A batch of which the share is known begins.

        Args:
            joins_steps: Whether all ranks have as many batches, so that they can meet in each.
        """
        self._position += 1
        self._samples += self._batches.share.local
        self.is_in_batch, self.joins_steps, self.logs_step = True, joins_steps, False
        # In the first batch nobody knows yet what will be logged.
        is_first = self._position == self._first
        self._metrics.watch_steps(lambda metric: joins_steps and (is_first or id(metric) in self._on_step))

    def end_batch(self) -> None:
        """All hooks of the batch have run."""
        self.is_in_batch = False

    def end_pass(self) -> None:
        """An epoch or an evaluation has ended, with all its hooks."""
        self.is_in_batch, self._position, self._samples, self._first, self._joined = False, -1, 0, 0, -1
        self._states = {}

    @property
    def is_full(self) -> bool:
        """Whether it is time to join, lest the rows fill the memory; the same on all ranks."""
        return self._position - self._joined >= _MOST

    def join(self, ends: bool = False, carried: Sequence[Any] = ()) -> list[list[Any]]:
        """Give Lightning what the ranks have logged since the last time. A collective.

        Args:
            ends: Whether the data have ended, so that the values of the epoch are computed, too.
            carried: Tensors and plain data that travel along.

        Returns:
            What each rank has ``carried``.
        """
        own = {key: metric.meta.metric_attribute for key, metric in self._uncomputed(False).items()} if ends else {}
        tensors: list[torch.Tensor] = []
        # On the CPU, where all that is sent then arrives.
        states = {key: [part.cpu() for part in parts] for key, (_, parts) in self._states.items()}
        header = pack([plain(self._rows), states, own, [*carried]], tensors)
        self._rows, metrics, self._states, self._joined = [], self._states, {}, self._position
        of_ranks = [unpack(*sent) for sent in all_gather_tensors(header, tensors, "the logged values")]
        for joined in join([[Row(*row) for row in rows] for rows, *_ in of_ranks], self._operation):
            if joined.key in self:
                self._accumulate(joined)
        for key, (metric, _) in metrics.items():
            self._take_states(key, metric, [states[key] for _, states, *_ in of_ranks if states.get(key)])
        if ends:
            self._compute({key: name for _, _, names, _ in of_ranks for key, name in names.items()}, set(own))
        return [carried for *_, carried in of_ranks]

    # --- a pass that is cut, or a step that is skipped ----------------------------------------------------------------

    def remember(self) -> Callable[[], dict[str, Callable[[], None]]]:
        """What tells, for each key that is logged in this step from now on, how to forget what was logged under it."""
        before = {key: dict(vars(metric)) for key, metric in self.items()}
        count, states = len(self._rows), dict(self._states)
        self._logged = set()

        def logged() -> dict[str, Callable[[], None]]:
            return {key: functools.partial(self._forget, key, before.get(key), count, states) for key in self._logged}

        return logged

    def pass_state(self) -> dict[str, Any]:
        """Of the pass under way, between two batches, when all is joined. For a file."""
        return {"position": self._position, "samples": self._samples}

    def load_pass_state(self, position: int, samples: int) -> None:
        """Inverse of :meth:`pass_state`, after Lightning's own part."""
        self._rows, self._states, self.is_in_batch = [], {}, False
        self._position, self._first, self._joined, self._samples = position, position + 1, position, samples
        self._on_step = {id(metric.value) for metric in self.values() if not metric.is_tensor and metric.meta.on_step}

    # --- inside -------------------------------------------------------------------------------------------------------

    def _row(self, key: str, value: torch.Tensor, size: float) -> Row:
        if not self.is_in_batch:
            return Row(key, -1, float(self._samples), size, self._is_given, False, value)
        weight, is_padding = self._batches.weight, self._batches.is_padding
        return Row(key, self._position, weight, size, self._is_given, is_padding, value)

    def _accumulate(self, joined: Joined) -> None:
        if joined.ends is not None and joined.key not in self.synced and get_rank() == 0:
            self._warn_of_difference(self[joined.key].meta.name, *joined.ends)
        size = int(joined.size) if joined.size.is_integer() else joined.size
        super().update_metrics(joined.key, self._tensor(joined), size)

    def _warn_of_difference(self, name: str, lowest: float, highest: float) -> None:
        """Warn, once, of what a hook has logged at the end of an epoch, with another value on each process."""
        if name not in self._warned and highest - lowest > 1e-6 * max(abs(lowest), abs(highest)):
            self._warned.add(name)
            warnings.warn(
                f"{name!r} is logged at the end of an epoch, with another value on each process (from {lowest:.6g} to "
                f"{highest:.6g}). It becomes their mean, weighted by samples, which may not be the value of one "
                "process. Log it in the step or use a torchmetrics metric; if the mean is what you want, pass "
                "sync_dist=True.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _take_states(self, key: str, metric: Metric, parts: list[list[torch.Tensor]]) -> None:
        """The value of the last step of a torchmetric, from the states of all ranks that count."""
        if parts and len(set(map(len, parts))) == 1:
            set_step_value(self[key], self._metrics.value_of(metric, parts))

    def _compute(self, attributes: dict[str, str], own: set[str]) -> None:
        """The values of the epoch. A collective, as torchmetrics merge their states.

        Args:
            attributes: Where in the module the torchmetrics are that any rank has logged, by key.
            own: The keys of this rank.
        """
        for key, attribute in attributes.items():
            if key in own:
                self[key].compute()
            else:
                self._metrics.compute(attribute)  # only others have logged it
        for metric in self._uncomputed(True).values():
            metric.compute()  # of the ranks that sync_dist_group names, if it does

    def _uncomputed(self, of_numbers: bool) -> dict[str, Any]:
        """What the value of the epoch is to be computed of: logged numbers, or torchmetrics."""
        return {
            key: metric
            for key, metric in self.items()
            if metric.is_tensor == of_numbers
            and metric.meta.on_epoch
            and not metric.has_reset
            and not is_computed(metric)
        }

    def _forget(self, key: str, before: dict[str, Any] | None, count: int, states: dict[str, Any]) -> None:
        """What was logged under a key since :meth:`remember`."""
        self._rows[count:] = [row for row in self._rows[count:] if row.key != key]
        self._states.pop(key, None)
        self._states |= {key: states[key]} if key in states else {}
        if before is None:
            del self[key]
        else:
            vars(self[key]).update(before)

    def _tensor(self, joined: Joined) -> torch.Tensor:
        like = self[joined.key].value
        return torch.tensor(joined.value, dtype=self._dtypes.get(joined.key, like.dtype), device=like.device)

    def _operation(self, key: str) -> str:
        return _logged.operation_of(self[key]) if key in self else "mean"
