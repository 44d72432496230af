"""Splitting: which unit runs where, and what crosses between stages.

This layer knows torch but not torch.distributed. In the order of use:

* :mod:`.unit_calls` finds the submodules that live whole on one stage, and intercepts their calls;
* :mod:`.dry_run` runs the user's step once on fake parameters, and records every unit call and what it reads;
* :mod:`.cut` assigns units to stages, :mod:`.memory` tells what each then holds;
* :mod:`.record` has the record, and the plan of what each stage runs, receives and sends;
* :mod:`.data` cuts a batch, :mod:`.fakes` stand for what a stage does not own, :mod:`.side_effects` are carried along;
* :mod:`.reductions` makes the loss that of the whole batch, :mod:`.comparison` checks it.
"""
