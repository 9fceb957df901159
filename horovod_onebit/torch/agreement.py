"""Before every call that needs the other workers, all of them compare what they are about to do."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, Protocol

from horovod_onebit import handshake
from horovod_onebit.engine import Engine
from horovod_onebit.errors import ConfigurationError, DesyncError, error_text, workers
from horovod_onebit.face import agreement_name
from horovod_onebit.handshake import Finite, Mismatch, Verdict
from horovod_onebit.tasks import Handle, Task, run
from horovod_onebit.torch.parameters import Parameters
from horovod_onebit.torch.transport import Transport
from horovod_onebit.warmup import Phase

logger = logging.getLogger("horovod_onebit")


class _Threads:
    """Keeps the agreements of one process apart: all optimizers of a process set meet the others under one name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None  # of the lock: a thread's identifier
        self._last: Any = None  # the last thread
        self.agreements: weakref.WeakSet[Agreement] = weakref.WeakSet()

    def cancel(self, agreement: Agreement | None = None) -> None:
        """All workers have found that they disagree, in an ``agreement`` of an optimizer or without one. It need not be
        of the same optimizer on all: what any optimizer has begun is dropped, so that all workers count alike. Local.
        """
        for each in list(self.agreements):
            if each is agreement or each.gradients.recallable:
                each.gradients.cancel(by_all=True)

    def check(self) -> None:
        """Raise if this thread is in an agreement already: what is called now would take that one's place."""
        if self._owner == threading.get_ident():
            raise ConfigurationError(
                "horovod_onebit was called while another of its calls waits for the other workers, by a signal handler "
                "perhaps. Let the handler set a flag, and make the call after the step, on all workers in the same step"
            )

    def enter(self, agreement: Agreement) -> None:
        """Wait for an agreement that another thread has under way. Raises if two threads take turns."""
        self.check()
        self._lock.acquire()
        self._owner = threading.get_ident()
        now, seen, last = threading.current_thread(), agreement.thread, self._last and self._last()
        if seen is not None and seen() is now and last not in (None, now) and last.is_alive():
            self.leave()
            raise ConfigurationError(
                f"DistributedOptimizers are used by turns in the threads {now.name!r} and {last.name!r}: the order of "
                "their steps would not be the same on all workers. Step all optimizers from one thread"
            )
        self._last = agreement.thread = weakref.ref(now)

    def leave(self) -> None:
        self._owner = None
        self._lock.release()


_threads: defaultdict[int, _Threads] = defaultdict(_Threads)


def meet(call: str, transport: Transport, setup: str = "") -> None:
    """``Agreement.meet`` for a worker that has no optimizer to do it with."""
    _threads[transport.number].check()
    try:
        run(handshake.meet(transport.agreement(), agreement_name(transport.number), call, setup))
    except DesyncError:
        _threads[transport.number].cancel()
        raise


