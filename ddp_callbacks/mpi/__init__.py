"""``backend="mpi4py"``: torch's process groups over MPI, for a torch that was built without.

Importing this module registers the backend; it needs the extra ``mpi``. With a script that ``mpiexec`` has started,
either of these is all::

    ddp_callbacks.join_process_group(backend="mpi4py")

    import ddp_callbacks.mpi
    torch.distributed.init_process_group("mpi4py", init_method="mpi://")

``mpi://`` lets MPI tell the processes where rank 0 listens; ``env://`` and the others work as well. While a group
exists, and until the process ends, the end of a process is taken care of: an uncaught exception ends the job, which
MPI by itself would leave hanging.
"""

from ddp_callbacks.mpi.backend import register
from ddp_callbacks.mpi.process_group import MPIProcessGroup
from ddp_callbacks.mpi.rendezvous import place

__all__ = ["MPIProcessGroup", "place"]

register()
