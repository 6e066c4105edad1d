"""What a job of ``ddprun`` did with its time. Imports only the standard library.

::

    on each rank, once the engine asks for it
        recorder     counts the seconds of each part of a step, and sends the totals now and then
        stopwatch    tells them from the waits for other ranks; progress: counts steps, epochs, validations
    at ddprun, which passes on what the ranks send
        trace        some steps of all ranks on one clock
        collector    keeps what they have sent, and what has happened meanwhile
        summary      what follows from it: shares, the rank that sets the pace, one line, what to try next
        page         report.html, which needs no network
    at ddprun predict
        cost         a model of the time of a step; prediction: what two runs tell by it; plot: as SVG
    commands that ask a running job, by its folder of logs
        requests     through files there
        stacks       where the ranks are; status: a table of what they do
"""
