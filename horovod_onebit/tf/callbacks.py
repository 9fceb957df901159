"""Horovod's Keras callbacks, working under Keras 3; names and arguments are Horovod's."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from horovod_onebit.checks import number, positive, whole
from horovod_onebit.errors import ConfigurationError, UnsupportedError
from horovod_onebit.schedule import Local, ZeroOne
from horovod_onebit.tf.agreement import unnumbered
from horovod_onebit.tf.functions import broadcast_variables, follow_variables
from horovod_onebit.tf.graph import MULTI, callback_lists, cond
from horovod_onebit.tf.meeting import announce, told
from horovod_onebit.tf.monitor import Monitor
from horovod_onebit.tf.optimizer import STOPPED, SWAPPED, check_ours, flush_all, held_optimizers, plain_optimizers
from horovod_onebit.tf.replicas import check_replicas

logger = logging.getLogger("horovod_onebit")
FIRST_EPOCH = ", by initial_epoch or BackupAndRestore, which must be the same on all workers"
LOOKUPS = (keras.layers.TextVectorization, keras.layers.StringLookup, keras.layers.IntegerLookup)
DECIDE = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)
"""What decides by metrics how the run goes on, which must be the same on all workers."""


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Before the first step, give every worker the variables of ``root_rank``: the model's and those of the optimizer
    that it was compiled with, but for the states of random generators (dropout, augmentation), which stay each worker's
    own.

    A model that is built by its first batch gets them once it is built, before that batch's step is taken. Of several
    optimizers that the model holds (a GAN's), each one that is not built yet waits before its first step for what was
    built since the broadcast before. Each ``fit`` broadcasts, also with the same callback.

    Vocabularies and ``bin_boundaries`` that layers have adapted are no variables: if they differ, all workers get a
    ``DesyncError``. Worker 0 warns of a plain optimizer, with which each worker would train alone.

    Args:
        root_rank: the worker whose variables all others get.
        device: where TensorFlow places the broadcasts; its choice by default.
        local_variables: a variable or several that stay each worker's own.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self._begin()
        self._local: list[Any] = []
        if isinstance(local_variables, (keras.Variable, tf.Variable)):
            local_variables = [local_variables]
        for variable in () if local_variables is None else local_variables:
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Do not broadcast ``var``."""
        if not isinstance(var, (keras.Variable, tf.Variable)):
            raise ConfigurationError(f"local_variables has {type(var).__name__}: expected variables of the model")
        self._local.append(_storage(var))

    def on_train_begin(self, logs: Any = None) -> None:
        self._begin()

    def _begin(self) -> None:
        self.begun = False  # the callback may have served another fit
        self._waiting: list[tuple[Any, Any]] | None = None  # None before the first batch; see ``_defer``
        self._sent: dict[int, set[int]] = {}  # by number of the broadcast, the variables that are in it

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.begun:
            return
        self.begun = True
        with told(hvd.global_process_set):
            _check_local(self.model)
            adapted = _adapted(self.model)
        remark = FIRST_EPOCH if epoch else ""  # BackupAndRestore of one worker alone changes its first epoch
        announce(f"fit from epoch {epoch + 1}", remark=remark, adapted=adapted)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._waiting is not None:
            return
        held, optimizer = held_optimizers(self.model), self.model.optimizer
        all_built = all(layer.built for layer in self.model._flatten_layers())
        if not (held or all_built or self.model.trainable_variables):
            with told(hvd.global_process_set):
                raise ConfigurationError(
                    f"BroadcastGlobalVariablesCallback: this model has no variables yet, and its optimizer is a "
                    f"{type(optimizer).__name__}: build the model before fit, by model.build(shape) or a first call"
                )
        unbuilt = [] if all_built else [one for one in held if not one.built]
        for one in held:
            one._compressor.before_step = None  # a fit that failed may have left one
        self._waiting = [self._defer(number, one) for number, one in enumerate(unbuilt, 1)]
        if not held or len(unbuilt) < len(held):
            if optimizer is not None and not optimizer.built and len(held) < 2:  # one of several trains a part
                optimizer.build(self.model.trainable_variables)
            self._broadcast(0)
        _warn_of_plain(self.model)  # a MultiOptimizer knows its optimizers once it is built

    def _defer(self, number: int, optimizer: Any) -> tuple[Any, Any]:
        """Let ``optimizer`` begin its first step with broadcast ``number``, which becomes a part of a graph that may be
        traced several times before it runs. Returns it, and a variable that tells whether that is still to come."""
        pending = tf.Variable(True, trainable=False)

        def work() -> None:
            self._broadcast(number)
            pending.assign(False)

        optimizer._compressor.before_step = lambda: cond(tf.convert_to_tensor(pending), work)
        return optimizer, pending

    def _broadcast(self, number: int) -> None:
        """Broadcast the variables that there are by now and that no other broadcast of this ``fit`` has."""
        optimizer = self.model.optimizer
        variables = [*self.model.variables, *(() if optimizer is None else optimizer.variables)]
        others = {one for other, sent in self._sent.items() if other != number for one in sent}
        kept = [v for v in variables if not any(_storage(v) is local for local in self._local)]
        common = [v for v in kept if id(v) not in others]
        sent = {id(v) for v in common}
        self._sent[number] = sent & self._sent.get(number, sent)  # of several steps in a graph, the first one sends
        if common:
            with tf.device(self.device):
                broadcast_variables(common, self.root_rank)
        if tf.executing_eagerly():
            follow_variables(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before, self._waiting = self._waiting or [], []
        for optimizer, pending in before:
            if pending.numpy():
                self._waiting.append((optimizer, pending))
            else:
                optimizer._compressor.before_step = None
        if len(self._waiting) < len(before):
            follow_variables(self.model)

    def on_train_end(self, logs: Any = None) -> None:
        for optimizer, _ in self._waiting or ():
            optimizer._compressor.before_step = None


def _adapted(model: Any) -> dict[str, str]:
    """Facts that workers compare: a digest, by layer of ``model``, of what it has adapted and keeps in no variable."""
    layers = list(model._flatten_layers())
    within = {id(getattr(layer, "_lookup_layer", None)) for layer in layers}  # those of TextVectorization
    found: dict[str, str] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, keras.layers.Discretization):
            value: Any = np.asarray(layer.bin_boundaries).tolist()
        elif isinstance(layer, LOOKUPS) and id(layer) not in within:
            weights = getattr(getattr(layer, "_lookup_layer", layer), "idf_weights_const", None)  # of TF-IDF
            value = np.asarray(layer.get_vocabulary()).tolist(), np.asarray(weights).tolist()
        else:
            continue
        what = f"what the layer {unnumbered(layer.name)!r} has adapted to (number {index})"
        found[what] = hashlib.sha256(repr(value).encode()).hexdigest()[:16]
    return found


