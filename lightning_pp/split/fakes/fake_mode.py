"""Operations on values of another stage: they return fakes of the right shapes, or raise an error with the line.

Torch's :class:`FakeTensorMode` refuses every operation whose output shape may depend on data. Here it is refused only
if it depends on the data that is missing: ``logits[labels != -100]`` with real labels has a known shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pp.errors import SplitError
from lightning_pp.split._torch_private import (
    LOG_OF_FAKES,
    NOT_FAKEABLE,
    FakeTensor,
    FakeTensorMode,
    OperationsMode,
    schema_of,
    tree_flatten,
    tree_map,
    tree_unflatten,
)
from lightning_pp.split.fakes.known_results import KnownResults
from lightning_pp.split.record.source_lines import user_line
from lightning_pp.split.record.sources import storage_of


class NeedsDataError(SplitError):
    """An operation outside any unit needs the data of a tensor that has none here.

    Args:
        operation: What needs them.
        line: The user's line.
        in_step: Whether it is part of a step, and not of a hook or a callback.

    Attributes:
        line: The user's line.
    """

    def __init__(self, operation: str, line: str, *, in_step: bool = True) -> None:
        advice = (
            "Move it into a unit or after the last unit call, or make it depend on the batch only. After a run, "
            "trainer.strategy.gather_module() puts all values into the module."
            if in_step
            else "Outside a step a rank has only the weights of its own stages, and no pipeline runs. Compute it in "
            "training_step or validation_step."
        )
        super().__init__(
            f"{line} needs the data of another stage ({operation}): its result or the shape of its result depends on "
            "weights. " + advice
        )
        self.line = line


class LostEditError(SplitError):
    """A hook writes a value of another stage into a tensor or gradient of this rank, which would not change."""

    def __init__(self, operation: str, edited: Tensor, line: str) -> None:
        super().__init__(
            f"{line} computes from parameters of another stage, which this rank does not have, and writes the result "
            f"into a tensor of shape {tuple(edited.shape)} ({operation}). Keep an average of parameters in a Parameter "
            "with requires_grad=False, not in a buffer. Compute it in on_train_batch_end of the module, before that "
            "hook reads anything left by the step: each stage then keeps the averages of its own parameters. Compute "
            "values to log, or values with gradients, in the step."
        )


class FakeValueMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode that finds shapes that depend on real inputs, such as masks, by trying.

    It is never entered by hand: with ``allow_non_fake_inputs`` an operation touches it only if an argument is fake.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # torch's: a third of the time of an operation that is not known
        self._depth = 0
        self._makes_up = False
        self._refuses_edits = False
        self._known = KnownResults(self)

    @property
    def refuses_edits(self) -> bool:
        """Whether a fake written into a tensor with data is an error now."""
        return self._refuses_edits

    @contextmanager
    def refusing_edits(self, refuses: bool = True) -> Iterator[None]:
        """In the block, writing a fake into a tensor with data raises :class:`LostEditError`, or not, for a step."""
        before, self._refuses_edits = self._refuses_edits, refuses
        try:
            yield
        finally:
            self._refuses_edits = before

    @contextmanager
    def refusing_text(self) -> Iterator[None]:
        """In the block, formatting a fake or making it an array raises :class:`NeedsDataError` if edits are refused."""

        def refusing(name: str) -> Callable[..., Any]:
            original = getattr(Tensor, name)

            def method(tensor: Tensor, *args: Any, **options: Any) -> Any:
                if self.refuses_edits:
                    raise NeedsDataError(name.strip("_"), user_line(), in_step=False)
                return original(tensor, *args, **options)

            return method

        names = [name for name in ("__format__", "numpy") if name not in vars(FakeTensor)]
        for name in names:
            setattr(FakeTensor, name, refusing(name))
        try:
            yield
        finally:
            for name in names:
                delattr(FakeTensor, name)

    @contextmanager
    def making_up(self, makes_up: bool = True) -> Iterator[None]:
        """In the block, operations that need missing data get made-up data instead of an error, or an error again."""
        before, self._makes_up = self._makes_up, makes_up
        try:
            yield
        finally:
            self._makes_up = before

    def known(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Result of ``func`` without torch's dispatch to a mode; ``NotImplemented`` if it has not run like this yet."""
        return NotImplemented if self._refuses_edits else self._known.result_of(func, args, kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Runs one operation on fakes."""
        kwargs = kwargs or {}
        if self._depth:  # a decomposition of what is being tried further up
            return super().__torch_dispatch__(func, types, args, kwargs)
        if self._refuses_edits and schema_of(func).is_mutable:
            for argument, value in zip(schema_of(func).arguments, args, strict=False):
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                if is_written and isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                    raise LostEditError(str(func), value, user_line())
        # torch takes a fake addmm apart, which costs five times as much as a product of the same shape
        has_bias = func is torch.ops.aten.addmm.default and not kwargs
        operation, operands = (torch.ops.aten.mm.default, args[1:]) if has_bias else (func, args)
        run = partial(super().__torch_dispatch__, operation, types, operands, kwargs)
        self._depth += 1
        try:
            return self._known.result_of(func, args, kwargs, run)
        except NOT_FAKEABLE as error:
            failure = error
        finally:
            self._depth -= 1
        return self._tried_out(func, args, kwargs, failure)

    def _tried_out(self, func: Any, args: Any, kwargs: Any, failure: Exception) -> Any:
        """Runs ``func`` on several contents of the fakes; if the shapes agree they do not depend on them.

        What it raises on all contents alike is raised.
        """
        attempts, errors = [], list[Exception]()
        for fill in (torch.zeros, torch.ones, MadeUpData().content):
            given = tree_map(lambda leaf, fill=fill: _filled(leaf, fill), (args, kwargs))
            try:
                attempts.append(tree_flatten(func(*given[0], **given[1])))
            except Exception as error:
                errors.append(error)
        if not attempts and len(set(map(repr, errors))) == 1:
            raise errors[0]
        if errors:
            raise NeedsDataError(str(func), user_line(), in_step=not self._refuses_edits) from failure
        leaves, containers = attempts[-1]
        alternatives = list(zip(*(attempt for attempt, _ in attempts), strict=False))
        known = len({len(attempt) for attempt, _ in attempts}) == 1 and all(map(_share_a_layout, alternatives))
        if not (known or self._makes_up):
            raise NeedsDataError(str(func), user_line(), in_step=not self._refuses_edits) from failure
        if schema_of(func).is_mutable:
            return args[0]
        if known:
            leaves = [
                leaf if _are_equal(others) else self._faked(leaf)
                for leaf, others in zip(leaves, alternatives, strict=True)
            ]
        else:
            leaves = [self._faked(leaf) for leaf in leaves]
        return tree_unflatten(leaves, containers)

    def _faked(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        with self:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)


class MadeUpData:
    """Substitutes real tensors for fakes: the same one every time, and one memory for its views.

    Their content is arbitrary, of a kind that most operations accept: floats in (0, 1), so that logarithms exist, and
    integers of 0 and 1.

    Args:
        seed: Seed of generators of its own; the global ones are left alone.
        signed: Whether floats are of both signs and any size.
    """

    def __init__(self, seed: int = 0, *, signed: bool = False) -> None:
        self.is_signed = signed
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        # the fake is kept as well, for its memory must not be given to another
        self._memories: dict[tuple[int | None, torch.dtype], tuple[Tensor, Tensor]] = {}

    def content(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of the given shape and dtype on ``device``."""
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        if dtype.is_floating_point or dtype.is_complex:
            draw = torch.randn if self.is_signed else torch.rand
            return draw(tuple(shape), generator=generator, device=device).to(dtype)
        return torch.randint(0, 2, tuple(shape), generator=generator, device=device).to(dtype)

    def real(self, leaf: Any) -> Any:
        """``leaf``, or the real tensor in place of a fake one."""
        if not isinstance(leaf, FakeTensor):
            return leaf
        key = (storage_of(leaf), leaf.dtype)
        if key not in self._memories:
            count = leaf.untyped_storage().nbytes() // leaf.dtype.itemsize
            self._memories[key] = (leaf, self.content((count,), dtype=leaf.dtype, device=leaf.device))
        return self._memories[key][1].as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())


