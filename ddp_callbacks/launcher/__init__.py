"""``ddprun``: starts a job on many nodes.

::

    before any node is contacted: what the user wants
        cli          the console script
        options      the command line; flags: all its flags, also those that it shares with torchrun
        meant        what is no command line of ours, and what was meant
        hosts        which nodes, and how many processes on each: from -H or a host file
        job          the settings; plan: what runs where, with which variables
    on this machine, while the job runs: one asyncio event loop
        run_job      one job after the other; batch_job: the Slurm or PBS job around it, its end and its next start
        connection   one node: messages and answers; remote: the command that reaches it, and why that failed
        launch       reaches all nodes, starts the job on all, ends it on all
        watch        passes on the job's output, restarts or ends it when something fails; outcome: reports how it ended
        members      the ranks that take part, those that were lost, and their successors
        streams      files and the terminal, line by line, and standard input for rank 0
        first_failure  finds which of several failures came first; warned: shows warnings of ranks that are not shown
        join         adds nodes to a running job; what else a command asks of one is in reporting
        same         what all nodes must have alike
        doctor       checks the nodes
        predict      runs a script on few and on more processes
    on each node
        node         the first process, without this package: starts the ranks, ends them with the connection
        store        hosts the store in which the ranks meet, on the first node
        hook         writes down the exception that ends a rank
        facts        facts about the node, for a start and the doctor; probe: sums between nodes
"""
