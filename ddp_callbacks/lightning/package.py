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
from ddp_callbacks.lightning.strategy import CallbackStrategyMixin
from ddp_callbacks.lightning.which_package import ROOTS, ByCaller

# Of the strategy; Lightning looks for it in lower case. Libraries that find "ddp" in it divide their data themselves.
NAMES = ("ddp_callbacks", "callbacks")

STRATEGY_DOC = """Train on many processes without wrapping the module; the strategy's name is ``"ddp_callbacks"``.

    Or ``"callbacks"``, for programs that divide their data themselves if they find "ddp" in it.

    Processes are those of ddprun, torchrun, srun or mpirun, whose number counts whatever the Trainer's ``devices`` and
    ``num_nodes`` say; without a launcher the Trainer starts ``devices`` of its own, also in a notebook. In a world of
    one nothing changes. Every process must make the same calls (``fit``, ``validate``, ``test``, ``predict``).

    Args:
        batch_size: ``"global"``: a loader's batch is the batch of the step, divided among the processes, so that N
            processes give the numbers of one. ``"per_process"``: each takes whole batches in turn.
        weight: A function of a batch (this process's part; in training, validation and test) that returns the number
            that the loss is the mean over, tokens that count, say. ``"cross_entropy"``: what the module's
            ``nn.CrossEntropyLoss`` (or ``nn.NLLLoss``) divides by, with class weights and ignored targets; see
            :class:`ddp_callbacks.CrossEntropyWeight`. ``None``: the number of samples.
        reduction: ``"mean"``; ``"sum"`` where the loss is a sum over the samples. Log such a loss by
            ``self.log(..., reduce_fx="sum")``, or as a mean.
        sync: ``"every_step"``: the gradients of every backward are summed over the processes, which is exact.
            :class:`ddp_callbacks.LocalSGD` or :class:`ddp_callbacks.DiLoCo`: each process takes its own steps, and
            parameters are averaged now and then, for slow networks; see :class:`ddp_callbacks.ParameterAverager`.
        verify: ``"first_batch"``: compare the gradient of the first batch of a fit with that of one process, and raise
            :class:`MismatchError` where they differ; see :func:`ddp_callbacks.verify_gradient`.
            ``training_step`` is called two or three times for it, with logging off.
        bucket_cap_mb, comm_hook, comm_state, compress: See :class:`ddp_callbacks.GradientSynchronizer`; beside another
            ``sync``, :class:`ddp_callbacks.ParameterAverager`.
        process_group_backend: As in :func:`torch.distributed.init_process_group`; ``None``: gloo, and NCCL for CUDA.
        timeout: How long to wait for the other processes to come, and for one that has gone silent.
        start_method: How the Trainer starts processes where no launcher has: ``"popen"``, ``"fork"``, ``"spawn"`` or
            ``"forkserver"``; ``None``: ``"popen"``, in a notebook ``"fork"``.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: As in ``DDPStrategy``.

    Raises:
        ConfigurationError: A setting that cannot be; a ``ValueError``.
    """
CALLBACK_DOC = """Refuse to train where the processes would not train together.

    ``Trainer(callbacks=[DDPCallback()])`` trains as without it in one process and with ``strategy="ddp_callbacks"``;
    with several processes and another strategy it raises :class:`ddp_callbacks.errors.ConfigurationError`, which names
    that remedy. A callback alone could not do more: Lightning chooses the strategy, and with it the rank, the device,
    who writes checkpoints and logs, when the Trainer is made, before it calls any callback. Two processes with a
    default Trainer are two Trainers that each take themselves for rank 0.
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
        "strategy_name": NAMES[0],
        "ddp_strategy": strategies.DDPStrategy,
        "results_class": type("JointResults", (JointResults, results_class(name)), {"__module__": home}),
        "monitors": (callbacks.EarlyStopping, callbacks.Checkpoint),
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
