"""How a step's loss depends on its batch: which sums, means and counts it makes, and what they are of the whole batch.

A pipeline runs a step on microbatches. What the step adds up over samples is then a part of the batch's sum, and what
it divides by may be a part of the batch's count. The mechanism of this room is dimensional analysis: every value has a
*degree*, the power of the number of samples that it grows with. Rows have degree 0, a sum over rows 1, a mean 0 and
``len(x)`` 1. Products add degrees and quotients subtract them. A value of degree d of one microbatch, times
``(1 / share) ** d``, stands for the whole batch: the weighted mean of these over the microbatches is the batch's value.

Where things are:

========================  ======================================================================
``functions``             the torch functions that matter, by what they do to the degree
``places``                where in the user's code a function is called
``recording``             a dry run notes these calls
``facts``                 two dry runs at two sizes: what grows with the batch
``scaling``               the real step: degrees are followed, counts are those of the global batch
``counting``              one batch: what its microbatches count, added up
========================  ======================================================================
"""
