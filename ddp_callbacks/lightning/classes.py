"""The classes as users, editors and type checkers see them; :func:`make` makes them for both packages of Lightning.

Their base classes are ``Any`` to a type checker, so it accepts them as strategies and callbacks of either package.
"""

from __future__ import annotations

import functools
import importlib
import typing
from collections.abc import Callable
from types import FunctionType
from typing import Any, Literal

from ddp_callbacks.checkpoints.resume import ARGUMENTS
from ddp_callbacks.lightning import _logged, _parts, _torchmetrics
from ddp_callbacks.lightning.callback import DDPCallbackMixin, let_callbacks_choose
from ddp_callbacks.lightning.fabric.fabric_strategy import CallbackFabricMixin
from ddp_callbacks.lightning.logs import JointResults
from ddp_callbacks.lightning.packages import FABRIC, ROOTS, require
from ddp_callbacks.lightning.resume_fit import ResumeMixin
from ddp_callbacks.lightning.strategy import CallbackStrategyMixin
from ddp_callbacks.lightning.strategy_processes import NAMES
from ddp_callbacks.versions import require_names

# Return types are left out: jsonargparse takes a function that returns a class for a factory of its objects.
_FUNCTIONS: dict[str, Any] = {
    "weight": Literal["cross_entropy"] | Callable[[Any], Any] | None,
    "comm_hook": Callable[[Any, Any], Any] | None,
}


class CallbackStrategy(CallbackStrategyMixin):
    """Train on many processes without wrapping the module; the strategy's name is ``"ddp_callbacks"``.

    The second name, ``"callbacks"``, is for programs that divide their data themselves if they find "ddp" in it.

    Under ddprun, torchrun, srun or mpirun, the launcher's processes are used, whatever the Trainer's ``devices`` and
    ``num_nodes`` are. Without a launcher the Trainer starts ``devices`` processes, also in a notebook. With a single
    process nothing changes. Every process must make the same calls (``fit``, ``validate``, ``test``, ``predict``).

    Args:
        batch_size: ``"global"``: a loader's batch is the global batch, divided among the processes, so that N processes
            give the same results as one. ``"per_process"``: each process takes whole batches in turn.
        weight: A function of a batch (this process's part; in training, validation and test) that returns the number
            that the loss is the mean over, for example tokens that count. ``"cross_entropy"``: the divisor of the
            module's ``nn.CrossEntropyLoss`` (or ``nn.NLLLoss``), with class weights and ignored targets; see
            :class:`ddp_callbacks.CrossEntropyWeight`. ``None``: the number of samples.
        reduction: ``"mean"``, or ``"sum"`` if the loss is a sum over the samples. Log such a loss with
            ``self.log(..., reduce_fx="sum")``, or as a mean.
        randomness: ``"global"``: a step draws dropout and noise for the global batch, as one process does, and on
            several processes each sample of a map-style data set draws its augmentation under a seed of its own.
            ``"by_sample"``: the same, and such seeds on one process, too, so that one and many draw the same.
            ``"by_process"``: each process draws its own numbers in a step, which costs less time.
        sync: ``"every_step"``: sum the gradients of every backward over the processes, which is exact.
            :class:`ddp_callbacks.LocalSGD` or :class:`ddp_callbacks.DiLoCo`, for slow networks: each process takes
            local steps, and parameters are averaged every few steps; see :class:`ddp_callbacks.ParameterAverager`. The
            loss must be a mean.
        verify: ``"warn"``: compare the gradient of the first batch of a fit with that of a single process, and warn if
            they differ by more than 1 %, unless ``weight``, ``reduction`` or ``batch_size`` says how the loss counts.
            So are batches 1, 2, 4, 8 and so on, for 0.5 s in all, then for 0.5 % of the time: a term may come later.
            ``"first_batch"``: in any case, and raise :class:`ddp_callbacks.errors.MismatchError`; see
            :func:`ddp_callbacks.verify_gradient`. Both call ``training_step``, and ``validation_step`` and
            ``test_step`` for the first batch of a loader, two or three times, on copies of the module that log nothing,
            and warn of logged values that differ.
        skip_batch: When all processes skip a training batch together, as one process does if ``training_step`` returns
            ``None``. ``"no_loss"``: it returns ``None`` on some process. ``"non_finite"``: the loss is NaN or infinite
            on some process. ``"any"``: either. Rank 0 reports the batch, and the ranks and hosts that have such a loss.
            It costs one small message in each step, and reading the loss from its GPU. ``None``: raise an error if only
            some return ``None``, and warn of the first loss that isn't finite. For automatic optimization, with an
            optimizer that computes the loss once per step.
        on_divergence: Parameters and the optimizers' states are compared every few steps, and parameters and buffers at
            the end of each epoch. If they differ, ``"raise"`` raises :class:`ddp_callbacks.errors.MismatchError`;
            ``"repair"`` gives all processes the values that more than half of them have, and raises without such a
            majority. With another ``sync``, they are compared at the end of each epoch only.
        bucket_cap_mb: The size in MiB at which a bucket of gradients is sent, as in ``DistributedDataParallel``; with
            another ``sync``, the size of the fragments of parameters.
        comm_hook: A communication hook, as for ``DistributedDataParallel.register_comm_hook``; see
            :class:`ddp_callbacks.GradientSynchronizer`.
        comm_state: The first argument of the hook.
        compress: Send over the network between nodes in half precision: ``"bf16"`` or ``"fp16"``; ``None``: nothing is
            changed.
        process_group_backend: As in :func:`torch.distributed.init_process_group`; ``None``: gloo, and NCCL for CUDA.
        timeout: How long to wait for the other processes to join, and for a silent process.
        start_method: How the Trainer starts processes without a launcher: ``"popen"``, ``"fork"``, ``"spawn"`` or
            ``"forkserver"``; ``None``: ``"popen"``, in a notebook ``"fork"``.
        accelerator: As in ``DDPStrategy``; ``None``: the Trainer's.
        parallel_devices: As in ``DDPStrategy``; ``None``: the Trainer's.
        cluster_environment: As in ``DDPStrategy``; ``None``: the Trainer's.
        checkpoint_io: As in ``DDPStrategy``; ``None``: the Trainer's.
        precision_plugin: As in ``DDPStrategy``; ``None``: the Trainer's.

    Raises:
        ConfigurationError: A setting is invalid; a ``ValueError``.
    """


