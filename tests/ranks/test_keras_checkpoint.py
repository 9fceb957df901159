"""Keras: checkpoints of every worker, and the comparison of replicas."""

import contextlib
import json
import shutil
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.tensorflow.functions import allgather_object, broadcast_object

import horovod_onebit.tf as onebit
import horovod_onebit.tf.elastic as elastic
from horovod_onebit import CheckpointArgumentError, CheckpointError, ConfigurationError, DesyncError, Recipe
from horovod_onebit.checkpoints import files
from horovod_onebit.tasks import run
from horovod_onebit.tf.checkpoint import _Keras
from horovod_onebit.world import total_residuals
from tests.ranks.disks import OF_NUMPY, another_job, checkpoint_of_numpy, fill, no_space, small_disk
from tests.ranks.keras_common import LOSS, OPTIMIZERS, RANK, SIZE, assert_replicas_equal, batch, build, weights, wrap

TWO_STAGE = Recipe(exchange="two_stage", block_size=64)


@pytest.fixture
def folder(tmp_path):
    """One folder for all workers."""
    return Path(broadcast_object(str(tmp_path), root_rank=0, name="folder"))


def compiled(kind, recipe, seed=0):
    model = build(seed)
    model.compile(optimizer=wrap(OPTIMIZERS[kind](), warmup_steps=4, recipe=recipe), loss=LOSS)
    return model


def fit(model, steps, start=0, **arguments):
    for number in range(start, start + steps):
        model.train_on_batch(*batch(number), **arguments)


