"""The program on a node, between launcher and ranks: it starts and signals them, and ends them with the connection.

The launcher sends it to the node (see :mod:`ddp_callbacks.launcher.remote`), whose interpreter may lack this package.
So it imports only the standard library and its own parts. Linux::

    program     starts the ranks, and passes on what comes from the launcher and from them
    ending      how the ranks are asked to stop, and ended
    answers     what the launcher asks before anything is started
    link        the connection to the launcher
    binding     which cores each rank gets
    processes   what the kernel knows of processes

Standard input brings messages, each a line with a length and as many bytes of JSON: ``{"do": NAME, ...}`` calls the
method ``do_NAME``, or the function of that name in ``answers``. Standard output takes :data:`link.GREETING`, then
frames: a header (:data:`link.HEADER`: kind, rank, length), as many bytes, and a newline, without which srun would hold
them back.

=====  ==============================================================================================
``r``  the answer to a message, JSON; ``{"problem": TEXT}`` if it could not be done
``o``  standard output of a rank
``e``  the same for standard error
``s``  the stacks of a rank's threads, as Python's faulthandler writes them
``f``  the record of a rank's failure, see :mod:`ddp_callbacks.launcher.hook`
``m``  a report, JSON: ``started``, ``ended``, ``asked`` (a signal came here), ``problem``
``b``  an answer to ``beat``, empty
``i``  rank 0 has taken its standard input so far, empty
``x``  everything here has ended, empty
=====  ==============================================================================================

Standard input is also the lifeline. If it ends for any reason (the launcher has ended or was killed, the connection
broke), or is silent for too long, every process of the job gets SIGTERM and a little later SIGKILL.

A job that is asked to stop is another matter: only the ranks get the signal, and everything gets SIGKILL once their
time is over.
"""
