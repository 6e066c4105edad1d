"""The gradient engine's interface for programs.

One backward, on each rank::

    a parameter's gradient is complete     its hook marks it; when a bucket and all before it are full, its gradients
                                           are moved into a flat buffer and its all-reduce starts
    ... more gradients ...                 the all-reduces overlap the rest of backward (in shared memory they are
                                           deferred to its end: they would compete with it for the same cores)
    the outermost backward ends            the remaining buckets start, the last one with the metadata; the engine waits
                                           for all; parameter.grad becomes a view of the reduced buffer

So memory holds the gradients once, as with DDP's ``gradient_as_bucket_view``.

[Note: CUDA graphs]
Ranks exchange messages at the end of backward. A graph cannot replay these, so capturing a backward raises an error.
``torch.cuda.make_graphed_callables`` works: the hooks run outside of its graphs. With ``torch.compile``, all gradients
arrive at the end of the compiled backward, so the buckets of one graph don't overlap it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.comm.agreement import layout_settings, parameter_settings, require_agreement
from ddp_callbacks.comm.held import Parameters
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.gradients.backward_hooks import BackwardHooks, Switch, refuse_foreign_hooks
from ddp_callbacks.gradients.bucket_sums import BucketSums, EngineOptions
from ddp_callbacks.gradients.comm_hooks import CommHook
from ddp_callbacks.gradients.compression import Compress
from ddp_callbacks.gradients.reducer import Reducer
from ddp_callbacks.gradients.weighing import Undo
from ddp_callbacks.process_group import get_world_size, resolve_group
from ddp_callbacks.process_group.runs import begin_run
from ddp_callbacks.replicas.checks import ParameterChecks
from ddp_callbacks.replicas.parameters import broadcast_all
from ddp_callbacks.replicas.step_times import StepTimes


class GradientSynchronizer:
    """All-reduces the gradients of a module in each backward, without wrapping the module.

    From construction to :meth:`close`, each backward adds to ``parameter.grad`` the sum over the ranks of ``weight /
    total weight`` times the local gradient. If you pass the number of samples to :meth:`weigh` and your loss is a mean,
    that is the gradient of the mean over all samples of all ranks. Backward returns when the sum is complete, so
    clipping and the optimizer see it. All ranks must call backward equally often and train the same parameters. If
    a rank leaves out the backward of a batch, all raise in the next one, provided that the batch is of a sharded loader
    and that the main thread draws it. With a single process it does nothing. The constructor is a collective: it blocks
    until every rank has called it.

    It lives as long as its module, whether you keep it or not. If a program trains several models one after the other,
    :meth:`close` each synchronizer: torch never frees a parameter with a hook that refers to it.

    Attributes:
        rounds: The number of complete synchronizations; 0 with a single process.
        times: This rank's times of the parts of a step. Who begins a batch marks the end of "between steps".

    Args:
        module: The module whose gradients are synchronized. Frozen parameters cost nothing, and may be unfrozen later.
        bucket_cap_mb: As in DDP, the size in MiB at which a bucket is launched.
        comm_hook, comm_state: A communication hook as for ``DistributedDataParallel.register_comm_hook`` and its
            state (see :class:`ddp_callbacks.GradBucket`). ``None`` is the exact all-reduce.
        compress: Send gradients over the network between nodes in half precision: ``"bf16"`` or ``"fp16"``. ``None``
            keeps every sum exact, as it always is on a single node.
        compare_replicas: Whether the ranks compare checksums of their trainable parameters after the optimizer's steps
            1, 2, 4, ..., 1024, and each 1024th one after these. They then wait for their GPUs. Rank 0 warns if
            optimizers have stepped other parameters that no synchronizer has, and these differ.
        process_group: The ranks' process group; ``None`` is the default group.

    Raises:
        ConfigurationError: The hook needs DDP itself, or a setting is out of range. Here and in the first backward: a
            parameter has another hook on its accumulation (``register_post_accumulate_grad_hook``). From the step of
            an optimizer: gradients of its parameters wait in :meth:`no_sync`.
        MismatchError: The ranks' models or settings differ. From backward: they train different parameters,
            have drawn unequal numbers of batches since the last one, or weigh by different totals. From the step of an
            optimizer: they hold different parameters.
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
        compare_replicas: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._options = EngineOptions(bucket_cap_mb, comm_hook, comm_state, compress)
        self.times = StepTimes(module, bucket_cap_mb=bucket_cap_mb, comm_hook=comm_hook, compress=compress)
        self._module = module
        self._compares = compare_replicas
        self._has_accumulated = False  # whether gradients were ever accumulated
        self._switch = Switch()
        self._reducer: Reducer | None = None
        self._world_size = get_world_size(process_group)
        if self._world_size == 1:
            return
        begin_run(process_group)
        self._group = resolve_group(process_group)
        self._start()

    def _start(self, before: Reducer | None = None) -> None:
        """Synchronize the parameters that the module has now, in place of the reducer ``before``. A collective."""
        known = Parameters(self._module)
        if before is None:
            refuse_foreign_hooks(known.named)
        else:
            self.close()  # its hooks keep autograd's nodes for the shapes before
        self._require_same_way()
        devices = [parameter.device for parameter in known.named.values()]
        reducer = Reducer(known, BucketSums(self._group, devices, self._options), self.times)
        if before is not None:
            reducer.continue_from(before)
        self._reducer = reducer
        self._hooks = BackwardHooks(reducer, self._switch)
        if self._compares:
            self._hooks.after_steps(ParameterChecks(known.named, self._group).after_step)

    def follow(self) -> None:
        """Synchronize parameters that were added to the module, replaced, or moved to another dtype or device.

        They get rank 0's values. A collective then: every rank must change its model alike, between the same steps.
        :meth:`weigh` calls this. If you call neither before the next forward pass, its backward raises.

        Raises:
            ConfigurationError: There is a communication hook, which may keep state for each bucket.
            MismatchError: The ranks' models differ.
        """
        changes = None if self._reducer is None else self._reducer.known.changes()
        if changes is not None:
            self._start(self._reducer)
            broadcast_all([*changes.values()], "the new parameters", self._group)

    def _require_same_way(self) -> None:
        """Raise if the ranks would sum different buckets, or use different all-reduces, and deadlock. A collective."""
        options, hook = self._options, self._options.comm_hook
        name = None if hook is None else getattr(hook, "__qualname__", type(hook).__name__)
        settings = {
            **parameter_settings(self._module),
            **layout_settings(self._module),
            "bucket_cap_mb": options.bucket_cap_mb,
            "comm_hook": str(name),
            "compress": str(options.compress),
        }
        remedy = "Give every process the same model and the same arguments."
        require_agreement(settings, "how gradients are synchronized", remedy, self._group)

    @property
    def rounds(self) -> int:
        """The number of complete synchronizations; 0 with a single process."""
        return 0 if self._reducer is None else self._reducer.rounds

    def weigh(self, weight: float, total: float | None = None) -> None:
        """Set this rank's weight in the following backwards. Local, unless parameters have changed, see :meth:`follow`.

        A backward's contribution to the gradients is multiplied by ``weight / total``, inside :meth:`no_sync` as well
        as outside. Contributions accumulated earlier keep their weights. If you run a second backward outside before
        setting the gradients to ``None``, it adds its sum over the ranks to the first one's.

        Args:
            weight: Usually the number of samples (or tokens) that the local loss is the mean of. With 0 this rank takes
                part, but zeros replace its contribution, which may be NaN.
            total: The sum of the ranks' weights, if known. If losses are sums, pass weight 1 and total 1 on all ranks.
                With ``None``, the weight is sent with the gradients. Either all ranks pass ``None`` or none does.

        Raises:
            ConfigurationError: Without ``total``: the weight changes while gradients of ``no_sync`` wait.
        """
        if self._reducer is not None:
            self.follow()
            self._reducer.weighing.set(weight, total)

    def weigh_loss(self, loss: torch.Tensor, weight: float, total: float) -> Undo:
        """Weight the backward of ``loss``, instead of calling :meth:`weigh`. Local; does not block.

        This is exact even if layers exchange gradients in backward (:class:`ddp_callbacks.BatchNormSynchronizer`). The
        value of the loss does not change.

        Args:
            loss: This rank's loss; call its ``backward()`` afterwards, scaled if you like.
            weight, total: As in :meth:`weigh`.

        Returns:
            A function that undoes the weight. Call it after the backward if backwards without a weight follow; in these
            all ranks count equally.
        """
        self.times.mark("in forward")
        return (lambda: None) if self._reducer is None else self._reducer.weighing.set_for(loss, weight, total)

    @property
    def is_enabled(self) -> bool:
        """Whether a backward synchronizes, as it does outside of :meth:`no_sync`."""
        return self._switch.enabled

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally inside; the next backward outside sends the accumulated gradients.

        Each contribution has the weight that :meth:`weigh` set for its backward. All ranks must use it in the same
        backwards. Nothing blocks inside. An optimizer must not step with gradients that have not been sent.
        """
        before, self._switch.enabled, self._has_accumulated = self._switch.enabled, False, True
        self._switch.in_forward = True
        if self._reducer is not None:
            self._reducer.weighing.accumulates = True
        try:
            yield
        finally:
            self._switch.enabled, self._switch.in_forward = before, False
            self.times.mark("in backward")

    def synchronize(self) -> None:
        """Join the other ranks' synchronization after a backward that reached none of the parameters.

        Such a backward fires no hook. Call this after backward if ``rounds`` did not increase; it blocks until all
        ranks take part. Inside :meth:`no_sync` it does nothing.

        Raises:
            PeerError: Another rank failed or died.
        """
        if self._reducer is not None and self._switch.enabled:
            self._hooks.synchronize()

    def skip(self) -> list[bool]:
        """Like :meth:`synchronize`, on a rank that skips this step; return which ranks do. A collective.

        Raises:
            PeerError: Another rank failed or died.
        """
        if self._reducer is None:
            return [True]
        self._reducer.skips = True
        self.synchronize()
        return self._reducer.skipped_by

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, to resume with the same bits: plain data and tensors, for a checkpoint. Local.

        It has the gradients that :meth:`no_sync` has accumulated, and the last weights, but not ``comm_state``. Each
        rank has a different state. Call it between two steps.
        """
        state: dict[str, Any] = {"world_size": self._world_size, "gradients": self._accumulated()}
        if self._reducer is None:
            return state
        return state | {"rounds": self.rounds, "weighing": self._reducer.weighing.state_dict()}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Resume from the states of all ranks, in rank order. Local, as :meth:`weigh`; every rank passes the same.

        With as many ranks as before, each takes its own state. Otherwise, rank 0 continues with the sum of all
        accumulated gradients, and the others without.

        Args:
            states: The result of :meth:`state_dict` on each rank.

        Raises:
            ConfigurationError: Another number of ranks has accumulated gradients under weights without a total.
        """
        self.follow()
        rank = 0 if self._reducer is None else self._group.rank()
        if len(states) == self._world_size:
            own = states[rank]
            if self._reducer is not None:
                self._reducer.rounds = own["rounds"]
                self._reducer.weighing.load_state_dict(own["weighing"])
            self._load_gradients(own["gradients"])
            return
        gradients = _sum_of_gradients(states, self._world_size)
        if gradients and self._reducer is not None:
            self._reducer.weighing.accumulates = True
        if rank:
            for name, parameter in self._module.named_parameters():
                parameter.grad = None if name in gradients else parameter.grad
        self._load_gradients(gradients if rank == 0 else {})

    def _accumulated(self) -> dict[str, torch.Tensor]:
        """Return a copy of this rank's gradients if they are not synchronized yet, by the name of the parameter."""
        if not (self._has_accumulated if self._reducer is None else self._reducer.weighing.accumulates):
            return {}
        named = [(name, parameter.grad) for name, parameter in self._module.named_parameters()]
        return {name: gradient.detach().clone() for name, gradient in named if gradient is not None}

    def _load_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        self._has_accumulated = self._has_accumulated or bool(gradients)
        for name, parameter in self._module.named_parameters():
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.device, copy=True)
        if self._reducer is not None:
            self._reducer.note_used(gradients)

    def close(self) -> None:
        """Remove every hook. Gradients stay unchanged. Local; safe to call twice."""
        if self._reducer is not None:
            self._hooks.close()
            self._reducer.weighing.close()


def _sum_of_gradients(states: Sequence[Mapping[str, Any]], world_size: int) -> dict[str, torch.Tensor]:
    """Return the sum of the accumulated gradients, scaled for one of ``world_size`` ranks, by parameter name."""
    if any(state["gradients"] for state in states) and len(states) > 1 and states[0]["weighing"]["total"] is None:
        raise ConfigurationError(
            f"the checkpoint holds gradients that {len(states)} processes have accumulated under weights without a "
            f"total, so {world_size} cannot resume from them. Start {len(states)}, or give weigh() the total."
        )
    factor = world_size / len(states)  # each contribution was multiplied by the number of ranks, see Weighing
    summed: dict[str, torch.Tensor] = {}
    for state in states:
        for name, gradient in state["gradients"].items():
            summed[name] = summed[name] + gradient if name in summed else gradient
    return {name: gradient * factor for name, gradient in summed.items()}
