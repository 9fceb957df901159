"""Checkpoints of every worker: the run goes on bit for bit, and bad files are an error on all."""

import contextlib
import copy
import json
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

import horovod_onebit.torch as onebit
from horovod_onebit import CheckpointArgumentError, CheckpointError, ConfigurationError, Recipe, tasks
from horovod_onebit.checkpoints import files
from horovod_onebit.feedback import MARK, SERVER_PREFIX, mark
from horovod_onebit.world import total_residuals
from tests.ranks.disks import OF_NUMPY, another_job, checkpoint_of_numpy, fill, no_space, small_disk
from tests.ranks.kinds import KINDS
from tests.ranks.torch_common import (
    RANK,
    REPEATABLE,
    SIZE,
    Net,
    assert_replicas_equal,
    batch,
    digest,
    train,
    weights,
    wrap,
)
from tests.ranks.world import world

TWO_STAGE = Recipe(exchange="two_stage", block_size=64)


@pytest.fixture
def folder(tmp_path):
    """One folder for all workers."""
    return Path(world.broadcast_object(str(tmp_path), root_rank=0, name="folder"))


@pytest.mark.parametrize("steps", [2, 5, 8])
@pytest.mark.parametrize("recipe", ["robust", "paper", TWO_STAGE])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, onebit.LAMB, torch.optim.SGD])
def test_a_resumed_run_goes_on_bit_for_bit(folder, kind, recipe, steps):
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    model = Net()
    optimizer = wrap(model, kind, warmup_steps=4, recipe=recipe, **momentum)
    train(model, optimizer, steps)
    onebit.save_checkpoint(folder, model, optimizer, extra={"epoch": 3})
    train(model, optimizer, 6, start=steps)

    again = Net(seed=5)
    resumed = wrap(again, kind, warmup_steps=4, recipe=recipe, **momentum)
    train(again, resumed, 1)
    assert onebit.load_checkpoint(folder, again, resumed) == {"epoch": 3}
    train(again, resumed, 6, start=steps)
    if REPEATABLE:
        assert torch.equal(weights(model), weights(again))
    assert_replicas_equal(again)


def test_one_process_loads_the_weights_alone(folder):
    """For inference: no other worker takes part. What fails changes nothing."""
    model = Net()
    optimizer = wrap(model, warmup_steps=2)
    saved = []
    for start in (0, 4):
        train(model, optimizer, 4, start=start)
        saved.append(weights(model))
        onebit.save_checkpoint(folder, model, optimizer)
    if RANK == 0:
        alone = Net(seed=5)
        onebit.load_weights(folder, alone)
        assert torch.equal(weights(alone), saved[1])
        onebit.load_weights(str(folder), alone, previous=True)
        assert torch.equal(weights(alone), saved[0])
        with pytest.raises(CheckpointError, match=r"latest\.json does not exist"):
            onebit.load_weights(folder / "other", alone)
        other = torch.nn.Linear(3, 3)
        before = weights(other)
        with pytest.raises(CheckpointError, match="another model"):
            onebit.load_weights(folder, other)
        assert torch.equal(weights(other), before)
        for wrong in ((folder, optimizer), (3, alone), (folder, alone, 1)):
            with pytest.raises(CheckpointArgumentError, match=r"expected (a|True)"):
                onebit.load_weights(wrong[0], wrong[1], **({"previous": wrong[2]} if wrong[2:] else {}))
        next(folder.glob("*.worker-0000.npz")).unlink()  # it has nothing that is needed
        onebit.load_weights(folder, alone)
        next(folder.glob("*.shared.npz")).write_bytes(b"damaged")
        with pytest.raises(CheckpointError, match=r"7 bytes.*of step 4, is kept: load_weights.*previous=True"):
            onebit.load_weights(folder, alone)
        assert torch.equal(weights(alone), saved[1])


def test_weights_are_loaded_while_a_job_saves(folder):
    """Its files move to another folder: they are looked for again."""
    model = Net()
    optimizer = wrap(model, warmup_steps=2)
    train(model, optimizer, 4)
    onebit.save_checkpoint(folder, model, optimizer)
    if RANK == SIZE - 1:
        for _ in range(50):
            alone = Net(seed=5)
            onebit.load_weights(folder, alone)
            assert torch.equal(weights(alone), weights(model))
    for _ in range(10):
        onebit.save_checkpoint(folder, model, optimizer)


