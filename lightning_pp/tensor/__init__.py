"""Tensor parallelism inside units: each rank of the tensor axis holds and computes a part of a unit's matrices.

What enters and leaves a unit is plain and the same on all tensor ranks. A parameter that is cut is a plain parameter of
this rank's part, so that sharding, deferral and optimizers treat it as any other.

* :mod:`.parts` says how a parameter lies over the axis;
* :mod:`.plans` reads plans, and :mod:`.tracing` finds how each unit's parameters can be cut;
* :mod:`.units` cuts them and runs units, :mod:`.region` with :mod:`.rules` computes functions on parts;
* :mod:`.head` keeps the logits of a rank's classes until a cross entropy takes them;
* :mod:`.compiling` has units compiled;
* :mod:`.check` compares each unit with itself run whole.
"""
