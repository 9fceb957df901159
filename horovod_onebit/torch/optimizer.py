"""``DistributedOptimizer`` for PyTorch: the wrapped optimizer's own steps in the warm-up, then one bit an element."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from inspect import Parameter, signature
from typing import Any

import torch

from horovod_onebit import feedback
from horovod_onebit.checks import flag, mapping, matching, positive, replica_interval
from horovod_onebit.errors import ConfigurationError, NonFiniteError, UnsupportedError
from horovod_onebit.face import chosen, next_name
from horovod_onebit.recipe import Recipe
from horovod_onebit.schedule import Gradients, Local, Schedule
from horovod_onebit.stats import Stats
from horovod_onebit.tasks import run
from horovod_onebit.torch import averaging, hooks
from horovod_onebit.torch.arguments import Arguments, groups_of, names_of, patterns_of
from horovod_onebit.torch.arrays import Placement
from horovod_onebit.torch.collectives import outside_inference
from horovod_onebit.torch.compressor import Compressor
from horovod_onebit.torch.hooks import Scaling, Where
from horovod_onebit.torch.loading import check_not_live, check_optimizer
from horovod_onebit.torch.local import LocalAdapter, LocalSteps, complete_entries
from horovod_onebit.torch.parameters import STATE_KEY, Parameters
from horovod_onebit.torch.plain import entries_of
from horovod_onebit.torch.private import asked_by_pytorch, called_by, untraced
from horovod_onebit.torch.rules import Adapter, AnyAdapter, adapter_for, check_parameter
from horovod_onebit.torch.transport import Average, Compression, choose
from horovod_onebit.warmup import Phase


@cache
def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether ``function`` has an argument of this name."""
    return name in signature(function).parameters


