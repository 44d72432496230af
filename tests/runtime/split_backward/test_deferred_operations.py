"""Every operation whose weight gradient can be deferred, against plain autograd in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from deferred_parity import assert_parity
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_pp.runtime.split_backward.deferral import weight_gradients_deferrable


@dataclass(frozen=True)
class Case:
    """An operation of an input with a module's ``weight``, ``bias`` and ``other``."""

    name: str
    input: tuple[int, ...]
    weight: tuple[int, ...]
    run: Callable[[nn.Module, Tensor], Tensor]
    bias: tuple[int, ...] = (1,)
    num_queued: int = 1


class Holder(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.weight = Parameter(torch.randn(case.weight, dtype=torch.float64))
        self.bias = Parameter(torch.randn(case.bias, dtype=torch.float64))


LINEAR = [
    Case("linear", (5, 4), (3, 4), lambda m, x: F.linear(x, m.weight)),
    Case("linear bias", (5, 4), (3, 4), lambda m, x: F.linear(x, m.weight, m.bias), (3,)),
    Case("linear keywords", (5, 4), (3, 4), lambda m, x: F.linear(input=x, weight=m.weight, bias=m.bias), (3,)),
    Case("linear 3D", (2, 5, 4), (3, 4), lambda m, x: F.linear(x, m.weight)),
    Case("linear 3D bias", (2, 5, 4), (3, 4), lambda m, x: F.linear(x, m.weight, m.bias), (3,)),
    Case("linear 4D bias", (2, 3, 5, 4), (3, 4), lambda m, x: F.linear(x, m.weight, m.bias), (3,)),
    Case("linear strided input", (5, 2, 4), (3, 4), lambda m, x: F.linear(x.transpose(0, 1), m.weight, m.bias), (3,)),
    Case("linear strided input, no bias", (4, 2, 5), (3, 4), lambda m, x: F.linear(x.transpose(0, 2), m.weight)),
    Case("linear broadcast bias", (5, 4), (3, 4), lambda m, x: F.linear(x, m.weight, m.bias), (1,)),
    Case("linear no rows", (0, 4), (3, 4), lambda m, x: F.linear(x, m.weight, m.bias), (3,)),
    Case("linear no rows 3D", (2, 0, 4), (3, 4), lambda m, x: F.linear(x, m.weight, m.bias), (3,)),
    Case("linear one row in one column", (1, 1), (1, 1), lambda m, x: F.linear(x, m.weight, m.bias)),
    Case("linear vector", (4,), (3, 4), lambda m, x: F.linear(x, m.weight, m.bias), (3,), num_queued=0),
    Case("linear vector weight", (5, 4), (4,), lambda m, x: F.linear(x, m.weight), num_queued=0),
    Case("linear w.t()", (2, 5, 4), (4, 3), lambda m, x: F.linear(x, m.weight.t(), m.bias), (3,)),
    Case("linear rows of a weight", (5, 4), (9, 4), lambda m, x: F.linear(x, m.weight[3:6], m.bias), (3,)),
    Case(
        "linear chunks",
        (5, 4),
        (9, 4),
        lambda m, x: torch.cat([F.linear(x, w).tanh() for w in m.weight.chunk(3)]),
        num_queued=3,
    ),
    Case("linear columns of a weight", (5, 4), (3, 8), lambda m, x: F.linear(x, m.weight[:, 2:6])),
    Case("linear one of several", (5, 4), (2, 3, 4), lambda m, x: F.linear(x, m.weight[1])),
    Case("linear reshaped weight", (5, 4), (12,), lambda m, x: F.linear(x, m.weight.view(3, 4))),
    Case("linear expanded weight", (5, 4), (1, 4), lambda m, x: F.linear(x, m.weight.expand(3, 4)), num_queued=0),
    Case("linear computed weight", (5, 4), (3, 4), lambda m, x: F.linear(x, m.weight.tanh()), num_queued=0),
    Case("linear twice", (5, 4), (4, 4), lambda m, x: F.linear(F.linear(x, m.weight).tanh(), m.weight), num_queued=2),
    Case(
        "linear tied",
        (5, 4),
        (6, 4),
        lambda m, x: F.linear(x, m.weight) @ F.embedding(torch.tensor([0, 1, 1, 5, 2, 3]), m.weight),
    ),
]
MATMUL = [
    Case("matmul", (5, 4), (4, 3), lambda m, x: torch.matmul(x, m.weight)),
    Case("matmul 3D", (2, 5, 4), (4, 3), lambda m, x: torch.matmul(x, m.weight)),
    Case("matmul 4D", (2, 2, 5, 4), (4, 3), lambda m, x: torch.matmul(x, m.weight)),
    Case("matmul strided input", (4, 5, 2), (4, 3), lambda m, x: torch.matmul(x.transpose(0, 2), m.weight)),
    Case("matmul keywords", (5, 4), (4, 3), lambda m, x: torch.matmul(input=x, other=m.weight), num_queued=0),
    Case("matmul vector", (4,), (4, 3), lambda m, x: torch.matmul(x, m.weight), num_queued=0),
    Case("matmul by a vector", (5, 4), (4,), lambda m, x: torch.matmul(x, m.weight), num_queued=0),
    Case("matmul from the left", (4, 5), (3, 4), lambda m, x: torch.matmul(m.weight, x), num_queued=0),
    Case("matmul batch", (2, 5, 4), (2, 4, 3), lambda m, x: torch.matmul(x, m.weight)),
    Case("matmul broadcast batch", (1, 5, 4), (2, 4, 3), lambda m, x: torch.matmul(x, m.weight), num_queued=0),
    Case("Tensor.matmul", (5, 4), (4, 3), lambda m, x: x.matmul(m.weight)),
    Case("@", (2, 5, 4), (4, 3), lambda m, x: x @ m.weight),
    Case("@ w.T", (2, 5, 4), (3, 4), lambda m, x: x @ m.weight.T),
    Case("@ of activations", (2, 5, 4), (4, 3), lambda m, x: (x @ m.weight).mT @ x),
    Case("mm", (5, 4), (4, 3), lambda m, x: torch.mm(x, m.weight)),
    Case("mm keywords", (5, 4), (4, 3), lambda m, x: torch.mm(x, mat2=m.weight), num_queued=0),
    Case("Tensor.mm", (5, 4), (4, 3), lambda m, x: x.mm(m.weight)),
    Case("mm no rows", (0, 4), (4, 3), lambda m, x: torch.mm(x, m.weight)),
    Case("bmm", (2, 5, 4), (2, 4, 3), lambda m, x: torch.bmm(x, m.weight)),
    Case("Tensor.bmm", (2, 5, 4), (2, 4, 3), lambda m, x: x.bmm(m.weight)),
    Case("bmm transposed experts", (2, 5, 4), (2, 3, 4), lambda m, x: torch.bmm(x, m.weight.transpose(1, 2))),
    Case("bmm no rows", (2, 0, 4), (2, 4, 3), lambda m, x: torch.bmm(x, m.weight)),
    Case("addmm", (5, 4), (4, 3), lambda m, x: torch.addmm(m.bias, x, m.weight), (3,)),
    Case("addmm w.t()", (5, 4), (3, 4), lambda m, x: torch.addmm(m.bias, x, m.weight.t()), (3,)),
    Case("addmm full bias", (5, 4), (4, 3), lambda m, x: torch.addmm(m.bias, x, m.weight), (5, 3)),
    Case("addmm column bias", (5, 4), (4, 3), lambda m, x: torch.addmm(m.bias, x, m.weight), (5, 1)),
    Case("addmm residual", (5, 4), (4, 4), lambda m, x: torch.addmm(x, x.tanh(), m.weight)),
    Case(
        "addmm scaled",
        (5, 4),
        (4, 3),
        lambda m, x: torch.addmm(m.bias, x, m.weight, beta=0.5, alpha=2),
        (3,),
        num_queued=0,
    ),
    Case("Tensor.addmm", (5, 4), (4, 3), lambda m, x: m.bias.addmm(x, m.weight), (3,)),
]
CONVOLUTION = [
    Case("conv1d", (2, 4, 9), (6, 4, 3), lambda m, x: F.conv1d(x, m.weight)),
    Case("conv1d bias", (2, 4, 9), (6, 4, 3), lambda m, x: F.conv1d(x, m.weight, m.bias), (6,)),
    Case("torch.conv1d", (2, 4, 9), (6, 4, 3), lambda m, x: torch.conv1d(x, m.weight, m.bias), (6,)),
    Case(
        "conv1d stride, padding, dilation",
        (2, 4, 9),
        (6, 4, 3),
        lambda m, x: F.conv1d(x, m.weight, m.bias, 2, 2, 2),
        (6,),
    ),
    Case("conv1d groups", (2, 4, 9), (6, 2, 3), lambda m, x: F.conv1d(x, m.weight, m.bias, groups=2), (6,)),
    Case("conv1d depthwise", (2, 4, 9), (4, 1, 3), lambda m, x: F.conv1d(x, m.weight, padding=1, groups=4)),
    Case("conv1d same", (2, 4, 9), (6, 4, 3), lambda m, x: F.conv1d(x, m.weight, padding="same")),
    Case("conv1d same, even kernel", (2, 4, 9), (6, 4, 4), lambda m, x: F.conv1d(x, m.weight, padding="same")),
    Case("conv1d valid", (2, 4, 9), (6, 4, 3), lambda m, x: F.conv1d(x, m.weight, padding="valid")),
    Case("conv1d unbatched", (4, 9), (6, 4, 3), lambda m, x: F.conv1d(x, m.weight, m.bias), (6,)),
    Case("conv1d of a squeezed weight", (2, 4, 9), (6, 4, 3, 1), lambda m, x: F.conv1d(x, m.weight[..., 0])),
    Case("conv2d", (2, 4, 7, 6), (6, 4, 3, 2), lambda m, x: F.conv2d(x, m.weight, m.bias), (6,)),
    Case("torch.conv2d", (2, 4, 7, 6), (6, 4, 3, 2), lambda m, x: torch.conv2d(x, m.weight)),
    Case(
        "conv2d pairs",
        (2, 4, 7, 6),
        (6, 4, 3, 2),
        lambda m, x: F.conv2d(x, m.weight, m.bias, (2, 1), (1, 2), (1, 2)),
        (6,),
    ),
    Case(
        "conv2d same, two even kernels",
        (2, 4, 7, 6),
        (6, 4, 2, 4),
        lambda m, x: F.conv2d(x, m.weight, padding="same", dilation=(1, 1)),
    ),
    Case("conv2d patches", (2, 3, 8, 8), (6, 3, 4, 4), lambda m, x: F.conv2d(x, m.weight, m.bias, stride=4), (6,)),
    Case("conv2d unbatched", (4, 7, 6), (6, 4, 3, 2), lambda m, x: F.conv2d(x, m.weight, m.bias), (6,)),
    Case(
        "conv2d channels last",
        (2, 4, 7, 6),
        (6, 4, 3, 3),
        lambda m, x: F.conv2d(x.contiguous(memory_format=torch.channels_last), m.weight),
    ),
    Case("conv3d", (1, 2, 5, 4, 4), (3, 2, 2, 2, 2), lambda m, x: F.conv3d(x, m.weight, m.bias, padding=1), (3,)),
    Case("torch.conv3d groups", (1, 2, 5, 4, 4), (4, 1, 2, 2, 2), lambda m, x: torch.conv3d(x, m.weight, groups=2)),
    Case("conv_transpose1d", (2, 4, 9), (4, 3, 3), lambda m, x: F.conv_transpose1d(x, m.weight, m.bias, 2, 1, 1), (3,)),
    Case(
        "conv_transpose2d groups",
        (2, 4, 5, 5),
        (4, 3, 3, 3),
        lambda m, x: F.conv_transpose2d(x, m.weight, m.bias, 2, 1, (1, 0), 2, 2),
        (6,),
    ),
    Case("conv_transpose3d", (1, 2, 3, 3, 3), (2, 3, 2, 2, 2), lambda m, x: F.conv_transpose3d(x, m.weight, stride=2)),
    Case("torch.conv_transpose2d unbatched", (4, 5, 5), (4, 3, 3, 3), lambda m, x: torch.conv_transpose2d(x, m.weight)),
]
CASES = LINEAR + MATMUL + CONVOLUTION


def named(*names: str) -> pytest.MarkDecorator:
    """Parametrizes with the cases of these names."""
    cases = {case.name: case for case in CASES}
    return pytest.mark.parametrize("case", [cases[name] for name in names], ids=names)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_those_of_plain_autograd(case: Case) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(case.input, dtype=torch.float64) for _ in range(3)]
    assert_parity(Holder(case), inputs, case.run, case.num_queued)


