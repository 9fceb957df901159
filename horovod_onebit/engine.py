"""One compressed step: rule -> feedback -> exchange -> rule, bucket by bucket.

send     1. the rule encodes each tensor of the bucket into one message: scales and bits
         2. the message starts on its way (from a GPU, once it has arrived); the next bucket is encoded, or the
            backward pass continues, meanwhile
agree    3. the workers agree on what they are about to do, or every worker raises; whether all gradients were finite
receive  4. a bucket's messages are there, and are what this step expects
         5. the rule decodes the mean and moves the weights; or all is taken back
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_onebit import exchange, handshake, rest, wire
from horovod_onebit.averages import all_finite, start_mean
from horovod_onebit.errors import NonFiniteError, OnebitError, WireError, workers
from horovod_onebit.exchange import Arrival, Collectives, Exchange, Gradient, Lane, Outgoing, Predict, Travel, choose
from horovod_onebit.feedback import SERVER_PREFIX, ErrorFeedback, held_back
from horovod_onebit.formulas import remainder
from horovod_onebit.handshake import Finite, ask
from horovod_onebit.kernels import backend
from horovod_onebit.kernels.reference import Array, Arrays
from horovod_onebit.layout import Bucket, Layout, Piece, TensorSpec
from horovod_onebit.layout import plan as lay_out
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules import Context, Rule, Tensor, finish_step, largest_scale, norms_of
from horovod_onebit.schedule import Sends
from horovod_onebit.stats import Stats, Times, Traffic, allreduce_bytes
from horovod_onebit.tasks import Handle, Task, start
from horovod_onebit.world import ResidualLayout, Residuals, total_residuals

logger = logging.getLogger("horovod_onebit")


@dataclass(frozen=True)
class Plan:
    """One step, as it is decided before anything of it is sent: its number, what it sends, the rules by tensor, and
    whether the workers have looked (``Engine.look``) before its first message.

    Buckets may be sent early by another plan than the one by which the step is received. The two may differ only in the
    learning rates, and in nothing where momenta are velocities.
    """

    number: int
    sends: Sends
    rules: tuple[Rule, ...]
    looked: bool = False

    @property
    def leaves_early(self) -> bool:
        """Whether its messages may leave before the workers have agreed: they are encoded of gradients alone."""
        return self.sends in (Sends.CONTRIBUTION, Sends.GRADIENT)


class Generation:
    """Part of the names of messages, so that only workers with the same generation exchange them: the names of
    cancelled messages may still be in use. It counts how often all workers have cancelled together, and how often this
    worker alone has cancelled since; ``text`` is both."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """There are other workers now, which have cancelled nothing."""
        self._by_all = self._by_me = 0
        self.text = "0.0"

    def cancelled(self, *, by_all: bool, under_way: bool) -> None:
        """Count a cancellation: one by all workers, or, if messages were ``under_way``, one by this worker."""
        if by_all:
            self._by_all, self._by_me = self._by_all + 1, 0
        else:
            self._by_me += under_way
        self.text = f"{self._by_all}.{self._by_me}"


class _Sent:
    """A bucket under way, with all that is needed to apply it or to take it back.

    Attributes:
        sure: whether the step can be taken if all messages are finite: no server's sum can overflow.
        encoded: the message that was written, and of what gradients; None as long as there is none.
        waiting: what its way is waiting for.
        stage: how many collectives have been waited for.
        arrived: the messages of all; None as long as they are not here.
    """

    def __init__(self, bucket: Bucket, rules: Sequence[Rule], *, sure: bool) -> None:
        self.bucket = bucket
        self.rules = rules
        self.sure = sure
        self.encoded: tuple[wire.Message, Gradient] | None = None
        self.stage = 0
        self.arrived: wire.Gathered | None = None

    def start(self, travel: Travel) -> None:
        """Begin ``travel``, up to the first thing that it waits for."""
        self._travel = travel
        self.waiting: Handle = next(travel)

    @property
    def arriving(self) -> bool:
        """Whether it waits for nobody else: its message is on its way from a GPU."""
        return isinstance(self.waiting, Arrival)

    def start_held(self) -> None:
        """Start the collective that it waits for, if that is held back."""
        if self.arrived is None:
            start(self.waiting)

    def close(self) -> None:
        """Let go of its collective, which a circle of references would keep. It is not used any more."""
        self._travel.close()
        del self.waiting

    def advance(self, result: Any) -> None:
        """Continue with what it was waiting for, up to the next thing, or to the end."""
        self.stage += not self.arriving
        try:
            self.waiting = self._travel.send(result)
        except StopIteration as end:
            self.arrived = end.value


def part_of(tensors: Sequence[Tensor], piece: Piece) -> Tensor:
    """The elements of ``piece``, as views."""
    tensor = tensors[piece.tensor]
    return tensor if piece.stop - piece.start == tensor.weight.size else tensor.part(piece.start, piece.stop)


def apply(
    messages: wire.Gathered,
    rules: Sequence[Rule],
    tensors: Sequence[Tensor],
    context: Context,
    before: Sequence[Tensor] | None = None,
) -> None:
    """Move the weights of a bucket by the mean of its messages; ``rules`` are by tensor. For ``before`` see
    ``Rule.apply``."""
    with context.kernels.batch():
        for piece in messages.bucket.pieces:
            tensor, old = part_of(tensors, piece), None if before is None else part_of(before, piece)
            coding = context.coding(piece.block_size, messages.bucket.codec)
            at, innovation = wire.RECORDS + piece.bytes.start, messages.innovation
            rules[piece.tensor].apply(tensor, messages.rows, at, coding, context, old, innovation=innovation)


def predictor(rules: Sequence[Rule], tensors: Sequence[Tensor], context: Context) -> Predict:
    """What takes from values of a piece the ``prediction`` of their mean, if the piece's rule has one. ``rules`` are by
    tensor."""
    host = context.kernels.host

    def take(piece: Piece, values: Array) -> None:
        tensor = part_of(tensors, piece)
        predict = rules[piece.tensor].prediction(context)
        if predict is not None:
            variance = None if tensor.variance is None else host(tensor.variance)
            p = rules[piece.tensor].motion(tensor, context).p
            context.kernels.move(remainder(predict), p, Arrays(None, host(tensor.momentum), variance, values, None))

    return take


def variance_of(rules: Sequence[Rule], tensors: Sequence[Tensor], context: Context) -> Callable[[Piece], Array | None]:
    """What gives the second moment of a piece in which elements rest: see ``exchange.Outgoing``."""

    def find(piece: Piece) -> Array | None:
        tensor = part_of(tensors, piece)
        return context.kernels.host(tensor.variance) if rules[piece.tensor].rests(tensor, context) else None

    return find


class Engine:
    """The compressed stage of one worker, over arrays and a ``Collectives``; it knows no framework.

    ``prepare`` says which tensors there are. A step is ``plan``, ``send_rest``, the caller's agreement with the other
    workers (``cancel`` if there is none), ``receive``. Buckets may be sent before it by ``send``,
    in any order, by any of the workers; the rest is done by all workers alike.

    ``name`` is the prefix of all collectives' names. ``what`` is logged with each new layout; None logs nothing.
    ``first_gradients``: numbers of the tensors none of whose elements had had a gradient before the latest compressed
    step, and some of whose have had one since, as far as the workers have looked.

    What is collective is a task (``tasks``). Where buckets go their own ways, after the workers have agreed, a step is
    ``plan``, ``send`` and ``travel`` of some buckets at a time, and ``conclude``.
    """

    def __init__(
        self,
        recipe: Recipe,
        collectives: Collectives,
        *,
        kernels: str = "cpu",
        name: str = "onebit",
        lane: Lane | None = None,
        what: str | None = "1-bit compression",
    ) -> None:
        self.recipe = recipe
        self._what = what
        self.collectives = collectives
        self._lane = lane
        self.name = name
        self._identity = f"{name} {recipe}"
        self.subject = "gradients"  # of which messages are made, in what is said of NaN
        self.context = Context(backend(kernels), recipe, collectives.size)
        self.feedback = ErrorFeedback(self.context.kernels)
        self.exchange = exchange.find("direct")(self.context, collectives, self.feedback, [], 0)
        self.traffic = Traffic()
        self.times = Times()
        self.exchanges = 0
        self.skipped = 0
        self.layout: Layout | None = None
        self.residual_layout: ResidualLayout | None = None  # where it is known
        self.tensors: list[Tensor] = []
        self._messages: list[wire.Message] = []
        self._bytes: list[tuple[int, int]] = []  # of each message: those that leave, and what float32 would need
        self._sent: dict[int, _Sent] = {}
        self._rules: list[Rule] = []
        self._held: dict[int, rest.Resting] | None = None  # before the step that is under way; None where nobody looks
        self.first_gradients: list[int] = []
        self._generation = Generation()
        self._turn: tuple[Any, deque[int]] = None, deque()  # of which step, and the buckets that have not left yet

    def use_kernels(self, kernels: str) -> None:
        """Compute with the backend ``kernels`` from now on."""
        self.context = self.exchange.context = replace(self.context, kernels=backend(kernels))
        self.feedback.kernels = self.context.kernels

    def prepare(
        self, tensors: Sequence[Tensor], rules: Sequence[Rule], details: Sequence[str] | None = None
    ) -> Task[None]:
        """Lay out ``tensors`` and make sure that all workers see the same (collective when anything changed).

        ``rules`` are the rules by tensor, ``details`` anything else by tensor that must agree, as text. Raises
        ``DesyncError`` on every worker if they do not agree.
        """
        texts = details or [""] * len(tensors)
        specs = [
            TensorSpec(t.name, t.weight.size, text, self._place(t)) for t, text in zip(tensors, texts, strict=True)
        ]
        self.tensors, self._rules = list(tensors), list(rules)
        if self.layout is not None and self.layout.tensors == tuple(specs):
            self._make_messages(self.layout)
            return
        on_device = not any(isinstance(tensor.residual, np.ndarray) for tensor in tensors)
        elements = sum(spec.size for spec in specs)
        recipe = yield from choose(self.recipe, elements, self.collectives, rules, on_device=on_device)
        layout = lay_out(specs, recipe, self.collectives.size)
        yield from self._handshake(layout, rules)
        yield from self._take_exchange(exchange.find(recipe.exchange), layout)
        self._messages = []
        self._make_messages(layout)
        self._bytes = [
            (self.exchange.bytes_sent(bucket), allreduce_bytes(4 * bucket.size, self.context.workers))
            for bucket in layout.buckets
        ]
        if self._what is not None:
            text = f"{self._what} of %s parameters in %d tensors, %d messages a step, %s exchange"
            values = f"{layout.size:,}", len(layout.tensors), len(layout.buckets), recipe.exchange
            self.say(logging.INFO, text, *values)

    def _place(self, tensor: Tensor) -> str:
        """With NCCL, a message that one worker has on a GPU and another has not cannot be gathered."""
        there = self.collectives.takes_device_memory and not isinstance(tensor.residual, np.ndarray)
        return "GPU" if there else "host"

    def say(self, level: int, text: str, *values: object) -> None:
        """Log on worker 0, and on one that is outside of the workers; on the others for debugging alone."""
        logger.log(level if self.collectives.rank <= 0 else logging.DEBUG, text, *values)

    def _take_exchange(self, way: type[Exchange], layout: Layout) -> Task[None]:
        """Go on with another exchange; if residuals mean something else to it, redistribute them. Collective."""
        before, left = self.residual_layout, self.residuals() if self.residual_layout is not None else {}
        if before is not None:  # of the same names, and perhaps of other sizes
            self.discard_servers()
        over = self._lane if self._lane is not None and way.of_all else self.collectives
        try:
            self.exchange = yield from way.create(self.context, over, self.feedback, layout.buckets, layout.digest)
        except OnebitError:
            for name in (name for name in left.get("feedback", {}) if name.startswith(SERVER_PREFIX)):
                self.feedback.put(name, left["feedback"][name])
            raise
        self.residual_layout, self.layout = ResidualLayout.of(self.exchange, layout.tensors), layout
        if before is None:
            if self.residual_layout.encodes is not None:
                self._keep_own(self.feedback.state_dict())
            return
        sizes = {name: len(one) for name, one in left["feedback"].items() if not name.startswith(SERVER_PREFIX)}
        changed, alike = yield from self._compare(before != self.residual_layout, sizes)
        if changed:
            yield from self.redistribute(left, sizes if alike else {spec.name: spec.size for spec in layout.tensors})
        else:
            for name in self.exchange.served():
                self.feedback.put(name, left["feedback"].get(name, np.float32(0)))

    def _compare(self, changed: bool, sizes: Mapping[str, int]) -> Task[tuple[bool, bool]]:
        """Whether something has changed for some worker, and whether all have residuals of the same ``sizes``."""
        names = repr(sorted(sizes.items()))
        answers = yield from ask(self.collectives, f"{self.name}.residual_layout", changed=changed, sizes=names)
        return answers.any("changed"), answers.same("sizes")

    def discard_servers(self) -> None:
        """Forget the residuals of this worker as a server of two stages; their sizes go by the number of workers."""
        for name in self.feedback:
            if name.startswith(SERVER_PREFIX):
                self.feedback.discard(name)

    def forget_order(self, name: str) -> None:
        """The elements of the tensor ``name`` are in another order now: what is kept by their places, here and by
        servers, which cannot be told apart, is lost. Local; on all workers alike."""
        self.feedback.reset([name, *(other for other in self.feedback if other.startswith(SERVER_PREFIX))])

    def residuals(self) -> Residuals:
        """Those of this worker now. The arrays are copies."""
        residual_layout = self.residual_layout or ResidualLayout(self.context.workers, {})
        return {"feedback": self.feedback.state_dict(), **residual_layout._asdict()}

    def residuals_replaced(self, residual_layout: ResidualLayout | None) -> None:
        """Declare that the residuals were replaced by others, laid out as ``residual_layout`` says; None if each worker
        has the total of all. Call it on all workers; the next ``prepare`` redistributes them if they are laid out
        otherwise then. Local."""
        self.residual_layout, self.layout = residual_layout, None

    @property
    def workers_changed(self) -> bool:
        """Whether Horovod was restarted with another number of workers, and the engine was not told."""
        return self.context.workers != self.collectives.size

    def leave_world(self, left: Residuals | None) -> Residuals:
        """Horovod was restarted, with other workers: forget what is under way; returns the residuals. Local.

        ``left`` is what an earlier call returned and has not been redistributed yet: then that is what counts.
        """
        if left is None:
            left = self.residuals()
        self.discard_servers()
        self.forget_world()
        return left

    def redistribute(self, left: Residuals, sizes: Mapping[str, int]) -> Task[None]:
        """Give every worker the mean of all residuals: of the tensors of ``sizes``, alike on all. Collective.

        A new worker has left nothing. The residuals of a worker that died are lost: an n-th of those of n workers.
        """
        total = total_residuals([left])
        handles = {}
        for name, size in sorted(sizes.items()):  # in one order on all
            mine = total.get(name, np.zeros(size, np.float32))
            handles[name] = self.collectives.allreduce(mine, f"{self.name}.residuals.{name}")
            self.traffic.add(allreduce_bytes(mine.nbytes, self.collectives.size), 0)
        found = {}
        for name, handle in handles.items():
            found[name] = yield handle
        self._keep_own(found)

    def _keep_own(self, residuals: Mapping[str, Array]) -> None:
        """Keep what this worker encodes of ``residuals``, which all have alike; others of its host encode the rest."""
        kept = dict(residuals)
        if self.layout is not None and self.residual_layout is not None and self.residual_layout.encodes is not None:
            encoded = {spec.name for spec in self.layout.tensors}
            share = np.float32(self.residual_layout.divisor / self.context.workers)  # of what nobody encodes now
            kept = {name: np.zeros_like(one) if name in encoded else one * share for name, one in residuals.items()}
            for name, start, stop in self.residual_layout.encodes:
                if name in kept:
                    kept[name][start:stop] = residuals[name][start:stop]
        for name, residual in kept.items():
            if not name.startswith(SERVER_PREFIX):
                self.feedback.put(name, residual)

    def _make_messages(self, layout: Layout) -> None:
        """Memory for the messages, again when tensors went to another memory."""
        here = [isinstance(tensor.residual, np.ndarray) for tensor in self.tensors]
        on_device = [not any(here[piece.tensor] for piece in bucket.pieces) for bucket in layout.buckets]
        if on_device != [message.on_device for message in self._messages]:
            stay = self.exchange.from_device and self.collectives.takes_device_memory
            self._messages = wire.messages(layout.buckets, on_device, self.context.kernels, stay=stay)

    def _handshake(self, layout: Layout, rules: Sequence[Rule]) -> Task[None]:
        """Raise on all workers alike unless they are about to begin the same ``layout``."""
        tensors = dict[str, object]()
        for spec, rule in zip(layout.tensors, rules, strict=True):
            tensors |= {
                f"the number of elements of {spec.name}": spec.size,
                f"shape, memory order and dtype of {spec.name}": spec.detail,
                f"where messages of {spec.name} are": spec.place,
                f"the algorithm of {spec.name}": rule.name,
            }
        progress: dict[str, object] = {"compressed steps": self.exchanges}
        facts = {"arguments": self.arguments(), "trained": tensors, "progress": progress}
        name, packed = f"{self.name}.handshake", handshake.packed(facts).decode()
        yield from handshake.compare(self.collectives, name, handshake.HANDSHAKE, facts, facts=packed)

    def record(self, *, setup: str, options: str, edited: bool = False, **own: Any) -> NDArray[np.int32]:
        """What this worker tells the others before a call that needs them: see ``handshake.agreement``, also for
        ``own``. Every worker sends it, in one small collective before every such call, whatever it believes, so that
        workers that disagree are told and not stuck.

        ``setup`` is what is trained and how, ``options`` the hyperparameters of this step, ``edited`` whether something
        changed that was sent already.
        """
        return handshake.agreement(
            self.collectives.rank,
            self.collectives.size,
            setup=f"{self._identity} {setup} {self.generation}",
            options=options,
            step=self.exchanges,
            early=self.under_way,
            edited=edited,
            **own,
        )

    def arguments(self) -> dict[str, object]:
        """What of ``record`` was chosen when the optimizer was built, in words."""
        recipe = {f"the recipe's {field.name}": getattr(self.recipe, field.name) for field in fields(self.recipe)}
        return {"the optimizer's number": self.name, **recipe}

    @property
    def generation(self) -> str:
        """See ``Generation``."""
        return self._generation.text

    @property
    def under_way(self) -> bool:
        """Whether messages are."""
        return bool(self._sent)

    def end_step(self) -> None:
        """Close this step's accounts."""
        self.traffic.end_step()
        self.times.end_step()

    def plan(self, sends: Sends, rules: Sequence[Rule]) -> Plan:
        """The next step."""
        return Plan(self.exchanges, sends, tuple(rules))

    def send(self, bucket_index: int, grads: Mapping[int, Array], plan: Plan) -> None:
        """Encode a bucket and start its message. ``grads`` (flat float32) are by tensor number.

        The gradients must stay as they are until the step is over. Local, not collective.
        """
        assert self.layout is not None
        self._progress()
        rules = plan.rules
        if not (self._sent or plan.looked):
            self._notice(rules)
        message = self._messages[bucket_index]
        parts = [(rules[p.tensor], self.tensors[p.tensor], p.block_size) for p in message.bucket.pieces]
        stamp = wire.Stamp(plan.number, self.layout.digest, largest_scale(parts, self.context))

        def gradient(piece: Piece) -> Array:
            return grads[piece.tensor][piece.start : piece.stop]

        sure = not self.exchange.stages or math.isfinite(stamp.largest_scale)
        item = _Sent(message.bucket, rules, sure=sure)

        def encode(message: wire.Message, gradient: Gradient) -> None:
            kernels, pieces = self.context.kernels, message.bucket.pieces
            tensors = [part_of(self.tensors, piece) for piece in pieces]
            with self.times.measure("encode"), ExitStack() as held:
                for piece, tensor in zip(pieces, tensors, strict=True) if shares else ():
                    if (share := shares.get(piece.tensor, 1.0)) < 1:
                        held.enter_context(held_back(tensor.residual, share, kernels))
                with kernels.batch():
                    for piece, tensor in zip(pieces, tensors, strict=True):
                        at, grad = wire.RECORDS + piece.bytes.start, gradient(piece)
                        rules[piece.tensor].encode(tensor, grad, message.row, at, piece.block_size, self.context)
            message.written(stamp)
            item.encoded = message, gradient

        shares = self._shares(message.bucket, rules)
        known = rules, self.tensors, self.context
        predict, variance = predictor(*known), variance_of(*known)
        name = f"{self.name}.bucket.{bucket_index}.{self.generation}"
        way = self.exchange.travel(Outgoing(message, gradient, encode, stamp, name, predict, variance, shares))
        try:
            item.start(way)
        except BaseException:
            self._restore(item)
            raise
        self._sent[bucket_index] = item
        self._leave_in_turn(self.layout, plan.number)
        self.traffic.add(*self._bytes[bucket_index])

    def _shares(self, bucket: Bucket, rules: Sequence[Rule]) -> dict[int, float]:
        """By number of the tensor, how much of its residuals travels; all, of those that are not in it."""
        paced = {piece.tensor for piece in bucket.pieces if rules[piece.tensor].paced}
        return {i: self.share(rules[i], self.tensors[i]) for i in paced}

    def share(self, rule: Rule, tensor: Tensor) -> float:
        """How much of the residuals of ``tensor`` travels with what it has moved."""
        return self.feedback.share(tensor.name, rule.local_rates(tensor)) if rule.paced else 1.0

    def lose(self, rules: Sequence[Rule], tensors: Sequence[Tensor]) -> None:
        """An exchange of ``tensors`` is taken: their residuals are what was lost of it. Local."""
        for rule, tensor in zip(rules, tensors, strict=True):
            if rates := rule.local_rates(tensor):
                self.feedback.lose(tensor.name, rates, self.share(rule, tensor))

    def send_rest(self, grads: Mapping[int, Array], plan: Plan) -> None:
        """Send what of ``plan`` was not sent before, if it may leave now."""
        if plan.leaves_early:
            self._send_all(grads, plan)

    def receive(
        self, grads: Mapping[int, Array], plan: Plan, *, finite: bool = True, certain: bool = False
    ) -> Task[bool]:
        """The rest of the step, after all workers have agreed on it. Collective.

        ``finite`` False says that something all workers know alike (an exact mean, a worker's own word) is not finite;
        ``certain`` that all messages are. Returns whether the step was taken; if any worker had NaN or Inf, none takes
        it, momentum and weights stay as they were, and the error feedback comes back to rounding. Raises
        ``NonFiniteError`` then if the recipe says so. After an error, the caller cancels.
        """
        assert self.layout is not None
        if plan.leaves_early:
            return (yield from self._receive(plan, finite=finite, certain=certain))
        if plan.sends is Sends.MEAN:
            return (yield from self._exact(grads, plan.rules, finite=finite))
        if not finite:
            self.exchanges += 1
            self.say_skipped("the gradients of some worker")
            return False
        with self.times.measure("decode"), self.context.kernels.batch():
            for index, tensor in enumerate(self.tensors):
                plan.rules[index].local_step(tensor, grads[index], self.context)
        if plan.sends is Sends.DISPLACEMENT:
            self._send_all(grads, plan)
            return (yield from self._receive(plan))
        self.exchanges += 1
        self.traffic.add(0, allreduce_bytes(4 * self.layout.size, self.collectives.size))
        for tensor in self.tensors:
            tensor.step += 1
        return True

    def _exact(self, grads: Mapping[int, Array], rules: Sequence[Rule], *, finite: bool) -> Task[bool]:
        """A full-precision step: the mean gradients travel as float32."""
        assert self.layout is not None
        self.exchanges += 1
        host, arriving = self.context.kernels.host, []
        for bucket in self.layout.buckets:
            pieces = [host(grads[piece.tensor][piece.start : piece.stop]) for piece in bucket.pieces]
            arriving.append(start_mean(pieces, self.collectives, f"{self.name}.exact.{bucket.index}", self.traffic))
        arrived, start, decoded = [], time.perf_counter(), self.times.decode
        for arrive in arriving:
            arrived.append((yield from arrive))
        self.waited(start, decoded)
        if not (finite and all(map(all_finite, arrived))):
            self.say_skipped("the mean gradient")
            return False
        means = self.layout.assemble(arrived)
        with self.times.measure("decode"):
            for index, tensor in enumerate(self.tensors):
                rested = rest.resting(tensor, rules[index], self.context)
                rules[index].exact_step(tensor, means[index], self.context)
                first = rest.woken(tensor, rules[index], rested, means[index], self.context)
                if first and index not in self.first_gradients:
                    self.first_gradients.append(index)
        return True

    def flush(self, rules: Sequence[Rule]) -> Task[None]:
        """Bring all workers to the same weights, exactly, after local steps. Collective."""
        waiting = list[tuple[int, Handle]]()
        for index, tensor in enumerate(self.tensors):
            moved = rules[index].moved_alone(tensor, self.context)
            if moved is not None:
                handle = self.collectives.allreduce(moved, f"{self.name}.flush.{index}")
                start(handle)
                waiting.append((index, handle))
                self.traffic.add(allreduce_bytes(moved.nbytes, self.collectives.size), 0)
        for index, handle in waiting:
            total = yield handle
            rules[index].settle(self.tensors[index], total / np.float32(self.collectives.size), self.context)

    @property
    def sent_finite(self) -> Finite:
        """Whether all messages of this step were sent, were finite, and what becomes of them will be."""
        encoded = [item.encoded if not item.arriving else None for item in self._sent.values()]
        if not all(e[0].finite for e in encoded if e is not None):
            return Finite.NO
        all_sent = self.layout is not None and len(encoded) == len(self.layout.buckets) and all(encoded)
        return Finite.YES if all_sent and all(item.sure for item in self._sent.values()) else Finite.UNKNOWN

    def recall(self, grads: Mapping[int, Array], plan: Plan) -> Task[None]:
        """Take back what was sent in this step, by whichever workers. Collective; gradients must be what they were."""
        self._send_all(grads, plan)
        yield from self.travel(self._sent)
        self.rollback()

    def cancel(self, *, by_all: bool = False, restore: bool = True, averages: bool = False) -> None:
        """Take back what was sent and has not arrived: all workers do so together (``by_all``), or this one alone.
        After the first, the next messages have other names on all workers; after the second, on this one, which the
        next agreement finds. Without ``restore`` residuals stay as encoding has left them: they are replaced, or not
        wanted. ``averages``: exact ones are under way, too, which the caller drops. Local."""
        self._generation.cancelled(by_all=by_all, under_way=self.under_way or averages)
        if restore:
            self.rollback()
        else:
            self._drop()

    def forget_world(self) -> None:
        """There are other workers now (Horovod was restarted): lay out and shake hands again. Local."""
        self.layout, self.residual_layout, self._sent = None, None, {}
        self._generation.reset()
        self.context = Context(self.context.kernels, self.recipe, self.collectives.size)

    def _send_all(self, grads: Mapping[int, Array], plan: Plan) -> None:
        assert self.layout is not None
        for index in self._in_turn(range(len(self.layout.buckets))):
            if index not in self._sent:
                self.send(index, grads, plan)
        self.leave(plan)
        self._progress()

    def leave(self, plan: Plan) -> None:
        """Wait until all that was encoded is here, and let it leave: before this worker waits for others, whose GPUs
        may wait for its messages. Local."""
        self._fetch(self._sent.values())
        if self.layout is not None:
            self._leave_in_turn(self.layout, plan.number)

    def progress(self) -> bool:
        """Do what messages under way wait for this worker to do, and wait for none; whether all are here. Local."""
        self._progress()
        last = self.exchange.stages
        return all(item.stage == last and not item.arriving and item.waiting.ready() for item in self._sent.values())

    def _progress(self) -> None:
        """Do what others wait for where that is due."""
        last = self.exchange.stages  # what is received after that, nobody waits for here
        for stage in range(last + 1):
            # What is written on a GPU leaves before anybody waits for others.
            for arriving in (True, False) if stage < last else (True,):
                for item in self._sent.values():
                    if item.stage == stage and item.arriving == arriving:
                        if item.waiting.ready():
                            item.advance(item.waiting.wait())
                        elif arriving:
                            break  # one that was asked for later may be there by now, and would leave before it

    def _fetch(self, items: Iterable[_Sent]) -> None:
        """Wait until what ``items`` have written on a GPU is here, and let it leave. Local."""
        for item in items:
            while item.arriving:
                item.advance(item.waiting.wait())

    def _in_turn(self, buckets: Iterable[int]) -> list[int]:
        """``buckets`` as they leave: in a lane as backward passes complete them, that of the last layers first."""
        return sorted(buckets, reverse=self._lane is not None)

    def _leave_in_turn(self, layout: Layout, number: int) -> None:
        """Let messages of step ``number`` leave before the workers have agreed, as far as all before them have left.
        Local."""
        lane = self._lane
        if lane is None or self.exchange.collectives is not lane or lane.generation != self.generation:
            return
        key = number, self.generation
        if key != self._turn[0]:
            self._turn = key, deque(self._in_turn(range(len(layout.buckets))))
        waiting = self._turn[1]
        while waiting:
            item = self._sent.get(waiting[0])
            if item is None or (item.arriving and not item.waiting.ready()):
                return
            self._release([item])
            waiting.popleft()

    def renew_lane(self) -> None:
        """All workers have agreed: renew the lane if messages were taken back since it was; what is sent then leaves at
        once. Collective if it was so."""
        if self._lane is not None:
            self._lane.renew(self.generation)

    def travel(self, buckets: Iterable[int], land: Callable[[_Sent], None] = lambda item: None) -> Task[None]:
        """Bring ``buckets`` that were sent to everybody, all through one stage before any through the next; each is
        given to ``land`` as soon as it has arrived, or at the end if it had arrived before."""
        items = [self._sent[index] for index in self._in_turn(buckets)]
        self.renew_lane()
        for stage in range(self.exchange.stages):
            self._release(items)
            for item in items:
                if item.stage == stage:
                    item.advance((yield item.waiting))
                    item.start_held()
        self._release(items)
        for item in items:
            if item.arrived is None:
                item.advance((yield item.waiting))
            assert item.arrived is not None, "this exchange waits for more than its stages"
            land(item)

    def release(self) -> None:
        """All workers have agreed on the step, and this one has sent all of it: let it leave, where it is held, in an
        order that is the same on all."""
        self.renew_lane()
        self._release([self._sent[index] for index in self._in_turn(self._sent)])

    def _release(self, items: Iterable[_Sent]) -> None:
        self._fetch(items)
        for item in items:
            item.start_held()

    def rollback(self) -> None:
        """Residuals are what they were before the step. Messages that have not arrived keep their names. Local."""
        for item in self._sent.values():
            self._restore(item)
        self._drop()

    def _drop(self) -> None:
        sent, self._sent = self._sent, {}
        for item in sent.values() if self._lane is not None else ():
            item.close()

    def _receive(self, plan: Plan, *, finite: bool = True, certain: bool = False) -> Task[bool]:
        """Wait for all buckets and move the weights; with ``certain``, each as soon as it is here."""
        rules, opened = plan.rules, list[wire.Gathered]()

        def land(item: _Sent) -> None:
            assert item.arrived is not None
            if not (finite and certain):
                opened.append(item.arrived)
                return
            if not item.arrived.finite.all():
                where = np.flatnonzero(~item.arrived.finite).tolist()
                raise WireError(f"the message of {workers(where)} is not finite, and it said that it would be")
            with self.times.measure("decode"):
                apply(item.arrived, rules, self.tensors, self.context)
            del self._sent[item.bucket.index]  # not to be taken back any more

        start, decoded = time.perf_counter(), self.times.decode
        yield from self.travel(list(self._sent), land)
        self.waited(start, decoded)
        if finite and certain:
            self.exchanges += 1
            return self._finish(rules)
        if finite and all(messages.finite.all() for messages in opened):
            with self.times.measure("decode"):
                for messages in opened:
                    apply(messages, rules, self.tensors, self.context)
        return self.conclude(plan, self.tensors, finite=finite)

    def _notice(self, rules: Sequence[Rule]) -> None:
        """Nothing of this step is encoded yet: take notice of what residuals hold of elements that rest, where it is
        time to ``look``. Encoding changes them, and when that is done may depend on when messages arrive. Local."""
        self._held = None
        if rest.looks(self.exchanges):
            pairs = enumerate(zip(self.tensors, rules, strict=True))
            may_rest = {number: tensor for number, (tensor, rule) in pairs if rule.rests(tensor, self.context)}
            self._held = rest.held(may_rest, self.context) if may_rest else None

    def look(self, rules: Sequence[Rule], *, refuses: bool = False) -> Task[rest.Moves]:
        """The workers have agreed on a step: look for elements that have rested and are to move from the next one on,
        where it is time to; see ``rest.wanted``. Collective."""
        if not self._sent:
            self._notice(rules)
        held, self.first_gradients = self._held, []
        if held is None:
            return {}
        args = held, self.tensors, self.context, self.collectives, self.name, self.traffic
        moves: rest.Moves = yield from rest.wanted(*args, refuses=refuses)
        self.first_gradients = [i for i in moves if held[i].resting == self.tensors[i].weight.size]
        return moves

    def awaken(self, moves: rest.Moves, rules: Sequence[Rule]) -> dict[int, Array]:
        """See ``rest.awaken``; the step in which they were found is over. Local."""
        return rest.awaken(moves, self.tensors, rules, self.context)

    def take_second_moments(self, seconds: Mapping[int, Array]) -> None:
        """Write what ``awaken`` gave to the tensors' own second moments. Local."""
        for number, second in seconds.items():
            self.context.kernels.write(self.tensors[number].variance, second)

    def waited(self, start: float, decoded: float) -> None:
        """Account for what was spent since ``start``, when decoding had taken ``decoded`` seconds, on anything else."""
        self.times.add("exchange", max(0.0, time.perf_counter() - start - (self.times.decode - decoded)))

    def step_into(self, buckets: Iterable[int], tensors: Sequence[Tensor]) -> Task[None]:
        """``travel``, and take the step of each bucket whose messages are all finite: from the engine's tensors to
        ``tensors``, whose momenta and weights are memory for what they become."""

        def land(item: _Sent) -> None:
            if item.arrived is not None and item.arrived.finite.all():
                with self.times.measure("decode"):
                    apply(item.arrived, item.rules, tensors, self.context, self.tensors)

        return self.travel(buckets, land)

    def conclude(self, plan: Plan, tensors: Sequence[Tensor], *, finite: bool = True) -> bool:
        """All buckets have arrived, and ``tensors`` were moved as far as messages are finite: the step is taken if all
        are, and taken back if not. The engine's own tensors are then ``tensors``, if it is taken. Local."""
        self.exchanges += 1
        where = self.refusing
        with self.times.measure("decode"):
            if finite and not where:
                self.tensors = list(tensors)
                return self._finish(plan.rules)
            self.rollback()
        self.say_skipped(f"the {self.subject} of {workers(where) if where else 'some worker'}")
        return False

    @property
    def refusing(self) -> list[int]:
        """The workers of which a message that has arrived is not finite."""
        flags = [item.arrived.finite for item in self._sent.values() if item.arrived is not None]
        everywhere: NDArray[np.bool_] = np.atleast_1d(np.logical_and.reduce(flags, axis=0))
        return list(np.flatnonzero(~everywhere).tolist())

    def refuse(self) -> None:
        """All messages of a step have arrived, and no worker takes it, which is no fault of the gradients. Local."""
        self.exchanges += 1
        self.rollback()

    def _finish(self, rules: Sequence[Rule]) -> bool:
        self._sent = {}
        self.exchange.commit()
        self.lose(rules, self.tensors)
        finish_step(rules, self.tensors, self.context)
        return True

    def count_skipped(self) -> int:
        """Count a skipped step; returns the level at which it is to be logged. The 1st, 2nd, 4th, 8th, ... is a
        warning: a run that diverges skips every step."""
        self.skipped += 1
        return logging.WARNING if self.skipped & (self.skipped - 1) == 0 else logging.DEBUG

    def say_skipped(self, where: str) -> None:
        """Account for a step that all workers skip; raises ``NonFiniteError`` if the recipe says so."""
        level, text = self.count_skipped(), f"NaN or Inf in {where}"
        if self.recipe.on_nonfinite == "raise":
            raise NonFiniteError(f"{text}; nothing was changed. Use on_nonfinite='skip' to skip such steps")
        self.say(level, "%s: step skipped (%d so far)", text, self.skipped)

    def _restore(self, item: _Sent) -> None:
        if item.encoded is None:
            return
        message, gradient = item.encoded
        for piece in message.bucket.pieces:
            tensor = part_of(self.tensors, piece)
            at, grad = wire.RECORDS + piece.bytes.start, gradient(piece)
            item.rules[piece.tensor].restore(tensor, grad, message.row, at, piece.block_size, self.context)

    def stats(self, *, phase: str, step: int, parameters: int, compressed: int, coded: int, norms: bool) -> Stats:
        """A snapshot; the face says what only it knows: steps taken, elements trained, compressed, and in few bits."""
        nan = math.nan
        error, momentum = norms_of(self.tensors, self._rules, self.context) if norms else (nan, nan)
        traffic, times = self.traffic, self.times
        return Stats(
            bytes_sent=traffic.total,
            bytes_received=traffic.total,
            step_bytes_sent=traffic.step,
            step_bytes_received=traffic.step,
            ratio_to_fp32=traffic.fp32_step / traffic.step if traffic.step else 1.0,
            encode_seconds=times.encode,
            exchange_seconds=times.exchange,
            decode_seconds=times.decode,
            phase=phase,
            step=step,
            skipped_steps=self.skipped,
            parameters=parameters,
            compressed_parameters=compressed,
            coded_parameters=coded,
            error_norm=error,
            momentum_norm=momentum,
        )