class DDPCallback(DDPCallbackMixin):
    """Train on many processes without wrapping the module: ``Trainer(callbacks=[DDPCallback()])``.

    The Trainer then trains as with ``strategy="ddp_callbacks"``. The callback takes the options of
    :class:`CallbackStrategy`, which says what they mean. Give it to the Trainer when you make it: then a Trainer
    chooses its strategy, and with it rank and device. One callback may choose for several Trainers.

    Args:
        batch_size, weight, reduction, randomness, sync, verify: See :class:`CallbackStrategy`.
        skip_batch, on_divergence: See :class:`CallbackStrategy`.
        bucket_cap_mb, comm_hook, comm_state, compress, process_group_backend: See :class:`CallbackStrategy`.
        timeout, start_method, accelerator, parallel_devices, cluster_environment: See :class:`CallbackStrategy`.
        checkpoint_io, precision_plugin: See :class:`CallbackStrategy`.

    Raises:
        ConfigurationError: A setting is invalid, or the Trainer is given another strategy, too. At the start of a run:
            the Trainer was made without this callback, or is one of the other package.
    """


class Resume(ResumeMixin):
    """Let ``trainer.fit`` stop anywhere and resume at the next batch, on any number of processes.

    ``Trainer(strategy="ddp_callbacks", callbacks=[Resume("run.ckpt")])``. If the file is there, ``trainer.fit(module)``
    resumes from it, and ``ckpt_path`` is ignored. When a process is asked to stop (SIGTERM, SIGUSR1, the time
    limit), all finish the batch of the training or the validation, rank 0 writes the file, and each process ends with
    exit code 75 (:class:`ddp_callbacks.errors.Preempted`). A validation that was cut is repeated. In a sanity check,
    the first batch of the training comes before the stop.

    The file is the Trainer's own checkpoint, which Lightning alone can load. In addition it has what Lightning does not
    save: the position in the loaders, logged values and metrics of the current pass, accumulated gradients, running
    statistics, random states, and the module's plain attributes that the fit has changed.

    On the same number of processes the fit resumes with the same bits. On another number, ranks draw other dropout
    masks than before, and the rest is equal up to rounding. The hooks that open the fit and the epoch run again; then
    the saved state is restored. A fit that had ended begins and ends once more, without an epoch. With ``fast_dev_run``
    the callback does nothing. It refuses another strategy, and searches for a batch size or a learning rate.
    """


Resume.__doc__ = f"{Resume.__doc__}{ARGUMENTS}"


