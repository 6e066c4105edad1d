"""The gradient engine: all-reduces the weighted gradients while backward still runs.

One backward, on each rank::

    a parameter's gradient is complete     its hook marks it; when a bucket and all before it are full, its gradients
                                           are moved into a flat buffer and its all-reduce starts
    ... more gradients ...                 the all-reduces overlap the rest of backward (in shared memory they are
                                           deferred to its end: they would compete with it for the same cores)
    the outermost backward ends            the remaining buckets start, the last one with the metadata; we wait for
                                           all; parameter.grad becomes a view of the reduced buffer

So the gradients are in memory once, as with DDP's ``gradient_as_bucket_view``.

[Note: metadata]
Two things are known only when backward ends: which parameters were used, and whether a bucket must be sent again. If
control flow differs between ranks, so do these. They are sent behind the gradients of the last bucket, which is
therefore never launched before the end: ``[weight, trained, dirty (one per bucket), used (one per parameter)]``, each
summed over the ranks. A parameter that no rank used keeps its gradient, also if it is ``None``. If only some ranks used
it, it gets the sum, and the others count as zero. If the last bucket cannot carry the metadata (low precision,
compression, or a communication hook), it is sent separately, in float64.

Gradients on GPUs never carry it: it is sent between the CPUs. So the host never waits for its GPU, whose buckets are
reduced in a stream, and still notices in each step if another rank has failed.

After the metadata there is room for numbers from the caller (:meth:`GradientSynchronizer.carry`), which saves a
message. Each rank writes to its own slot, which is zero on all other ranks, so the sum is a gather. The numbers are
encoded as 16-bit integers, which float32 holds exactly, whatever their bits.

[Note: which parameters are trained]
Buckets of frozen parameters are not sent. Which parameters are frozen may change, and by mistake on some ranks only;
they would then sum different buckets. So a backward sends the buckets that earlier backwards predict, which all ranks
have seen, and the metadata has a checksum of the trained parameters: if it differs, all ranks raise. Otherwise, buckets
missing from the prediction follow; buckets predicted in vain were zeros.

[Note: a gradient that comes twice]
With reentrant checkpointing, a parameter's hook can fire twice in a backward, the second time after its bucket was
launched (DDP raises "marked ready only once", https://github.com/pytorch/pytorch/issues/46166). All ranks then send
what was added to the bucket, and from then on it waits for the end of backward.

[Note: CUDA graphs]
Ranks exchange messages at the end of backward, which a graph cannot replay, so capturing a backward is refused.
``torch.cuda.make_graphed_callables`` works: the hooks run outside of its graphs. With ``torch.compile``, all gradients
arrive at the end of the compiled backward, so the buckets of one graph don't overlap it.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddp_callbacks._torch import call_at_end_of_backward, current_node, hooks_on_accumulation
from ddp_callbacks.comm.agreement import layout_settings, parameter_settings, require_agreement
from ddp_callbacks.comm.buckets import Bucket, Forecast, ParameterSpec, assign_buckets, check_bucket_cap_mb
from ddp_callbacks.comm.collectives import all_gather_tensors
from ddp_callbacks.comm.compression import (
    Compress,
    check_compress,
    dtype_of,
    hook_of,
    load_state_of_hook,
    state_of_hook,
)
from ddp_callbacks.comm.flat_buffer import BufferPool
from ddp_callbacks.comm.hooks import CommHook, GradBucket, check_comm_hook
from ddp_callbacks.comm.process_group import ProcessGroupAllReduce
from ddp_callbacks.comm.protocol import allocate
from ddp_callbacks.comm.topology import choose_all_reduce
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group import get_world_size, resolve_group
from ddp_callbacks.process_group.failures import Launched, enter, launching, wait
from ddp_callbacks.process_group.runs import begin_run
from ddp_callbacks.weighing import Undo, Weighing, hook_even_if_frozen

_CPU = torch.device("cpu")
_PIECES = 4  # 16-bit integers in a float64


class GradientSynchronizer:
    """All-reduce the gradients of a module in each backward, without wrapping the module.

    From construction to :meth:`close`, each backward adds to ``parameter.grad`` the sum over the ranks of ``weight /
    total weight`` times the local gradient. If you pass the number of samples to :meth:`weigh` and your loss is a mean,
    that is the gradient of the mean over all samples of all ranks. Backward returns when the sum is complete, so
    clipping and the optimizer see it. All ranks must call backward equally often and train the same parameters. With a
    single process it does nothing. The constructor is a collective: it blocks until every rank has called it.

    It lives as long as its module, whether you keep it or not. If a program trains several models one after the other,
    :meth:`close` each synchronizer: torch never frees a parameter with a hook that refers to it.

    Attributes:
        rounds: How many synchronizations are complete; 0 with a single process.
        room: As given.
        carried: What the ranks passed to :meth:`carry` last, float64 of shape ``[world size, room]``.

    Args:
        module: Its parameters are synchronized. Frozen ones cost nothing, and may be unfrozen later.
        bucket_cap_mb: As in DDP, the size in MiB at which a bucket is launched.
        comm_hook, comm_state: A communication hook as for ``DistributedDataParallel.register_comm_hook`` and its
            state (see :class:`ddp_callbacks.comm.hooks.GradBucket`). ``None`` is the exact all-reduce.
        compress: How to send less over the network between nodes: in half precision (``"bf16"``, ``"fp16"``) or as
            matrices of low rank (:class:`ddp_callbacks.PowerSGD`). ``None`` keeps every sum exact, as it always is on a
            single node.
        process_group: ``None`` is the default group.
        room: How many numbers of each rank can travel with the gradients (:meth:`carry`).

    Raises:
        ConfigurationError: The hook needs DDP itself, or a setting is out of range. Here and in the first backward: a
            parameter has a hook that is not ours (``register_post_accumulate_grad_hook``).
        MismatchError: The ranks' models or settings differ. From backward: they train different parameters.
        PeerError: From backward: another rank failed or died.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        bucket_cap_mb: float = 25.0,
        comm_hook: CommHook | None = None,
        comm_state: Any = None,
        compress: Compress = None,
        process_group: dist.ProcessGroup | None = None,
        room: int = 0,
    ) -> None:
        check_bucket_cap_mb(bucket_cap_mb)
        check_compress(compress, comm_hook)
        if comm_hook is not None:
            check_comm_hook(comm_hook)
        self.rounds = 0  # completed synchronizations
        self._module = module
        self._has_accumulated = False  # ever
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._world_size = get_world_size(process_group)
        self._enabled = True
        self.room, self.carried = room, torch.zeros(0, room, dtype=torch.float64)
        self._piggyback: torch.Tensor | None = None  # of this rank, for the next synchronization
        if self._world_size == 1:
            return
        begin_run(process_group)
        self._group = resolve_group(process_group)
        self._last_total = 0.0
        self._graph_task: Callable[[], _GraphTask | None] = _no_graph_task  # of the running backward
        self._round = _Round([], 0.0, 0.0, False, is_finished=True)
        parameters = [parameter for parameter in module.parameters() if _differentiable(parameter)]
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._refuse_foreign_hooks(parameters)
        _require_same_way(module, bucket_cap_mb, comm_hook, compress, room, process_group)
        sparse = _sparse_parameters(module)
        self._dense = [parameter for parameter in parameters if id(parameter) not in sparse]
        self._sparse = [parameter for parameter in parameters if id(parameter) in sparse]
        devices = [parameter.device for parameter in parameters]
        self._choose_ways(devices, comm_hook, comm_state, compress)
        self._has_double = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
        self._parameters = [*self._dense, *self._sparse]
        self._used = [False] * len(parameters)  # since the last synchronization
        self._weighing = Weighing(self._parameters, self._used, self._world_size)
        self._buckets = self._make_buckets(bucket_cap_mb)
        self._forecast = Forecast([bucket.index for bucket in self._buckets if bucket.active])
        self._lock = threading.RLock() if len(set(devices)) > 1 else None  # autograd has a thread per device
        self._register()

    def weigh(self, weight: float, total: float | None = None) -> None:
        """Set this rank's weight in the following backwards. Local; does not block.

        A backward's contribution to the gradients is multiplied by ``weight / total``, inside :meth:`no_sync` as well
        as outside. Contributions accumulated earlier keep their weights. If you run a second backward outside before
        setting the gradients to ``None``, it adds its sum over the ranks to the first one's.

        Args:
            weight: Usually the number of samples (or tokens) that the local loss is the mean of. With 0 this rank takes
                part, but zeros replace its contribution, which may be NaN.
            total: The sum of the ranks' weights, if known. If losses are sums, pass weight 1 and total 1 on all ranks.
                ``None`` sends the weight along. Either all ranks pass ``None`` or none does.

        Raises:
            ConfigurationError: Without ``total``: the weight changes while gradients of ``no_sync`` wait.
        """
        if self._world_size > 1:
            self._weighing.set(weight, total)

    def weigh_loss(self, loss: torch.Tensor, weight: float, total: float) -> Undo:
        """Weight the backward of ``loss``, instead of calling :meth:`weigh`. Local; does not block.

        This is exact even if layers exchange gradients in backward (:class:`ddp_callbacks.BatchNormSynchronizer`). The
        value of the loss does not change.

        Args:
            loss: This rank's loss; call its ``backward()`` afterwards, scaled if you like.
            weight, total: As in :meth:`weigh`.

        Returns:
            A function that undoes it. Call it after the backward if backwards without a weight follow; in these all
            ranks count the same.
        """
        return _nothing if self._world_size == 1 else self._weighing.set_for(loss, weight, total)

    @property
    def is_enabled(self) -> bool:
        """Whether a backward synchronizes, as it does outside of :meth:`no_sync`."""
        return self._enabled

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally inside; the next backward outside sends the accumulated gradients.

        Each contribution has the weight that :meth:`weigh` set for its backward. All ranks must use it in the same
        backwards. Nothing blocks inside.
        """
        before, self._enabled, self._has_accumulated = self._enabled, False, True
        if self._world_size > 1:
            self._weighing.accumulate()
        try:
            yield
        finally:
            self._enabled = before

    def synchronize(self) -> None:
        """Join the other ranks' synchronization after a backward that reached none of the parameters.

        Such a backward fires no hook. Call this after backward if ``rounds`` did not increase; it blocks until all
        ranks take part. Inside :meth:`no_sync` it does nothing.

        Raises:
            PeerError: Another rank failed or died.
        """
        if self._world_size > 1 and self._enabled and self._graph_task() is None:
            self._begin()
            self._finish()

    def carry(self, numbers: torch.Tensor) -> None:
        """Send numbers with the next synchronization; afterwards, ``carried`` has those of all ranks. Local.

        Every rank must call it before the same synchronization.

        Args:
            numbers: float64, on the CPU, of shape ``[room]``.

        Raises:
            ConfigurationError: ``numbers`` has another dtype or shape.
        """
        if numbers.shape != (self.room,) or numbers.dtype != torch.float64:
            given = f"{numbers.dtype} of shape {tuple(numbers.shape)}"
            raise ConfigurationError(f"there is room for float64 numbers of shape ({self.room},), got {given}.")
        self._piggyback = numbers
        if self._world_size == 1:
            self.carried = numbers[None]

    def state_dict(self) -> dict[str, Any]:
        """What this rank must know to go on with the same bits: plain data and tensors, for a checkpoint. Local.

        It has the gradients if :meth:`no_sync` accumulates them, the last weights, and what PowerSGD keeps from step to
        step. Each rank has a different one. Call it between two steps.
        """
        state: dict[str, Any] = {"world_size": self._world_size, "gradients": self._accumulated()}
        if self._world_size == 1:
            return state
        hook = state_of_hook(self._comm_hook, self._comm_state)
        weighing = self._weighing.state_dict()
        return state | {"rounds": self.rounds, "total": self._last_total, "weighing": weighing, "hook": hook}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the states of all ranks, in rank order. Local; every rank passes the same.

        With as many ranks as before, each takes its own. Otherwise accumulated gradients go on from their sum, on rank
        0, and PowerSGD starts anew.

        Args:
            states: What :meth:`state_dict` has returned on each rank.

        Raises:
            ConfigurationError: Gradients were accumulated under weights without a total, by another number of ranks.
        """
        if len(states) == self._world_size:
            self._load_own(states[self._rank])
            return
        gradients = _sum_of_gradients(states, self._world_size)
        if gradients and self._world_size > 1:
            self._weighing.accumulate()
        self._load_gradients(gradients if self._rank == 0 else {})

    def _load_own(self, state: Mapping[str, Any]) -> None:
        if self._world_size > 1:
            self.rounds, self._last_total = state["rounds"], state["total"]
            self._weighing.load_state_dict(state["weighing"])
            load_state_of_hook(self._comm_hook, self._comm_state, dict(state["hook"]))
        self._load_gradients(state["gradients"])

    @property
    def _rank(self) -> int:
        return self._group.rank() if self._world_size > 1 else 0

    def _accumulated(self) -> dict[str, torch.Tensor]:
        """The gradients of this rank that no synchronization has seen, by the name of the parameter."""
        if not (self._weighing.accumulates if self._world_size > 1 else self._has_accumulated):
            return {}
        named = [(name, parameter.grad) for name, parameter in self._module.named_parameters()]
        return {name: gradient.detach().clone() for name, gradient in named if gradient is not None}

    def _load_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        self._has_accumulated = self._has_accumulated or bool(gradients)
        for name, parameter in self._module.named_parameters():
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.device, copy=True)
        if self._world_size > 1:
            for slot, parameter in enumerate(self._parameters):
                self._used[slot] = self._used[slot] or self._names[id(parameter)] in gradients

    def close(self) -> None:
        """Remove every hook. Gradients stay unchanged. Local; safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._world_size > 1:
            self._weighing.close()

    # --- set-up -------------------------------------------------------------------------------------------------

    def _choose_ways(
        self, devices: list[torch.device], comm_hook: CommHook | None, comm_state: Any, compress: Compress
    ) -> None:
        """Choose the all-reduce for buckets, and the exact one for data that must not be compressed."""
        if compress is not None:
            comm_hook, comm_state = hook_of(compress, self._group, devices)
        self._comm_hook, self._comm_state = comm_hook, comm_state
        if comm_hook is None:
            self._all_reduce = choose_all_reduce(self._group, devices, dtype_of(compress))
        else:
            self._all_reduce = ProcessGroupAllReduce(self._group, getattr(comm_hook, "allocate", allocate))
        self._between_cpus = choose_all_reduce(self._group, [_CPU])
        self._is_on_gpu = any(device.type == "cuda" for device in devices)

    def _make_buckets(self, bucket_cap_mb: float) -> list[Bucket]:
        specs = [ParameterSpec(p.numel(), p.dtype, p.device, p.requires_grad) for p in self._dense]
        assigned = assign_buckets(specs, bucket_cap_mb)
        self._tail = 2 + len(assigned) + len(self._used)
        tail = self._tail + self._world_size * self.room * _PIECES
        return [
            Bucket(index, slots, BufferPool([self._dense[slot] for slot in slots], tail, self._all_reduce.allocate))
            for index, slots in enumerate(assigned)
        ]

    def _register(self) -> None:
        for bucket in self._buckets:
            for position, (slot, parameter) in enumerate(zip(bucket.slots, bucket.pool.parameters, strict=True)):
                self._register_hook(parameter, self._dense_hook(bucket, position, slot))
        for slot, parameter in enumerate(self._sparse, start=len(self._dense)):
            self._register_hook(parameter, self._sparse_hook(slot))

    def _register_hook(self, parameter: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]) -> None:
        hook = hook if self._lock is None else _one_at_a_time(hook, self._lock)
        register = parameter.register_post_accumulate_grad_hook
        self._handles.append(hook_even_if_frozen(parameter, register, hook))

    def _refuse_foreign_hooks(self, parameters: list[torch.nn.Parameter]) -> None:
        """Refuse other hooks on gradient accumulation: they would see, or consume, the local gradient."""
        ours = {handle.id for handle in self._handles}
        for parameter in parameters:
            for key, hook in hooks_on_accumulation(parameter).items():
                if key not in ours:
                    name = getattr(hook, "__qualname__", type(hook).__name__)
                    raise ConfigurationError(
                        f"{self._names[id(parameter)]} has a hook of register_post_accumulate_grad_hook: {name}. It "
                        "would see this process's gradient before it is summed over the processes. Remove it and do "
                        "its work after backward (an optimizer that steps in backward: step after it), or close "
                        "the GradientSynchronizer that made it."
                    )

    def _dense_hook(self, bucket: Bucket, position: int, slot: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            self._used[slot] = True
            if self._enabled:
                if self._graph_task() is None:
                    self._begin_in_backward()
                bucket.mark(position)
                if not bucket.missing:
                    self._launch_full()

        return hook

    def _sparse_hook(self, slot: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            self._used[slot] = True
            if self._enabled and self._graph_task() is None:
                self._begin_in_backward()

        return hook

    # --- one backward -------------------------------------------------------------------------------------------

    def _begin_in_backward(self) -> None:
        self._begin()
        task = _GraphTask()
        self._graph_task = weakref.ref(task)
        self._call_at_end(task)

    def _begin(self) -> None:
        if not self._round.is_finished:  # an exception ended the last backward: drop its sums and memory
            for bucket in self._buckets:
                bucket.pool.abandon()
        if not self.rounds:
            self._refuse_foreign_hooks(self._parameters)
        if self._is_on_gpu and torch.cuda.is_current_stream_capturing():
            raise ConfigurationError(
                "a CUDA graph cannot contain the synchronization of gradients, in which processes exchange messages. "
                "Capture the forward pass or parts of the model with torch.cuda.make_graphed_callables, and call "
                "backward outside of a capture."
            )
        self._round.is_finished = False  # stays False if getting the first weight fails
        for bucket in self._buckets:
            bucket.start()
        buckets = [self._buckets[index] for index in self._forecast.guess]
        carries_metadata = bool(buckets) and self._can_carry(buckets[-1])
        self._round = _Round(buckets, *self._scales(), carries_metadata)

    def _can_carry(self, bucket: Bucket) -> bool:
        """Whether the metadata can be summed with this bucket's gradients. Flags can, in any real dtype."""
        first = bucket.pool.parameters[0]
        if self._comm_hook is not None or not self._all_reduce.exact or first.device.type != "cpu":
            return False
        dtype = first.dtype
        if self._weighing.total is not None or not self._has_double:
            return dtype in (torch.float32, torch.float64)
        return dtype == torch.float64  # do not round the weight more than the gradients that it divides

    def _scales(self) -> tuple[float, float]:
        """The factor for the gradients before the sum, and the total weight that it assumes."""
        average = self._world_size if self._comm_hook is not None else 1  # a hook divides by the world size
        if self._weighing.total is not None:
            return self._weighing.unit * average, self._weighing.total
        # The total arrives with the sum. Until then we assume the last total, so that half precision does not overflow.
        # Before the first step there is none, so that step asks for it.
        if not self._last_total:
            weight = torch.tensor([self._weighing.weight], dtype=torch.float64)
            doing = "the first weight"
            self._between_cpus.launch(weight, doing).wait(doing)
            self._last_total = float(weight)
        reference = self._last_total
        return (self._weighing.weight * average / reference if reference else 0.0), reference

    def _launch_full(self) -> None:
        """Launch every full bucket, in order, except one that carries the metadata."""
        now = self._round
        while now.launched < len(now.buckets) - now.carries_metadata:
            bucket = now.buckets[now.launched]
            if bucket.missing or bucket.deferred:
                return
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        if self._comm_hook is not None and self._round.launched:
            # A hook may start further collectives from its futures (PowerSGD does), at a moment that differs between
            # the ranks. Launch the next bucket after them. On a GPU they are in a stream by now, in order.
            before = self._round.buckets[self._round.launched - 1]
            assert before.future is not None
            wait(Launched(before.future), before.doing, self._group)
        self._round.launched += 1
        self._send(bucket)

    def _call_at_end(self, task: _GraphTask) -> None:
        call_at_end_of_backward(partial(self._end_of_graph_task, task))

    def _end_of_graph_task(self, task: _GraphTask) -> None:
        # Reentrant checkpointing runs a backward inside a node of another one; only the outermost one ends here.
        node = current_node()
        if node is None:
            self._graph_task = _no_graph_task
            self._finish()
        else:
            node.register_hook(lambda *_: self._call_at_end(task))

    def _finish(self) -> None:
        self._forget_lost_gradients()
        for bucket in self._round.waiting:
            self._launch(bucket)
        metadata = self._exchange_metadata()
        weight = metadata.weight
        self._require_same_trained(metadata.trained)
        for bucket, is_dirty in zip(self._buckets, metadata.dirty, strict=True):
            if is_dirty:
                bucket.deferred = True
                self._send_rest(bucket)
        filled = [bucket for bucket in self._buckets if bucket.active]
        for bucket in filled:
            if bucket.memory is None:  # not in the forecast
                self._send_behind(bucket)
        self._require_same_kind(weight, filled)
        self._write_back(filled, weight, metadata.used)
        self._forecast.note([bucket.index for bucket in filled])
        self._last_total = weight
        self._weighing.end(weight)
        self._used[:] = [False] * len(self._used)
        self._round.is_finished = True
        self.rounds += 1

    def _write_back(self, filled: list[Bucket], weight: float, used: list[bool]) -> None:
        counts = weight != 0 or self._weighing.total is not None
        for bucket in filled:
            self._rescale(bucket, weight)
            bucket.write_back(used, counts)
        for slot in range(len(self._dense), len(self._parameters)):
            if used[slot]:
                self._exchange_sparse(slot, weight)

    def _forget_lost_gradients(self) -> None:
        for bucket in self._buckets:
            if bucket.memory is None:
                bucket.forget_lost(self._used)
        for slot, parameter in enumerate(self._sparse, start=len(self._dense)):
            self._used[slot] = self._used[slot] and parameter.grad is not None

    def _send_rest(self, bucket: Bucket) -> None:
        """Add what ranks have contributed since the bucket was launched."""
        assert bucket.memory is not None
        flat = bucket.memory.flat[: bucket.memory.numel]
        before = flat.clone()
        self._send_behind(bucket)
        flat.add_(before)

    def _send_behind(self, bucket: Bucket) -> None:
        self._send(bucket)
        self._await(bucket)

    def _require_same_trained(self, trained: float) -> None:
        """Raise, on all ranks, if they train different parameters."""
        if trained == self._trained() * self._world_size:
            return
        settings = {self._names[id(p)]: "trained" if p.requires_grad else "frozen" for p in self._parameters}
        remedy = "Freeze the same parameters on every rank (requires_grad), before the same backward."
        require_agreement(settings, "which parameters are trained", remedy, self._group)

    def _require_same_kind(self, weight: float, filled: list[Bucket]) -> None:
        """Raise if weights change from means to sums on top of gradients, which were not scaled for that."""
        if self._weighing.become_sums(weight) and any(bucket.has_kept() for bucket in filled):
            raise ConfigurationError(
                f"the ranks' weights add up to {weight:g}, not to the total {self._weighing.total:g} as in previous "
                "backwards, to whose gradients this backward adds. Set the gradients to None in between, or weigh "
                "each loss with weigh_loss(loss, weight, total)."
            )

    # --- the wire -----------------------------------------------------------------------------------------------

    def _send(self, bucket: Bucket) -> None:
        memory = bucket.fill(self._round.scale, self._used)
        if self._weighing.kept != 1:
            bucket.scale_untouched(self._used, self._weighing.kept)
        is_last = bool(self._round.buckets) and bucket is self._round.buckets[-1]
        if self._comm_hook is not None:
            grad_bucket = GradBucket(bucket.index, memory.flat[: memory.numel], bucket.pool.parameters, is_last=is_last)
            enter(bucket.doing)
            with launching(bucket.doing, self._group):
                bucket.future = self._comm_hook(self._comm_state, grad_bucket)
            return
        payload = memory.flat[: memory.numel]
        if is_last and self._round.carries_metadata:
            payload = memory.flat
            payload[memory.numel :] = self._metadata().to(payload)
        bucket.sum = self._all_reduce.launch(payload, bucket.doing)

    def _await(self, bucket: Bucket) -> None:
        doing = bucket.doing
        if bucket.sum is not None:
            bucket.sum.wait(doing)
            return
        assert bucket.future is not None and bucket.memory is not None
        wait(bucket.future, doing, self._group)
        value, flat = bucket.future.value(), bucket.memory.flat[: bucket.memory.numel]
        if flat.is_complex() and not value.is_complex():  # torch's all_reduce returns it like this
            value = torch.view_as_complex(value.view(-1, 2))
        if value.data_ptr() != flat.data_ptr() or value.dtype != flat.dtype:
            flat.copy_(value.view(-1))

    def _metadata(self) -> torch.Tensor:
        """This rank's metadata, as it is summed."""
        dirty = [float(bucket.is_dirty) for bucket in self._buckets]
        numbers = [self._weighing.weight, self._trained(), *dirty, *map(float, self._used)]
        metadata = torch.tensor(numbers, dtype=torch.float64)
        if not self.room:
            return metadata
        places = torch.zeros(self._world_size, self.room * _PIECES, dtype=torch.float64)
        if self._piggyback is not None:
            places[self._group.rank()] = self._piggyback.view(torch.int16)
        return torch.cat([metadata, places.view(-1)])

    def _trained(self) -> float:
        """A checksum of the trained parameters; float32 holds the sum over the ranks exactly."""
        checksum = 0
        for bucket in self._buckets:
            checksum = zlib.crc32(bytes(bucket.frozen), checksum)
        if self._sparse:
            checksum = zlib.crc32(bytes(parameter.requires_grad for parameter in self._sparse), checksum)
        return float(checksum % ((1 << 24) // self._world_size))

    def _exchange_metadata(self) -> _Metadata:
        """Wait for all buckets, and for the metadata of all ranks."""
        for bucket in self._round.buckets:
            self._await(bucket)
        if self._round.carries_metadata:
            memory = self._round.buckets[-1].memory
            assert memory is not None
            numbers = memory.flat[memory.numel :]
        else:
            # Not earlier: a hook may start further collectives from its futures, at a moment that differs between
            # ranks.
            numbers = self._metadata()
            doing = "the metadata of the gradients"
            self._between_cpus.launch(numbers, doing).wait(doing)
        if self._piggyback is not None:
            places = numbers[self._tail :].view(self._world_size, -1)
            self.carried, self._piggyback = places.to(torch.int16).view(torch.float64), None
        weight, trained, *flags = numbers[: self._tail].tolist()
        count = len(self._buckets)
        return _Metadata(weight, trained, [flag > 0 for flag in flags[:count]], [flag > 0 for flag in flags[count:]])

    def _rescale(self, bucket: Bucket, weight: float) -> None:
        """Correct for a total weight that was unknown when the bucket was sent."""
        if self._weighing.total is not None:
            return
        assert bucket.memory is not None
        if weight != self._round.supposed_total and weight:  # if no rank has a sample, all gradients are already zero
            bucket.memory.flat[: bucket.memory.numel].mul_(self._round.supposed_total / weight)

    def _exchange_sparse(self, slot: int, weight: float) -> None:
        parameter = self._parameters[slot]
        grad = parameter.grad
        parts = []
        is_dense = grad is not None and not grad.is_sparse  # a layer tied to the embedding
        if grad is not None:
            grad = (grad.to_sparse(1) if is_dense else grad).coalesce()
            share = self._share_of_sum(slot, weight)
            rows = slice(None if share else 0)
            parts = [grad.indices()[:, rows], grad.values()[rows] * share]
        gathered = all_gather_tensors(is_dense, parts, "a sparse gradient", self._group)
        sent = [part for _, part in gathered if part]
        indices = torch.cat([part[0] for part in sent], dim=1).to(parameter.device)
        values = torch.cat([part[1] for part in sent]).to(parameter.device)
        with torch.sparse.check_sparse_tensor_invariants(False):  # torch 2.11 warns beside check_invariants=False
            reduced = torch.sparse_coo_tensor(indices, values, parameter.shape).coalesce()
        parameter.grad = reduced.to_dense() if any(is_dense for is_dense, _ in gathered) else reduced

    def _share_of_sum(self, slot: int, weight: float) -> float:
        """The factor for this rank's gradient, once the total weight is known."""
        if self._weighing.total is None:
            return self._weighing.weight / weight if self._weighing.weight else 0.0
        return self._weighing.unit * (1.0 if self._used[slot] else self._weighing.kept)


@dataclass
class _Round:
    """The state of one synchronization.

    Attributes:
        buckets: The buckets that the backward should fill, in launch order.
        scale: The factor for the gradients before the sum.
        supposed_total: The total weight that ``scale`` assumes.
        carries_metadata: Whether the metadata is sent with the last bucket.
        launched: The number of launched buckets.
        is_finished: Also ``False`` after an exception has ended the backward.
    """

    buckets: list[Bucket]
    scale: float
    supposed_total: float
    carries_metadata: bool
    launched: int = 0
    is_finished: bool = False

    @property
    def waiting(self) -> list[Bucket]:
        """The buckets that are not yet launched."""
        return self.buckets[self.launched :]


class _Metadata(NamedTuple):
    """The metadata of all ranks together.

    Attributes:
        weight: The total weight.
        trained: The sum of the checksums of the trained parameters.
        dirty: Per bucket, whether any rank must send it again.
        used: Per parameter, whether any rank has a gradient for it.
    """

    weight: float
    trained: float
    dirty: list[bool]
    used: list[bool]


class _GraphTask:
    """Lives as long as autograd's graph task: an exception drops the task, and with it this object."""


def _no_graph_task() -> None:
    return None


def _nothing() -> None:
    pass


def _one_at_a_time(hook: Callable[[torch.Tensor], None], lock: threading.RLock) -> Callable[[torch.Tensor], None]:
    def locked(gradient: torch.Tensor) -> None:
        with lock:
            hook(gradient)

    return locked


def _sum_of_gradients(states: Sequence[Mapping[str, Any]], world_size: int) -> dict[str, torch.Tensor]:
    """The accumulated gradients of all ranks as those of one rank among ``world_size``, by parameter name."""
    if any(state["gradients"] for state in states) and len(states) > 1 and states[0]["weighing"]["total"] is None:
        raise ConfigurationError(
            f"the checkpoint holds gradients that {len(states)} processes have accumulated under weights without a "
            f"total, so {world_size} cannot go on from them. Start {len(states)}, or give weigh() the total."
        )
    factor = world_size / len(states)  # each contribution was multiplied by the number of ranks, see Weighing
    summed: dict[str, torch.Tensor] = {}
    for state in states:
        for name, gradient in state["gradients"].items():
            summed[name] = summed[name] + gradient if name in summed else gradient
    return {name: gradient * factor for name, gradient in summed.items()}


def _require_same_way(
    module: torch.nn.Module,
    bucket_cap_mb: float,
    comm_hook: CommHook | None,
    compress: Compress,
    room: int,
    group: dist.ProcessGroup | None,
) -> None:
    """Raise if the ranks would sum different buckets, or use different all-reduces, and so deadlock."""
    hook = None if comm_hook is None else getattr(comm_hook, "__qualname__", type(comm_hook).__name__)
    settings = {
        **parameter_settings(module),
        **layout_settings(module),
        "bucket_cap_mb": bucket_cap_mb,
        "comm_hook": str(hook),
        "compress": str(compress),
        "room": room,
    }
    remedy = "Give every process the same model and the same arguments."
    require_agreement(settings, "how gradients are synchronized", remedy, group)


def _differentiable(parameter: torch.nn.Parameter) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _sparse_parameters(module: torch.nn.Module) -> set[int]:
    """The ids of the parameters whose gradient is sparse."""
    return {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag) and layer.sparse
    }