def _warn_of_plain(model: Any) -> None:
    """Warn on worker 0 if plain optimizers train ``model``, or a part of it, on each of several workers alone."""
    found = [f"a plain {type(one).__name__} ({where})" for where, one in plain_optimizers(model)]
    if found and hvd.size() > 1 and hvd.rank() == 0:
        logger.warning(
            "a plain optimizer averages nothing, and this model has %s: with it, each of the %d workers trains alone. "
            "Compile the model with onebit.DistributedOptimizer(optimizer, ...), in each model.compile(), and wrap "
            "each of several optimizers; if train_step() does not use it, or averages the gradients itself, all is "
            "well",
            " and ".join(found),
            hvd.size(),
        )


def _storage(variable: Any) -> Any:
    """What holds the value, by which a variable of Keras and that of TensorFlow inside it are the same."""
    return variable.value if isinstance(variable, keras.Variable) else variable


class MetricAverageCallback(keras.callbacks.Callback):
    """At the end of an epoch, replace each metric by its mean over the workers of ``process_set``, arrays element by
    element. Put it before the callbacks that read metrics: ``EarlyStopping`` and ``ReduceLROnPlateau`` before it are a
    ``ConfigurationError``. Means are computed in float64; numbers become floats, arrays float64 arrays of their shape.
    Raises ``DesyncError`` on all workers if names or shapes differ. ``device``, an argument of Horovod's, has no
    effect."""

    def __init__(self, device: str = "", process_set: Any = hvd.global_process_set) -> None:
        super().__init__()
        if not isinstance(device, str):
            raise ConfigurationError(f"device={device!r}: expected a text; is it meant as process_set=...?")
        self.process_set = process_set

    def on_train_begin(self, logs: Any = None) -> None:
        with told(self.process_set):
            _check_order()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not self.process_set.included():
            return
        logs = {} if logs is None else logs
        names = sorted(logs)
        with told(self.process_set):
            arrays = [np.asarray(logs[name]).astype(np.float64) for name in names]
        shapes = {name: array.shape for name, array in zip(names, arrays, strict=True) if array.ndim}
        setup = f"{names}, shapes {shapes}" if shapes else str(names)
        stopped = getattr(self.model, "stop_training", False)
        announce("average of metrics", self.process_set, setup, remark=STOPPED if stopped else "")
        if not names:
            return
        values = tf.constant(np.concatenate([array.reshape(-1) for array in arrays]))
        means = hvd.allreduce(values, name="onebit.metrics", op=hvd.Average, process_set=self.process_set)
        parts = np.split(np.asarray(means), np.cumsum([array.size for array in arrays])[:-1])
        for name, array, part in zip(names, arrays, parts, strict=True):
            logs[name] = part.reshape(array.shape) if array.ndim else float(part[0])


