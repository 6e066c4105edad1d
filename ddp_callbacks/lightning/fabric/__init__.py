"""Train a loop of Lightning Fabric on many processes: ``Fabric(strategy="ddp_callbacks")``.

A loop, in Fabric's order::

    fabric.launch()              the processes join, and get rank 0's random state: fabric_strategy
    fabric.setup(...)            models and optimizers are compared, rank 0's parameters broadcast: models
    fabric.setup_dataloaders()   each loader is divided: loader
    for batch in loader          each batch is noted, with its share: loss_batches; a padding batch leaves no trace
    model(batch)                 it is noted which batches the inputs are of: loss_batches; loop_draws: as one process
    fabric.backward(loss)        loss_checks; the loss is weighed by the share of its batch; gradients are summed
    fabric.save(...)             running statistics are merged before

``classes`` makes the class for both packages, as for the Trainer.
"""
