"""The program on a node, between launcher and ranks: it starts and signals them, and ends them with the connection.

The launcher sends it to the node (see :mod:`ddp_callbacks.launcher.remote`), whose interpreter may lack this package.
So it imports only the standard library and its own parts. Linux::

    program     starts the ranks, and passes on what comes from the launcher and from them
    ending      how the ranks are asked to stop, and ended
    answers     what the launcher asks before anything is started
    link        the connection to the launcher
    binding     which cores each rank gets
    processes   what the kernel knows of processes

Messages are lines of JSON, ``{"do": NAME, ...}``, with any bytes in its texts (os.fsencode). On standard input, each
calls the method ``do_NAME``, or the function of that name in ``answers``. Standard output begins with
:data:`link.GREETING`, then takes:

===========  =============================================================================================
``answer``   the answer to a message; ``problem`` if it could not be done
``wrote``    by a rank to a stream: ``o`` (standard output), ``e`` (standard error), ``s`` (the stacks of its
             threads, as Python's faulthandler writes them) or ``f`` (the record of its failure, see
             :mod:`ddp_callbacks.launcher.hook`)
``started``  the ranks of this node
``ended``    a rank, after all that it wrote
``asked``    a signal came here that asks the job to stop
``problem``  the job cannot continue
``beat``     the answer to ``beat``
``taken``    rank 0 has taken its standard input so far
``done``     everything here has ended
===========  =============================================================================================

Standard input is also the lifeline. If it ends for any reason (the launcher has ended or was killed, the connection
broke), or is silent for too long, every process of the job gets SIGTERM and a little later SIGKILL.

A job that is asked to stop is another matter: only the ranks get the signal, and everything gets SIGKILL once their
time is over.
"""