def test_weights_that_a_module_refuses_leave_it_as_it_was(folder):
    """Though it refuses its own again, and what it keeps has another shape."""

    class Scaled(torch.nn.BatchNorm1d):
        def __init__(self, size):
            super().__init__(3)
            self.history, self.asked = torch.arange(float(size)), 0

        def get_extra_state(self):
            return self.history

        def set_extra_state(self, found):
            self.asked += 1
            if len(self.history):
                raise ValueError("not this one")
            self.history = found

    def built(size):
        return torch.nn.Sequential(Scaled(size), torch.nn.Linear(3, 3))

    model = built(2)
    optimizer = wrap(model, warmup_steps=2)
    onebit.save_checkpoint(folder, model, optimizer)
    if RANK == 0:
        fresh, refusing = built(0), built(3)
        onebit.load_weights(folder, fresh)
        assert torch.equal(weights(fresh), weights(model))
        assert torch.equal(fresh[0].history, torch.arange(2.0, device="cpu"))
        before = weights(refusing)
        assert not torch.equal(before, weights(model))
        with pytest.raises(CheckpointError, match="ValueError: not this one"):
            onebit.load_weights(folder, refusing)
        assert torch.equal(weights(refusing), before)
        assert refusing[0].asked == 2


@pytest.mark.parametrize(("since", "to"), [("direct", "two_stage"), ("two_stage", "direct")])
def test_a_run_goes_on_with_another_exchange(folder, since, to):
    """The residuals are redistributed: ``"auto"`` may mean another exchange than when it was saved."""

    def prepared(exchange, seed=0):
        model = Net(seed=seed)
        return model, wrap(model, warmup_steps=4, recipe=Recipe(exchange=exchange, block_size=64))

    def all_owe(optimizer):
        return total_residuals(world.allgather_object(optimizer._compressor.engine.residuals(), name="all residuals"))

    model, optimizer = prepared(since)
    train(model, optimizer, 8)
    onebit.save_checkpoint(folder, model, optimizer)
    again, resumed = prepared(to, seed=5)
    train(again, resumed, 6)
    onebit.load_checkpoint(folder, again, resumed)
    engine, before = resumed._compressor.engine, all_owe(optimizer)
    assert all(np.array_equal(all_owe(resumed)[name], value) for name, value in before.items())
    tasks.run(engine.prepare(engine.tensors, engine._rules))
    for name, value in all_owe(resumed).items():
        np.testing.assert_allclose(value, before[name], atol=1e-6)
    assert {name for name in engine.feedback if name.startswith(SERVER_PREFIX)} == set(engine.exchange.served())
    train(again, resumed, 6, start=8)
    assert engine.exchange.name == to
    assert_replicas_equal(again)


def test_the_last_complete_one_counts(folder):
    model = Net()
    optimizer = wrap(model, warmup_steps=2)
    for steps in range(3):
        train(model, optimizer, 2, start=2 * steps)
        onebit.save_checkpoint(folder, model, optimizer, extra={"steps": steps})
    world.barrier()
    assert len(list(folder.glob("*.npz"))) == SIZE + 1
    assert not list(folder.glob("tmp.*"))
    assert onebit.load_checkpoint(folder, model, optimizer) == {"steps": 2}


FAULTS = [
    "empty folder", "truncated", "missing", "foreign", "another key", "bad json", "another format", "a bit",
    "a bit of the shared file", "no key", "no workers", "a list",
]  # fmt: skip


def rot(path):
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_files_are_an_error_on_all_workers_and_change_nothing(folder, fault):
    model = Net()
    optimizer = wrap(model, warmup_steps=2)
    train(model, optimizer, 5)
    if fault != "empty folder":
        onebit.save_checkpoint(folder, model, optimizer)
    before = weights(model)
    if RANK == 0 and fault != "empty folder":
        last = sorted(folder.glob(f"*.worker-{SIZE - 1:04d}.npz"))[0]
        if fault == "truncated":
            last.write_bytes(last.read_bytes()[:200])
        elif fault == "missing":
            last.unlink()
        elif fault == "foreign":
            torch.save(torch.ones(3), last)
        elif fault == "another key":
            torch.save({"format": 1, "key": "other"}, last)
        elif fault.startswith("a bit"):
            rot(next(folder.glob("*.shared.npz")) if "shared" in fault else last)
        elif fault in ("no key", "no workers", "a list"):
            latest = json.loads((folder / "latest.json").read_text())
            changed = {"no key": {"key": None}, "no workers": {"workers": 0}, "a list": {"previous": [1]}}[fault]
            (folder / "latest.json").write_text(json.dumps(latest | changed))
        elif fault == "bad json":
            (folder / "latest.json").write_text("{")
        else:
            (folder / "latest.json").write_text(json.dumps({"format": 99}))
    world.barrier()
    with pytest.raises(CheckpointError, match="cannot load the checkpoint; worker"):
        onebit.load_checkpoint(folder, model, optimizer)
    assert torch.equal(before, weights(model))
    train(model, optimizer, 2, start=5)
    assert_replicas_equal(model)