def _check_order() -> None:
    """Raise ``ConfigurationError`` if callbacks of this ``fit`` come before those that average what they read."""
    callbacks = next(callback_lists(), ())
    before = itertools.takewhile(lambda one: not isinstance(one, MetricAverageCallback), callbacks)
    for one in before:
        name = type(one).__name__
        if isinstance(one, DECIDE):
            raise ConfigurationError(
                f"{name} comes before MetricAverageCallback in the callbacks of fit, and would decide on each worker "
                f"by that worker's own metrics: put MetricAverageCallback before {name}"
            )
        if isinstance(one, keras.callbacks.ModelCheckpoint) and one.save_best_only and hvd.rank() == 0:
            logger.warning(
                "%s comes before MetricAverageCallback and takes the best model by the metrics of one worker: put "
                "MetricAverageCallback before it",
                name,
            )


def _check_local(model: Any) -> None:
    """Raise an error if ``model`` or this ``fit`` has what cannot work with local steps, and some optimizer takes such.

    ``SwapEMAWeights`` would put averages into the model while they are not exchanged; it swaps by additions, whose
    rounding would make the averages differ, too. ``EarlyStopping`` would restore each worker's own weights of the
    middle of a round. ``SpectralNormalization`` sets its kernel by a vector that is not trained, and is each worker's
    own after a step alone.
    """
    optimizers = [*held_optimizers(model), *getattr(model.optimizer, "optimizers", ())]
    schedules = [one._wrapping.schedule for one in optimizers if hasattr(one, "_wrapping")]
    schedule = next((one for one in schedules if isinstance(one, (Local, ZeroOne))), None)
    if schedule is None:
        return
    before = list(itertools.takewhile(lambda one: not isinstance(one, FlushCallback), next(callback_lists(), ())))
    if any(isinstance(one, keras.callbacks.SwapEMAWeights) for one in before):
        raise ConfigurationError(SWAPPED)
    if any(isinstance(one, keras.callbacks.EarlyStopping) and one.restore_best_weights for one in before):
        raise ConfigurationError(
            "EarlyStopping(restore_best_weights=True) would keep each worker's own weights of a round that is not "
            "over: put FlushCallback before it in the callbacks of fit"
        )
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.SpectralNormalization):
            raise UnsupportedError(
                f"the layer {layer.name!r}, a SpectralNormalization, sets its kernel in each forward pass by a vector "
                "that no optimizer trains, and that is each worker's own after steps that each takes alone: with "
                f"schedule={schedule} the weights would drift apart. Train without a schedule, or with Gradients(), or "
                "leave the layer out"
            )


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiply ``initial_lr`` by ``multiplier(epoch)``. The optimizer's learning rate must be a number, not a schedule;
    in a ``MultiOptimizer`` that of each optimizer is set.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a function of the epoch; or a number, to the power of the epochs since ``start_epoch``.
        start_epoch, end_epoch: the first epoch in which it acts, and the first in which it no longer does.
        staircase: False changes the rate every batch, with fractional epochs.
        momentum_correction: refused, unless it is False.
        steps_per_epoch: where ``staircase`` is False; taken from ``fit`` if it knows the number.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = False,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if momentum_correction:
            raise UnsupportedError(
                "momentum_correction=True: Keras 3 compiles SGD's momentum into the step, so that it cannot follow the "
                "learning rate; leave it out"
            )
        self.initial_lr = positive("initial_lr", initial_lr)
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase
        self.steps_per_epoch = steps_per_epoch
        if not callable(multiplier):
            number("multiplier", multiplier)
        self.multiplier = multiplier if callable(multiplier) else (lambda epoch: multiplier ** (epoch - start_epoch))
        self.epoch = 0

    @property
    def learning_rate(self) -> float:
        """That of the optimizer, or of the first of several."""
        return float(self._optimizers()[0].learning_rate)

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        for optimizer in self._optimizers():
            optimizer.learning_rate = value

    def _optimizers(self) -> Sequence[Any]:
        optimizer = self.model.optimizer
        return optimizer.optimizers if isinstance(optimizer, MULTI) else [optimizer]

    def _adjust(self, epoch: float) -> None:
        if epoch >= self.start_epoch and (self.end_epoch is None or epoch < self.end_epoch):
            self.learning_rate = self.initial_lr * self.multiplier(epoch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        self._adjust(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.staircase:
            return
        steps = self.steps_per_epoch or self.params.get("steps")
        if not steps:
            raise ConfigurationError("the length of an epoch is unknown: pass steps_per_epoch")
        self._adjust(self.epoch + batch / steps)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = self.learning_rate


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from ``initial_lr / size`` to ``initial_lr`` in ``warmup_epochs`` (Goyal et al. 2017).

    ``steps_per_epoch`` and ``momentum_correction`` as in ``LearningRateScheduleCallback``; ``verbose`` logs the end.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = False,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            epoch += 1.0 / (self.steps_per_epoch or self.params.get("steps") or 1)
            return 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / warmup_epochs + 1)

        positive("warmup_epochs", warmup_epochs)
        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if epoch + 1 == self.end_epoch:  # with steps_per_execution, the last call in it was about earlier batches
            self.learning_rate = self.initial_lr
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch + 1 == self.end_epoch and hvd.rank() == 0:
            text = "epoch %d: the learning rate's warm-up is over, it is %g"
            logger.info(text, epoch + 1, self.learning_rate)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """``ModelCheckpoint`` of the best model so far, on worker 0 alone.

    ``filepath``, ``monitor`` and all other ``arguments`` are those of ``keras.callbacks.ModelCheckpoint``;
    ``save_best_only`` may be True alone.
    """

    def __init__(
        self, filepath: str, monitor: str = "val_loss", *, save_best_only: bool = True, **arguments: Any
    ) -> None:
        if not save_best_only:
            raise ConfigurationError(
                "save_best_only=False: BestModelCheckpoint saves the best model alone. For a model of each epoch, add "
                "keras.callbacks.ModelCheckpoint to the callbacks of worker 0"
            )
        super().__init__(filepath, monitor=monitor, save_best_only=True, **arguments)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if hvd.rank() == 0:
            super().on_epoch_end(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if hvd.rank() == 0:
            super().on_train_batch_end(batch, logs)


class _Every:
    """Whether ``every`` more batches are over: with ``steps_per_execution``, Keras calls once for several."""

    def __init__(self, every: int) -> None:
        self.every, self.batches, self.last = every, 0, -1

    def begin_epoch(self) -> None:
        self.last = -1

    def passed(self, batch: int) -> bool:
        """After ``batch``, the last one of those that Keras calls for."""
        before = self.batches
        self.batches, self.last = before + batch - self.last, batch
        return self.batches // self.every > before // self.every


class StatsCallback(keras.callbacks.Callback):
    """Write ``optimizer.stats()`` and the batch's logs every ``every`` batches, on worker 0.

    Args:
        log_dir: a folder for TensorBoard; tags begin with ``horovod_onebit/``.
        jsonl: a file for a JSON object a line; ``horovod-onebit plot`` draws it.
        every: batches from one line to the next; None is the end of every epoch.
        append: continue the file of a run that is resumed, instead of overwriting it.
    """

    def __init__(
        self, log_dir: str | None = None, *, jsonl: str | None = None, every: int | None = None, append: bool = False
    ) -> None:
        super().__init__()
        if log_dir is None and jsonl is None:
            raise ConfigurationError("expected log_dir, jsonl, or both")
        if every is not None:
            whole("every", every, "None or a whole number of batches")
        self.log_dir, self.jsonl, self.append = log_dir, jsonl, append
        self.every = None if every is None else _Every(every)
        self.monitor: Monitor | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.monitor = Monitor(
            self.model.optimizer, jsonl=self.jsonl, tensorboard=self.log_dir, every=1, append=self.append
        )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.every:
            self.every.begin_epoch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.monitor and self.every and self.every.passed(batch):
            self.monitor.step(**(logs or {}))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.monitor and not self.every:
            self.monitor.step(epoch=epoch, **(logs or {}))

    def on_train_end(self, logs: Any = None) -> None:
        if self.monitor:
            self.monitor.close()


class ReplicaCheckCallback(keras.callbacks.Callback):
    """Every ``every`` batches, compare weights and optimizer state of all workers bit by bit.

    If they have drifted apart, ``DesyncError`` on all workers names the variables and the workers. With ``Local`` and
    0/1 Adam it waits for the next batch after which workers' weights should be the same, and with ``Local`` compares
    these alone.
    """

    def __init__(self, every: int = 100) -> None:
        super().__init__()
        self.every = _Every(whole("every", every, "a whole number of batches"))
        self.due = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.every.begin_epoch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.due |= self.every.passed(batch)
        if self.due and not check_ours(self.model.optimizer)._compressor.pending:
            self.due = False
            check_replicas(self.model.optimizer)


class FlushCallback(keras.callbacks.Callback):
    """With local steps: all workers have the same weights when they are evaluated, and at the end of each epoch, when
    other callbacks save them. Put it before those; on all workers, of which some may have no validation data. Of a
    model that keeps optimizers in attributes, all are flushed."""

    def __init__(self) -> None:
        super().__init__()
        self._fits = False
        self._due = True  # once in an epoch: where there is validation, when it begins, and else at the end

    def on_train_begin(self, logs: Any = None) -> None:
        self._fits = self._due = True
        with told(hvd.global_process_set):
            if isinstance(self.model.optimizer, MULTI) or not held_optimizers(self.model):
                check_ours(self.model.optimizer)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._due = True

    def on_train_end(self, logs: Any = None) -> None:
        self._fits = False

    def on_test_begin(self, logs: Any = None) -> None:
        self._flush()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._flush()

    def _flush(self) -> None:
        if self._due or not self._fits:
            self._due = False
            flush_all(self.model)
