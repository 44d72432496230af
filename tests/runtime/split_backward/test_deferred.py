"""Scopes and queue of deferred weight gradients, and what is held between I and W."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from deferred_parity import Block, assert_parity, assert_same_gradients, collected, plain_backward, seed_gradient
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pp.runtime.split_backward.deferral import (
    WeightGradientQueue,
    collect_weight_gradients,
    delayed_weight_gradient_modules,
    weight_gradients_deferrable,
)

_BEFORE = {
    (owner, name): getattr(owner, name)
    for owner, names in (
        (F, ["linear", "conv1d", "conv2d", "conv3d", "conv_transpose2d"]),
        (torch, ["matmul", "mm", "bmm", "addmm", "conv1d", "conv2d", "conv3d"]),
        (Tensor, ["matmul", "__matmul__", "mm", "bmm", "addmm"]),
    )
    for name in names
}
_BY_PICKLE = {"__slotnames__"}  # pickle adds it to any class that it meets
_TENSOR_NAMES = set(vars(Tensor)) - _BY_PICKLE


def assert_functions_are_torchs_own() -> None:
    assert [key for key, function in _BEFORE.items() if getattr(*key) is not function] == []
    assert set(vars(Tensor)) - _BY_PICKLE == _TENSOR_NAMES


@pytest.fixture(autouse=True)
def functions_are_restored() -> Iterator[None]:
    yield
    assert_functions_are_torchs_own()


# Scopes


def test_functions_are_restored_after_exceptions() -> None:
    def run() -> None:
        with weight_gradients_deferrable(), weight_gradients_deferrable():
            assert [key for key, function in _BEFORE.items() if getattr(*key) is function] == []
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert_functions_are_torchs_own()


def test_nested_scopes_restore_with_the_outermost() -> None:
    with weight_gradients_deferrable():
        with weight_gradients_deferrable():
            pass
        assert F.linear is not _BEFORE[F, "linear"]
    assert_functions_are_torchs_own()


def test_overlapping_scopes_of_threads() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with weight_gradients_deferrable():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with weight_gradients_deferrable():
        thread.start()
        assert entered.wait(10)
    assert F.linear is not _BEFORE[F, "linear"]
    leave.set()
    thread.join()
    assert_functions_are_torchs_own()


def test_functions_replaced_by_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = nn.Linear(4, 4), torch.randn(3, 4)

    def doubled(*args: Tensor) -> Tensor:
        return 2 * _BEFORE[F, "linear"](*args)

    expected = 2 * linear(x)
    with monkeypatch.context() as patch:
        patch.setattr(F, "linear", doubled)
        with weight_gradients_deferrable():
            assert F.linear is doubled
            output = linear(x)
            queue = collected(output)
        assert F.linear is doubled
    torch.testing.assert_close(output, expected)
    assert len(queue) == 0
    assert linear.weight.grad is not None
    with weight_gradients_deferrable(), monkeypatch.context() as patch:
        patch.setattr(F, "linear", doubled)
        torch.testing.assert_close(linear(x), expected)


def test_backward_in_threads_of_autograd_is_collected() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).double()
    reference = copy.deepcopy(model)
    x = torch.randn(2, 5, 8, dtype=torch.float64)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    plain_backward(reference, [x], step)
    queue = WeightGradientQueue()
    with weight_gradients_deferrable():
        output = step(model, x.requires_grad_())
        with collect_weight_gradients(queue):
            device_thread = threading.Thread(target=output.backward, args=[seed_gradient(output)])
            device_thread.start()
            device_thread.join()
    assert len(queue) == 12
    queue.run()
    assert_same_gradients(model, reference)


def test_two_threads_cannot_collect_at_once() -> None:
    errors: list[str] = []

    def other() -> None:
        try:
            with collect_weight_gradients(WeightGradientQueue()):
                pass
        except RuntimeError as error:
            errors.append(str(error))

    with collect_weight_gradients(WeightGradientQueue()):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(errors) == 1
    assert "one split backward at a time" in errors[0]


# The queue


def test_nested_collections_fill_their_own_queues() -> None:
    linear = nn.Linear(4, 4)
    outer, inner = WeightGradientQueue(), WeightGradientQueue()
    with weight_gradients_deferrable():
        outputs = [linear(torch.randn(3, 4)) for _ in range(4)]
        with collect_weight_gradients(outer):
            outputs[0].sum().backward()
            with collect_weight_gradients(inner):
                outputs[1].sum().backward()
            outputs[2].sum().backward()
        outputs[3].sum().backward()
    assert (len(outer), len(inner)) == (2, 1)


def test_run_needs_exactly_one_i() -> None:
    linear = nn.Linear(4, 4)
    queue = WeightGradientQueue()
    with pytest.raises(RuntimeError, match="each W runs once, after its I"):
        queue.run()
    with weight_gradients_deferrable():
        output = linear(torch.randn(3, 4))
        with collect_weight_gradients(queue):
            output.sum().backward()
            with pytest.raises(RuntimeError, match="only run after the backward of its I has ended"):
                queue.run()
        assert len(queue) == 1
        queue.run()
        assert len(queue) == 0
        before = linear.weight.grad.clone()
        with pytest.raises(RuntimeError, match="each W runs once, after its I"):
            queue.run()
        torch.testing.assert_close(linear.weight.grad, before, rtol=0, atol=0)
        with collect_weight_gradients(queue):  # it serves the next microbatch
            linear(torch.randn(3, 4)).sum().backward()
    queue.run()
    assert not torch.equal(linear.weight.grad, before)


def test_nothing_to_defer_is_no_error() -> None:
    norm = nn.LayerNorm(4)
    with weight_gradients_deferrable():
        queue = collected(norm(torch.randn(3, 4)))
    assert len(queue) == queue.held_bytes == 0
    queue.run()
    assert norm.weight.grad is not None


def test_failed_backward_leaves_nothing_behind() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x * 1

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            raise ArithmeticError("no gradient")

    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    queue = WeightGradientQueue()

    def run() -> None:
        with weight_gradients_deferrable():
            output = second(Fails.apply(first(torch.randn(3, 4))))
            with collect_weight_gradients(queue):
                output.sum().backward()

    with pytest.raises(ArithmeticError):
        run()
    assert_functions_are_torchs_own()
    assert len(queue) == queue.held_bytes == 0
    assert second.weight.grad is None
    second.zero_grad()
    with pytest.raises(RuntimeError, match="a backward that raises clears it"):
        queue.run()
    assert_parity(nn.Sequential(first, second).double(), [torch.randn(3, 4, dtype=torch.float64)], num_queued=2)


def test_failed_w_keeps_nothing() -> None:
    def fail(*args: object) -> Tensor:
        raise MemoryError

    linear, x = nn.Linear(4, 4), torch.randn(3, 4)
    queue = WeightGradientQueue()
    queue.append(linear.weight, x, x, fail)
    with weight_gradients_deferrable(), collect_weight_gradients(queue):
        linear(x).sum().backward()
    with pytest.raises(MemoryError):
        queue.run()
    assert len(queue) == queue.held_bytes == 0
    with pytest.raises(RuntimeError, match="each W runs once"):
        queue.run()


def test_clear_drops_what_is_owed() -> None:
    linear = nn.Linear(4, 4)
    with weight_gradients_deferrable():
        queue = collected(linear(torch.randn(3, 4)))
    queue.clear()
    assert len(queue) == queue.held_bytes == 0
    with pytest.raises(RuntimeError, match="each W runs once"):
        queue.run()
    assert linear.weight.grad is None


def test_weight_modified_between_forward_and_backward() -> None:
    linear = nn.Linear(4, 4)
    with weight_gradients_deferrable():
        output = linear(torch.randn(3, 4))
        with torch.no_grad():
            linear.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"shape \[4, 4\] was modified in place"):
            collected(output)


class _DelayedLinear(nn.Linear):
    """Keeps its weight gradients back, oldest first, as Transformer Engine does with ``delay_wgrad_compute``."""

    def __init__(self, *args: int, is_delayed: bool = True) -> None:
        super().__init__(*args)
        self.is_delayed = is_delayed
        self.kept: list[tuple[Tensor, Tensor]] = []

    def need_backward_dw(self) -> bool:
        return self.is_delayed

    def forward(self, x: Tensor) -> Tensor:
        output = x @ self.weight.detach().t()
        output.register_hook(lambda gradient: self.kept.append((x.detach(), gradient)))
        return output

    def backward_dw(self) -> None:
        x, gradient = self.kept.pop(0)
        update = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        self.weight.grad = update if self.weight.grad is None else self.weight.grad + update


def test_modules_that_delay_their_own_weight_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), _DelayedLinear(4, 4), nn.Linear(4, 4)).double()
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)).double()
    plain.load_state_dict(model.state_dict(), strict=False)
    inputs = [torch.randn(3, 4, dtype=torch.float64) for _ in range(3)]
    queues = []
    with weight_gradients_deferrable():
        for output in [model(x) for x in inputs]:
            queues.append(collected(output))
            for module in delayed_weight_gradient_modules(model):
                queues[-1].defer_module(module)
                queues[-1].defer_module(module)
    assert [len(queue) for queue in queues] == [3, 3, 3]
    for queue in queues:
        queue.run()
    assert model[1].kept == []
    plain_backward(plain, inputs)
    for ours, theirs in zip(model, plain, strict=True):
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-12, atol=1e-12)


def test_delayed_modules_are_found_from_outside_in() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _DelayedLinear(2, 2)

        def backward_dw(self) -> None:
            self.inner.backward_dw()

    asked_not_to = _DelayedLinear(2, 2, is_delayed=False)
    model = nn.Sequential(nn.Linear(2, 2), Layer(), nn.Sequential(_DelayedLinear(2, 2)), asked_not_to)
    assert delayed_weight_gradient_modules(model) == [model[1], model[2][0]]
    with pytest.raises(TypeError, match=r"Linear has no backward_dw\(\)"):
        WeightGradientQueue().defer_module(model[0])


# Memory


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_held_bytes_are_inputs_and_output_gradients_of_linears(is_checkpointed: bool) -> None:
    model = nn.Sequential(*[Block(width=8) for _ in range(3)])
    x = torch.randn(4, 6, 8, requires_grad=True)

    with weight_gradients_deferrable():
        output = x
        for block in model:
            output = checkpoint(block, output, use_reentrant=False) if is_checkpointed else block(output)
        queue = collected(output)
    # Inputs: query, key and value share one; output, up; down four times as wide. Output gradients: query, key, value,
    # output, up (four times as wide), and down, which is the gradient of the block's output.
    per_block = (1 + 1 + 1 + 4) + (3 + 1 + 4 + 1)
    assert queue.held_bytes == 3 * per_block * x.nbytes
    queue.run()
    assert queue.held_bytes == 0


class _Traced(torch.autograd.Function):
    """Leaves a weak reference to something that lives as long as its node."""

    @staticmethod
    def forward(ctx, x, traces):  # type: ignore[no-untyped-def]
        ctx.trace = x.detach().clone()
        traces.append(weakref.ref(ctx.trace))
        return x * 1

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, None


def test_graph_is_freed_after_i() -> None:
    linear1, linear2 = nn.Linear(4, 4), nn.Linear(4, 4)
    traces: list[weakref.ref[Tensor]] = []
    gc.disable()  # no cycle may keep anything: freed at once, not when the collector comes by
    try:
        with weight_gradients_deferrable():
            x = torch.randn(2, 3, 4, requires_grad=True)
            hidden = _Traced.apply(linear1(_Traced.apply(x, traces)), traces)
            output = linear2(hidden).exp()
            queue = collected(output)
            assert [trace() is None for trace in traces] == [False, False]
            del output, hidden
        assert [trace() is None for trace in traces] == [True, True]
        assert len(queue) == 2
        queue.run()
    finally:
        gc.enable()


def test_run_frees_as_it_goes() -> None:
    linears = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
    with weight_gradients_deferrable():
        queue = collected(linears(torch.randn(3, 4)))
    held = [weakref.ref(entry[1]) for entry in queue._entries]
    alive: list[int] = []

    class Watched(nn.Module):
        def backward_dw(self) -> None:
            alive.append(sum(reference() is not None for reference in held))

    queue.defer_module(Watched())
    queue.run()
    assert alive == [0]