def test_a_folder_that_cannot_be_written_is_an_error_on_all_workers(folder):
    model = Net()
    optimizer = wrap(model)
    if RANK == 0:
        (folder / "file").write_text("")
    world.barrier()
    with pytest.raises(CheckpointError, match="cannot save"):
        onebit.save_checkpoint(folder / "file", model, optimizer)
    with pytest.raises(ConfigurationError, match="expected what"):
        onebit.save_checkpoint(folder, model, torch.optim.SGD(model.parameters(), lr=0.1))


def state(model, optimizer):
    """All that a checkpoint could change, as one list of values."""
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), optimizer.feedback_state_dict()])
    return torch.utils._pytree.tree_flatten(saved)[0]


def assert_same(before, after):
    assert len(before) == len(after)
    for one, other in zip(before, after, strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one.to_dense().cpu(), other.to_dense().cpu())
        else:
            assert one == other


def run(kind, steps, optimizer=torch.optim.AdamW):
    model = Net()
    plain = optimizer(model.parameters(), lr=1e-3)
    optimizer = onebit.DistributedOptimizer(plain, model.named_parameters(), **KINDS[kind])
    if steps:
        train(model, optimizer, steps)
    return model, optimizer


NEXT = dict(zip(KINDS, [*KINDS][1:] + [*KINDS][:1], strict=True))


@pytest.mark.parametrize(("since", "to"), [*NEXT.items(), *zip(KINDS, KINDS, strict=True), ("local", "momentum")])
def test_residuals_are_of_a_kind_of_run(folder, since, to):
    model, optimizer = run(since, 8)
    onebit.save_checkpoint(folder, model, optimizer)
    residuals = optimizer.feedback_state_dict()
    other, resumed = run(to, 6)
    if since == to:
        resumed.load_feedback_state_dict(residuals)
        onebit.load_checkpoint(folder, other, resumed)
        assert_same(state(model, optimizer), state(other, resumed))
        return
    before = state(other, resumed)
    with pytest.raises(ConfigurationError, match="these residuals were saved with"):
        resumed.load_feedback_state_dict(residuals)
    with pytest.raises(CheckpointError, match="the checkpoint was saved with"):
        onebit.load_checkpoint(folder, other, resumed)
    assert_same(before, state(other, resumed))


def test_without_a_second_moment_residuals_are_of_one_kind():
    residuals = run("momentum", 4, torch.optim.SGD)[1].feedback_state_dict()
    run("update", 0, torch.optim.SGD)[1].load_feedback_state_dict(residuals)


def test_residuals_of_an_earlier_version_have_no_mark():
    residuals = run("momentum", 4)[1].feedback_state_dict()
    unmarked = {name: value for name, value in residuals.items() if not name.startswith(MARK)}
    assert len(unmarked) == len(residuals) - 1
    optimizer = run("update", 0)[1]
    optimizer.load_feedback_state_dict(unmarked)
    found = optimizer.feedback_state_dict()
    assert all(torch.equal(found[name], value) for name, value in unmarked.items())