class AsFake(OperationsMode):  # type: ignore[no-untyped-call]
    """A context in which operations on real tensors return fakes; autograd, which is above, connects the two."""

    def __init__(self, mode: FakeValueMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operation with its first argument faked."""
        first = args[0] if isinstance(args[0], FakeTensor) else self._mode.from_tensor(args[0].detach())
        return func(first, *args[1:], **kwargs)


def _filled(leaf: Any, fill: Callable[..., Tensor]) -> Any:
    if not isinstance(leaf, FakeTensor):
        return leaf
    return fill(tuple(leaf.shape), dtype=leaf.dtype, device=leaf.fake_device)


def _share_a_layout(leaves: Sequence[Any]) -> bool:
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        return False  # a number is read for its value
    return len({(tuple(leaf.shape), leaf.dtype) for leaf in leaves}) == 1


def _are_equal(leaves: Sequence[Tensor]) -> bool:
    """Whether an output is the same whatever the fakes hold, as the batch sizes of a packed sequence are."""
    return not leaves[0].is_floating_point() and all(torch.equal(leaf, leaves[0]) for leaf in leaves[1:])


@contextmanager
def attempts_untold() -> Iterator[None]:
    """In the block, torch does not report failed attempts on fakes; their outcome is reported here."""
    before, LOG_OF_FAKES.disabled = LOG_OF_FAKES.disabled, True
    try:
        yield
    finally:
        LOG_OF_FAKES.disabled = before