class _ScalerValue:
    """An attribute that ``GradScaler`` sets for the time of a step. It may set it on a proxy that imitates our class
    (those of Lightning and Fabric), and that has our attributes: it is kept where both look."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, owner: type) -> Any:
        values = {} if optimizer is None else optimizer._compressor.scaler_values
        if self._name not in values:
            raise AttributeError(self._name)
        return values[self._name]

    def __set__(self, optimizer: Any, value: Any) -> None:
        optimizer._compressor.scaler_values[self._name] = value

    def __delete__(self, optimizer: Any) -> None:
        del optimizer._compressor.scaler_values[self._name]


class _DistributedOptimizer:
    """Mixed into the wrapped optimizer's class; the methods that users call."""

    param_groups: list[dict[str, Any]]
    state: Any
    _compressor: Compressor
    _kind: Any  # the wrapped optimizer's class
    _within = False  # whether its own step is under way
    grad_scale, found_inf = _ScalerValue(), _ScalerValue()

    @property
    def _gradients(self) -> hooks.GradientHooks:
        return self._compressor.gradients

    @property
    def _parameters(self) -> Parameters:
        return self._compressor.parameters

    @property
    def _participates(self) -> bool:
        return self._compressor.included

    # -- Horovod's interface --------------------------------------------------------------------------------------

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes whose gradients are added up before one exchange."""
        return self._gradients.passes

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Parameter -> name, where Horovod's optimizer has it."""
        return self._parameters.names

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes that precede a step."""
        self._gradients.set_passes(passes)

    @untraced
    @outside_inference
    def synchronize(self) -> None:
        """In warm-up, wait until the gradients are averaged, as Horovod's does.

        Afterwards averaged gradients never exist: what is averaged is the update. The gradients stay this worker's own
        until ``step()``, so what is done to them in between is done to them alone; to clip, ``clip_grad_norm_``.
        """
        if self._participates:
            self._compressor.synchronize()
        self._gradients.where = Where.SYNCHRONIZED

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step()`` inside this context does not synchronize: for ``synchronize(); clip...; step()``."""
        self._gradients.automatic = False
        try:
            yield
        finally:
            self._gradients.automatic = True

    @untraced
    @outside_inference
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale the gradients by one factor, the same on all workers, so that their norm is at most ``max_norm``.

        Call it between ``backward()`` and ``step()``. In warm-up the norm is that of the averaged gradient, as in
        ``synchronize(); torch.nn.utils.clip_grad_norm_(...)``; afterwards it is the root mean square over the workers
        of the norms of their own gradients (times their number, with ``Sum``), which is not smaller. Returns the
        Euclidean norm before clipping. Raises ``ConfigurationError`` unless ``max_norm`` is positive. Collective.
        """
        positive("max_norm", max_norm)
        if not self._participates:
            return self._clip_own_grad_norm(max_norm)
        self._compressor.synchronize("clip_grad_norm_", max_norm=float(max_norm))
        return self._compressor.clip_grad_norm_(max_norm)

    def _clip_own_grad_norm(self, max_norm: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], max_norm))

    @untraced
    def zero_grad(self, set_to_none: bool | None = None, **options: Any) -> None:
        """Reset gradients, with the wrapped optimizer's own arguments; not between ``backward()`` and ``step()``, when
        they are being exchanged."""
        if self._gradients.where is Where.LOCAL:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        self._gradients.where = Where.NOWHERE
        reset = super().zero_grad  # type: ignore[misc]
        # accelerate gives True wherever the argument has a name: that is for optimizers that know it.
        if set_to_none is not None and (not set_to_none or _takes(reset.__func__, "set_to_none")):
            options["set_to_none"] = set_to_none
        reset(**options)

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step: the wrapped optimizer's own in the warm-up, then 1-bit. Collective.

        Returns what ``closure`` does, or None. Raises on all workers ``DesyncError`` if they disagree,
        ``NonFiniteError`` if the recipe says so, ``ConfigurationError`` if gradients were changed after they were sent;
        ``WireError`` for a damaged message, ``TransportError`` over ``torch.distributed``. After the first three
        nothing has changed; a step that was refused by the first or the third can be taken again.
        """
        if self._within:
            return self._inherited_step(closure)
        if isinstance(self._parameters.adapter, AnyAdapter) and called_by(MAKE_STATE, __name__):
            return self._init_state_by_a_step()
        self._parameters.drop_made_state()
        loss = None
        if closure is not None:
            told = self._compressor.agreement.told("step") if self._participates else nullcontext()
            with told, torch.enable_grad():
                loss = closure()
        if not self._participates:
            self._exact_step()
            return loss
        gradients = self._gradients
        if gradients.automatic and gradients.where is Where.SYNCHRONIZED:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(). This can cause training slowdown.",
                stacklevel=2,
            )
        try:
            with self._scaling() as scaling, torch.no_grad(), self._compressor.agreement.told("step"):
                self._compressor.step(self._exact_step, scaling)
        except NonFiniteError:
            gradients.used()
            raise
        gradients.used()  # and not those of a refused step, which may be taken again
        return loss

    @contextmanager
    def _scaling(self) -> Iterator[Scaling]:
        """GradScaler, if one is used, stores ``grad_scale`` and ``found_inf`` on the optimizer during a step; they are
        hidden here, so that the wrapped optimizer does not unscale a second time. After an error GradScaler would
        leave them, and multiply by them in the next step: they are put back only after a step without one."""
        compressor = self._compressor
        values, compressor.scaler_values = compressor.scaler_values, {}
        scale = values.get("grad_scale")
        yield Scaling(bool(values), None if scale is None else float(scale), bool(values.get("found_inf", False)))
        compressor.scaler_values = values

    @torch.no_grad()
    def _init_state_by_a_step(self) -> None:
        """What ``hvd.broadcast_optimizer_state`` and ``get_optimizer_state_dict`` call ``step`` for, perhaps on some of
        the workers only: it leaves neither weights changed nor a step counted."""
        self._parameters.made_state = called_by(STATE_DICTS, __name__)
        parameters = [p for group in self.param_groups for p in group["params"]]
        weights = [p.clone() for p in parameters]
        self._exact_step()
        for p, weight in zip(parameters, weights, strict=True):
            p.copy_(weight)
        for state in entries_of(self.state):
            if "step" in state:
                state["step"] = state["step"] * 0

    def _exact_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's own step, without running its hooks a second time."""
        self._parameters.start_momentum()
        step = super().step  # type: ignore[misc]
        function = step.__func__
        while getattr(function, "hooked", False):
            function = function.__wrapped__
        self._within = True
        try:
            return function(self) if closure is None else function(self, closure)
        finally:
            self._within = False

    def _inherited_step(self, closure: Callable[[], Any] | None) -> Any:
        """What the wrapped optimizer's step means by ``super(type(self), self).step``, as detectron2 writes it."""
        step = super(self._kind, self).step  # type: ignore[misc]
        return step() if closure is None else step(closure)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; they warm up on their own before they are compressed. All workers must do the same."""
        super().add_param_group(param_group)  # type: ignore[misc]
        try:
            run(self._compressor.check_groups())
        except (ConfigurationError, UnsupportedError):
            self.param_groups.pop()
            self._compressor.forget_gone()
            raise

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # PyTorch's GradScaler asks this before it looks at the gradients. They must have arrived by then; and with True
        # it leaves it to step() to skip, so that all workers skip alike. Lightning asks too, and would not clip.
        if not asked_by_pytorch():
            return False
        apart = isinstance(self, _LocalOptimizer) or self._gradients.where.settled
        if self._participates and self._gradients.automatic and not apart:
            self._compressor.synchronize()
        return self._participates

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """The fused optimizers set it; it is always true here."""

    # -- this project's interface ---------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The phase of the next step; it is ``COMPRESSED`` as soon as any parameter is."""
        return self._compressor.phase

    @property
    def recipe(self) -> Recipe:
        """How gradients become bits."""
        return self._compressor.engine.recipe

    @outside_inference
    def flush(self) -> None:
        """After local steps (``Local``, 0/1 Adam), bring all workers to the same weights, to be saved say. Collective.

        Costs one exchange (an exact one for 0/1 Adam) if the last step was a local one, and a small message otherwise;
        nothing with all other algorithms. Raises ``DesyncError`` on all workers if they have not taken as many steps of
        a round.
        """
        self._compressor.agreement.check()
        with torch.no_grad():
            run(self._compressor.flush())

    @outside_inference
    def check_replicas(self) -> None:
        """Compare weights and optimizer state with worker 0's, bit by bit. Collective; a pass over memory.

        Raises ``DesyncError`` on all workers, which names the parameters and the workers. ``check_replicas_every`` of
        ``DistributedOptimizer`` does it every so many steps. With 0/1 Adam and local steps, call ``flush()``
        before.
        """
        self._parameters.drop_made_state()
        if self._participates:
            run(self._compressor.agreement.meet("check_replicas"))
            run(self._compressor.check_replicas())

    def stats(self, *, norms: bool = True) -> Stats:
        """What the run has cost so far; ``print(optimizer.stats())`` for a line of text. Local, not collective.

        ``norms`` False leaves the norms out (NaN), which need a pass over memory: cheap enough for every step.
        """
        return self._compressor.stats(norms)

    @outside_inference
    def feedback_state_dict(self) -> dict[str, torch.Tensor]:
        """This worker's error feedback by parameter name (flat float32). Save one for each worker. An empty tensor
        among them has a name that tells what they are of."""
        compressor = self._compressor
        residuals = compressor.engine.feedback.state_dict()
        found = {name: torch.from_numpy(value) for name, value in residuals.items()}
        return found | {feedback.mark(compressor.kind, compressor.workers): torch.empty(0, device="cpu")}

    @outside_inference
    def load_feedback_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what ``feedback_state_dict`` of the same worker gave, after ``load_state_dict``.

        Raises ``ConfigurationError`` if they are of another kind of run, model or number of workers.
        """
        compressor = self._compressor
        own = feedback.unmarked(mapping("state", state, "names to tensors"), compressor.kind, compressor.workers)
        arrays = {name: torch.as_tensor(value).numpy(force=True) for name, value in own.items()}
        compressor.load_feedback(arrays)

    # -- state ----------------------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "a DistributedOptimizer cannot be copied or pickled: it takes part in collectives, and watches the "
            "gradients of its own parameters. Copy or save its state: copy.deepcopy(optimizer.state_dict()), or "
            "horovod_onebit.torch.save_checkpoint"
        )

    @outside_inference
    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and as option ``"horovod_onebit"`` of the first group the warm-up's progress.
        It is the same on all workers, so that saving worker 0's is enough; with ``Local``, each worker has moments of
        its own until they are frozen, or always. The error feedback is not in it: see ``feedback_state_dict``."""
        self._compressor.adopt()
        state = super().state_dict()  # type: ignore[misc]
        if not {"state", "param_groups"} <= state.keys():
            raise UnsupportedError(
                f"{self._kind.__name__}.state_dict() has {sorted(state)}, and checkpoints and broadcasts need 'state' "
                "and 'param_groups': save and load its state by the methods of the plain optimizer, on every worker"
            )
        self._parameters.export(state)
        return state

    @outside_inference
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer or of a plain one (which then warms up). Error feedback starts at zero.

        Unlike PyTorch's, it copies: ``state_dict`` stays as it is, and can be loaded again. Raises
        ``ConfigurationError`` for a state of another optimizer or model, and for one whose tensors are those of this
        optimizer, which has taken steps since.
        """
        self._load(state_dict, keep_feedback=False, given=True)

    def _load(self, state_dict: dict[str, Any], *, keep_feedback: bool, given: bool = False) -> None:
        """``given``: by the caller, who may have its parameters in another order, and keeps it."""
        if not {"state", "param_groups"} <= mapping("state_dict", state_dict, "state and param_groups").keys():
            raise ConfigurationError(f"state_dict has {sorted(state_dict)}: expected what optimizer.state_dict() gave")
        check_optimizer(self._parameters, state_dict, ordered=given)
        theirs = {id(value) for entries in entries_of(state_dict["state"]) for value in entries.values()}
        check_not_live(self._parameters, state_dict, theirs)
        loaded = self._parameters.digest(state_dict)
        # Trainers that move state between devices load what they have just saved.
        same = not keep_feedback and loaded == self._parameters.digest(self.state_dict())
        groups, state = self.param_groups, self.state
        inner = [(one, one.param_groups is groups, one.state is state) for one in within(self)]
        super().load_state_dict({**state_dict, "state": complete_entries(state_dict["state"])})  # type: ignore[misc]
        for entries in entries_of(self.state) if given else ():
            # PyTorch takes tensors over: steps would change the caller's, and could not change those of inference mode.
            tensors = [k for k, v in entries.items() if id(v) in theirs and isinstance(v, torch.Tensor)]
            entries.update({k: entries[k].detach().clone() for k in tensors})
            entries.update({k: copy.deepcopy(v) for k, v in entries.items() if isinstance(v, (list, tuple, dict))})
        # In place: schedulers that were made before wrapping hold the old objects.
        for old, new in zip(groups, self.param_groups, strict=True):
            if "exact" in old:
                new.setdefault("exact", old["exact"])  # states of before had no such option
            old.clear()
            old.update(new)
        state.clear()
        state.update(self.state)
        self.param_groups, self.state = groups, state
        for one, shares_groups, shares_state in inner:
            if shares_groups:
                one.param_groups = groups
            if shares_state:
                one.state = state
        self._compressor.share()
        self._gradients.automatic = True
        own = self.param_groups[0].pop(STATE_KEY, None)
        self._compressor.load(own, state_dict, keep_feedback=keep_feedback or same)
        self._parameters.lineage = loaded
        if not (keep_feedback or same):
            self._compressor.loaded_at = self._parameters.steps


class _LocalOptimizer(_DistributedOptimizer):
    """With ``schedule=Local(...)``: gradients stay this worker's own, and so do all steps between two exchanges."""

    _compressor: LocalSteps  # type: ignore[assignment]

    def synchronize(self) -> None:
        """Nothing: gradients are never averaged."""

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale this worker's own gradients so that their norm is at most ``max_norm``; returns it. Local."""
        return self._clip_own_grad_norm(positive("max_norm", max_norm))

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of this worker alone; collective if it is the last one of a round."""
        if self._within:
            return self._inherited_step(closure)
        if not self._participates:
            return self._exact_step(closure)
        if called_by(MAKE_STATE, __name__):
            return self._init_state_by_a_step()
        self._parameters.drop_made_state()
        with self._scaling() as scaling, self._compressor.agreement.told("step"):
            return self._compressor.step(self._exact_step, closure, scaling)


OWNER = "_onebit_owner"
"""What an optimizer within another one, as those of Lookahead and SAM, knows the ``DistributedOptimizer`` by."""


def within(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers in attributes of ``optimizer`` that have parameters of it: they take steps for it."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [one for one in vars(optimizer).values() if isinstance(one, torch.optim.Optimizer)]
    return [one for one in found if any(id(p) in own for group in one.param_groups for p in group["params"])]


def _check_owner(inner: torch.optim.Optimizer, *_: Any) -> None:
    """Before each step of ``inner``: gradients of which the ``DistributedOptimizer`` around it knows nothing are this
    worker's alone."""
    owner = getattr(inner, OWNER)()
    if called_by(MAKE_STATE, __name__):  # a broadcast of its state
        return
    if owner is not None and owner._participates and not (owner._within or owner._gradients.where.settled):
        name = type(inner).__name__
        raise ConfigurationError(
            f"{name}, which {type(owner).__name__} has within, took a step of its own, of gradients that are this "
            "worker's alone: take steps by step(closure) of what DistributedOptimizer returned, or call its "
            "synchronize() before (recipe='exact', or Gradients())"
        )