def test_residuals_of_other_sizes_or_of_other_workers():
    model = Net()
    optimizer = wrap(model, warmup_steps=2, recipe=TWO_STAGE)
    train(model, optimizer, 4)
    residuals = optimizer.feedback_state_dict()
    found = {name: value for name, value in residuals.items() if not name.startswith(MARK)}
    others = found | {mark("step", SIZE + 1): torch.empty(0)}
    fresh = wrap(Net(), warmup_steps=2, recipe=TWO_STAGE)  # does not know yet what is compressed
    for wrong, message in (
        (residuals | {"first.weight": residuals["first.weight"][:5]}, "got 5 elements, expected 4096"),
        (others, f"one of {SIZE + 1} workers, and there are {SIZE}"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            fresh.load_feedback_state_dict(wrong)
        assert not any(value.any() for value in fresh.feedback_state_dict().values())
    own = {name: value for name, value in others.items() if not name.startswith(SERVER_PREFIX)}
    assert len(own) < len(others)
    fresh.load_feedback_state_dict(own)  # without a server's, the number does not matter


@pytest.mark.parametrize("kind", [torch.optim.AdamW, onebit.LAMB])
@pytest.mark.parametrize("since", ["before it is wrapped", "after that"])
@pytest.mark.parametrize("how", ["checkpoint", "state"])
def test_what_was_compressed_is_frozen_when_it_is_loaded(folder, how, since, kind):
    """And warms up anew when it is trained again."""
    model, again = Net(), Net(seed=5)
    optimizer = wrap(model, kind, warmup_steps=3)
    train(model, optimizer, 30)
    p, q = model.second.weight, again.second.weight
    q.requires_grad_(since != "before it is wrapped")
    resumed = wrap(again, kind, warmup_steps=3)
    q.requires_grad_(False)
    if how == "checkpoint":
        onebit.save_checkpoint(folder, model, optimizer)
        onebit.load_checkpoint(folder, again, resumed)
    else:
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(again, resumed, 2, start=30)
    assert torch.equal(p, q)
    beta1, beta2 = optimizer.param_groups[0]["betas"]
    kept, saved = resumed.state[q], optimizer.state[p]
    for key, beta, seen in (("exp_avg", beta1, 30), ("exp_avg_sq", beta2, 3)):
        corrected = kept[key] / (1 - beta ** float(kept["step"]))
        torch.testing.assert_close(corrected, saved[key] / (1 - beta**seen), rtol=1e-4, atol=1e-12)
    q.requires_grad_(True)
    others = optimizer.stats(norms=False).compressed_parameters - q.numel()
    for step in range(32, 35):
        assert resumed.stats(norms=False).compressed_parameters == others
        train(again, resumed, 1, start=step)
    assert resumed.stats(norms=False).compressed_parameters == others + q.numel()
    train(again, resumed, 2, start=35)
    assert_replicas_equal(again)


class Other(Net):
    """``Net``, but for one thing."""

    def __init__(self, what):
        super().__init__(seed=5)
        if what == "a name":
            self.renamed = self.norm
            del self.norm
        elif what == "a shape":
            self.last = torch.nn.Linear(128, 11)
        elif what == "a dtype":
            self.frozen = torch.nn.Parameter(self.frozen.detach().double(), requires_grad=False)


def optimizer_of(model, what):
    if what == "a hyperparameter":
        return wrap(model, onebit.LAMB, warmup_steps=2)
    if what == "a group":
        params = [p for p in model.parameters() if p.requires_grad]
        plain = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}], lr=1e-3)
        return onebit.DistributedOptimizer(plain, model.named_parameters(), warmup_steps=2)
    if what == "a parameter's name":
        named = [(f"my.{name}", p) for name, p in model.named_parameters()]
        return onebit.DistributedOptimizer(torch.optim.AdamW(model.parameters()), named, warmup_steps=2)
    return wrap(model, warmup_steps=2)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    "what", ["a name", "a shape", "a dtype", "a group", "a hyperparameter", "a parameter's name", "progress", "a hook"]
)
def test_a_refused_checkpoint_changes_nothing_on_any_worker(folder, what, alone):
    """``alone``: it is refused by the last worker, and fits the others."""
    model = Net()
    optimizer = wrap(model, warmup_steps=2)
    train(model, optimizer, 4)
    if what == "progress":
        progress = optimizer.state_dict

        def damaged():
            found = progress()
            found["param_groups"][0]["horovod_onebit"]["exact_steps"].pop()
            return found

        optimizer.state_dict = damaged
        with pytest.raises(CheckpointError, match="exact_steps"):  # read back, and refused, before anything is replaced
            onebit.save_checkpoint(folder, model, optimizer)
        assert not list(folder.glob("*.npz"))
        return
    onebit.save_checkpoint(folder, model, optimizer)
    here = what if RANK == SIZE - 1 or not alone else ""
    again = Other(here)
    resumed = optimizer_of(again, here)
    if what == "a hook":
        again.register_load_state_dict_post_hook(lambda *_: 1 / 0)
    before = state(again, resumed)
    with pytest.raises(CheckpointError, match="cannot load the checkpoint; worker") as caught:
        onebit.load_checkpoint(folder, again, resumed)
    if alone and what != "a hook":
        assert f"the checkpoint; worker {SIZE - 1}: " in str(caught.value)
    assert_same(before, state(again, resumed))
    if what == "a hook":
        again._load_state_dict_post_hooks.clear()
        train(again, resumed, 1)