@contextmanager
def meeting(call: str, transport: Transport, setup: str = "") -> Iterator[None]:
    """``meet`` after this block, with ``setup``. What a worker finds wrong in it is raised when all have been told: the
    others get a ``DesyncError``."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # less than what is raised here
            meet(call, transport, error_text(error))
        raise
    meet(call, transport, setup)


class Compared(Protocol):
    """The gradients of one optimizer, as far as the workers' agreement is about them; see ``GradientHooks``.

    Attributes:
        recallable: what was begun may be dropped at any time, if all workers do so.
    """

    recallable: bool

    def edited(self) -> bool: ...

    def describe(self) -> str: ...

    def arguments(self) -> dict[str, object]: ...

    def progress(self) -> dict[str, object]: ...

    def send_late(self, reason: str, *, averages: bool = False) -> None: ...

    def cancel(self, *, by_all: bool) -> None: ...


class Agreement:
    """Compares what this worker is about to do with what the others are: ``start``, then ``answer``, for each call.

    It rests on one rule: whatever a worker believes, it starts the agreement before every call that needs the others,
    under the same name, and waits for it before it waits for any collective that depends on what it believes.

    ``check_replicas_every`` is an argument of ``DistributedOptimizer``, which must be the same on all workers, as what
    ``parameters`` and ``gradients`` describe must be.
    """

    def __init__(
        self, engine: Engine, parameters: Parameters, gradients: Compared, transport: Transport,
        check_replicas_every: int | None,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._parameters = parameters
        self.gradients = gradients
        self._arguments = {"check_replicas_every": check_replicas_every}
        self._collectives = transport.agreement()
        self.name = agreement_name(transport.number)
        self._handle: Handle | None = None
        self._verdict = Verdict()
        self._begun = False  # since ``told``
        self._facts: Callable[[], handshake.Facts] = dict  # of the agreement that is under way
        self.thread: weakref.ref[threading.Thread] | None = None  # the one that used it last
        self._threads = _threads[transport.number]
        self._threads.agreements.add(self)

    def start(
        self,
        call: str,
        finite: Finite = Finite.UNKNOWN,
        options: handshake.Facts | None = None,
        gradients: str = "",
        replicas: Mapping[str, int] | None = None,
    ) -> None:
        """Tell the others.

        ``call`` is one of ``handshake.CALLS``, ``finite`` whether this worker's gradients are, ``options`` what else
        must be the same on all workers, ``gradients`` what averaged gradients are now,
        ``replicas`` checksums of weights and state, if they are compared now.
        """
        self.check()
        edited = self.gradients.edited()
        setup = f"{self._parameters.describe()} {self.gradients.describe()} {self._arguments}"
        hyperparameters = f"{self._parameters.hyperparameters()} {options}"
        self._facts = functools.partial(self._in_words, call, options or {}, gradients, replicas or {})
        self._threads.enter(self)
        self._begun = True
        try:
            record = self._engine.record(
                call=call, setup=setup, options=hyperparameters, finite=finite, edited=edited, gradients=gradients,
                replicas=str(replicas) if replicas else 0,
            )  # fmt: skip
            self._handle = self._collectives.allreduce(record, self.name)
        except BaseException:
            self._threads.leave()
            raise

    @contextmanager
    def told(self, call: str) -> Iterator[None]:
        """What this worker finds wrong by itself before the agreement of ``call`` has begun, it raises when all have
        been told: the others get a ``DesyncError``."""
        self.check()
        self._begun = False
        try:
            yield
        except Exception as error:
            if not self._begun:
                self._begun = True  # around this, nobody has to be told again
                logger.error("%s: %s; this worker waits until the others know", call, error_text(error))
                with suppress(Exception):  # less than what is raised here
                    run(self.meet(call, setup=error_text(error)))
                    self._threads.cancel(self)  # all workers have found the same
            raise
        self._begun = False

    def answer(self) -> Task[Verdict]:
        """Wait for the answer, if it is not known yet; raise on all workers alike if they disagree."""
        handle, self._handle = self._handle, None
        if handle is None:
            return self._verdict
        try:
            total = yield handle
            verdict = self._verdict = handshake.read_agreement(total, self._engine.collectives.size)
        except Mismatch as error:
            facts = self._facts()  # before what has been sent is taken back
            self._threads.cancel(self)
            raise (yield from handshake.named(error, facts, self._collectives, self.name)) from None
        except DesyncError:
            self._threads.cancel(self)
            raise
        finally:
            self._threads.leave()
        if verdict.edited:
            self.gradients.send_late("gradients change between backward() and step()", averages=True)
            if self._parameters.phase is Phase.COMPRESSED or verdict.early:
                self.gradients.cancel(by_all=True)
                raise ConfigurationError(
                    f"{workers(verdict.edited)} changed gradients, hyperparameters or what is trained between "
                    "backward() and step(), when its messages were on their way already. Build DistributedOptimizer "
                    "with overlap=False; or clip by optimizer.clip_grad_norm_(); or call optimizer.synchronize() "
                    "before the change. The weights were not changed"
                )
        return verdict

    def _in_words(
        self, call: str, options: handshake.Facts, gradients: str, replicas: Mapping[str, int]
    ) -> handshake.Facts:
        """What ``start`` has told the others."""
        arguments = self._engine.arguments() | self.gradients.arguments() | self._arguments
        facts: dict[str, Any] = {"arguments": arguments}
        for kind, found in chain(self._parameters.facts().items(), options.items()):
            facts[kind] = {**facts.get(kind, {}), **found}
        facts["progress"] |= {"compressed steps": self._engine.exchanges, **self.gradients.progress()}
        averaged = {"what was done to the averaged gradients": gradients}
        return handshake.facts_of(call, **facts, gradients=averaged, replicas=replicas)

    def meet(self, call: str, setup: str | None = None) -> Task[None]:
        """Make sure that all workers make this call now, for the same optimizer (or the same ``setup``). Collective."""
        engine = self._engine
        self._threads.enter(self)
        try:
            setup = engine.name if setup is None else setup
            yield from handshake.meet(self._collectives, self.name, call, setup)
        except DesyncError:
            self._begun = True  # nobody has to be told: all have found it
            self._threads.cancel(self)
            raise
        finally:
            self._threads.leave()

    def check(self) -> None:
        """Before a call that needs the others, which must not begin within another one: see ``_Threads.check``."""
        self._threads.check()

    def reset(self) -> None:
        """The call is over, perhaps by an error."""
        self._verdict = Verdict()
        if self._handle is not None:
            self._handle = None
            self._threads.leave()
