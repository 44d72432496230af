"""What the functions of a step reach besides its module is as before a run that is not the real one."""

from __future__ import annotations

import outside_parts
import torch
from outside_parts import everything, module

from lightning_pp.split.side_effects.outside_state import OutsideState
from lightning_pp.split.side_effects.step_functions import FunctionsOfStep


def test_all_is_put_back_and_nothing_else_is_touched() -> None:
    outside = OutsideState(module)
    identities = [id(getattr(outside_parts, name)) for name in vars(outside_parts)]
    before = everything()
    for _ in range(2):  # each time from what is there then
        with outside.preserved():
            module.training_step(torch.ones(3, 2))
            during = everything()
        after = everything()
        for name, value in before.items():
            assert during[name] != value, f"{name} was to be changed"
            assert after[name] == value, name
    assert identities == [id(getattr(outside_parts, name)) for name in vars(outside_parts)]
    module.training_step(torch.ones(3, 2))
    before = everything()
    assert before["number"] == before["sums"][1] == before["counts"][0] == before["history"] - 70_000 == 1
    with outside.preserved():
        module.training_step(torch.ones(3, 2))
    assert everything() == before


def test_only_what_steps_come_to_is_kept() -> None:
    found = FunctionsOfStep(module)
    names = {function.__code__.co_name for function in found.functions}
    assert {"call", "training_step", "by_names", "__call__", "noted"} <= names and "train_dataloader" not in names
    named = {name for _, name in found.globals.values()}
    assert {"events", "teacher", "rate"} <= named and not {"larger", "everything"} & named
    assert all(kind.__module__ == "outside_parts" for kind in found.classes)