class WithExtra(Net):
    """Keeps something besides tensors, and may refuse another of it."""

    def __init__(self, extra):
        super().__init__()
        self.extra, self.refuses = extra, False

    def get_extra_state(self):
        return {"extra": self.extra}

    def set_extra_state(self, found):
        if self.refuses and found["extra"] != self.extra:
            raise ValueError("not this one")
        self.extra = found["extra"]


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("odd", [0, SIZE - 1])
def test_what_one_worker_cannot_take_over_changes_nothing_on_any(folder, odd, steps):
    """And all go on together, those that had taken no step, too."""
    model = WithExtra("saved")
    optimizer = wrap(model, warmup_steps=2)
    train(model, optimizer, 4)
    onebit.save_checkpoint(folder, model, optimizer)
    again = WithExtra("own")
    resumed = wrap(again, warmup_steps=2)
    if steps:
        train(again, resumed, steps)
    again.refuses = odd == RANK
    before, start = state(again, resumed), weights(again)
    with pytest.raises(CheckpointError, match=f"worker {odd}: .*not this one"):
        onebit.load_checkpoint(folder, again, resumed)
    assert torch.equal(start, weights(again))
    assert again.extra == "own"
    if steps:  # before the first step a state may be empty or zero
        assert_same(before, state(again, resumed))
    train(again, resumed, 1, start=steps)
    assert_replicas_equal(again)


class WithOwnState(Net):
    """What it keeps besides parameters and buffers is made when it is asked for."""

    def __init__(self, kind, number, seed=0):
        super().__init__(seed=seed)
        self.kind, self.number = kind, number

    def get_extra_state(self):
        scale = torch.full((2,), float(self.number), dtype=torch.bfloat16)
        states = {"tensor": scale, "longer": torch.zeros(self.number), "within": {"scale": [scale]}}
        return states | {"ordered": OrderedDict(scale=scale)} if self.kind == "all" else states[self.kind]

    def set_extra_state(self, found):
        if self.kind == "all":
            assert type(found["ordered"]) is OrderedDict
            found = found["ordered"]["scale"]
        if self.kind == "within":
            (found,) = found["scale"]
        self.number = len(found) if self.kind == "longer" else int(found[0])


@pytest.mark.parametrize("kind", ["tensor", "longer", "within", "all"])
def test_all_workers_get_what_modules_keep_of_their_own(folder, kind):
    model = WithOwnState(kind, 3)
    optimizer = wrap(model, warmup_steps=2)
    train(model, optimizer, 3)
    onebit.save_checkpoint(folder, model, optimizer, extra=0)
    again = WithOwnState(kind, 7 + RANK, seed=1)
    assert onebit.load_checkpoint(folder, again, wrap(again, warmup_steps=2)) == 0
    assert again.number == 3
    assert_replicas_equal(again)


KEPT = {
    "scalar": np.float64(0.5), "array": np.arange(6, dtype=np.int16).reshape(2, 3), "path": Path("/data"),
    "tuple": (1, None, b"\0"), "keys": {1: {(2, "a"): True}}, "tensor": torch.ones(2, dtype=torch.bfloat16),
    "ordered": OrderedDict(a=np.bool_(True)), "text": np.array(["a", "bcd"]), "empty": np.zeros((0, 2)),
    "milestones": Counter({30: 1}), "best": float("inf"), "set": {1, 2}, "bytes": bytearray(b"3"),
    "size": torch.Size([2]), "dtype": torch.bfloat16, "device": torch.device("cuda:0"), "layout": torch.strided,
    "parameter": torch.nn.Parameter(torch.ones(2, 1)), "conjugate": torch.tensor(1 + 2j).conj(),
    "graph": torch.eye(3, dtype=torch.bfloat16).to_sparse(), "none": torch.zeros(0, 3),
    "edges": torch.eye(2).to_sparse().requires_grad_(), "columns": torch.arange(6).view(2, 3).T,
}  # fmt: skip


