"""The program on a node, between launcher and ranks: it starts and signals them, and ends them with the connection.

The launcher sends it to the node (see :mod:`ddp_callbacks.launcher.remote`), whose interpreter may lack this package.
So it imports only the standard library and its own parts. Linux::

    program     starts the ranks, and passes on what comes from the launcher and from them
    ending      asks the ranks to stop, and ends them
    answers     answers the launcher's questions before the ranks start
    reports     what it tells the launcher
    link        the connection to the launcher
    binding     chooses the cores of each rank
    processes   starts processes, and reads their state from the kernel
    stopped     kills ranks that were stopped for long

Messages are lines of JSON, whose texts may hold any bytes (os.fsencode). On standard input each calls a method of
:class:`program.Node`: ``[NAME, QUESTION, [...], {...}]``. Standard output begins with :data:`link.GREETING`; then
follow :mod:`reports`, ``[KIND, *VALUES]``, and answers, ``["answer", QUESTION, {...}]``, which may hold a ``problem``.

Standard input is also the lifeline. If it ends for any reason (the launcher has ended or was killed, the connection
broke), or is silent for too long, every process of the job gets SIGTERM and a little later SIGKILL.

If the job is asked to stop, only the ranks get the signal, and every process gets SIGKILL once their time is over.
"""
