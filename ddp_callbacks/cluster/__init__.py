"""Where the processes of a job are; without torch, for the library and ddprun.

- :mod:`.environment`: who am I: rank, world size, where to meet
- :mod:`.schedulers`: what PBS, Slurm, LSF and MPI launchers tell a process
- :mod:`.network`: the addresses and interfaces of this machine
"""