def test_extra_is_given_back_or_refused_before_anything_is_replaced(folder):
    model = Net()
    optimizer = wrap(model, warmup_steps=2)
    optimizer.param_groups[0]["lr"] = np.float64(1e-3)  # as schedules of NumPy's give it
    train(model, optimizer, 1)
    onebit.save_checkpoint(folder, model, optimizer, extra=KEPT)
    refused = [
        ({"run": {"stats": [optimizer.stats()]}}, r"extra\['run'\]\['stats'\]\[0\] is horovod_onebit.stats.Stats"),
        ({"object": object()}, r"extra\['object'\] is builtins.object"),
        ({"array": np.array([None])}, r"extra\['array'\] is a NumPy array of object"),
        ({np.int64(3): 1}, r"extra has the key np.int64\(3\)"),
        ({"x": torch.ones(3, device="meta")}, r"extra\['x'\] is torch.Tensor \(torch.float32, torch.strided, meta\)"),
        ({"x": torch.eye(3).to_sparse_csr()}, r"extra\['x'\] is torch.Tensor \(torch.float32, torch.sparse_csr,"),
    ]
    for extra, message in refused:
        with pytest.raises(CheckpointError, match=message):
            onebit.save_checkpoint(folder, model, optimizer, extra=extra if RANK == 0 else None)
    found = onebit.load_checkpoint(folder, model, optimizer)
    assert found.keys() == KEPT.keys()
    for name, value in KEPT.items():
        assert type(found[name]) is type(value), name
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(found[name], value)
            assert found[name].dtype == value.dtype
        else:
            assert_same([value], [found[name]])
            for what in ("dtype", "requires_grad"):
                assert getattr(found[name], what, None) == getattr(value, what, None), name
    for path in folder.glob("*.npz"):
        with np.load(path, allow_pickle=False) as file:
            assert all(isinstance(file[name], np.ndarray) for name in file.files if name != "values.json")


def test_a_checkpoint_of_another_framework_is_refused_on_all_workers(folder):
    if RANK == 0:
        checkpoint_of_numpy(folder)
    world.barrier()
    model = Net()
    optimizer = wrap(model, warmup_steps=2)
    train(model, optimizer, 3)
    before = digest(model, optimizer)
    for load in (lambda: onebit.load_checkpoint(folder, model, optimizer), lambda: onebit.load_weights(folder, model)):
        with pytest.raises(CheckpointError, match=OF_NUMPY):
            load()
    assert digest(model, optimizer) == before
    train(model, optimizer, 1, start=3)
    assert_replicas_equal(model)


def test_the_checkpoint_before_is_kept(folder):
    model = Net()
    optimizer = wrap(model, warmup_steps=2)
    for steps in range(4):
        train(model, optimizer, 1, start=steps)
        onebit.save_checkpoint(folder, model, optimizer, extra={"steps": steps})
    files = [*folder.glob("*.npz"), *folder.glob("previous/*.npz")]
    assert len(files) == 2 * (SIZE + 1)
    world.barrier()
    if RANK == 0:
        rot(next(folder.glob(f"*.worker-{SIZE - 1:04d}.npz")))
    world.barrier()
    with pytest.raises(
        CheckpointError, match=rf"worker {SIZE - 1}: .*digest.*The checkpoint before, of step 3, is kept"
    ):
        onebit.load_checkpoint(folder, model, optimizer)
    assert onebit.load_checkpoint(folder, model, optimizer, previous=True) == {"steps": 2}
    onebit.save_checkpoint(folder, model, optimizer, extra={"steps": 9})
    assert onebit.load_checkpoint(folder, model, optimizer) == {"steps": 9}
    assert onebit.load_checkpoint(folder, model, optimizer, previous=True) == {"steps": 2}  # not the damaged one