def unwrapped(optimizer: Any) -> Any:
    """What is in an optimizer around another one, as accelerate makes them, if that is one of ours."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, _DistributedOptimizer) else optimizer


def check_ours(optimizer: Any) -> _DistributedOptimizer:
    """``optimizer``, or what is in it, if that is what ``DistributedOptimizer`` returned."""
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, _DistributedOptimizer):
        raise ConfigurationError(
            f"optimizer is {type(optimizer).__name__}; expected what horovod_onebit.torch.DistributedOptimizer returned"
        )
    return optimizer


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
    *,
    process_group: Any = None,
    model: torch.nn.Module | None = None,
    warmup_steps: int | float | str | None = None,
    total_steps: int | None = None,
    schedule: Schedule | None = None,
    recipe: str | Recipe = "robust",
    overlap: bool = True,
    kernels: str = "auto",
    check_replicas_every: int | None = None,
    exact: Iterable[str] | None = None,
) -> Any:
    """An optimizer whose gradients travel as one bit per parameter once warm-up is over.

    The arguments of ``horovod.torch.DistributedOptimizer`` keep their names and meanings; ``compression`` and
    ``gradient_predivide_factor`` concern what travels uncompressed: exact steps, and tensors with fewer than
    ``recipe.min_compressed_size`` elements. ``groups`` and ``num_groups`` are checked and have no other effect: how
    Horovod fuses exact averages is up to its own settings.

    Args:
        optimizer: ``torch.optim.Adam``, ``AdamW``, ``SGD``, a ``Lion``, or this package's ``LAMB``; any with
            ``schedule=Local(...)`` or ``Gradients()``, or with ``recipe="exact"``. Its state and hyperparameters are
            kept. The result is an instance of its class, and shares ``state`` and ``param_groups`` with it.
        named_parameters: names, the same on every worker; usually ``model.named_parameters()``.
        compression: ``Compression.fp16`` of this module, or Horovod's, halves what exact steps and small tensors send.
        backward_passes_per_step: backward passes whose gradients are added up before one exchange.
        op: ``Average`` or ``Sum`` of this module, or Horovod's.
        gradient_predivide_factor: divides gradients before the sum of an exact mean, which is multiplied by it; the
            mean stays the same. Needs ``Average``.
        sparse_as_dense: turn sparse gradients into dense ones; without it they are refused.
        process_set: over Horovod, the workers that train together; all by default.
        process_group: over ``torch.distributed``, the same: a ``ProcessGroup`` or a ``DeviceMesh`` of one dimension.
            With neither, all workers, over whichever of the two is initialised.
        model: what is trained, if it is in ``DistributedDataParallel``, or a trainer puts it there before its first
            forward pass: gradients are then not averaged there as well (``require_backward_grad_sync`` is set to
            False, at once and before each forward pass, as long as this optimizer lives).
        warmup_steps: optimizer steps that are the optimizer's own with the mean gradient, which travels as
            ``Recipe.warmup`` says; step ``warmup_steps + 1`` is compressed. A number below 1 is a share of
            ``total_steps``. ``"auto"``, the default, starts compression when the learning rate no longer rises and the
            second moment is stable, but at most 210 steps after that rise.
        schedule: ``horovod_onebit.torch.ZeroOne(...)`` makes Adam 0/1 Adam; a ``Stepwise`` of your own says what Adam's
            steps send. With ``horovod_onebit.torch.Local(...)``, ``optimizer`` may be any; each worker takes its steps
            alone, and the changes of the weights are exchanged after some. With ``horovod_onebit.torch.Gradients()``,
            ``optimizer`` may be any, too, and takes its own step with the mean gradient, which travels in three bits an
            element. None has ``warmup_steps``.
        total_steps: optimizer steps of the whole run, where ``warmup_steps`` is a share of them.
        recipe: ``"robust"``, ``"paper"``, ``"fixed"``, or a ``horovod_onebit.Recipe``. ``"exact"`` never compresses:
            each step is the optimizer's own with the mean gradient, as with Horovod's ``DistributedOptimizer``, and
            what this one checks is checked; ``warmup_steps`` then has no effect.
        overlap: send messages during the backward pass. If gradients change between ``backward()`` and ``step()`` (a
            ``GradScaler``, clipping), they are sent in ``step()`` from then on; if they change for the first time after
            they were sent, they are sent again in the warm-up; after it, ``step`` raises on all workers and names this
            option.
        kernels: ``"auto"`` compresses parameters on a GPU there, by the CUDA kernels, where these work; ``"cuda"``
            insists on that; ``"cpu"`` does it in the host's memory.
        check_replicas_every: compare weights and optimizer state of all workers after so many steps, or after the next
            exchange where they differ between exchanges; see ``check_replicas``. None compares in the first step and
            when compression starts only (with ``Gradients()`` and ``recipe="exact"`` in the second step, too, unless
            the optimizer is one of PyTorch's own), False never.
            (``Local`` always compares the weights when its first round begins.)
        exact: names, or patterns as ``"*.embedding.*"``, of parameters that are never compressed: they travel in the
            allreduce of small tensors. With SGD, Lion, ``Local`` and ``recipe="paper"``, those need it that have
            elements whose gradient is always zero (the row of an embedding's ``padding_idx``, masked weights) and that
            must not move at all. A parameter group may say so as well: ``{"params": ..., "exact": True}``.

    Over ``torch.distributed`` the call is collective: build the optimizer on all workers, in the same order. Over
    Horovod it is local.

    Raises:
        UnsupportedError: an optimizer, an option or a parameter that has no 1-bit form.
        ConfigurationError: an invalid argument; a parameter with no name; duplicate names.
        TransportError: over ``torch.distributed``, if another worker has ended, or does not answer.
    """
    _check_plain(optimizer)
    transport = choose(process_set, process_group, call="DistributedOptimizer")
    names, others = names_of(optimizer, named_parameters)
    arguments = Arguments(
        compression=compression, backward_passes_per_step=backward_passes_per_step, op=op,
        gradient_predivide_factor=gradient_predivide_factor, groups=groups_of(groups, num_groups, names),
        sparse_as_dense=sparse_as_dense, transport=transport,
    )  # fmt: skip
    resolved, schedule, warmup = chosen(recipe, schedule, warmup_steps, total_steps)
    adapter = _adapter_of(optimizer, schedule)
    patterns = patterns_of(exact)
    matching("exact", patterns, [*names.values(), *others.values()])
    flag("overlap", overlap)
    replica_interval(check_replicas_every)
    _check_supported(optimizer, adapter, names, model)
    placement = Placement(kernels)
    options: dict[str, Any] = {
        "name": next_name(transport.number, transport.ranks), "recipe": resolved, "names": names,
        "exact": patterns or (), "schedule": None if isinstance(schedule, Gradients) else schedule,
        "placement": placement, "check_replicas_every": check_replicas_every,
    }  # fmt: skip
    if isinstance(adapter, LocalAdapter):
        arguments.check_local()
        wrapped = _instance(optimizer, _LocalOptimizer)
        wrapped._compressor = LocalSteps(wrapped, arguments, adapter=adapter, warmup=warmup, **options)
    else:
        wrapped = _instance(optimizer, _DistributedOptimizer)
        options |= {"overlap": overlap, "adapter": adapter, "warmup": warmup}
        wrapped._compressor = Compressor(wrapped, arguments, **options)
    compressor = wrapped._compressor
    compressor.parameters.expect(others)
    lineage = compressor.parameters.digest(optimizer.state_dict()) if optimizer.state else ""
    run(compressor.check_groups())
    compressor.parameters.lineage = lineage
    _share(optimizer, wrapped)
    averaging.switch_off(model, wrapped, speaks=transport.world[0] == 0)
    return wrapped


STATE_DICTS = {"torch.distributed.checkpoint.state_dict"}
MAKE_STATE = {"horovod.torch.functions", *STATE_DICTS}
"""Modules that call ``step`` of an optimizer without state, to make it."""
REPLACED = {"step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"}
"""Methods that somebody may have replaced in one optimizer."""
_wrappers: Any = weakref.WeakKeyDictionary()
"""Plain optimizer -> what wraps it now, and shares its state."""


def _share(optimizer: torch.optim.Optimizer, wrapped: _DistributedOptimizer) -> None:
    """``wrapped`` has the groups and the state of the plain ``optimizer`` from now on."""
    _wrappers[optimizer] = weakref.ref(wrapped)
    wrapped._compressor.wraps(optimizer)


def _last_wrapper(optimizer: Any) -> _DistributedOptimizer | None:
    """What the plain ``optimizer`` was last wrapped as; None if it was not, or that is gone."""
    found: _DistributedOptimizer | None = _wrappers[optimizer]() if optimizer in _wrappers else None
    return found


def wrapper_of(optimizer: Any) -> Any:
    """What wraps the plain ``optimizer`` and shares its state now, or else ``optimizer``."""
    wrapped = _last_wrapper(optimizer)
    return optimizer if wrapped is None or wrapped._compressor.has_parted else wrapped


def _check_flushed(optimizer: torch.optim.Optimizer) -> None:
    """Raise if another wrapper of ``optimizer`` has taken local steps that were not exchanged. Alike on all workers."""
    before = _last_wrapper(optimizer)
    if before is not None and before._compressor.pending:
        raise ConfigurationError(
            "this optimizer was wrapped before, and its workers' weights differ after local steps: call flush() on "
            "that DistributedOptimizer, on all workers, before you wrap its optimizer again"
        )


def _adapter_of(optimizer: torch.optim.Optimizer, schedule: Schedule | None) -> Adapter:
    if isinstance(schedule, Local):
        return LocalAdapter(schedule, optimizer)
    if not isinstance(schedule, Gradients):
        return adapter_for(optimizer, schedule)
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise UnsupportedError(
            f"{type(optimizer).__name__} computes gradients several times in a step, by a closure, and recipe='exact' "
            "and schedule=Gradients() average those of one backward pass: use schedule=Local(...)"
        )
    return AnyAdapter(optimizer)


def _check_supported(
    optimizer: torch.optim.Optimizer, adapter: Adapter, names: dict[torch.Tensor, str], model: Any
) -> None:
    """Its groups' options, and its parameters; and whether something averages their gradients besides ``model``."""
    for group in optimizer.param_groups:
        adapter.check(group)
    for p, name in names.items():
        if p.requires_grad:
            check_parameter(name, p)
    averaging.check(names, model)


def _instance(optimizer: torch.optim.Optimizer, mixin: type) -> Any:
    """An instance of a subclass of ``optimizer``'s class that shares its state, groups, defaults and hooks."""
    kind = type(optimizer)
    cls = type(kind.__name__, (mixin, kind), {"__module__": __name__, "__doc__": kind.__doc__, "_kind": kind})
    wrapped: Any = object.__new__(cls)
    # A learning-rate scheduler made earlier leaves its own "step" in the instance, bound to the old optimizer.
    skip = {*REPLACED, "_step_supports_amp_scaling"}
    wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key not in skip})
    wrapped._patch_step_function()
    for one in within(wrapped):
        if not hasattr(one, OWNER):
            with suppress(AttributeError):  # of a class that has not called that of PyTorch
                one.register_step_pre_hook(_check_owner)
        setattr(one, OWNER, weakref.ref(wrapped))
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        # That scheduler asks the old optimizer, and would warn that `optimizer.step()` was never called.
        optimizer._opt_called = True  # type: ignore[attr-defined]
    return wrapped


def _check_plain(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"optimizer is {type(optimizer).__name__}; expected a torch.optim optimizer")
    if isinstance(optimizer, _DistributedOptimizer):
        raise ConfigurationError("this optimizer is a DistributedOptimizer already: wrap the plain one")
    if hasattr(optimizer, "_requires_update"):
        raise ConfigurationError(
            "this optimizer is horovod.torch.DistributedOptimizer: wrap the plain torch.optim optimizer instead"
        )
    own = {name: getattr(type(optimizer), name).__get__(optimizer) for name in REPLACED}
    replaced = {name for name, method in own.items() if getattr(optimizer, name) != method}
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # by a scheduler that was made before
        replaced -= {"step"}
    if replaced:
        raise UnsupportedError(
            f"{', '.join(sorted(replaced))} of this optimizer was replaced by another function, and the "
            "DistributedOptimizer has one of its own: wrap the optimizer first, and replace that of what is returned"
        )
    _check_flushed(optimizer)
