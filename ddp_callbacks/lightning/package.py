"""Lightning comes as two packages, ``lightning`` and ``pytorch_lightning``, whose classes know nothing of each other.

The classes here are made once for each that is installed, from the same mixins.
"""

from __future__ import annotations

import importlib
from typing import Any

from ddp_callbacks.lightning._lightning import add_worker_init_fn, is_interactive, require_lightning, results_class
from ddp_callbacks.lightning._torchmetrics import require_torchmetrics
from ddp_callbacks.lightning.callback import DDPCallbackMixin
from ddp_callbacks.lightning.logs import JointResults
from ddp_callbacks.lightning.processes import NAMES
from ddp_callbacks.lightning.strategy import CallbackStrategyMixin
from ddp_callbacks.lightning.which_package import HOMES, ROOTS, ByCaller

STRATEGY_DOC = """Train on many processes without wrapping the module; the strategy's name is ``"ddp_callbacks"``.

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
        sync: ``"every_step"``: sum the gradients of every backward over the processes, which is exact.
            :class:`ddp_callbacks.LocalSGD` or :class:`ddp_callbacks.DiLoCo`, for slow networks: each process takes
            local steps, and parameters are averaged every few steps; see :class:`ddp_callbacks.ParameterAverager`.
        verify: ``"first_batch"``: compare the gradient of the first batch of a fit with that of a single process, and
            raise :class:`MismatchError` if they differ; see :func:`ddp_callbacks.verify_gradient`. It calls
            ``training_step`` two or three times, with logging off.
        skip_batch: What lets all processes skip a training batch together, as one process does if ``training_step``
            returns ``None``: ``"no_loss"``: it returns ``None`` on some process. ``"non_finite"``: the loss is NaN or
            infinite on some process. ``"any"``: either. Rank 0 reports the batch, and the ranks and hosts that have
            such a loss. It costs one small message in each step, and reading the loss from its GPU. ``None``: an error
            if only some return ``None``, and a warning at the first loss that isn't finite. For automatic
            optimization, with an optimizer that computes the loss once per step.
        bucket_cap_mb, comm_hook, comm_state, compress: See :class:`ddp_callbacks.GradientSynchronizer`; with another
            ``sync``, :class:`ddp_callbacks.ParameterAverager`.
        process_group_backend: As in :func:`torch.distributed.init_process_group`; ``None``: gloo, and NCCL for CUDA.
        timeout: How long to wait for the other processes to join, and for a silent process.
        start_method: How the Trainer starts processes without a launcher: ``"popen"``, ``"fork"``, ``"spawn"`` or
            ``"forkserver"``; ``None``: ``"popen"``, in a notebook ``"fork"``.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: As in ``DDPStrategy``.

    Raises:
        ConfigurationError: A setting is invalid; a ``ValueError``.
    """
CALLBACK_DOC = """Refuse to train if the processes would not train together.

    ``Trainer(callbacks=[DDPCallback()])`` changes nothing with a single process or with ``strategy="ddp_callbacks"``.
    With several processes and another strategy it raises :class:`ddp_callbacks.errors.ConfigurationError`, which names
    that strategy as the remedy. A callback cannot do more: the Trainer chooses the strategy, and with it rank, device,
    and who writes checkpoints and logs, before it calls any callback. Two processes with a default Trainer are two
    separate Trainers, each with rank 0.
    """


def make(name: str, home: str) -> tuple[type, type]:
    """Make the strategy and the callback for a package, and register the strategy there.

    Args:
        home: The module that has them.
    """
    root = ROOTS[name]
    require_lightning(name)
    require_torchmetrics()
    strategies = importlib.import_module(f"{root}.strategies")
    callbacks = importlib.import_module(f"{root}.callbacks")
    members: dict[str, Any] = {
        "__module__": home,
        "__doc__": STRATEGY_DOC,
        "homes": HOMES,
        "strategy_name": NAMES[0],
        "ddp_strategy": strategies.DDPStrategy,
        "results_class": type("JointResults", (JointResults, results_class(name)), {"__module__": home}),
        "add_worker_init_fn": staticmethod(add_worker_init_fn(name)),
        "interactive": is_interactive(name),
    }
    strategy = ByCaller("CallbackStrategy", (CallbackStrategyMixin, strategies.DDPStrategy), members)
    described = {"__module__": home, "__doc__": CALLBACK_DOC}
    callback = type("DDPCallback", (DDPCallbackMixin, callbacks.Callback), described)
    what = "gradients synchronized by callbacks, the module is not wrapped"
    for each in NAMES:
        strategies.StrategyRegistry.register(each, strategy.exactly, description=what, override=True)
    return strategy, callback
