"""Train a loop of Lightning Fabric on many processes: ``Fabric(strategy="ddp_callbacks")``.

What happens in a loop, in Fabric's order::

    fabric.launch()              the processes meet, and have rank 0's random state: strategy
    fabric.setup(...)            models and optimizers compared, rank 0's parameters for all: models
    fabric.setup_dataloaders()   each loader is divided: loader
    for batch in loader          which batches the loop has in hand, each with its share: batches; a padding batch
                                 leaves no trace: traces
    model(batch)                 its output remembers them
    fabric.backward(loss)        the loss is weighed by the share of the batch that it is of; gradients are summed
    fabric.save(...)             running statistics are merged before

``package`` makes the class for both packages, as for the Trainer.
"""