class CallbackFabricStrategy(CallbackFabricMixin):
    """Train a loop of Fabric on many processes without wrapping the model; its name is ``"ddp_callbacks"``.

    The second name, ``"callbacks"``, is for programs that divide their data themselves if they find "ddp" in it.

    Under ddprun, torchrun, srun or mpirun, the launcher's processes are used, whatever Fabric's ``devices`` and
    ``num_nodes`` are. Without a launcher ``fabric.launch()`` starts ``devices`` processes. With a single process
    nothing changes. Every process must make the same calls of Fabric's methods, iterate over the same loaders, and call
    ``fabric.backward`` equally often.

    Args:
        batch_size: ``"global"``: the batch of a loader of ``setup_dataloaders`` is the global batch, divided among the
            processes, so that N processes give the same results as one. ``"per_process"``: each process takes whole
            batches in turn.
        weight: A function of a batch (this process's part, of a loader of ``setup_dataloaders``) that returns the
            number that the loss is the mean over, for example tokens that count. ``"cross_entropy"``: the divisor of
            the one ``nn.CrossEntropyLoss`` (or ``nn.NLLLoss``) in the models that were set up; see
            :class:`ddp_callbacks.CrossEntropyWeight`. ``None``: the number of samples.
        reduction: ``"mean"``, or ``"sum"`` if the loss is a sum over the samples.
        randomness: See :class:`CallbackStrategy`; a step is the body of a loop over a divided loader.
        bucket_cap_mb, comm_hook, comm_state, compress: See :class:`ddp_callbacks.GradientSynchronizer`.
        process_group_backend: As in :func:`torch.distributed.init_process_group`; ``None``: gloo, and NCCL for CUDA.
        timeout: How long to wait for the other processes to join, and for a silent process.
        start_method: How ``fabric.launch`` starts processes without a launcher: ``"popen"`` runs the script again;
            ``"fork"``, ``"spawn"`` and ``"forkserver"`` need a function, ``fabric.launch(function)``. ``None``:
            ``"popen"``, in a notebook ``"fork"``.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision: As in Fabric's ``DDPStrategy``.

    Raises:
        ConfigurationError: A setting is invalid; a ``ValueError``. From ``fabric.backward``: the loss may be of several
            batches that are divided in different proportions.
        MismatchError: From ``fabric.setup`` and ``setup_dataloaders``: the processes' models, optimizers or data
            differ.
        PeerError: From any call that blocks: another process failed or died.
    """


def make(name: str, home: str) -> tuple[type, type, type, type]:
    """Make ``CallbackStrategy``, ``DDPCallback``, ``Resume`` and ``CallbackFabricStrategy`` for a package.

    Args:
        home: The name of the module that has the classes.

    Raises:
        ImportError: The installed version lacks something.
    """
    require(name, _parts.PRIVATE + _logged.PRIVATE, _parts.PRIVATE_OF_BOTH)
    require_names("torchmetrics", _torchmetrics.PRIVATE)
    strategies = importlib.import_module(f"{ROOTS[name]}.strategies")
    base = importlib.import_module(f"{ROOTS[name]}.callbacks").Callback
    let_callbacks_choose(importlib.import_module(ROOTS[name]).Trainer)
    of_fabric = importlib.import_module(f"{FABRIC[name]}.strategies")
    shared: dict[str, Any] = {"package": name}
    own = {
        "__init__": _for_configs(CallbackStrategy.__init__, strategies.DDPStrategy.__init__),
        "strategy_name": NAMES[0],
        "ddp_strategy": strategies.DDPStrategy,
        "results_class": type("JointResults", (JointResults, _logged.results_class(name)), {"__module__": home}),
    }
    strategy = _make(home, CallbackStrategy, strategies.DDPStrategy, shared | own)
    fabric = _make(home, CallbackFabricStrategy, of_fabric.DDPStrategy, shared)
    what = "gradients synchronized by callbacks, the module is not wrapped"
    for each in NAMES:
        strategies.StrategyRegistry.register(each, strategy, description=what, override=True)
        of_fabric.STRATEGY_REGISTRY.register(each, fabric, description=what, override=True)
    init = functools.wraps(own["__init__"])(lambda *args, **options: DDPCallbackMixin.__init__(*args, **options))
    callback = _make(home, DDPCallback, base, shared | {"__init__": init, "strategy_class": strategy})
    return strategy, callback, _make(home, Resume, base, shared), fabric


def _make(home: str, described: type, base: type, members: dict[str, Any]) -> type:
    """Make a class for the package, with the name and the docstring of ``described``."""
    return type(described.__name__, (described, base), {"__module__": home, "__doc__": described.__doc__, **members})


def _for_configs(init: Any, of_ddp: Any) -> FunctionType:
    """Return a copy of ``init`` with the types that LightningCLI needs to make objects from a YAML file.

    Args:
        of_ddp: ``DDPStrategy.__init__``, which has the package's own classes where ``init`` has ``Any``.
    """
    copy = FunctionType(init.__code__, init.__globals__, init.__name__, init.__defaults__, init.__closure__)
    copy.__kwdefaults__, copy.__qualname__ = init.__kwdefaults__, init.__qualname__
    of_ddp = typing.get_type_hints(of_ddp)
    hints = init.__annotations__
    own = {name: of_ddp[name] for name in hints if hints[name] == "Any" and name in of_ddp}
    copy.__annotations__ = hints | own | _FUNCTIONS
    return copy
