"""Turn values of ``self.log`` into those of the whole batch and the whole epoch, on every rank.

Lightning keeps each rank's own values, or with ``sync_dist=True`` their mean over the ranks. If the ranks' parts differ
in size, neither is what one process logs. Here each call of ``self.log`` makes a row, until the ranks join their rows.
Lightning's own accumulation then gets the value and the size of each whole batch, so it is the same on all ranks.
Between two joins, a reader gets the rank's own value of the step. The ranks join

- before a logger writes, and before a scheduler, ``ModelCheckpoint`` or ``EarlyStopping`` reads;
- after each batch of an evaluation in which some rank has logged a value of the step;
- before a validation, at the end of the data, and after the hooks at the end of an epoch;
- after a number of batches, so that rows do not fill the memory, and before ``Resume`` writes a file.

These moments are the same on all ranks, whatever they log. Between them the ranks exchange nothing, so rank 0 alone may
log, or read logged values. With local steps, the ranks join only in steps in which a window closes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.data.own_code import is_measured
from ddp_callbacks.errors import warn
from ddp_callbacks.lightning import _logged
from ddp_callbacks.lightning._torchmetrics import begin_again, is_computed, set_step_value, value_of
from ddp_callbacks.lightning.batches import Batches
from ddp_callbacks.lightning.logged_rows import Joined, Row, Sizes, Way, join, plain
from ddp_callbacks.lightning.synced_metrics import SyncedMetrics
from ddp_callbacks.process_group import get_rank

_MOST = 64  # batches between two joins
_COUNTS = (
    "is logged at the end of an epoch, and is the number of samples that this process has had: it becomes the mean of "
    'such numbers. Pass reduce_fx="sum" to self.log.'
)
_ODD_SIZES = (
    "is logged without batch_size=, so batches count by what Lightning takes for the number of samples ({found}): "
    "another mean than on one process, unless that is always the same. Pass batch_size= to self.log."
)

_Lightnings: Any = object  # stands for either package's class, which follows in the MRO


class JointResults(_Lightnings):  # type: ignore[misc]
    """Mixin of Lightning's ``_ResultCollection``, of which each loop of a Trainer has one.

    The run calls all methods that Lightning does not call, at fixed moments.

    Attributes:
        synced: The keys that were logged with ``sync_dist=True``, which makes no difference here.
        joins_steps: Whether the ranks meet in this batch.
        is_in_batch: Whether a batch is being computed.
        logs_step: Whether a value of this step was logged for a logger.
        is_shown: Whether the Trainer's metrics have the values of the last step.
        logs_of_parts: Whether a value that was logged since the last batch may be of what each process has collected.
        counts: Numbers of the program's that count the samples of this rank's parts, after the last batch.
        odd_sizes: What Lightning takes for numbers of samples, if those of parts don't add up; else empty.
    """

    def __init__(self, training: bool, trainer: Any, batches: Batches, metrics: SyncedMetrics) -> None:
        super().__init__(training)
        self._lightnings = tuple(vars(self))  # names of Lightning's attributes
        self._trainer, self._batches, self._metrics = trainer, batches, metrics
        self.synced: set[str] = set()
        self.joins_steps, self.is_in_batch, self.logs_step, self.is_shown = True, False, False, False
        self.logs_of_parts, self.odd_sizes, self.counts = False, "", list[float]()
        self._is_given, self._is_synced = False, False  # arguments of the last self.log
        self._rows: list[Row] = []
        self._states: dict[str, dict[str, Any]] = {}  # of the torchmetrics, in the last step that logged them
        self._on_step: set[int] = set()  # ids of the torchmetrics whose value of each step is logged
        self._dtypes: dict[str, str] = {}  # of logged values, by key
        self._shared: dict[str, str | None] = {}  # keys that all ranks have, with the dtypes that they know
        self._sizes = Sizes()
        self._missed: dict[str, dict[Way, Sequence[float]]] = {}  # by key: the sums of Joined.missed
        self._logged: set[str] = set()  # keys since remember()
        self._warned: set[str] = set()  # names that have caused a warning
        self._position, self._first, self._samples = -1, 0, 0
        self._joined = -1  # the position of the last join

    def __reduce__(self) -> Any:
        """Copy and pickle as Lightning's own collection, with the values that are joined already."""
        lightnings = type(self).__mro__[2]
        state = {name: getattr(self, name) for name in self._lightnings}
        return lightnings, (self.training,), state, None, iter(self.items())

    # --- Lightning's side ---------------------------------------------------------------------------------------------

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Like Lightning's; a value for some ranks only (``sync_dist_group``, ``rank_zero_only``) stays with them."""
        self._is_synced = bool(kwargs.get("sync_dist"))
        if kwargs.get("sync_dist_group") is None:
            kwargs["sync_dist"] = False
        self._is_given = kwargs.get("batch_size") is not None
        super().log(fx, name, value, *args, **kwargs)

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Record a number as a row: Lightning's own accumulation gets it after the next join."""
        metric = self[key]
        self._logged.add(key)
        if self._is_synced:
            self.synced.add(key)
        self.logs_step = self.logs_step or (metric.meta.on_step and metric.meta.logger)
        if not metric.is_tensor and metric.meta.on_step and self.joins_steps:
            self._on_step.add(id(value))
            self._states[key] = {} if self._batches.is_padding else self._metrics.batch_states(value)
        if not metric.is_tensor or _is_for_some_ranks(metric.meta.sync):
            super().update_metrics(key, value, batch_size)
            return
        metric.has_reset = False
        if self.odd_sizes and metric.meta.on_epoch and metric.meta.is_mean_reduction and not self._is_given:
            self._warn(metric.meta.name, _ODD_SIZES.format(found=self.odd_sizes))
        may_count = not self.is_in_batch and metric.meta.is_mean_reduction and not self._is_synced
        if may_count and float(value) in self.counts:
            self._warn(metric.meta.name, _COUNTS)
            self.logs_of_parts = True
        value = value.detach().clone()
        value = value if value.dtype in (torch.float32, torch.float64) else value.to(metric.value.dtype)
        self._note_dtype(key, str(value.dtype).removeprefix("torch."))
        self._rows.append(self._row(key, value, float(batch_size)))
        if metric.meta.on_step:
            set_step_value(metric, value)

    def _get_cache(self, result_metric: Any, on_step: bool) -> torch.Tensor | None:
        """Like Lightning's, but local: for an epoch that is not joined yet, return this rank's own value."""
        if on_step or not result_metric.meta.on_epoch or is_computed(result_metric):
            value: torch.Tensor | None = super()._get_cache(result_metric, on_step)
            return value
        rows = [row for row in self._rows if self[row.key] is result_metric]
        if rows:
            (*_, joined) = join([rows], self._operation, Sizes())
            return self._tensor(joined)
        if not result_metric.is_tensor or result_metric.meta.sync.should:
            return None
        own: torch.Tensor = result_metric.compute()
        return own

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """Like Lightning's, and drop the rows of what is reset."""
        super().reset(*args, **kwargs)
        self._rows = [row for row in self._rows if not self[row.key].has_reset]
        self._missed = {key: missed for key, missed in self._missed.items() if not self[key].has_reset}

    # --- the run's moments --------------------------------------------------------------------------------------------

    def begin_batch(self, joins_steps: bool) -> None:
        """Begin a batch whose share is known.

        Args:
            joins_steps: Whether the ranks can meet in this batch.
        """
        self._position += 1
        self._samples += self._batches.share.local
        self.is_in_batch, self.joins_steps, self.logs_step, self.is_shown = True, joins_steps, False, False
        # In the first batch nobody knows yet what will be logged.
        begins = self._position == self._first
        self._metrics.watch_steps(lambda metric: joins_steps and (begins or id(metric) in self._on_step))

    def end_batch(self) -> None:
        """End the batch, after all its hooks."""
        self.is_in_batch = False

    def end_pass(self) -> None:
        """End an epoch or an evaluation, after all its hooks."""
        self.is_in_batch, self._position, self._samples, self._first, self._joined = False, -1, 0, 0, -1
        self._states, self.logs_of_parts = {}, False

    @property
    def is_first(self) -> bool:
        """Whether this is the first batch of the pass, and this rank has no sample of it."""
        return self._position == self._first and not self._samples

    @property
    def is_full(self) -> bool:
        """Whether to join now, so that rows do not fill the memory; the same on all ranks."""
        return self._position - self._joined >= _MOST

    def join(self, ends: bool = False, carried: Sequence[Any] = ()) -> list[list[Any]]:
        """Join the rows that the ranks have logged since the last join, for Lightning. A collective.

        Args:
            ends: Whether the data have ended, so that the values of the epoch are computed, too.
            carried: Tensors and plain data to send along.

        Returns:
            Each rank's ``carried``.
        """
        computes = [*self._uncomputed(False)] if ends else []
        mine = [plain(self._rows), self._states, self._new_keys(), computes, [*carried]]
        self._rows, self._states, self._joined = [], {}, self._position
        rows, states, keys, computed, carried = zip(*all_gather_object(mine, "the logged values"), strict=True)
        for key, (made, dtype) in [each for of_rank in keys for each in of_rank.items()]:
            self._share(key, made, dtype)
        for joined in join([[Row(*row) for row in of_rank] for of_rank in rows], self._operation, self._sizes):
            self._accumulate(joined)
        for key in dict.fromkeys(key for of_rank in states for key in of_rank):
            self._set_step_value(key, [of_rank[key] for of_rank in states if of_rank.get(key)])
        if ends:
            self._compute(dict.fromkeys(key for of_rank in computed for key in of_rank))
        return list(carried)

    # --- a pass that is cut, or a step that is skipped ----------------------------------------------------------------

    def names_of(self, value: float) -> list[str]:
        """Return the names under which a value was logged in this step."""
        rows = [row for row in self._rows if row.position == self._position and float(row.value) == value]
        return [self[row.key].meta.name for row in rows]

    def remember(self) -> Callable[[], dict[str, Callable[[], None]]]:
        """Return a function that returns, for each key logged since this call, a function to forget its values."""
        before = {key: dict(vars(metric)) for key, metric in self.items()}
        count, states = len(self._rows), dict(self._states)
        self._logged = set()

        def logged() -> dict[str, Callable[[], None]]:
            return {key: functools.partial(self._forget, key, before.get(key), count, states) for key in self._logged}

        return logged

    def pass_state(self) -> dict[str, Any]:
        """Return the state of the current pass for a file, between two batches, when all rows are joined."""
        sizes = {"by_size": sorted(self._sizes.by_size), "sizes": self._sizes.seen, "missed": self._missed}
        return {"position": self._position, "samples": self._samples} | sizes

    def load_pass_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`pass_state`. Call it after Lightning's own part is loaded.

        Args:
            state: That of a pass without rows needs only the position.
        """
        position, self._samples = state["position"], state.get("samples", 0)
        self._position, self._first, self._joined = position, position + 1, position
        self._shared = {key: self._dtypes.get(key) for key in self}
        self._sizes, self._missed = Sizes(state.get("by_size", ()), state.get("sizes")), dict(state.get("missed", {}))
        self._rows, self._states, self.is_in_batch = [], {}, False
        self._on_step = {id(metric.value) for metric in self.values() if not metric.is_tensor and metric.meta.on_step}

    # --- inside -------------------------------------------------------------------------------------------------------

    def _row(self, key: str, value: torch.Tensor, size: float) -> Row:
        if not self.is_in_batch:
            return Row(key, -1, 1, None, float(self._samples), size, self._is_given, value)
        share, weight = self._batches.share, self._batches.weight
        return Row(key, self._position, share.local, share.total, weight, size, self._is_given, value)

    def _new_keys(self) -> dict[str, Any]:
        """Return what the other ranks need for the keys that only this rank may have."""
        return {
            key: [_logged.result_key(metric, key in self.synced), self._dtypes.get(key)]
            for key, metric in self.items()
            if self._shared.get(key, "") != self._dtypes.get(key)
            and not (metric.is_tensor and _is_for_some_ranks(metric.meta.sync))
        }

    def _share(self, key: str, made: dict[str, Any], dtype: str | None) -> None:
        """Have a key that a rank has logged."""
        if dtype is not None:
            self._note_dtype(key, dtype)
        self._shared[key] = self._dtypes.get(key)
        if key not in self:
            self[key] = _logged.new_result(self._trainer, made, joint=True)
            self.synced |= {key} if made["syncs"] else set()

    def _note_dtype(self, key: str, dtype: str) -> None:
        """Note the dtype of a value, if it is wider than those before: so Lightning's sums grow, too."""
        if self._dtypes.get(key) != "float64":
            self._dtypes[key] = dtype

    def _accumulate(self, joined: Joined) -> None:
        metric, key = self[joined.key], joined.key
        if joined.ends is not None:
            self._note_end(key, *joined.ends)
        super().update_metrics(key, self._tensor(joined), _whole(joined.size))
        missed = self._missed.get(key, {})
        now = missed.pop(self._sizes.way_of(key), (0.0, 0.0))
        if any(now) and metric.meta.on_epoch and metric.meta.is_mean_reduction:
            metric.value = metric.value + now[0]
            metric.cumulated_batch_size = metric.cumulated_batch_size + _whole(now[1])
        self._missed[key] = {
            way: [sum(each) for each in zip(more, missed.get(way, (0.0, 0.0)), [-each for each in now], strict=True)]
            for way, more in joined.missed.items()
        }

    def _note_end(self, key: str, lowest: float, highest: float) -> None:
        """Note what a hook has logged at the end of an epoch; warn of a mean that differs between the processes."""
        name, is_mean = self[key].meta.name, self._operation(key) == "mean" and key not in self.synced
        differs = highest - lowest > 1e-6 * max(abs(lowest), abs(highest))
        self.logs_of_parts = self.logs_of_parts or differs or not is_mean
        owners = [self._trainer.lightning_module, *self._trainer.callbacks]
        if differs and is_mean and not is_measured(owners, name):
            self._warn(
                name,
                f"is logged at the end of an epoch, with another value on each process (from {lowest:.6g} to "
                f"{highest:.6g}). It becomes their mean, weighted by samples, which may not be the value of one "
                "process. Log it in the step, use a torchmetrics metric, or let all processes gather what you compute "
                'it from (all_gather_object of ddp_callbacks.comm); reduce_fx="sum" makes it a count, and '
                "sync_dist=True says that you want the mean.",
            )

    def _warn(self, name: str, text: str) -> None:
        """Warn of what is logged as ``name``, once, on rank 0."""
        if get_rank() == 0 and name not in self._warned:
            self._warned.add(name)
            warn(f"{name!r} {text}")

    def _set_step_value(self, key: str, states: list[dict[str, Any]]) -> None:
        """Set the last step's value of a torchmetric, from its states on all ranks that have samples."""
        if states:
            if self[key].has_reset:
                begin_again(self[key])
            set_step_value(self[key], value_of(self[key].value, states))

    def _compute(self, keys: Iterable[str]) -> None:
        """Compute the values of the epoch. A collective: torchmetrics merge their states.

        Args:
            keys: Those of the torchmetrics that any rank has logged.
        """
        for key in keys:
            begin_again(self[key])  # perhaps only other ranks have updated it
            self[key].compute()
        for metric in self._uncomputed(True).values():
            metric.compute()  # over the ranks of sync_dist_group, if it was given

    def _uncomputed(self, of_numbers: bool) -> dict[str, Any]:
        """Return the logged numbers, or the torchmetrics, whose value of the epoch is not computed yet."""
        logged = {key: each for key, each in self.items() if each.is_tensor == of_numbers and each.meta.on_epoch}
        return {key: each for key, each in logged.items() if not (each.has_reset or is_computed(each))}

    def _forget(self, key: str, before: dict[str, Any] | None, count: int, states: dict[str, Any]) -> None:
        """Forget the values logged under a key since :meth:`remember`."""
        self._rows[count:] = [row for row in self._rows[count:] if row.key != key]
        self._states.pop(key, None)
        self._states |= {key: states[key]} if key in states else {}
        if before is None:
            del self[key]
        else:
            vars(self[key]).update(before)

    def _tensor(self, joined: Joined) -> torch.Tensor:
        like = self[joined.key].value
        dtype = getattr(torch, self._dtypes[joined.key]) if joined.key in self._dtypes else like.dtype
        return torch.tensor(joined.value, dtype=dtype, device=like.device)

    def _operation(self, key: str) -> str:
        if key not in self:
            return "mean"
        meta = self[key].meta
        step = meta.fx.partition(".")[0]  # without the number of the loader
        return self._trainer.strategy.operations.get(f"{step}.{meta.name}") or _logged.operation_of(self[key])


def _whole(size: float) -> float:
    return int(size) if size.is_integer() else size  # Lightning's sum of whole numbers is exact


def _is_for_some_ranks(sync: Any) -> bool:
    """Whether a value is for some ranks only, by ``sync_dist_group`` or ``rank_zero_only``."""
    return bool(sync.should or sync.rank_zero_only)
