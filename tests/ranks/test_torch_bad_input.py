"""Wrong arguments of the PyTorch face: an error that names what was given, on every rank."""

import re

import horovod.torch as hvd
import numpy as np
import pytest
import torch

import horovod_onebit.torch as onebit
from horovod_onebit import ConfigurationError, OnebitError
from horovod_onebit.torch import diagnostics
from tests.ranks.torch_common import Net, repeatable_sums_only, train, weights, wrap

NAN = float("nan")


def made(**arguments):
    net = arguments.pop("net", None) or Net()
    plain = arguments.pop("optimizer", None) or torch.optim.AdamW(net.parameters())
    return onebit.DistributedOptimizer(plain, **{"warmup_steps": 2} | arguments)


def named(key=None, value=None):
    net = Net()
    return made(net=net, named_parameters=[(key or n, value or p) for n, p in net.named_parameters()])


WRAPPING = [
    (lambda: made(named_parameters=5), "tuples (name, parameter)"),
    (lambda: named(key=1), "tuples (name, parameter)"),
    (lambda: named(value="weight"), "tuples (name, parameter)"),
    (lambda: made(named_parameters=dict(Net().named_parameters())), "tuples (name, parameter)"),
    (lambda: made(compression="fp16"), "compression='fp16'"),
    (lambda: made(gradient_predivide_factor="2"), "gradient_predivide_factor='2'"),
    (lambda: made(gradient_predivide_factor=NAN), "gradient_predivide_factor=nan"),
    (lambda: made(num_groups=-1), "groups"),
    (lambda: made(groups=[[1]]), "groups"),
    (lambda: made(sparse_as_dense="no"), "sparse_as_dense='no'"),
    (lambda: made(overlap="no"), "overlap='no'"),
    (lambda: made(process_set=0), "process_set=0"),
    (lambda: made(process_set=hvd.ProcessSet([0])), "not registered"),
    (lambda: made(check_replicas_every="5"), "check_replicas_every='5'"),
    (lambda: made(optimizer=torch.optim.SGD([torch.nn.Parameter(torch.ones(9, device="meta"))], lr=1.0)), "meta"),
    (lambda: onebit.DistributedOptimizer(torch.optim.Adam, warmup_steps=2), "optimizer is type"),
    (lambda: onebit.LAMB(Net().parameters(), lr="x"), "lr='x'"),
    (lambda: onebit.LAMB(Net().parameters(), betas=0.9), "betas=0.9"),
    (lambda: onebit.OnebitAdam(Net().parameters(), freeze_step=0), "warmup_steps=0"),
    (lambda: onebit.ZeroOneAdam(Net().parameters(), local_step_scaler=1.5), "local_step_scaler=1.5"),
    (lambda: onebit.broadcast_optimizer_state(Net()), "optimizer is Net"),
    (lambda: onebit.broadcast_optimizer_state(made(), root_rank="0"), "root_rank='0'"),
    (lambda: onebit.broadcast_optimizer_state(made(), root_rank=hvd.size()), f"root_rank={hvd.size()}"),
    (lambda: onebit.save_checkpoint(None, Net(), made()), "folder=None"),
    (lambda: onebit.load_checkpoint(5, Net(), made()), "folder=5"),
    (lambda: diagnostics.Collector().add(5), "gradients is int"),
]


@pytest.mark.parametrize(("call", "message"), WRAPPING)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(OnebitError, match=re.escape(message)):
        call()


def feedback(change):
    return lambda optimizer: optimizer.load_feedback_state_dict(change(optimizer.feedback_state_dict()))


METHODS = [
    (lambda optimizer: optimizer.clip_grad_norm_("1"), "max_norm='1'"),
    (lambda optimizer: optimizer.set_backward_passes_per_step("3"), "backward_passes_per_step='3'"),
    (lambda optimizer: optimizer.load_state_dict(None), "state_dict is NoneType"),
    (lambda optimizer: optimizer.load_state_dict({}), "what optimizer.state_dict() gave"),
    (lambda optimizer: optimizer.load_state_dict(torch.optim.SGD(Net().parameters()).state_dict()), "betas, eps"),
    (feedback(lambda kept: list(kept)), "state is list"),
    (feedback(lambda kept: kept | {"no such": torch.ones(3)}), "no such"),
    (feedback(lambda kept: {name: value[:5] for name, value in kept.items()}), "got 5 elements"),
    (feedback(lambda kept: {name: value * NAN for name, value in kept.items()}), "NaN or Inf"),
    (feedback(lambda kept: {name: value.double() for name, value in kept.items()}), "float64"),
]


@repeatable_sums_only
@pytest.mark.parametrize(("call", "message"), METHODS)
def test_a_refused_call_changes_nothing(call, message):
    results = []
    for wrong in (True, False):
        model = Net()
        optimizer = wrap(model, warmup_steps=2)
        train(model, optimizer, 5)
        if wrong:
            with pytest.raises(ConfigurationError, match=re.escape(message)):
                call(optimizer)
        train(model, optimizer, 3, start=5)
        results.append(weights(model).numpy())
    np.testing.assert_array_equal(*results)
