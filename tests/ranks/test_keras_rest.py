"""The Keras face on real ranks: elements that have never had a gradient stay where they are, and are learned from when
they get one."""

from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.tensorflow.functions import broadcast_object

import horovod_onebit.tf as onebit
from horovod_onebit import Recipe, rest
from horovod_onebit.warmup import Phase
from tests.ranks.keras_common import LOSS, RANK, SIZE, assert_replicas_equal

WORDS, LATE, WIDTH = 64, 48, 32
"""Words from ``LATE`` on are not met before step number ``MET``, and word 0 never."""
MET = 12


def build():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(WORDS, WIDTH), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(64)]
    return keras.Sequential([keras.layers.Input((8,), dtype="int32"), *layers])


def words_of(step):
    """Only the last worker meets the late words."""
    most = WORDS if step >= MET and RANK == SIZE - 1 else LATE
    return np.random.default_rng([step, RANK]).integers(1, most, (16, 8)).astype(np.int32)


def reader(model, optimizer, graph):
    def step(words):
        with tf.GradientTape() as tape:
            loss = LOSS(words[:, 0], model(words, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        grads = [tf.convert_to_tensor(g) for g in grads]  # of the embedding, slices
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    compiled = tf.function(step) if graph else step

    def read(start, stop):
        for number in range(start, stop):
            compiled(tf.constant(words_of(number)))

    return read


def rows(model):
    return np.array(model.trainable_variables[0])


CASES = {
    "AdamW": (lambda: keras.optimizers.AdamW(0.01, weight_decay=0.0), {}, True),
    "in few bits from the start": (lambda: keras.optimizers.Adam(0.01), {"recipe": Recipe(warmup="three_bit")}, True),
    "two stages": (lambda: keras.optimizers.Adam(0.01), {"recipe": Recipe(exchange="two_stage")}, False),
    "LAMB": (lambda: keras.optimizers.Lamb(0.01), {}, False),
    "0/1 Adam": (lambda: keras.optimizers.Adam(0.01), {"schedule": onebit.ZeroOne(8, 4, 6, 4)}, True),
}


def make(case):
    kind, options, graph = CASES[case]
    model, steps = build(), {} if "schedule" in options else {"warmup_steps": 5}
    optimizer = onebit.DistributedOptimizer(kind(), **steps, **options)
    optimizer.build(model.trainable_variables)
    return model, optimizer, reader(model, optimizer, graph)


@pytest.mark.parametrize("case", CASES)
def test_words_that_were_never_met_stay_and_are_learned_when_they_are(case, caplog):
    model, optimizer, read = make(case)
    start = rows(model)
    read(0, MET)
    optimizer.flush()
    assert optimizer.phase is Phase.COMPRESSED
    np.testing.assert_array_equal(rows(model)[LATE:], start[LATE:])
    read(MET, 52)
    optimizer.flush()
    np.testing.assert_array_equal(rows(model)[0], start[0])
    assert (np.abs(rows(model)[LATE:] - start[LATE:]).mean(1) > 1e-3).all()
    assert_replicas_equal(model)
    assert "warm-up begins again" not in caplog.text
    assert optimizer.phase is Phase.COMPRESSED


def test_residuals_are_looked_at_once_in_a_step_of_which_workers_tell_each_other(monkeypatch):
    looks, held = [], rest.held
    model, optimizer, read = make("AdamW")
    read(0, 5)
    monkeypatch.setattr(rest, "held", lambda *args: looks.append(args) or held(*args))
    read(5, 15)
    assert optimizer.phase is Phase.COMPRESSED
    assert len(looks) == 9  # before compressed steps 2 to 10
    assert_replicas_equal(model)


@pytest.mark.parametrize(("kept_by", "stop"), [("save_checkpoint", 50), ("Keras", MET + 1)])
def test_a_run_that_is_resumed_between_two_looks_continues_bit_for_bit(kept_by, stop, tmp_path):
    """After 50 steps workers have looked after 46, 48 and 50 compressed ones, and look after each second one; after
    MET + 1 they look in the next one, and find the late words."""
    folder = Path(broadcast_object(str(tmp_path), root_rank=0, name="folder"))
    file, residuals, ends = str(tmp_path / "own.keras"), {}, []
    for resumed in (False, True):
        model, optimizer, read = make("AdamW")
        model.compile(optimizer=optimizer, loss=LOSS, jit_compile=False)
        if not resumed:
            read(0, stop)
            onebit.save_checkpoint(folder, model)
            model.save(file)
            residuals = optimizer.feedback_state_dict()
        elif kept_by == "save_checkpoint":
            onebit.load_checkpoint(folder, model)
        else:
            model = keras.models.load_model(file)
            optimizer = model.optimizer
            optimizer.load_feedback_state_dict(residuals)
            read = reader(model, optimizer, graph=True)
        read(stop, stop + 20)
        ends.append((rows(model), *optimizer.feedback_state_dict().values()))
    for before, after in zip(*ends, strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("kind", [keras.optimizers.Adam, keras.optimizers.Lamb])
def test_a_layer_whose_gradients_begin_after_the_warm_up_begins_it_again(kind, caplog):
    """As the second term of a loss may begin later."""
    lengths = []
    for recipe in ("exact", "robust"):
        variables = [keras.Variable(np.full((64, 64), 0.5, np.float32)) for _ in range(2)]
        optimizer = onebit.DistributedOptimizer(kind(0.01), recipe=recipe, warmup_steps=5)
        optimizer.build(variables)
        moves = []
        for step in range(120):
            noise = 0.5 * np.random.default_rng([step, RANK]).standard_normal((2, 64, 64))
            grads = [tf.constant(np.array(v) - 1 + n, tf.float32) for v, n in zip(variables, noise, strict=True)]
            if step < MET:
                grads[1] = tf.zeros_like(grads[1])
            before = np.array(variables[1])
            optimizer.apply(grads, variables)
            moves.append(np.abs(np.array(variables[1]) - before).mean())
        lengths.append(np.mean(moves[-40:]))
        assert max(moves[:MET]) == 0
        rows = hvd.allgather(np.concatenate([np.array(v) for v in variables])[None], name="late.weights").numpy()
        assert (rows == rows[0]).all()
    assert optimizer.phase is Phase.COMPRESSED
    assert lengths[1] < 1.5 * lengths[0]
    assert ("begins with a first gradient: the warm-up begins again" in caplog.text) == (RANK == 0)


def test_a_layer_whose_gradients_are_rare_begins_the_warm_up_again_once(caplog):
    variables = [keras.Variable(np.zeros((64, 64), np.float32)) for _ in range(2)]
    optimizer = onebit.DistributedOptimizer(keras.optimizers.Adam(0.01), warmup_steps=5)
    optimizer.build(variables)
    ones = tf.ones((64, 64))
    for step in range(3 * 80 + 1):
        optimizer.apply([ones, ones if step and step % 80 == 0 else tf.zeros((64, 64))], variables)
    assert np.array(variables[1]).max() < -0.005  # by the third, once the second has been found in compressed steps
    assert caplog.text.count("the warm-up begins again") == (RANK == 0)
    assert optimizer._compressor.counts()["late"] == [1]
    assert optimizer.phase is Phase.COMPRESSED


def noise(step):
    return [tf.constant(g, tf.float32) for g in np.random.default_rng([step, RANK]).standard_normal((2, 64, 64))]


def drawn(variables, optimizer, steps, begins=0):
    """The mean of what each variable moves in each of the ``steps``; the second one has gradients since ``begins``."""
    moves = []
    for step in steps:
        first, second = noise(step)
        before = [np.array(v) for v in variables]
        optimizer.apply([first, second if step >= begins else tf.zeros_like(second)], variables)
        moves.append([np.abs(np.array(v) - old).mean() for v, old in zip(variables, before, strict=True)])
    return np.array(moves)


def two_variables(optimizer, **arguments):
    variables = [keras.Variable(np.full((64, 64), 0.5, np.float32)) for _ in range(2)]
    optimizer = onebit.DistributedOptimizer(optimizer, **arguments)
    optimizer.build(variables)
    return variables, optimizer


@pytest.mark.parametrize(
    "schedule", [None, onebit.Local(every=4, doubling=0, freeze=20), onebit.ZeroOne(var_freeze_step=60)]
)
def test_steps_of_zeros_are_not_counted_in_a_second_moment(schedule):
    """Those of a layer whose gradients begin in the last steps of the warm-up: the others would be three times too long
    in the rest of the run."""
    arguments = {"warmup_steps": 20} if schedule is None else {"schedule": schedule}
    variables, optimizer = two_variables(keras.optimizers.Adam(1e-3), **arguments)
    moves = drawn(variables, optimizer, range(100), begins=18)
    of_first, of_second = moves[-24:].mean(0)
    assert optimizer.phase is Phase.COMPRESSED
    assert 0.6 < of_second / of_first < 1.5


def test_a_layer_that_had_zeros_in_the_whole_warm_up_rests():
    variables, optimizer = two_variables(keras.optimizers.Adam(1e-3), warmup_steps=20)
    moves = drawn(variables, optimizer, range(30), begins=30)
    assert int(optimizer._exact_steps.value) == 20
    assert not moves[:, 1].any()


def test_iterations_that_are_set_in_the_warm_up_leave_what_second_moments_have_seen():
    """As a rate schedule is resumed."""
    results = []
    for moved in (False, True):
        variables, optimizer = two_variables(keras.optimizers.Adam(1e-3), warmup_steps=20)
        drawn(variables, optimizer, range(5))
        if moved:
            optimizer.iterations.assign(1000)
        results.append(drawn(variables, optimizer, range(5, 60))[-30:].mean())
    assert results[1] == pytest.approx(results[0], rel=0.2)


def test_second_moments_of_variables_that_are_not_compressed_any_more(tmp_path):
    """They are corrected by all steps from then on, as plain ones."""
    folder = Path(broadcast_object(str(tmp_path), root_rank=0, name="folder"))
    model, optimizer, read = make("AdamW")
    model.compile(optimizer=optimizer, loss=LOSS, jit_compile=False)
    read(0, 200)
    onebit.save_checkpoint(folder, model)
    second = np.array(onebit.plain_optimizer(optimizer)._velocities[0])
    arguments = {"warmup_steps": 5, "exact": ["*embedding*"]}
    model = build()
    optimizer = onebit.DistributedOptimizer(keras.optimizers.AdamW(0.01, weight_decay=0.0), **arguments)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer=optimizer, loss=LOSS, jit_compile=False)
    onebit.load_checkpoint(folder, model)
    np.testing.assert_allclose(np.array(optimizer._velocities[0]), second, rtol=1e-5)
    reader(model, optimizer, graph=True)(200, 210)
    assert optimizer.phase is Phase.COMPRESSED


def test_a_rolled_back_run_finds_a_late_layer_again(caplog):
    variables, optimizer = two_variables(keras.optimizers.Adam(1e-3), warmup_steps=5)
    drawn(variables, optimizer, range(20), begins=40)
    state = [np.array(v) for v in optimizer.variables]
    drawn(variables, optimizer, range(20, 80), begins=40)
    optimizer.set_weights(state)
    moves = drawn(variables, optimizer, range(20, 120), begins=40)
    of_first, of_second = moves[-24:].mean(0)
    assert 0.6 < of_second / of_first < 1.5
    assert caplog.text.count("the warm-up begins again") == (2 if RANK == 0 else 0)


def test_gradients_that_wait_for_the_last_pass_are_not_broadcast():
    variables, optimizer = two_variables(keras.optimizers.SGD(1.0), recipe="exact", backward_passes_per_step=2)
    ones = tf.ones((64, 64))
    optimizer.apply([ones * (RANK + 1), ones], variables)
    onebit.broadcast_variables(optimizer.variables)
    optimizer.apply([ones, ones], variables)
    expected = 0.5 - np.mean([rank + 2 for rank in range(SIZE)])
    np.testing.assert_allclose(np.array(variables[0]), expected, rtol=1e-6)


def test_an_automatic_warm_up_that_worker_0_begins_again_is_that_of_all():
    variables, optimizer = two_variables(keras.optimizers.Adam(1e-3))
    drawn(variables, optimizer, range(230))
    assert optimizer.phase is Phase.COMPRESSED
    if RANK == 0:
        plain = keras.optimizers.Adam(1e-3)
        plain.build(variables)
        optimizer.set_weights([np.array(v) for v in plain.variables])
    onebit.broadcast_variables(optimizer.variables)
    drawn(variables, optimizer, range(230, 260))
    weights = hvd.allgather(np.array(variables[0])[None], name="restarted").numpy()
    assert (weights == weights[0]).all()
