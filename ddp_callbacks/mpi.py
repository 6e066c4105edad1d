"""``backend="mpi4py"``: torch's process groups over MPI, for a torch that was built without MPI.

Importing this module registers the backend; it needs the extra ``mpi``. In a script started by ``mpiexec``, write
either of these::

    ddp_callbacks.join_process_group(backend="mpi4py")

    import ddp_callbacks.mpi
    torch.distributed.init_process_group("mpi4py", init_method="mpi://")

With ``mpi://``, MPI tells the processes where rank 0 listens; ``env://`` and other methods work too. While a group
exists, an uncaught exception in one process ends the whole job; MPI alone would hang.
"""

from ddp_callbacks.comm.mpi.backend import register
from ddp_callbacks.comm.mpi.process_group import MPIProcessGroup
from ddp_callbacks.comm.mpi.rendezvous import place

__all__ = ["MPIProcessGroup", "place"]

register()
