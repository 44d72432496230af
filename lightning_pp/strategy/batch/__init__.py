"""One batch, from the loader to the work of every stage.

========================  ======================================================================
``cutter``                the batch becomes microbatches
``run``                   a call of the user's step, and a batch that is ready to be run
``preparation``           plans, copies, corrections and scopes: makes such a batch
``scaling``               what microbatches compute stands for the global batch
``whole_batch``           the step's end runs once, on all of the batch (``whole_batch_loss``)
``comparison``            all ranks of a pipeline run the same batch
``checks``                the first batches of a run are checked
``part_check``            one part, in one piece and in two
``differences``           what differs, and what to say of it
========================  ======================================================================
"""