def test_what_an_earlier_version_saved_is_refused_and_left_as_it_is(folder):
    model = Net()
    optimizer = wrap(model, warmup_steps=2)
    train(model, optimizer, 3)
    before = state(model, optimizer)
    if RANK == 0:
        saved = {"format": 1, "key": "0" * 16, "workers": SIZE, "step": 3, "files": {}, "previous": None}
        (folder / "latest.json").write_text(json.dumps(saved))
        (folder / f"{'0' * 16}.shared.pt").write_bytes(b"0.1")
    world.barrier()
    for call in (onebit.load_checkpoint, onebit.save_checkpoint):
        with pytest.raises(CheckpointError, match=r"of horovod-onebit 0\.1.*Load the weights alone.*another folder"):
            call(folder, model, optimizer)
    with pytest.raises(CheckpointError, match=r"of horovod-onebit 0\.1"):
        onebit.load_weights(folder, model)
    assert_same(before, state(model, optimizer))
    world.barrier()
    assert (folder / f"{'0' * 16}.shared.pt").read_bytes() == b"0.1"
    assert json.loads((folder / "latest.json").read_text())["format"] == 1


class Versioned(Net):
    """Migrates states of before, which have no version."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *arguments):
        if metadata.get("version") != 2:
            state[prefix + "frozen"] += 1
        super()._load_from_state_dict(state, prefix, metadata, *arguments)


def test_versions_of_modules_and_tied_weights_are_kept(folder):
    model = Versioned()
    optimizer = wrap(model, warmup_steps=2)
    train(model, optimizer, 3)
    onebit.save_checkpoint(folder, model, optimizer)
    before = state(model, optimizer)
    if RANK == 0:
        alone = Versioned(seed=5)
        onebit.load_weights(folder, alone)
        assert torch.equal(weights(alone), weights(model))
        with np.load(next(folder.glob("*.shared.npz"))) as file:
            assert "model/second.weight" in file.files
            assert "model/tied.weight" not in file.files  # once is enough
    onebit.load_checkpoint(folder, model, optimizer)
    assert_same(before, state(model, optimizer))


def test_two_jobs_do_not_replace_each_others_checkpoints(folder, monkeypatch):
    monkeypatch.setattr(files, "PATIENCE", 0.5)
    model = Net()
    optimizer = wrap(model, warmup_steps=2)
    job = contextlib.ExitStack()
    if RANK == 0:
        job.enter_context(another_job(folder))
    world.barrier()
    with pytest.raises(CheckpointError, match=r"another job, which is still running.*\(process \d+ on"):
        onebit.save_checkpoint(folder, model, optimizer)
    assert json.loads((folder / "latest.json").read_text())["step"] == 77
    world.barrier()
    job.close()  # killed, with all that it held
    onebit.save_checkpoint(folder, model, optimizer)
    world.barrier()
    latest = folder / "latest.json"
    ours = latest.read_text()
    world.barrier()
    if RANK == 0:  # a job that did not see the lock, from a host that has none
        latest.write_text(json.dumps(json.loads(ours) | {"key": "0123456789abcdef"}))
    world.barrier()
    with pytest.raises(CheckpointError, match="another job has saved a checkpoint"):
        onebit.save_checkpoint(folder, model, optimizer)
    world.barrier()
    if RANK == 0:
        latest.write_text(ours)
    world.barrier()
    onebit.save_checkpoint(folder, model, optimizer)
    other = torch.nn.Linear(40, 40)
    second = onebit.DistributedOptimizer(torch.optim.SGD(other.parameters()), other.named_parameters(), warmup_steps=2)
    with pytest.raises(CheckpointError, match="this job saves another model"):
        onebit.save_checkpoint(folder, other, second)
    onebit.load_checkpoint(folder, model, optimizer)


def test_a_folder_that_not_all_workers_share(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PATIENCE", 0.5)
    model = Net()
    optimizer = wrap(model, warmup_steps=2)
    train(model, optimizer, 1)
    mine = folder / "shared" if RANK == 0 else tmp_path / "apart"
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"worker 0: .*which another worker has written"):
            onebit.save_checkpoint(mine, model, optimizer)
        assert not list(mine.glob("*.*"))
    onebit.save_checkpoint(folder, model, optimizer)
    before = state(model, optimizer)
    with pytest.raises(CheckpointError, match=r"worker 1: .*does not exist"):
        onebit.load_checkpoint(folder if RANK == 0 else mine, model, optimizer)
    assert_same(before, state(model, optimizer))


def test_a_full_disk(folder, monkeypatch):
    model = Net()
    optimizer = wrap(model, warmup_steps=2)
    train(model, optimizer, 3)
    disk = contextlib.ExitStack()
    mounted = RANK == 0 and disk.enter_context(small_disk(folder, 6000))
    mounted = world.broadcast_object(mounted, root_rank=0, name="mounted")
    try:
        onebit.save_checkpoint(folder, model, optimizer, extra={"steps": 3})
        before = sorted(folder.rglob("*.npz"))
        filler = fill(folder) if RANK == 0 and mounted else None
        world.barrier()
        with monkeypatch.context() as patch:
            if not mounted and RANK == SIZE - 1:
                no_space(patch)
            for _ in range(2):
                with pytest.raises(
                    CheckpointError, match=r"cannot save the checkpoint; worker .*No space left on device"
                ):
                    onebit.save_checkpoint(folder, model, optimizer)
                world.barrier()
                assert sorted(folder.rglob("*.npz")) == before
        if filler:
            filler.unlink()
        world.barrier()
        onebit.save_checkpoint(folder, model, optimizer, extra={"steps": 4})
        assert onebit.load_checkpoint(folder, model, optimizer) == {"steps": 4}
        world.barrier()
    finally:
        disk.close()


@pytest.mark.parametrize("warmup_steps", [2, 9])
def test_a_save_between_backward_and_step_is_refused(folder, warmup_steps):
    model = Net()
    optimizer = wrap(model, warmup_steps=warmup_steps)
    train(model, optimizer, 3)
    for between in (lambda: None, optimizer.synchronize):
        x, y = batch(3)
        optimizer.zero_grad()
        last = torch.nn.functional.cross_entropy(model(x), y)
        if RANK == SIZE - 1:
            last.backward()
        if between is optimizer.synchronize:
            if RANK != SIZE - 1:
                last.backward()
            between()
        with pytest.raises(CheckpointError, match=rf"worker {SIZE - 1}: .*between backward\(\) and step\(\)"):
            onebit.save_checkpoint(folder, model, optimizer)
        if RANK != SIZE - 1 and between is not optimizer.synchronize:
            last.backward()
        optimizer.step()
    onebit.save_checkpoint(folder, model, optimizer)
    assert_replicas_equal(model)


def test_calls_that_differ_between_workers_are_an_error_on_all(folder):
    model = Net()
    optimizer = wrap(model, warmup_steps=2)
    first = RANK == 0
    with pytest.raises(ConfigurationError, match=r"cannot save the checkpoint; worker 0: .*folder=None"):
        onebit.save_checkpoint(None if first else folder, model, optimizer)
    with pytest.raises(ConfigurationError, match=r"cannot load the checkpoint; worker 0: .*previous=3"):
        onebit.load_checkpoint(folder, model, optimizer, previous=3 if first else True)
    plain = torch.optim.SGD(model.parameters())
    with pytest.raises(CheckpointError, match=r"worker 0: .*optimizer is SGD"):
        onebit.save_checkpoint(folder, model, plain if first else optimizer)
    call = onebit.save_checkpoint if first else onebit.load_checkpoint
    with pytest.raises(CheckpointError, match="same function: worker 0: save_checkpoint, worker 1: load_checkpoint"):
        call(folder, model, optimizer)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("recipe", ["robust", TWO_STAGE])
def test_other_workers_owe_together_what_these_did(recipe):
    """As after Horovod was restarted; here the new world has the same number of workers."""
    model = Net()
    optimizer = wrap(model, warmup_steps=2, recipe=recipe)
    train(model, optimizer, 6)
    compressor = optimizer._compressor
    compressor.leave_world()
    compressor.leave_world()  # twice is once
    assert not any(name.startswith(SERVER_PREFIX) for name in compressor.engine.feedback.state_dict())
    train(model, optimizer, 1, start=6)  # settles
    assert compressor.left is None
    train(model, optimizer, 3, start=7)
    assert_replicas_equal(model)

    compressor.leave_world()
    expected = total_residuals(world.allgather_object(compressor.left, name="saved again"))
    tasks.run(compressor.redistribute())
    for name, residual in compressor.engine.feedback.state_dict().items():
        np.testing.assert_allclose(residual, expected[name], rtol=1e-5, atol=1e-7)
    assert expected
    train(model, optimizer, 3, start=10)
    assert_replicas_equal(model)
