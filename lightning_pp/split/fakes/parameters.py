"""Fake parameters, in place of parameters that a rank does not own.

A fake parameter is a :class:`FakeTensor` on the device where the parameter would live. It has a shape and a dtype and
no data; an operation on it gives another fake. It sits in the module's ``__dict__``, where attribute access finds it,
and not among the module's parameters, so ``named_parameters()`` and ``state_dict()`` know only what is owned.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from lightning_pp.errors import ConfigurationError
from lightning_pp.split._torch_private import (
    PARAMETERS,
    FakeTensor,
    is_made_of_others,
    parameters_of,
    without_dispatch_modes,
)
from lightning_pp.split.fakes.fake_mode import FakeValueMode
from lightning_pp.split.record.step_record import TensorSpec


def is_fake(value: object) -> bool:
    """Whether ``value`` is a tensor without data."""
    return isinstance(value, FakeTensor)


def has_data(tensor: Tensor) -> bool:
    """Whether ``tensor`` can be read: neither fake nor on the meta device."""
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


class FakeParameters:
    """Makes fakes for one model, and swaps its parameters with them.

    The mode is never entered: with ``allow_non_fake_inputs`` an operation touches fakes only if an argument is fake,
    and everything computed from the batch alone stays real.

    Args:
        module: The whole model.
        device: Where the parameters of this rank live while it computes.

    Raises:
        ConfigurationError: A module with parameters is TorchScript, which takes no fakes.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        scripted = {name: child for name, child in module.named_modules() if isinstance(child, torch.jit.ScriptModule)}
        for name, child in scripted.items():
            if next(child.parameters(), None) is not None:
                raise ConfigurationError(
                    f"{name!r} is a TorchScript module with parameters. They cannot be removed from it on the stages "
                    "that do not own it. Use the module that it was made from. compile=True compiles units with "
                    "torch.compile."
                )
        self.module = module
        self.device = device
        self.mode = FakeValueMode()
        with self.mode:  # from here on torch makes fakes of devices that this machine has not
            pass
        # every name that a parameter has, in registration order, tied names included
        self.names: dict[str, nn.Parameter] = dict(module.named_parameters(remove_duplicate=False))
        self.canonical_names: dict[str, str] = {}
        first: dict[nn.Parameter, str] = {}
        self._originals: Any = WeakIdKeyDictionary()  # of whoever keeps them: name by parameter
        for name, parameter in self.names.items():
            self.canonical_names[name] = first.setdefault(parameter, name)
            self._originals[parameter] = self.canonical_names[name]
        self._order = {
            prefix: list(parameters_of(child)) for prefix, child in module.named_modules() if prefix not in scripted
        }
        self.made: dict[str, nn.Parameter] = {}  # fakes, by canonical name
        self.released: set[str] = set()
        # dtype that parameters have while their unit runs, but for those in `uncast`; None: their own
        self.compute_dtype: torch.dtype | None = None
        self.uncast: frozenset[str] = frozenset()
        self._computing_fakes: dict[str, nn.Parameter] = {}

    def fake(self, spec: TensorSpec) -> Tensor:
        """A fake of the given shape and dtype on this rank's device."""
        with self.mode:
            return torch.empty(spec.shape, dtype=spec.dtype, device=self.device)

    def _empty(self, like: Tensor, dtype: torch.dtype | None) -> FakeTensor:
        meta = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device="meta")
        return FakeTensor(self.mode, meta, self.device)

    def name_of_original(self, parameter: Tensor) -> str | None:
        """The canonical name of a parameter that the module had when this was made; None for any other tensor."""
        name: str | None = self._originals.get(parameter)
        return name

    def unit_of_parameters(self, units: Iterable[str]) -> dict[str, str]:
        """For each canonical name, the first of ``units`` that has the parameter by any of its names."""
        names = list(units)
        place_of_unit = {unit: place for place, unit in enumerate(names)}
        found: dict[str, int] = {}
        for name, canonical in self.canonical_names.items():
            parts = name.split(".")
            prefixes = (".".join(parts[:length]) for length in range(len(parts)))
            places = [place_of_unit[prefix] for prefix in prefixes if prefix in place_of_unit]
            if places:
                found[canonical] = min(*places, found.get(canonical, len(names)))
        return {canonical: names[place] for canonical, place in found.items()}

    def parameter(self, name: str) -> nn.Parameter:
        """The fake of the parameter ``name``; tied names share one."""
        canonical = self.canonical_names[name]
        if canonical not in self.made:
            real = self.names[canonical]
            self.made[canonical] = nn.Parameter(self._empty(real, real.dtype), requires_grad=real.requires_grad)
        return self.made[canonical]

    def fakes(self) -> list[nn.Parameter]:
        """All fake_parameters made so far."""
        return [*self.made.values(), *self._computing_fakes.values()]

    def set_compute_dtype(self, dtype: torch.dtype | None, uncast: Collection[str] = ()) -> None:
        """Has parameters be of ``dtype`` within calls of their units, as mixed precision keeps gathered parameters.

        Args:
            dtype: Of real floating-point parameters with a dimension; None: their own.
            uncast: Canonical names of parameters that keep theirs.
        """
        self.compute_dtype, self.uncast = dtype, frozenset(uncast)
        self._computing_fakes.clear()

    def is_cast(self, name: str) -> bool:
        """Whether the parameter of that canonical name has the dtype of computation while its unit runs."""
        parameter = self.names[name]
        return (
            self.compute_dtype is not None
            and name not in self.uncast
            and parameter.dim() > 0
            and parameter.is_floating_point()
        )

    @contextmanager
    def computing(self, unit: str, tag: Callable[[nn.Parameter, str], None] = lambda *_: None) -> Iterator[None]:
        """Within :meth:`all_fake`, for a call of ``unit``: its parameters have the dtype of computation.

        ``tag(fake, canonical name)`` is called for each.
        """
        if self.compute_dtype is None:
            yield
            return
        module = self.module.get_submodule(unit)
        fakes: dict[str, nn.Parameter] = {}
        for name, parameter in module.named_parameters(unit, remove_duplicate=False):
            canonical = self.canonical_names[name]
            if self.is_cast(canonical):
                fakes[name] = self._computing_fake(canonical, parameter)
                tag(fakes[name], canonical)
        with self._in_place(module, fakes):
            yield

    @contextmanager
    def replaced(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Within :meth:`all_fake`, the parameters of some canonical names are others: ``parameters``."""
        others = {
            name: parameters[canonical] for name, canonical in self.canonical_names.items() if canonical in parameters
        }
        with self._in_place(self.module, others):
            yield

    @contextmanager
    def _in_place(self, module: nn.Module, others: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """In the block, ``module`` has ``others``, by name, instead of its own parameters, its aliases included."""
        saved: list[tuple[nn.Module, str, nn.Parameter | None]] = []
        in_place_of: dict[nn.Parameter, nn.Parameter] = {}
        aliases: list[tuple[Any, Any, Any]] = []
        try:
            for name, other in others.items():
                parent, attribute = self._locate(name)
                own = parameters_of(parent).get(attribute)
                saved.append((parent, attribute, own))
                if own is not None:
                    in_place_of[own] = other
                parameters_of(parent)[attribute] = other
            aliases = _replace_aliases(module, in_place_of)
            yield
        finally:
            for container, key, held in aliases:
                container[key] = held
            # a module of several names was saved several times, first as it was
            for parent, attribute, own in reversed(saved):
                parameters_of(parent)[attribute] = own

    def _computing_fake(self, canonical: str, like: nn.Parameter) -> nn.Parameter:
        if canonical not in self._computing_fakes:
            with without_dispatch_modes():  # of a dry run, which follow every operation
                self._computing_fakes[canonical] = nn.Parameter(self._empty(like, self.compute_dtype))
        fake = self._computing_fakes[canonical]
        fake.requires_grad_(like.requires_grad)
        return fake

    def release(self, owned: Collection[str]) -> None:
        """Drops every parameter whose canonical name is not in ``owned`` and leaves its fake parameter behind."""
        fakes: dict[nn.Parameter, nn.Parameter] = {}
        for name in self.names:
            if self.canonical_names[name] in owned:
                continue
            parent, attribute = self._locate(name)
            fake = fakes[self.names[name]] = self.parameter(name)
            if parameters_of(parent).pop(attribute, None) is not None:
                parent.__dict__[attribute] = fake
            self.released.add(name)
        # a fake is as good as the original for its shape and dtype, and does not keep the memory of what is sharded
        self.names = {name: self.parameter(name) for name in self.names}
        _replace_aliases(self.module, fakes)

    def restore_names(self) -> None:
        """Undoes :meth:`release` as far as names go: fake_parameters become (fake) parameters again."""
        for name in self.released:
            parent, attribute = self._locate(name)
            parent.__dict__.pop(attribute, None)
            parameters_of(parent)[attribute] = self.parameter(name)
        self._sort()

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Undoes :meth:`release`: the module has all of its parameters again.

        Args:
            values: Whole tensors by canonical name, which become the data of new parameters.
        """
        self.restore_names()
        restored: dict[str, nn.Parameter] = {}
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        for name in self.names:
            canonical = self.canonical_names[name]
            parent, attribute = self._locate(name)
            current = parameters_of(parent).get(attribute)
            if current is None:
                continue
            if canonical not in restored:
                restored[canonical] = nn.Parameter(values[canonical], requires_grad=current.requires_grad)
            replaced[current] = parameters_of(parent)[attribute] = restored[canonical]
        _replace_aliases(self.module, replaced)
        self.released.clear()

    def tie_names(self, is_replaced: Callable[[nn.Parameter], bool]) -> None:
        """Makes all names of a parameter mean one object again, after it was replaced under some of them.

        ``is_replaced`` tells the new object from the old one.
        """
        replacement: dict[str, nn.Parameter] = {}
        present = [(name, *self._locate(name)) for name in self.names if name not in self.released]
        for name, parent, attribute in present:
            parameter = parameters_of(parent)[attribute]
            if parameter is not None and is_replaced(parameter):
                replacement[self.canonical_names[name]] = parameter
        for name, parent, attribute in present:
            parameters_of(parent)[attribute] = replacement.get(
                self.canonical_names[name], parameters_of(parent)[attribute]
            )

    @contextmanager
    def all_parameters(self) -> Iterator[None]:
        """In the block, ``named_parameters()`` yields every parameter in one-device order, un-owned ones as fakes."""
        self.restore_names()
        try:
            yield
        finally:
            for name in self.released:
                parent, attribute = self._locate(name)
                fake = parameters_of(parent).pop(attribute, None)
                if fake is not None:
                    parent.__dict__[attribute] = fake

    @property
    def stand_for_shards(self) -> bool:
        """Whether the module has sharded parameters. An operation on one may wait for other ranks."""
        return any(map(is_made_of_others, self.module.parameters()))

    def own(self) -> list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter | None]]:
        """Where each parameter is that the module has now, and the parameter."""
        places = ((parameters_of(parent), name) for parent, name in map(self._locate, self.names))
        return [(place, name, place[name]) for place, name in places if name in place]

    @contextmanager
    def all_fake(self, tag: Callable[[nn.Parameter, str], None] = lambda *_: None) -> Iterator[None]:
        """In the block, every parameter is fake. ``tag(fake, canonical name)`` is called for each.

        A parameter that FSDP keeps sharded is replaced too; the original object returns afterwards.
        """
        with self.all_parameters():
            fakes: dict[str, nn.Parameter] = {}
            for name in self.names:
                parent, attribute = self._locate(name)
                fake = fakes[name] = self.parameter(name)
                current = parameters_of(parent).get(attribute)
                if current is not None:
                    fake.requires_grad_(current.requires_grad)
                tag(fake, self.canonical_names[name])
            with self._in_place(self.module, fakes):
                yield

    @contextmanager
    def without_registering_fakes(self) -> Iterator[None]:
        """In the block, code may put fakes back where it found them; they do not become parameters of their modules.

        ``torch.func.functional_call`` does so, and ``Module.__setattr__`` makes a parameter of each.
        """
        registered: list[tuple[nn.Module, str]] = []

        def note(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if is_fake(parameter):
                registered.append((module, name))

        with register_module_parameter_registration_hook(note):
            try:
                yield
            finally:
                for module, name in registered:
                    if is_fake(parameters_of(module).get(name)):
                        module.__dict__[name] = parameters_of(module).pop(name)

    def _locate(self, name: str) -> tuple[nn.Module, str]:
        prefix, _, attribute = name.rpartition(".")
        return self.module.get_submodule(prefix), attribute

    def _sort(self) -> None:
        for prefix, order in self._order.items():
            parameters = parameters_of(self.module.get_submodule(prefix))
            if list(parameters) != order:
                current = dict(parameters)
                parameters.clear()
                for attribute in [*order, *(key for key in current if key not in order)]:
                    if attribute in current:
                        parameters[attribute] = current[attribute]


def _replace_aliases(
    module: nn.Module, replacements: Mapping[nn.Parameter, nn.Parameter]
) -> list[tuple[Any, Any, Any]]:
    """Replaces parameters that modules hold besides their own: in attributes, and in lists and dicts among those.

    Recurrent layers of torch hold theirs in such a list, and weak references to them in another.

    Returns:
        Container, key and what was there, for each.
    """
    by_id = {id(old): new for old, new in replacements.items()}  # isinstance of a parameter takes long
    replaced: list[tuple[Any, Any, Any]] = []
    new: list[Any] = []

    def visit(container: Any, items: Any) -> None:
        for key, value in items:
            is_reference = isinstance(value, weakref.ref)
            parameter = value() if is_reference else value
            if (replacement := by_id.get(id(parameter))) is not None:
                replaced.append((container, key, value))
                new.append(weakref.ref(replacement) if is_reference else replacement)

    for child in module.modules():
        attributes = child.__dict__
        visit(attributes, attributes.items())
        for key, value in attributes.items():
            if key == PARAMETERS:
                continue
            if type(value) is list:
                visit(value, enumerate(value))
            elif type(value) is dict:
                visit(value, value.items())
    for (container, key, _), value in zip(replaced, new, strict=True):
        container[key] = value
    return replaced
