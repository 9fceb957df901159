"""The rules' exact steps against PyTorch's own optimizers, to rounding."""

import numpy as np
import pytest

pytest.importorskip("torch.nn")
import torch

from horovod_onebit import Recipe
from horovod_onebit.kernels import cpu
from horovod_onebit.rules import Context, Tensor
from horovod_onebit.rules.adam import Adam
from horovod_onebit.rules.lamb import LAMB
from horovod_onebit.rules.sgd import SGD
from horovod_onebit.torch.lamb import LAMB as TorchLAMB
from horovod_onebit.torch.rules import AnyAdapter, adapter_for

f32 = np.float32
CASES = [
    (Adam(lr=0.01, weight_decay=0.1, decoupled=False), lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1)),
    (Adam(lr=0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    (
        Adam(lr=0.01, beta1=0.8, beta2=0.9, eps=1e-3, grad_scale=-1.0),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.9), eps=1e-3, maximize=True),
    ),
    (LAMB(lr=0.01, weight_decay=0.1), lambda p: TorchLAMB(p, lr=0.01, weight_decay=0.1)),
    (
        LAMB(lr=0.1, bias_correction=False, max_coeff=0.1),
        lambda p: TorchLAMB(p, lr=0.1, bias_correction=False, max_coeff=0.1),
    ),
    (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    (
        SGD(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    ),
    (
        SGD(lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ),
    (SGD(lr=0.1, grad_scale=-1.0), lambda p: torch.optim.SGD(p, lr=0.1, maximize=True)),
    (SGD(lr=0.1, momentum=0.9, velocity=True), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    (
        SGD(lr=0.1, momentum=0.9, nesterov=True, velocity=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ),
]


@pytest.mark.parametrize(("rule", "build"), CASES)
def test_exact_steps(rule, build):
    rng = np.random.default_rng(0)
    start = rng.standard_normal(50).astype(f32)
    p = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = build([p])
    tensor = Tensor("w", start.copy(), np.zeros(50, f32), np.zeros(50, f32), np.zeros(50, f32))
    rule.init(tensor)
    context = Context(cpu, Recipe(), 1)
    for _ in range(30):
        g = rng.standard_normal(50).astype(f32)
        p.grad = torch.from_numpy(g.copy())
        optimizer.step()
        rule.exact_step(tensor, g, context)
    np.testing.assert_allclose(tensor.weight, p.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "divides"),
    [(torch.optim.AdamW, True), (torch.optim.Adam, True), (TorchLAMB, True), (torch.optim.SGD, False)],
)
def test_which_optimizers_divide_by_a_second_moment(make, divides):
    """Of these no errors of gradients in few bits are kept, in a warm-up and in all steps."""
    optimizer = make([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    assert adapter_for(optimizer).divides is AnyAdapter(optimizer).divides is divides


def test_of_other_optimizers_nothing_is_known():
    assert not AnyAdapter(torch.optim.Adafactor([torch.nn.Parameter(torch.zeros(3))])).divides


def test_all_hyperparameters_of_pytorchs_own_optimizers_are_compared():
    """Of another's, those that all call the same."""
    kinds = {kind for kind in vars(torch.optim).values() if isinstance(kind, type)} - {torch.optim.Optimizer}
    kinds = {kind for kind in kinds if issubclass(kind, torch.optim.Optimizer)}
    assert {torch.optim.Muon, torch.optim.Adafactor, torch.optim.RMSprop} < kinds
    for kind in kinds:
        optimizer = kind([torch.nn.Parameter(torch.zeros(4, 4))])
        assert AnyAdapter(optimizer).hyperparameters(optimizer.param_groups[0]).keys() == optimizer.defaults.keys()

    class Own(torch.optim.RMSprop):
        pass

    optimizer = Own([torch.nn.Parameter(torch.zeros(4, 4))])
    found = AnyAdapter(optimizer).hyperparameters(optimizer.param_groups[0])
    assert found.keys() == {"lr", "eps", "weight_decay", "momentum"}


def test_lamb_does_not_depend_on_the_number_of_threads():
    """Workers of one processor may have different ones; sums are then made of other parts."""
    found, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            generator = torch.Generator().manual_seed(0)
            p = torch.nn.Parameter(torch.randn(700, 700, generator=generator))
            optimizer = TorchLAMB([p], lr=0.01, weight_decay=0.1)
            for _ in range(3):
                p.grad = torch.randn(700, 700, generator=generator)
                optimizer.step()
            found.append(p.detach())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
