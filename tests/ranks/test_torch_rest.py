"""The PyTorch face on real ranks: elements that have never had a gradient stay where they are, and are learned from
when they get one."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import horovod_onebit.torch as onebit
from horovod_onebit import Recipe
from horovod_onebit.schedule import Sends
from horovod_onebit.warmup import Phase
from tests.ranks.torch_common import DEVICE, RANK, assert_replicas_equal, digest, wrap
from tests.ranks.world import world

WORDS, LATE, WIDTH = 64, 48, 32
"""Words from ``LATE`` on are not met before step number ``MET``, and word 0 is padding."""
MET = 12


class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.last = torch.nn.Linear(WIDTH, 128)
        with torch.no_grad():
            self.embedding.weight[0] = 7.0

    def forward(self, words):
        return self.last(self.embedding(words).mean(1))


def read(model, optimizer, steps, start=0):
    """Only the last worker meets the late words."""
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(100 * step + RANK)
        most = WORDS if step >= MET and world.size() - 1 == RANK else LATE
        words = torch.randint(0, most, (16, 8), generator=generator, device="cpu").to(DEVICE)
        optimizer.zero_grad()
        cross_entropy(model(words), words[:, 0]).backward()
        optimizer.step()


def rows(model):
    return model.embedding.weight.detach().clone()


CASES = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.0}, {}),
    "in few bits from the start": (torch.optim.AdamW, {"weight_decay": 0.0}, {"recipe": Recipe(warmup="three_bit")}),
    "two stages": (torch.optim.Adam, {}, {"recipe": Recipe(exchange="two_stage")}),
    "LAMB": (onebit.LAMB, {"weight_decay": 0.0}, {}),
    "0/1 Adam": (torch.optim.Adam, {}, {"schedule": onebit.ZeroOne(8, 4, 6, 4)}),
    "gradients in few bits": (
        torch.optim.RMSprop,
        {"momentum": 0.5},
        {"schedule": onebit.Gradients(), "recipe": Recipe(warmup="three_bit")},
    ),
}


def make(case):
    kind, options, wrapping = CASES[case]
    model = Reader()
    recipe = wrapping.get("recipe", "robust")
    more = {key: value for key, value in wrapping.items() if key != "recipe"}
    steps = {} if "schedule" in wrapping else {"warmup_steps": 5}
    named = list(model.named_parameters())
    plain = kind(model.parameters(), lr=0.01, **options)
    return model, onebit.DistributedOptimizer(plain, named, recipe=recipe, **steps, **more)


@pytest.mark.parametrize("case", CASES)
def test_words_that_were_never_met_stay_and_are_learned_when_they_are(case, caplog):
    model, optimizer = make(case)
    start = rows(model)
    read(model, optimizer, MET)
    optimizer.flush()
    if case != "gradients in few bits":
        assert optimizer.phase is Phase.COMPRESSED
    assert torch.equal(rows(model)[LATE:], start[LATE:])
    read(model, optimizer, 40, start=MET)
    optimizer.flush()
    assert torch.equal(rows(model)[0], start[0])
    moved = (rows(model)[LATE:] - start[LATE:]).abs().mean(1)
    assert (moved > 1e-3).all()
    assert_replicas_equal(model)
    assert "warm-up begins again" not in caplog.text


@pytest.mark.parametrize("case", ["AdamW", "in few bits from the start"])
def test_a_run_that_is_resumed_between_two_looks_continues_bit_for_bit(case, tmp_path):
    folder = Path(world.broadcast_object(str(tmp_path), name="folder"))
    model, optimizer = make(case)
    read(model, optimizer, 50)  # workers look after 46, 48 and 50 compressed steps, and then after each second one
    onebit.save_checkpoint(folder, model, optimizer)
    read(model, optimizer, 20, start=50)
    other, resumed = make(case)
    onebit.load_checkpoint(folder, other, resumed)
    read(other, resumed, 20, start=50)
    assert torch.equal(rows(model), rows(other))
    assert digest(model, optimizer) == digest(other, resumed)


def test_masked_weights_stay_zero():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).to(DEVICE)
    mask = torch.rand(64, 64, device=DEVICE) < 0.5
    with torch.no_grad():
        model[0].weight[mask] = 0
    model[0].weight.register_hook(lambda grad: grad.masked_fill(mask, 0))
    optimizer = wrap(model, warmup_steps=5, lr=0.01)
    for step in range(40):
        generator = torch.Generator().manual_seed(100 * step + RANK)
        x = torch.randn(32, 64, generator=generator, device="cpu").to(DEVICE)
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
    assert not model[0].weight[mask].any()
    assert model[0].weight[~mask].all()
    assert_replicas_equal(model)


def draw_late(step, p, *, none):
    """The gradients of a loss whose second term begins in step number ``MET``: towards 1, with noise."""
    generator = torch.Generator().manual_seed(100 * step + RANK)
    both = [q.detach() - 1 + 0.5 * torch.randn(64, 64, generator=generator, device="cpu").to(DEVICE) for q in p]
    p[0].grad = both[0]
    p[1].grad = both[1] if step >= MET else None if none else torch.zeros_like(p[1])


@pytest.mark.parametrize("none", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, onebit.LAMB])
def test_a_layer_whose_gradients_begin_after_the_warm_up_has_its_own(kind, none):
    lengths, seconds = [], []
    for recipe in ("exact", "robust"):
        p = [torch.nn.Parameter(torch.full((64, 64), 0.5, device=DEVICE)) for _ in range(2)]
        plain = kind(p, lr=0.01)
        named = [("first", p[0]), ("second", p[1])]
        optimizer = onebit.DistributedOptimizer(plain, named, recipe=recipe, warmup_steps=5)
        for step in range(MET):
            draw_late(step, p, none=none)
            optimizer.step()
        moves = []
        for step in range(MET, 120):
            before = p[1].detach().clone()
            draw_late(step, p, none=none)
            optimizer.step()
            moves.append((p[1].detach() - before).abs().mean())
        lengths.append(float(torch.stack(moves[-40:]).mean()))
        seconds.append(optimizer.state_dict()["state"][1]["exp_avg_sq"].mean())
        assert_replicas_equal(torch.nn.ParameterList(p))
    assert optimizer.stats().compressed_parameters == 2 * 64 * 64
    assert lengths[1] < 1.5 * lengths[0]
    assert 0.3 < seconds[1] / seconds[0] < 3.0  # it is frozen after few steps, whose gradients are larger


def test_a_layer_whose_gradients_are_rare_is_trained():
    """With fewer in all than a warm-up has steps, and each after more steps than that."""
    p = torch.nn.Parameter(torch.zeros(64, 64, device=DEVICE))
    q = torch.nn.Parameter(torch.zeros(64, 64, device=DEVICE))
    optimizer = onebit.DistributedOptimizer(torch.optim.AdamW([p, q], lr=0.01), warmup_steps=5)
    moves = []
    for step in range(3 * 80 + 1):
        p.grad, q.grad = torch.ones_like(p), torch.full_like(q, float(step > 0 and step % 80 == 0))
        before = q.detach().clone()
        optimizer.step()
        moves.append(bool((q.detach() < before).any()))
    assert not any(moves[:160])  # the first is found afterwards
    assert moves[160]
    assert moves[240]
    assert optimizer.stats().compressed_parameters == 2 * 64 * 64


def test_a_layer_that_is_trained_since_shortly_before_does_not_prolong_the_automatic_warmup():
    """The bias of each second moment is corrected by its own count of gradients."""
    p = torch.nn.Parameter(torch.zeros(64, 64, device=DEVICE))
    q = torch.nn.Parameter(torch.zeros(64, 64, device=DEVICE))
    optimizer = onebit.DistributedOptimizer(torch.optim.AdamW([p], lr=0.01), warmup_steps="auto")
    for step in range(80):
        if step == 15:
            optimizer.add_param_group({"params": [q]})
        generator = torch.Generator().manual_seed(100 * step + RANK)
        p.grad = torch.randn(64, 64, generator=generator, device="cpu").to(DEVICE)
        q.grad = torch.randn(64, 64, generator=generator, device="cpu").to(DEVICE) if step >= 15 else None
        optimizer.step()
    assert optimizer.phase == "compressed"


def noise(step, number):
    generator = torch.Generator().manual_seed(1000 * step + 10 * RANK + number)
    return torch.randn(64, 64, generator=generator, device="cpu").to(DEVICE)


L2 = (torch.optim.Adam, {"weight_decay": 1e-2})
OPTIMIZERS = {"Adam with L2": L2, "AdamW": (torch.optim.AdamW, {}), "LAMB": (onebit.LAMB, {"weight_decay": 0.01})}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("joins", "begins"), [(0, 18), (0, 60), (25, 225)])
def test_steps_without_a_gradient_are_not_counted_in_a_second_moment(kind, joins, begins):
    """In the last steps of the warm-up, after it, and long after the parameter was added: its steps would be three
    times too long in the rest of the run, or more."""
    p, q = (torch.nn.Parameter(torch.full((64, 64), 0.5, device=DEVICE)) for _ in range(2))
    make, options = OPTIMIZERS[kind]
    plain = make([p] if joins else [p, q], lr=1e-3, **options)
    optimizer = onebit.DistributedOptimizer(plain, [("p", p), ("q", q)], warmup_steps=20)
    moves = []
    for step in range(begins + 90):
        if step == joins > 0:
            optimizer.add_param_group({"params": [q]})
        p.grad, q.grad = noise(step, 0), noise(step, 1) if step >= begins else None
        before = [one.detach().clone() for one in (p, q)]
        optimizer.step()
        moves.append([float((one.detach() - old).abs().mean()) for one, old in zip((p, q), before, strict=True)])
    assert optimizer.stats().compressed_parameters == 2 * 64 * 64
    of_p, of_q = torch.tensor(moves[-40:]).mean(0)
    assert 0.6 < of_q / of_p < 1.5
    assert_replicas_equal(torch.nn.ParameterList([p, q]))


@pytest.mark.parametrize("stop", [10, 19, 22])
def test_a_run_that_is_resumed_within_a_late_warmup_continues_bit_for_bit(stop, tmp_path):
    folder = Path(world.broadcast_object(str(tmp_path), root_rank=0, name="folder"))
    ends = []
    for resumed in (False, True):
        p, q = (torch.nn.Parameter(torch.full((64, 64), 0.5, device=DEVICE)) for _ in range(2))
        model = torch.nn.ParameterList([p, q])
        plain = torch.optim.Adam([p, q], lr=1e-3, weight_decay=1e-2)
        optimizer = onebit.DistributedOptimizer(plain, model.named_parameters(), warmup_steps=20)
        if resumed:
            onebit.load_checkpoint(folder, model, optimizer)
        for step in range(stop if resumed else 0, 40):
            if step == stop and not resumed:
                onebit.save_checkpoint(folder, model, optimizer)
            p.grad, q.grad = noise(step, 0), noise(step, 1) if step >= 18 else None
            optimizer.step()
        ends.append(q.detach().clone())
    assert torch.equal(*ends)


@pytest.mark.parametrize("before", [0, 1])
def test_a_first_gradient_in_a_step_of_exact_means_of_zero_one_adam_or_before_it_begins_a_warmup(before, caplog):
    """That step gives all elements a second moment, of one gradient, before the warm-up can begin."""
    caplog.set_level("INFO", "horovod_onebit")
    sends, begins = list[Sends](), 1000
    for _ in range(2):
        p, q = (torch.nn.Parameter(torch.full((64, 64), 0.5, device=DEVICE)) for _ in range(2))
        plain = torch.optim.AdamW([p, q], lr=1e-3)
        optimizer = onebit.DistributedOptimizer(
            plain, [("p", p), ("q", q)], schedule=onebit.ZeroOne(var_freeze_step=200)
        )
        for step in range(60):
            sends.append(optimizer._compressor.driver.sends)
            p.grad, q.grad = noise(step, 0), noise(step, 1) if step >= begins else None
            optimizer.step()
        begins = next(i for i in range(20, 60) if sends[i] is Sends.MEAN) - before
    assert ("q: the first gradients since compression started" in caplog.text) == (RANK == 0)


@pytest.mark.parametrize("recipe", ["robust", "fixed", "paper", "0/1 Adam"])
def test_a_layer_that_is_never_used_stays_compressed_whatever_decays_it(recipe, caplog):
    caplog.set_level("INFO", "horovod_onebit")
    p, q = (torch.nn.Parameter(torch.full((64, 64), 0.5, device=DEVICE)) for _ in range(2))
    plain = torch.optim.Adam([p, q], lr=1e-3, weight_decay=1e-2)
    arguments = {"warmup_steps": 20, "recipe": recipe}
    if recipe == "0/1 Adam":
        arguments = {"schedule": onebit.ZeroOne(var_freeze_step=60)}
    optimizer = onebit.DistributedOptimizer(plain, [("p", p), ("q", q)], **arguments)
    for step in range(80):
        p.grad, q.grad = noise(step, 0), None
        optimizer.step()
    assert "first gradients" not in caplog.text
    assert optimizer.stats().compressed_parameters == 2 * 64 * 64
    assert (q > 0.3).all()
    assert (q <= 0.5).all()
