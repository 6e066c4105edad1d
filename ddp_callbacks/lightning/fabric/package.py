"""Fabric comes in two packages, ``lightning.fabric`` and ``lightning_fabric``; the class here is made once for each."""

from __future__ import annotations

import importlib
from typing import Any

from ddp_callbacks.lightning._lightning import add_worker_init_fn, is_interactive, require_fabric
from ddp_callbacks.lightning.fabric.strategy import CallbackFabricMixin
from ddp_callbacks.lightning.processes import NAMES
from ddp_callbacks.lightning.which_package import FABRIC, HOMES_OF_FABRIC, ByCaller

DOC = """Train a loop of Fabric on many processes without wrapping the model; its name is ``"ddp_callbacks"``.

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
        bucket_cap_mb, comm_hook, comm_state, compress: See :class:`ddp_callbacks.GradientSynchronizer`.
        process_group_backend: As in :func:`torch.distributed.init_process_group`; ``None``: gloo, and NCCL for CUDA.
        timeout: How long to wait for the other processes to join, and for a silent process.
        start_method: How ``fabric.launch`` starts processes without a launcher: ``"popen"`` runs the script again;
            ``"fork"``, ``"spawn"`` and ``"forkserver"`` need a function, ``fabric.launch(function)``. ``None``:
            ``"popen"``, in a notebook ``"fork"``.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision: As in Fabric's ``DDPStrategy``.

    Raises:
        ConfigurationError: A setting is invalid; a ``ValueError``. From ``fabric.backward``: the loss is of several
            batches that are divided in different proportions.
        MismatchError: From ``fabric.setup`` and ``setup_dataloaders``: the processes' models, optimizers or data
            differ.
        PeerError: From any call that blocks: another process failed or died.
    """


def make(name: str, home: str) -> type:
    """Make the strategy for a package, and register it there.

    Args:
        home: The module that has it.
    """
    require_fabric(name)
    strategies = importlib.import_module(f"{FABRIC[name]}.strategies")
    members: dict[str, Any] = {
        "__module__": home,
        "__doc__": DOC,
        "homes": HOMES_OF_FABRIC,
        "add_worker_init_fn": staticmethod(add_worker_init_fn(name)),
        "interactive": is_interactive(name),
    }
    strategy = ByCaller("CallbackFabricStrategy", (CallbackFabricMixin, strategies.DDPStrategy), members)
    what = "gradients synchronized by callbacks, the model is not wrapped"
    for each in NAMES:
        strategies.STRATEGY_REGISTRY.register(each, strategy.exactly, description=what, override=True)
    return strategy