@pytest.mark.by_day(25)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_merged_and_split_microbatches_mix(case: Case) -> None:
    torch.manual_seed(1)
    inputs = [torch.randn(case.input, dtype=torch.float64) for _ in range(3)]
    assert_parity(Holder(case), inputs, case.run, case.num_queued, merged=[1])


@named("linear 3D bias", "matmul 3D", "bmm", "conv1d bias")
def test_input_that_needs_no_gradient(case: Case) -> None:
    torch.manual_seed(2)
    inputs = [torch.randn(case.input, dtype=torch.float64) for _ in range(2)]
    assert_parity(Holder(case), inputs, lambda m, x: case.run(m, x.detach()), case.num_queued)


@named("linear 3D bias", "matmul 3D", "bmm", "addmm", "conv1d bias")
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parameters_get_no_gradient(case: Case, frozen: str) -> None:
    torch.manual_seed(3)
    module = Holder(case)
    getattr(module, frozen).requires_grad_(False)
    inputs = [torch.randn(case.input, dtype=torch.float64) for _ in range(2)]
    assert_parity(module, inputs, case.run, num_queued=int(frozen == "bias"))
    assert getattr(module, frozen).grad is None


@pytest.mark.by_day(25)
@pytest.mark.parametrize("case", [c for c in CASES if c.num_queued], ids=lambda case: case.name)
def test_outputs_may_be_edited_in_place(case: Case) -> None:
    torch.manual_seed(4)
    inputs = [torch.randn(case.input, dtype=torch.float64)]
    assert_parity(Holder(case), inputs, lambda m, x: F.relu(case.run(m, x).mul_(2), inplace=True))


@named(
    "linear 3D bias",
    "linear strided input",
    "linear w.t()",
    "matmul 3D",
    "bmm",
    "addmm",
    "conv2d pairs",
    "conv_transpose1d",
)
def test_second_derivatives(case: Case) -> None:
    torch.manual_seed(5)
    module = Holder(case)

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return case.run(module, x)

    input = torch.randn(case.input, dtype=torch.float64, requires_grad=True)
    with weight_gradients_deferrable():
        assert torch.autograd.gradgradcheck(run, (input, module.weight, module.bias), atol=1e-6)
