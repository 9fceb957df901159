"""Keras: checkpoints of every worker, and the comparison of replicas."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest
from horovod.tensorflow.functions import allgather_object, broadcast_object

import horovod_onebit.tf as onebit
from horovod_onebit import CheckpointError, ConfigurationError, DesyncError, Recipe
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


FAULTS = ["empty folder", "truncated", "missing", "foreign", "bad json", "another model"]


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_files_are_an_error_on_all_workers(folder, fault):
    model = compiled("adam", "robust")
    fit(model, 6)
    if fault != "empty folder":
        onebit.save_checkpoint(folder, model)
    before = weights(model)
    own = next(folder.glob(f"*.worker-{SIZE - 1:04d}.npz"), None)
    allgather_object(0, name="barrier")
    if RANK == 0:
        if fault == "truncated":
            own.write_bytes(own.read_bytes()[:100])
        elif fault == "missing":
            own.unlink()
        elif fault == "foreign":
            np.savez(own, about=np.array(json.dumps({"format": 1, "key": "other"})))
        elif fault == "bad json":
            (folder / "latest.json").write_text("{")
        elif fault == "another model":
            other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            other.compile(optimizer="adam")
            other.save(next(folder.glob("*.keras")))
    allgather_object(0, name="barrier")
    with pytest.raises(CheckpointError, match="cannot load the checkpoint; worker"):
        onebit.load_checkpoint(folder, model)
    np.testing.assert_array_equal(weights(model), before)
    allgather_object(0, name="barrier")


def test_what_is_no_model_of_ours_is_refused(folder):
    model = build()
    model.compile(optimizer="adam", loss=LOSS)
    with pytest.raises(ConfigurationError, match="the model's optimizer is Adam; expected"):
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
    with pytest.raises(DesyncError, match=rf"on worker \[{SIZE - 1}\]"):
        onebit.check_replicas(model.optimizer)
