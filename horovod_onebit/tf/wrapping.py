"""What ``DistributedOptimizer`` was called with: checked, and saved with the optimizer's configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import keras

from horovod_onebit import face
from horovod_onebit.checks import flag, replica_interval
from horovod_onebit.errors import ConfigurationError, UnsupportedError
from horovod_onebit.recipe import Recipe
from horovod_onebit.schedule import Gradients, Local, Schedule, Stepwise, ZeroOne
from horovod_onebit.warmup import FixedWarmup, Warmup


@dataclass(frozen=True, kw_only=True)
class Wrapping(face.Arguments):
    """Everything but the optimizer; the meanings are those of ``DistributedOptimizer``'s arguments."""

    constants = hvd

    process_set: Any
    warmup: Warmup
    recipe: Recipe
    average_aggregated_gradients: bool
    exact: Any = ()
    name: str | None = None
    schedule: Schedule | None = None
    kernels: str = "auto"
    check_replicas_every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        face.check_process_set(self.process_set, hvd.ProcessSet)
        if self.compression not in (hvd.Compression.none, hvd.Compression.fp16):
            raise UnsupportedError(
                f"compression={self.compression!r}: expected hvd.Compression.none or fp16, for exact steps"
            )
        if isinstance(self.exact, str) or not isinstance(self.exact, Iterable):
            raise ConfigurationError(f"exact={self.exact!r}: expected a list of names or patterns of variables")
        object.__setattr__(self, "exact", tuple(self.exact))
        flag("average_aggregated_gradients", self.average_aggregated_gradients)
        replica_interval(self.check_replicas_every)
        if self.local is not None:
            self.check_local()
            if self.check_replicas_every:
                raise UnsupportedError(
                    f"check_replicas_every={self.check_replicas_every} with Local(...): workers' weights differ "
                    "between exchanges; use callbacks.ReplicaCheckCallback, or flush() and then check_replicas()"
                )

    @property
    def local(self) -> Local | None:
        """The schedule, if workers take their own optimizers' steps."""
        return self.schedule if isinstance(self.schedule, Local) else None

    @property
    def after_warmup(self) -> Stepwise | Local | None:
        """The schedule of the steps after the warm-up, if it ends."""
        return None if isinstance(self.schedule, Gradients) else self.schedule

    @property
    def compresses(self) -> bool:
        """Whether a warm-up ends, or rounds do."""
        return not isinstance(self.schedule, Gradients)

    def __str__(self) -> str:
        """What all workers must have in common; not the names in ``exact``, since Keras numbers layers by process."""
        return str(self.compared())

    def compared(self) -> dict[str, Any]:
        """What all workers must have in common, by argument."""
        return {key: value for key, value in self.to_config().items() if key not in ("exact", "kernels")}

    def to_config(self) -> dict[str, Any]:
        """As plain values, but for the process set."""
        return {
            "warmup_steps": self.warmup.steps if isinstance(self.warmup, FixedWarmup) else "auto",
            "recipe": dataclasses.asdict(self.recipe),
            "fp16": self.compression is hvd.Compression.fp16,
            "sparse_as_dense": self.sparse_as_dense,
            "sum": self.sums,
            "gradient_predivide_factor": self.gradient_predivide_factor,
            "backward_passes_per_step": self.backward_passes_per_step,
            "average_aggregated_gradients": self.average_aggregated_gradients,
            "exact": list(self.exact),
            "name": self.name,
            "schedule": None if self.schedule is None else _config(self.schedule),
            "kernels": self.kernels,
            "check_replicas_every": self.check_replicas_every,
        }

    @classmethod
    def of_config(cls, config: dict[str, Any]) -> Wrapping:
        """What ``to_config`` was made from, in the whole world's process set."""
        config = dict(config)
        steps = config.pop("warmup_steps")
        config["recipe"] = Recipe(**{"warmup": "exact", **config["recipe"]})  # version 0.1.0 had no other
        config["compression"] = hvd.Compression.fp16 if config.pop("fp16") else hvd.Compression.none
        config["schedule"] = schedule = _of_config(config.pop("schedule"))
        config["warmup"] = face.warmup_of(None if schedule else steps, None, config["schedule"])
        config["op"] = hvd.Sum if config.pop("sum") else hvd.Average
        return cls(**config, process_set=hvd.global_process_set)


CLASS = "class"


def _config(schedule: Any) -> dict[str, Any]:
    """Its fields, and of a class of the user's own the name by which Keras finds it."""
    fields = dataclasses.asdict(schedule)
    own = type(schedule) not in (ZeroOne, Local, Gradients)
    return fields | ({CLASS: keras.saving.get_registered_name(type(schedule))} if own else {})


def _of_config(fields: dict[str, Any] | None) -> Schedule | None:
    """What ``_config`` was made from."""
    if not fields:
        return None
    if CLASS in fields:
        own = keras.saving.get_registered_object(fields[CLASS])
        if own is None:
            raise ConfigurationError(
                f"the saved optimizer has a schedule of the class {fields[CLASS]}, which Keras does not know: import "
                "the module where it is, and write @keras.saving.register_keras_serializable() above it before the "
                "model is saved"
            )
        return own(**{name: value for name, value in fields.items() if name != CLASS})
    if "codec" in fields:
        return Gradients(**fields)
    return (Local if "every" in fields else ZeroOne)(**fields)
