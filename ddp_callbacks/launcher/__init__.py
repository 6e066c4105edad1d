"""``ddprun``: starts a job on many nodes.

::

    the user's wishes, worked out before anything is contacted
        hosts        which nodes, and how many processes on each: from -H or a host file
        options      the command line: flags for the nodes, and every flag of torchrun
        plan         what runs where
    on this machine, while the job runs
        cli          the console script
        connection   one node: messages and answers; ways: the command that reaches it, and why that failed
        launch       reaches all nodes, lets them meet, starts the job on all, ends it on all
        batch_job    the Slurm or PBS job around it: when it ends, and how it starts again
        watch        passes on the job's output, ends all nodes when something fails, and reports why
        output       files and the terminal, line by line
        failures     which of several failures came first; tracebacks: the exceptions that a rank printed
        doctor       checks the nodes; diagnosis: what the findings mean
    on each node
        remote       how the job gets there unchanged, over ssh or any other pipe
        node         the first process, which does not need this package; ends the job with the connection
        agent        torchrun's agent; rounds: how the agents meet; meeting: their store and interface
        facts, probe run by the doctor
"""
