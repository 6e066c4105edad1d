"""``ddprun``: starts a job on many nodes.

::

    the user's wishes, worked out before anything is contacted
        hosts        which nodes, and how many processes on each: from -H or a host file
        options      the command line; flags: those that it shares with torchrun
        plan         the job: what runs where
    on this machine, while the job runs
        cli          the console script
        connection   one node: messages and answers; ways: the command that reaches it, and why that failed
        launch       reaches all nodes, starts the job on all, ends it on all; ranks: their numbers and variables
        batch_job    the Slurm or PBS job around it: when it ends, and how it starts again
        watch        passes on the job's output, restarts or ends it when something fails, and reports why
        stdin        passes standard input on to rank 0
        output       files and the terminal, line by line
        failures     which of several failures came first; record: the exception that has ended a rank
        doctor       checks the nodes; diagnosis: what the findings mean
    on each node
        remote       how the job gets there unchanged, over ssh or any other pipe
        node         the first process, without this package: starts the ranks, ends them with the connection
        store        hosts the store in which the ranks meet, on the first node
        hook         writes down the exception that ends a rank
        facts        what a start and the doctor must know of the node; probe: an all-reduce, run by the doctor
"""
