"""Random numbers of a step as on one process: dropout, noise and sampling, on any number of processes.

All ranks hold one random state. What a step draws for a batch, each rank draws for the whole batch and keeps the rows
of its part, so the state stays the same on all ranks.

- :mod:`.option`: what users choose.
- :mod:`.draws`: the batches of a run; a model that draws nothing pays for one comparison per batch.
- :mod:`.modes`: find the calls that draw (a torch function mode), and inside of these, the operators (a dispatch mode).
- :mod:`.operators`: what each drawing operator needs to draw for the whole batch, from torch's schemas.
- :mod:`.whole`: draw for the whole batch in the part's memory layout, and keep the rows.
- :mod:`.bernoulli`: the draws of dropout on the CPU, cheaper.
- :mod:`.dimension`: which dimension holds the batch; notes what cannot be told.
- :mod:`.generators`: states of the generators on the CPU and on GPUs, and draws that differ by rank.
"""

from ddp_callbacks.randomness.draws import WholeDraws as WholeDraws
from ddp_callbacks.randomness.rows import Rows as Rows
