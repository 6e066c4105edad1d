"""torch's process group over MPI; :mod:`ddp_callbacks.mpi` registers it as the backend ``"mpi4py"``."""
