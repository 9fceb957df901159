"""The names that PyTorch, TensorFlow and Keras keep to themselves and the faces need.

Who upgrades one of them sees here what has gone, and not in the middle of a run.
"""

import inspect
import tempfile

import pytest


@pytest.mark.parametrize("name", [
    "_foreach_add_", "_compile._disable_dynamo", "optim.Optimizer._patch_step_function",
    "nn.parallel.DistributedDataParallel._get_active_ddp_module",
])  # fmt: skip
def test_pytorch_has(name):
    found = __import__("torch._compile")
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)


def test_a_model_of_pytorch_says_whether_it_is_in_join():
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from horovod_onebit.torch.private import joins

    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        assert not joins(model)
        with model.join():
            assert joins(model)
    finally:
        dist.destroy_process_group()


def test_pytorchs_scaler_asks_an_optimizer_whether_it_handles_scales():
    from torch.amp import GradScaler

    assert "_step_supports_amp_scaling" in inspect.getsource(GradScaler.step)


METHODS = [
    "_apply_weight_decay", "_backend_apply_gradients", "_backend_update_step", "_clip_gradients", "_get_variable_index",
    "_use_weight_decay", "_var_key", "update_step",
]  # fmt: skip
ATTRIBUTES = ["_iterations", "_trainable_variables", "_trainable_variables_indices", "_variables"]


@pytest.mark.parametrize("name", METHODS)
def test_keras_calls(name):
    import keras

    assert callable(getattr(keras.optimizers.Adam, name))


@pytest.mark.parametrize("name", [*ATTRIBUTES, "_model_variables_moving_average"])
def test_an_optimizer_of_keras_keeps(name):
    import keras

    optimizer = keras.optimizers.Adam(use_ema=True, ema_momentum=0.9)
    optimizer.build([keras.Variable([1.0])])
    assert hasattr(optimizer, name)


@pytest.mark.parametrize(
    ("kind", "names"),
    [("Adam", ["_momentums", "_velocities"]), ("SGD", ["momentums"]), ("Lamb", ["_momentums", "_velocities"])],
)
def test_an_optimizer_of_keras_calls_its_moments(kind, names):
    import keras

    optimizer = getattr(keras.optimizers, kind)(**({"momentum": 0.9} if kind == "SGD" else {}))
    optimizer.build([keras.Variable([1.0])])
    assert all(len(getattr(optimizer, name)) == 1 for name in names)


def test_a_model_and_a_scaler_of_keras_call():
    import keras

    assert callable(keras.Model._flatten_layers)
    assert callable(keras.optimizers.LossScaleOptimizer._overwrite_variable_with_gradient)


def test_a_graph_of_tensorflow_can_run_operations_out_of_order():
    import tensorflow as tf

    def look(x):
        graph = tf.compat.v1.get_default_graph()
        assert hasattr(graph.experimental_acd_manager, "run_independently")
        assert hasattr(x.op, "_set_attr")
        return tf.identity(x)

    tf.function(look, autograph=False).get_concrete_function(tf.TensorSpec([]))
