"""A plain optimizer that is wrapped more than once: the last wrapping has its state.

Keras's ``build`` runs in the optimizer that was wrapped, and the plain one knows nothing of the moments. They are found
again by what both have in common, a ``Lineage``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from horovod_onebit.errors import ConfigurationError

EXCLUDED = tuple(f"_exclude_from_weight_decay{end}" for end in ("", "_pattern", "_cache"))
"""The attributes that Keras's ``exclude_from_weight_decay`` sets, all together."""


@dataclass
class Lineage:
    """What a plain optimizer has become. It and all that it was wrapped as have one in common.

    Attributes:
        last: the optimizer that it was wrapped as last, which has its state.
        built: the names of the attributes of that in which Keras's ``build`` has left the state.
        given: the attributes that the plain optimizer had when it was wrapped last.
    """

    last: Any = None
    built: set[str] = field(default_factory=set)
    given: dict[str, Any] = field(default_factory=dict)

    def kept(self, optimizer: Any, options: Iterable[str]) -> dict[str, Any]:
        """Those of ``options``, attributes, that ``last`` has, but for what was set on the plain ``optimizer`` since it
        was wrapped."""
        groups = [(name,) for name in options] + [EXCLUDED]
        now = optimizer.__dict__
        unchanged = [group for group in groups if now.get(group[0]) is self.given.get(group[0])]
        return {name: self.last.__dict__[name] for group in unchanged for name in group if name in self.last.__dict__}


def lineage_of(optimizer: Any) -> Lineage:
    """That of a plain optimizer."""
    found: Lineage = optimizer.__dict__.setdefault("_lineage", Lineage())
    return found


def take_over(optimizer: Any, wrapped: Any) -> None:
    """Give ``wrapped``, which is empty, the attributes of the plain ``optimizer``; of the one that this was wrapped as
    before, if there is one, the options that were set there, and the state, in plain form. Local.

    Variables that are added to ``wrapped`` are not added to ``optimizer``. Raises ``ConfigurationError`` if the state
    differs between workers now.
    """
    lineage = lineage_of(optimizer)
    last, source = lineage.last, optimizer
    attributes, variables = dict(optimizer.__dict__), list(optimizer._variables)
    if last is not None and last.built:
        if last._compressor.pending:
            raise ConfigurationError(
                "this optimizer was wrapped before, and the workers have taken local steps that they have not "
                "exchanged yet: call flush() of that DistributedOptimizer on all workers, then wrap the plain one again"
            )
        last._compressor.settle()
        last._compressor.options = last._compressor.options_now()
        last._compressor.moments.make_plain()
        attributes |= {name: last.__dict__[name] for name in lineage.built}
        known = {id(v) for v in variables}
        variables += [v for v in last.plain_variables if id(v) not in known]
        source = last
    if last is not None:
        attributes |= lineage.kept(optimizer, {"_learning_rate"} | last.option_names())
        rates = {id(one._learning_rate) for one in (optimizer, last)} - {id(attributes["_learning_rate"])}
        variables = [v for v in variables if id(v) not in rates]  # one that a schedule has replaced
    lineage.given = dict(optimizer.__dict__)
    give(wrapped, attributes, variables, source)


def give(wrapped: Any, attributes: dict[str, Any], variables: list[Any], source: Any) -> None:
    """Let ``wrapped``, which is empty, have ``attributes`` of another optimizer, with lists of its own: of the
    ``variables``, and of the trained ones of ``source``."""
    tracker = attributes.pop("_tracker")
    attributes |= {k: v.copy() for k, v in source.__dict__.items() if k.startswith("_self_") and hasattr(v, "copy")}
    attributes["_trainable_variables_indices"] = dict(source._trainable_variables_indices)
    wrapped.__dict__.update(attributes)
    wrapped._variables = variables
    is_variable, _ = tracker.config["variables"]
    own = type(tracker)({"variables": (is_variable, wrapped._variables)})
    own.stored_ids["variables"].update(id(v) for v in variables)
    wrapped.__dict__["_tracker"] = own


def check_last(optimizer: Any) -> None:
    """Raise ``ConfigurationError`` if another optimizer has taken over the state of ``optimizer``."""
    if optimizer._lineage.last is not optimizer:
        raise ConfigurationError(
            "the plain optimizer inside this DistributedOptimizer was wrapped again, and the newer "
            "DistributedOptimizer has taken over its state: compile the model with the newer one, or wrap an optimizer "
            "of its own for each model"
        )