@pytest.mark.parametrize(
    ("kind", "recipe", "steps"),
    [
        ("adamw", "robust", 2),
        ("adamw", "robust", 6),
        ("lamb", TWO_STAGE, 6),
        ("sgd", "paper", 6),
        ("lamb", "paper", 6),
        ("adam", TWO_STAGE, 4),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(folder, kind, recipe, steps):
    model = compiled(kind, recipe)
    fit(model, steps)
    onebit.save_checkpoint(folder, model, extra={"epoch": 3})
    fit(model, 5, start=steps)

    again = compiled(kind, recipe, seed=5)
    fit(again, 1)
    assert onebit.load_checkpoint(folder, again) == {"epoch": 3}
    fit(again, 5, start=steps)
    if SIZE == 2:
        np.testing.assert_array_equal(weights(model), weights(again))
    assert_replicas_equal(again)


def test_a_run_whose_second_moments_are_frozen_keeps_its_beta_2(folder):
    model, again = compiled("adamw", "robust"), compiled("adamw", "robust", seed=5)
    fit(model, 6)
    onebit.save_checkpoint(folder, model)
    again.optimizer.beta_2 = 0.99
    onebit.load_checkpoint(folder, again)
    for one in (model, again):
        fit(one, 1, start=6)
    if SIZE == 2:
        for v, w in zip(model.trainable_variables, again.trainable_variables, strict=True):
            if len(v.shape) == 2:  # biases take Keras's own steps
                np.testing.assert_array_equal(v, w)
    assert_replicas_equal(again)


class Towers(keras.Model):
    """Two equal layers, which are made in the order of their ``names``."""

    def __init__(self, *names):
        super().__init__()
        for name in names:
            setattr(self, name, keras.layers.Dense(32, name=name))
        self.top = keras.layers.Dense(10, name="top")

    def call(self, x):
        return self.top(self.user(x) + 2 * self.item(x))


def towers(*names):
    keras.utils.set_random_seed(0)
    model = Towers(*names)
    model(batch(0)[0])
    model.compile(optimizer=wrap(keras.optimizers.Adam(1e-3), warmup_steps=4), loss=LOSS)
    return model


@pytest.mark.parametrize("stored", [True, False], ids=["now", "before"])
def test_moments_are_of_the_layers_that_they_were_of(folder, stored, monkeypatch):
    """Equal layers that are made in another order, which is that of the moments; versions before stored no names."""
    model, swapped = towers("user", "item"), towers("item", "user")
    fit(model, 6)
    if not stored:
        shared = _Keras.shared
        monkeypatch.setattr(_Keras, "shared", lambda face: {k: v for k, v in shared(face).items() if k != "trained"})
    onebit.save_checkpoint(folder, model)
    onebit.load_checkpoint(folder, towers("user", "item"))
    if stored:
        text = "variable 1 of those that the optimizer trains is user/kernel there, expected item/kernel"
        with pytest.raises(CheckpointError, match=text):
            onebit.load_checkpoint(folder, swapped)


@pytest.mark.parametrize("how", ["checkpoint", "weights"])
@pytest.mark.parametrize(("first", "then"), [("auto", 8), (12, 8), (12, "auto"), (12, 4)])
def test_the_warm_up_of_a_resumed_run_is_as_long_as_that_says(folder, how, first, then):
    model, again = (build(seed) for seed in (0, 5))
    for one, warmup in ((model, first), (again, then)):
        one.compile(optimizer=wrap(OPTIMIZERS["adamw"](), warmup_steps=warmup), loss=LOSS)
        one.optimizer.build(one.trainable_variables)
    fit(model, 6)
    if how == "checkpoint":
        onebit.save_checkpoint(folder, model)
        onebit.load_checkpoint(folder, again)
    else:
        again.optimizer.set_weights([np.array(v) for v in model.optimizer.variables])
        again.set_weights(model.get_weights())
    phases = []
    for step in range(6, 14):
        phases.append(str(again.optimizer.phase))
        fit(again, 1, start=step)
    ends = {8: 8, 4: 6, "auto": 99}[then]
    assert phases == ["compressed" if step >= ends else "warmup" for step in range(6, 14)]
    assert_replicas_equal(again)


def test_tensorflows_checkpoint_may_be_restored_before_the_optimizer_is_built(folder):
    model, again = compiled("adam", "robust"), compiled("adam", "robust", seed=5)
    fit(model, 8)
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(folder / f"{RANK}"))
    tf.train.Checkpoint(model=again, optimizer=again.optimizer).restore(saved)
    again.optimizer.build(again.trainable_variables)
    for one, other in zip(model.optimizer.variables, again.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("how", ["plain", "compiled"])
def test_one_process_loads_the_weights_alone(folder, how):
    """For inference: no other worker takes part. What fails changes nothing."""
    model = compiled("adamw", "robust")
    saved = []
    for start in (0, 6):
        fit(model, 6, start=start)
        saved.append(weights(model))
        onebit.save_checkpoint(folder, model)
    alone = build(5) if how == "plain" else compiled("sgd", "robust", seed=5)  # on all: they are counted
    if RANK == 0:
        if how == "compiled":
            alone.optimizer.build(alone.trainable_variables)
        onebit.load_weights(folder, alone)
        np.testing.assert_array_equal(weights(alone), saved[1])
        onebit.load_weights(str(folder), alone, previous=True)
        np.testing.assert_array_equal(weights(alone), saved[0])
        assert how == "plain" or int(alone.optimizer.iterations) == 0
        with pytest.raises(CheckpointError, match=r"latest\.json does not exist"):
            onebit.load_weights(folder / "other", alone)
        other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
        before = weights(other)
        with pytest.raises(CheckpointError, match="another model"):
            onebit.load_weights(folder, other)
        np.testing.assert_array_equal(weights(other), before)
        with pytest.raises(CheckpointArgumentError, match="not built"):
            onebit.load_weights(folder, keras.Sequential([keras.layers.Dense(3)]))
        for wrong in ((folder, model.optimizer), (3, alone), (folder, alone, 1)):
            with pytest.raises(CheckpointArgumentError, match=r"expected (a|True)"):
                onebit.load_weights(wrong[0], wrong[1], **({"previous": wrong[2]} if wrong[2:] else {}))
        next(folder.glob("*.shared.npz")).write_bytes(b"damaged")
        with pytest.raises(CheckpointError, match=r"7 bytes.*of step 6, is kept: load_weights.*previous=True"):
            onebit.load_weights(folder, alone)
        np.testing.assert_array_equal(weights(alone), saved[0])


class WithItsOwnOptimizer(keras.Model):
    """Keeps an optimizer besides the one it is compiled with, as a GAN does, and normalises what it is given."""

    def __init__(self):
        super().__init__()
        self.normalization, self.dense = keras.layers.Normalization(), keras.layers.Dense(3)
        self.of_generator = keras.optimizers.Adam()

    def call(self, x):
        return self.dense(self.normalization(x))


def adapted(mean):
    model = WithItsOwnOptimizer()
    model.normalization.adapt(np.array([[mean - 1.0] * 4, [mean + 1.0] * 4]))
    model(np.zeros((1, 4), np.float32))
    model.of_generator.build(model.trainable_variables)
    model.compile(optimizer=wrap(OPTIMIZERS["adam"]()), loss=LOSS)
    model.optimizer.build(model.trainable_variables)
    return model


def test_normalization_computes_with_what_was_loaded_and_other_optimizers_stay(folder):
    model, x = adapted(5.0), np.ones((1, 4), np.float32)
    model.of_generator.iterations.assign(7)
    onebit.save_checkpoint(folder, model)
    again = adapted(100.0 + RANK)
    onebit.load_checkpoint(folder, again)
    assert_replicas_equal(again)
    np.testing.assert_array_equal(again.normalization.mean, model.normalization.mean)
    other, stays = adapted(100.0), adapted(100.0)
    if RANK == 0:
        np.testing.assert_array_equal(again(x), model(x))
        other.of_generator.iterations.assign(9)
        onebit.load_weights(folder, other)
        np.testing.assert_array_equal(other(x), model(x))
        assert int(other.of_generator.iterations) == 9
        stays.dense.bias.assign = lambda value: 1 / 0
        before = np.array(stays(x))
        with pytest.raises(CheckpointError, match="cannot load the weights"):
            onebit.load_weights(folder, stays)
        np.testing.assert_array_equal(stays(x), before)


@pytest.mark.parametrize(("since", "to"), [("direct", "two_stage"), ("two_stage", "direct")])
def test_a_run_goes_on_with_another_exchange(folder, since, to):
    """The residuals are redistributed: ``"auto"`` may mean another exchange than when it was saved."""
    model = compiled("adamw", Recipe(exchange=since, block_size=64))
    fit(model, 8)
    onebit.save_checkpoint(folder, model)
    again = compiled("adamw", Recipe(exchange=to, block_size=64), seed=5)
    fit(again, 6)
    onebit.load_checkpoint(folder, again)
    engine, saved = again.optimizer._compressor.engine, model.optimizer._compressor.engine.residuals()
    before = total_residuals(allgather_object(saved, name="all residuals"))
    run(engine.prepare(engine.tensors, engine._rules))
    for name, value in total_residuals(allgather_object(engine.residuals(), name="all residuals")).items():
        np.testing.assert_allclose(value, before[name], atol=1e-6)
    fit(again, 6, start=8)
    assert engine.exchange.name == to
    assert_replicas_equal(again)


def test_an_automatic_warm_up_goes_on_with_what_it_has_seen(folder):
    """For one that looks afresh, the learning rate rises at its first look."""

    def made(seed=0):
        model = build(seed)
        optimizer = wrap(OPTIMIZERS["adam"](beta_2=0.9), warmup_steps="auto", recipe=Recipe(warmup="exact"))
        model.compile(optimizer=optimizer, loss=LOSS)
        model.optimizer.build(model.trainable_variables)
        return model

    def train(model, start, end):
        phases = []
        for step in range(start, end):
            model.optimizer.learning_rate = 1e-4 * min(step + 1, 10)
            random = np.random.default_rng([step, RANK])
            grads = [tf.constant(random.standard_normal(v.shape), tf.float32) for v in model.trainable_variables]
            model.optimizer.apply(grads, model.trainable_variables)
            phases.append(model.optimizer.phase)
        return phases

    model, again = made(), made(5)
    train(model, 0, 13)
    onebit.save_checkpoint(folder, model)
    train(again, 0, 2)
    onebit.load_checkpoint(folder, again)
    phases = train(model, 13, 26)
    assert phases == train(again, 13, 26) == 6 * ["warmup"] + 7 * ["compressed"]
    if SIZE == 2:
        np.testing.assert_array_equal(weights(model), weights(again))
    assert_replicas_equal(again)


FAULTS = ["empty folder", "truncated", "missing", "foreign", "bad json", "another model", "a bit", "no workers"]


def rot(path):
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def barrier():
    allgather_object(0, name="barrier")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model and its checkpoint, for tests that change neither."""
    saved = Path(broadcast_object(str(tmp_path_factory.mktemp("saved")), root_rank=0, name="saved"))
    model = compiled("adam", "robust")
    fit(model, 6)
    onebit.save_checkpoint(saved, model)
    return model, saved


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_files_are_an_error_on_all_workers(trained, folder, fault):
    model, saved = trained
    if fault != "empty folder" and RANK == 0:
        shutil.copytree(saved, folder, dirs_exist_ok=True)
    barrier()
    before = everything(model)
    own = next(folder.glob(f"*.worker-{SIZE - 1:04d}.npz"), None)
    allgather_object(0, name="barrier")
    if RANK == 0:
        if fault == "truncated":
            own.write_bytes(own.read_bytes()[:100])
        elif fault == "missing":
            own.unlink()
        elif fault == "foreign":
            np.savez(own, about=np.array(json.dumps({"format": 1, "key": "other"})))
        elif fault == "a bit":
            rot(own)
        elif fault == "no workers":
            latest = json.loads((folder / "latest.json").read_text())
            (folder / "latest.json").write_text(json.dumps(latest | {"workers": 0}))
        elif fault == "bad json":
            (folder / "latest.json").write_text("{")
        elif fault == "another model":
            other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            other.compile(optimizer="adam")
            other.save(folder / "other.keras")
            (folder / "other.keras").replace(next(folder.glob("*.shared.npz")))
    allgather_object(0, name="barrier")
    with pytest.raises(CheckpointError, match="cannot load the checkpoint; worker"):
        onebit.load_checkpoint(folder, model)
    assert_same(before, everything(model))
    allgather_object(0, name="barrier")


class Scaled(keras.layers.Layer):
    """No configuration tells how to make it again."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), name="scale", initializer="ones")

    def call(self, x):
        return self.function(x) * self.scale


def custom(own_layer, seed=0, units=10):
    """A model that ``load_model`` cannot make: a loss, a layer and a ``Lambda`` of its own, and random masks."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    middle = Scaled(lambda x: x + 1) if own_layer else layers.Lambda(lambda x: x + 1)
    stack = [layers.Dense(96), layers.Dropout(0.3, seed=seed + RANK), middle, layers.BatchNormalization()]
    model = keras.Sequential([layers.Input((32,)), *stack, layers.Dense(units)])
    optimizer = wrap(OPTIMIZERS["adamw"](), warmup_steps=2)
    model.compile(optimizer=optimizer, loss=lambda y, p: LOSS(y, p), metrics=["accuracy"])
    return model


def everything(model):
    model.optimizer.build(model.trainable_variables)  # nothing if it is built
    values = [np.array(v) for v in (*model.variables, *model.optimizer.variables)]
    return [*values, *model.optimizer.feedback_state_dict().values()]


def assert_same(before, after):
    assert len(before) == len(after)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("own_layer", [False, True])
def test_a_model_that_keras_cannot_make_again(folder, own_layer):
    model = custom(own_layer)
    fit(model, 4)
    onebit.save_checkpoint(folder, model, extra={"path": Path("/data"), "rate": np.float64(0.5), 1: (2, b"3")})
    before = everything(model)
    fit(model, 3, start=4)
    keras.layers.Dense(3)  # layers are counted: those that follow have other names
    again = custom(own_layer, seed=5)
    fit(again, 1)
    found = onebit.load_checkpoint(folder, again)
    assert found == {"path": Path("/data"), "rate": 0.5, 1: (2, b"3")}
    assert type(found["rate"]) is np.float64
    if RANK == 0:  # the others take over its moving means
        assert_same(everything(again), before)
    fit(again, 3, start=4)
    np.testing.assert_array_equal(weights(model), weights(again))  # with the same random masks


@pytest.mark.parametrize("alone", [False, True])
def test_a_refused_checkpoint_changes_nothing_on_any_worker(folder, alone):
    """``alone``: it is refused by the last worker, and fits the others."""
    model = custom(False)
    fit(model, 4)
    onebit.save_checkpoint(folder, model)
    differs = RANK == SIZE - 1 or not alone
    others = [custom(differs, seed=5), custom(False, seed=5, units=11 if differs else 10)]
    for other in others if alone else [*others, compiled("lamb", "robust")]:
        before = everything(other)
        with pytest.raises(CheckpointError, match=rf"worker {SIZE - 1 if alone else 0}: .*another model or"):
            onebit.load_checkpoint(folder, other)
        assert_same(everything(other), before)
    with pytest.raises(CheckpointError, match=r"worker 0: TypeError: extra\['stats'\] is horovod_onebit.stats.Stats"):
        onebit.save_checkpoint(folder, model, extra={"stats": model.optimizer.stats()})


def test_a_checkpoint_of_another_framework_is_refused_on_all_workers(folder):
    if RANK == 0:
        checkpoint_of_numpy(folder)
    hvd.allreduce(tf.zeros([1]), name="saved")
    model = compiled("adamw", "robust")
    fit(model, 1)
    before = [np.array(v) for v in (*model.variables, *model.optimizer.variables)]
    for load in (onebit.load_checkpoint, onebit.load_weights):
        with pytest.raises(CheckpointError, match=OF_NUMPY):
            load(folder, model)
    for value, v in zip(before, (*model.variables, *model.optimizer.variables), strict=True):
        np.testing.assert_array_equal(value, np.array(v))


def test_the_checkpoint_before_is_kept_and_those_of_earlier_versions_are_refused(folder, monkeypatch):
    monkeypatch.setattr(files, "PATIENCE", 0.5)
    model = compiled("adam", "robust")
    for steps in range(3):
        fit(model, 2, start=2 * steps)
        onebit.save_checkpoint(folder, model, extra=steps)
    barrier()
    if RANK == 0:
        rot(next(folder.glob("*.shared.npz")))
    barrier()
    with pytest.raises(CheckpointError, match=r"worker 0: .*digest.*, of step 4, is kept"):
        onebit.load_checkpoint(folder, model)
    assert onebit.load_checkpoint(folder, model, previous=True) == 1
    onebit.save_checkpoint(folder, model, extra=5)
    barrier()
    before = everything(model)
    fit(model, 1)
    assert onebit.load_checkpoint(folder, model) == 5
    assert_same(everything(model), before)
    barrier()
    if RANK == 0:
        latest = json.loads((folder / "latest.json").read_text())
        (folder / "latest.json").write_text(json.dumps(latest | {"format": 1}))
    barrier()
    files_before = sorted(folder.rglob("*.npz"))
    for call in (onebit.load_checkpoint, onebit.save_checkpoint, onebit.load_weights):
        with pytest.raises(CheckpointError, match=r"of horovod-onebit 0\.1.*Load the weights alone.*another folder"):
            call(folder, model)
    assert sorted(folder.rglob("*.npz")) == files_before
    assert_same(everything(model), before)
    barrier()
    if RANK == 0:
        (folder / "latest.json").write_text(json.dumps(latest))
    barrier()
    small = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    small.compile(optimizer=wrap(OPTIMIZERS["adam"]()))
    with pytest.raises(CheckpointError, match="worker 0: "):
        onebit.load_checkpoint(folder, small)
    barrier()


def test_other_jobs_other_folders_and_a_full_disk(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PATIENCE", 0.5)
    model = compiled("adam", "robust")
    fit(model, 5)
    job = contextlib.ExitStack()
    if RANK == 0:
        job.enter_context(another_job(folder))
    barrier()
    with pytest.raises(CheckpointError, match="another job, which is still running"):
        onebit.save_checkpoint(folder, model)
    barrier()
    job.close()
    with pytest.raises(CheckpointError, match="which another worker has written"):
        onebit.save_checkpoint(folder if RANK == 0 else tmp_path, model)
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    barrier()
    mounted = allgather_object(RANK == 0 and job.enter_context(small_disk(disk, 2000)), name="mounted")[0]
    try:
        onebit.save_checkpoint(disk, model, extra=1)
        before = sorted(disk.rglob("*.*"))
        filler = fill(disk) if RANK == 0 and mounted else None
        barrier()
        with monkeypatch.context() as patch:
            if not mounted and RANK == SIZE - 1:
                no_space(patch)
            for _ in range(2):
                with pytest.raises(CheckpointError, match=r"cannot save .* worker .*No space left on device"):
                    onebit.save_checkpoint(disk, model)
                barrier()
                assert sorted(disk.rglob("*.*")) == before
        if filler:
            filler.unlink()
        barrier()
        onebit.save_checkpoint(disk, model, extra=2)
        assert onebit.load_checkpoint(disk, model) == 2
        barrier()
    finally:
        job.close()


def test_gradients_that_wait_for_the_next_step_are_kept(folder):
    def made(seed=0):
        model = build(seed)
        optimizer = wrap(OPTIMIZERS["adam"](), warmup_steps=2, backward_passes_per_step=2)
        model.compile(optimizer=optimizer, loss=LOSS)
        return model

    model = made()
    fit(model, 7)
    onebit.save_checkpoint(folder, model)
    waiting = [np.array(v) for v in model.optimizer._accumulated]
    fit(model, 5, start=7)
    again = made(seed=5)
    onebit.load_checkpoint(folder, again)
    fit(again, 5, start=7)
    np.testing.assert_array_equal(weights(model), weights(again))
    assert_replicas_equal(again)

    if RANK == 0:  # as if another worker, with what worker 0 has, had been there
        latest = json.loads((folder / "latest.json").read_text())
        paths = [files.worker_file(folder, latest["key"], rank) for rank in (0, SIZE)]
        shutil.copy(*paths)
        latest["files"][paths[1].name] = latest["files"][paths[0].name]
        (folder / "latest.json").write_text(json.dumps(latest | {"workers": SIZE + 1}))
    barrier()
    onebit.load_checkpoint(folder, again)
    everybody = allgather_object(waiting, name="waiting")
    for found, *saved in zip(again.optimizer._accumulated, *everybody, everybody[0], strict=True):
        assert np.any(saved)
        np.testing.assert_allclose(found, np.mean(saved, axis=0), rtol=1e-5, atol=1e-7)


def test_calls_that_differ_between_workers_are_an_error_on_all(folder):
    model = compiled("adam", "robust")
    first = RANK == 0
    with pytest.raises(ConfigurationError, match=r"cannot save the checkpoint; worker 0: .*folder=None"):
        onebit.save_checkpoint(None if first else folder, model)
    plain = build()
    plain.compile(optimizer="adam", loss=LOSS)
    with pytest.raises(CheckpointError, match=r"worker 0: .*optimizer is Adam; expected"):
        onebit.load_checkpoint(folder, plain if first else model)
    call = onebit.save_checkpoint if first else onebit.load_checkpoint
    with pytest.raises(CheckpointError, match="same function: worker 0: save_checkpoint, worker 1: load_checkpoint"):
        call(folder, model)


def test_what_is_no_model_of_ours_is_refused(folder):
    model = build()
    model.compile(optimizer="adam", loss=LOSS)
    with pytest.raises(ConfigurationError, match="the optimizer is Adam; expected"):
        onebit.save_checkpoint(folder, model)
    with pytest.raises(ConfigurationError, match="optimizer is Adam; expected"):
        onebit.check_replicas(model.optimizer)
    with pytest.raises(ConfigurationError, match="every=0"):
        onebit.callbacks.ReplicaCheckCallback(0)


@pytest.mark.parametrize("what", ["weight", "state"])
def test_replicas_that_drift_are_named(what):
    model = compiled("adam", "robust")
    x, y = batch(0)
    callbacks = [onebit.callbacks.BroadcastGlobalVariablesCallback(0), onebit.callbacks.ReplicaCheckCallback(2)]
    model.fit(np.tile(x, (12, 1)), np.tile(y, 12), batch_size=16, epochs=1, verbose=0, callbacks=callbacks)
    onebit.check_replicas(model.optimizer)
    if RANK == SIZE - 1:
        variable = model.trainable_variables[2] if what == "weight" else model.optimizer.variables[5]
        value = np.array(variable)
        value.flat[1] = np.nextafter(value.flat[1], np.float32(9))
        variable.assign(value)
    with pytest.raises(DesyncError, match=rf"of worker {SIZE - 1} differs from that of worker 0"):
        onebit.check_replicas(model.optimizer)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize(("first", "then"), [("robust", "exact"), ("exact", "robust")])
def test_a_checkpoint_goes_on_with_the_recipe_exact_and_back(folder, kind, first, then):
    """Moments that compressed steps left are a plain optimizer's again, and the other way round the warm-up begins."""
    model, again = compiled(kind, first), compiled(kind, then, seed=1)
    fit(model, 9)
    onebit.save_checkpoint(folder, model)
    onebit.load_checkpoint(folder, again)
    np.testing.assert_array_equal(weights(model), weights(again))
    ours, theirs = (onebit.plain_optimizer(one.optimizer).variables for one in (again, model))
    for variable, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(variable), np.asarray(other))
    if then == "exact":
        for variable, other in zip(again.optimizer.plain_variables, theirs, strict=True):
            np.testing.assert_array_equal(np.asarray(variable), np.asarray(other))
    assert again.optimizer.phase == "warmup"
    fit(again, 8, start=9)
    assert_replicas_equal(again)
    assert again.optimizer.phase == ("warmup" if then == "exact" else "compressed")


def test_moving_averages_that_are_in_the_model_are_not_saved(folder):
    """What saves comes before ``SwapEMAWeights``, or an error says so; a run that was saved there goes on."""
    x, y = (np.concatenate(part) for part in zip(*(batch(step) for step in range(4)), strict=True))

    def fit_of(model, *callbacks, first=0):
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        listed = [swap if one is None else keras.callbacks.LambdaCallback(on_epoch_end=one) for one in callbacks]
        model.fit(x, y, 16, epochs=3, initial_epoch=first, shuffle=False, verbose=0, callbacks=listed)
        assert_replicas_equal(model)

    def made():
        model = build()
        optimizer = wrap(keras.optimizers.AdamW(3e-3, use_ema=True), recipe="exact")
        model.compile(optimizer=optimizer, loss=LOSS, run_eagerly=True)
        optimizer.build(model.trainable_variables)
        return model

    def save(epoch, logs):
        if epoch == 1:
            onebit.save_checkpoint(folder, model)

    def commit(epoch, logs):
        elastic.KerasState(model).save()

    model, again = made(), made()
    fit_of(model, save, commit, None)
    onebit.load_checkpoint(folder, again)
    fit_of(again, None, first=2)
    np.testing.assert_allclose(weights(again), weights(model), atol=1e-6)  # Keras swaps by additions
    for last, error in ((save, CheckpointError), (commit, ConfigurationError)):
        model = made()
        with pytest.raises(error, match="put what saves before SwapEMAWeights"):
            fit_of(model, None, last)


CASES = ({"recipe": "exact"}, "now"), ({"schedule": onebit.Local(4)}, "before")


@pytest.mark.parametrize(("options", "stored"), CASES, ids=["now", "before, local steps"])
def test_variables_without_a_name_are_known_whatever_the_process_has_made_before(folder, options, stored, monkeypatch):
    """Keras counts them, and Nadam has one; versions before kept the numbers."""

    def made():
        keras.Variable(0.0)
        model = build()
        optimizer = onebit.DistributedOptimizer(keras.optimizers.Nadam(1e-3), **options)
        model.compile(optimizer=optimizer, loss=LOSS, run_eagerly=True)
        optimizer.build(model.trainable_variables)
        return model

    model, again = made(), made()
    fit(model, 3)
    if stored == "before":
        shared, own = _Keras.shared, _Keras.own

        def numbered(values):
            return {"optimizer/variable_7" if k == "optimizer/variable" else k: v for k, v in values.items()}

        monkeypatch.setattr(_Keras, "shared", lambda f: (s := shared(f)) | {"optimizer": numbered(s["optimizer"])})
        monkeypatch.setattr(_Keras, "own", lambda f: (s := own(f)) | {"state": numbered(s["state"])})
    onebit.save_checkpoint(folder, model)
    onebit.load_checkpoint(folder, again)
    for one in (model, again):
        fit(one, 3, start=3)
    if SIZE == 2:
        np.testing.assert_array_equal(weights(again), weights(model))
    again.optimizer.flush()
    assert_replicas_equal(again)
