"""The program on a node, between launcher and ranks: it starts and signals them, and ends them with the connection.

The launcher sends it to the node (see :mod:`ddp_callbacks.launcher.remote`), whose interpreter may lack this package.
So it imports only the standard library and its own parts. Linux::

    program     starts the ranks, and passes on what comes from the launcher and from them
    ending      asks the ranks to stop, and ends them
    answers     answers the launcher's questions before the ranks start
    link        the connection to the launcher
    binding     chooses the cores of each rank
    processes   starts processes, and reads their state from the kernel
    stopped     kills ranks that were stopped for long

Messages are lines of JSON, ``{"do": NAME, ...}``, whose texts may hold any bytes (os.fsencode). A message on standard
input calls the method ``do_NAME``, or the function of that name in ``answers``. Standard output begins with
:data:`link.GREETING`; then these messages follow:

===========  =============================================================================================
``answer``   the answer to a message; ``problem`` if it could not be done
``wrote``    output of a rank on a stream: ``o`` (standard output), ``e`` (standard error, or both if they are one),
             ``s`` (the stacks of its threads, as Python's faulthandler writes them) or ``f`` (the record of its
             failure, see :mod:`ddp_callbacks.launcher.hook`, or before it that a successor is ready)
``started``  the ranks of this node have started
``ended``    a rank has ended; all its output came before
``asked``    a signal to this program asks the job to stop
``problem``  the job cannot continue
``beat``     the answer to ``beat``
``done``     everything here has ended
===========  =============================================================================================

Standard input is also the lifeline. If it ends for any reason (the launcher has ended or was killed, the connection
broke), or is silent for too long, every process of the job gets SIGTERM and a little later SIGKILL.

If the job is asked to stop, only the ranks get the signal, and every process gets SIGKILL once their time is over.
"""
