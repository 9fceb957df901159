"""A step as a coroutine: it runs on a thread of its own, and hands over what it wants done instead of waiting for it.

A host function of TensorFlow must not wait for a collective: it occupies one of TensorFlow's threads, perhaps the only
one, and the collective needs one too. The engine is written as if it could wait. So it runs here, and where it would
wait, ``ask`` passes a question to whoever called ``start`` or ``resume``, and sleeps until ``resume`` has the answer.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any


class Abandoned(BaseException):
    """The step will not be resumed. Raised where it sleeps, so that it can clean up."""


@dataclass
class _End:
    """How the work ended."""

    error: BaseException | None = None


@dataclass
class _Talk:
    """The two ends of one run."""

    questions: SimpleQueue = field(default_factory=SimpleQueue)
    answers: SimpleQueue = field(default_factory=SimpleQueue)


_here = threading.local()


def asking() -> bool:
    """Whether this code runs inside a ``Coroutine``."""
    return getattr(_here, "talk", None) is not None


def ask(question: Any) -> Any:
    """Hand ``question`` to the caller of ``start`` or ``resume``; the answer is what ``resume`` is given next."""
    talk = _here.talk
    talk.questions.put(question)
    answer = talk.answers.get()
    if answer is Abandoned:
        raise Abandoned
    return answer


def _serve(jobs: SimpleQueue) -> None:
    while (job := jobs.get()) is not None:
        work, talk = job
        _here.talk = talk
        try:
            work()
            end = _End()
        except BaseException as error:
            end = _End(error)
        _here.talk = None
        talk.questions.put(end)
        del job, work, talk, end


class Coroutine:
    """Runs one function at a time; its thread is made when it is first needed, and again in a forked child."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._jobs: SimpleQueue = SimpleQueue()
        self._talk: _Talk | None = None

    def start(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` to its first question, which is returned; None if it is done.

        What ``work`` raises is raised here, or by ``resume``. A run that was not finished is abandoned.
        """
        self.abandon()
        if self._thread is None or not self._thread.is_alive():
            self._jobs = SimpleQueue()
            # A daemon: a program that ends by an error must not wait for a step that will never be resumed.
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="onebit-step", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        self._talk = _Talk()
        self._jobs.put((work, self._talk))
        return self._next()

    def resume(self, answer: Any) -> Any:
        """Go on with ``answer``; returns and raises as ``start``."""
        assert self._talk is not None, "nothing to resume"
        self._talk.answers.put(answer)
        return self._next()

    def abandon(self) -> None:
        """End a run that will not be resumed, if there is one."""
        talk, self._talk = self._talk, None
        if talk is not None:
            talk.answers.put(Abandoned)
            while not isinstance(talk.questions.get(), _End):
                pass

    def _next(self) -> Any:
        assert self._talk is not None
        said = self._talk.questions.get()
        if not isinstance(said, _End):
            return said
        self._talk = None
        try:
            if said.error is not None:
                raise said.error
        finally:
            del said  # or this frame and the error would keep each other, and all that the step had
        return None
