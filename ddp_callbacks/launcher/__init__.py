"""What starts a job on many nodes: ``ddprun``.

::

    what the user wants, worked out before anything is contacted
        hosts        which nodes, and how many processes on each: named by hand or in a host file
        options      the command line: flags for the nodes, and every flag of torchrun
        plan         what is to run where
    here, while the job runs
        cli          the console script
        connection   one node: what it is told, and what it answers; ways: what leads there, and why it does not
        launch       reaches all nodes, lets them meet, starts the job on all, ends it on all
        watch        passes on what the job prints, ends all when something fails, and says why
        output       files and the terminal, line by line
        failures     which of several failures came first; tracebacks: what a rank has printed of its own
        doctor       looks at the nodes; diagnosis: what the findings mean
        bench        measures a training step on the nodes, and says how its cost grows
    on each node
        remote       how the job gets there unchanged, over ssh or any other pipe
        node         started first, by an interpreter that knows nothing of this package; ends all with the connection
        agent        torchrun's agent there; rounds: how the agents meet; meeting: the store and the interface for that
        facts, probe what the doctor runs there
"""
