"""Saving and loading of checkpoints, whatever the framework: all workers succeed, or all raise the same error.

``save`` and ``load`` are sequences of steps that every worker takes; after each, all learn whether it has failed
anywhere. ``load_alone`` is for one process. A ``Face`` gives and takes mappings of plain values and arrays: one of each
worker, and one that all workers share. A mapping is one file (``checkpoints.archive``), and ``checkpoints.files`` knows
which files are complete.

Nothing replaces a checkpoint before its files have been read back by the code that loads them, and nothing is put
into a model or an optimizer before all workers have checked everything that is to be put there.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from horovod_onebit import checks
from horovod_onebit.checkpoints import archive, files, lock
from horovod_onebit.checkpoints.archive import Converter
from horovod_onebit.checkpoints.files import Complete, Digest
from horovod_onebit.errors import CheckpointArgumentError, CheckpointError, ConfigurationError, error_text, some
from horovod_onebit.feedback import check_kind
from horovod_onebit.world import Residuals, total_residuals

__all__ = ["Face", "check_same", "described", "load", "load_alone", "save"]

logger = logging.getLogger("horovod_onebit")
T = TypeVar("T")
OTHER_WORKERS = "the checkpoint is of %d workers and there are %d: the residuals of all are redistributed"


class Face(ABC):
    """A model and its optimizer in some framework. Only ``gather``, ``flush`` and ``spread`` are collective."""

    rank: int
    workers: int

    kind: str = "step"
    """Of the residuals, as ``horovod_onebit.feedback.kind`` says."""

    framework = "NumPy"
    converter = Converter()

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """The values of all workers, on every worker."""

    def check_arguments(self) -> None:
        """Raise ``ConfigurationError`` unless the model and the optimizer are such as can be saved and loaded."""
        return

    def check_saving(self) -> None:
        """Raise ``ConfigurationError`` if what this worker has now must not be saved: it is not between steps, say."""
        return

    @abstractmethod
    def flush(self) -> None:
        """Bring all workers to the same weights."""

    @abstractmethod
    def steps(self) -> int:
        """Steps taken so far."""

    @abstractmethod
    def owner(self) -> tuple[object, str]:
        """The optimizer, and which parameters it has."""

    @abstractmethod
    def own(self) -> Residuals:
        """What is this worker's: its residuals with all that ``RunState.residuals`` has, and as ``"state"`` what its
        optimizer or model keeps and counts and no other worker has, or None."""

    @abstractmethod
    def shared(self) -> Mapping[str, Any]:
        """What all workers share: the model and its optimizer."""

    def merge(self, everybody: Iterable[Residuals]) -> Residuals:
        """What each worker takes over, from what all of another number of workers saved: read one by one, because of
        the memory that all would need."""
        total = total_residuals(everybody)
        return {"feedback": total, "divisor": None, "served": {}, "encodes": None, "gradients": None, "state": None}

    @abstractmethod
    def about(self, shared: Mapping[str, Any]) -> Any:
        """What all workers check of ``shared``, which worker 0 has read, and what else all get: small, and can be
        pickled."""

    @abstractmethod
    def check(self, about: Any, own: Residuals) -> None:
        """Raise unless what was read fits this worker's model and optimizer; changes nothing."""

    def keep(self) -> Sequence[Callable[[], None]]:
        """Before ``take_over``: what gives back all that it replaces, should it fail on some worker. Local."""
        return []

    @abstractmethod
    def take_over(self, shared: Mapping[str, Any] | None, about: Any) -> None:
        """Put what was read into the model and the optimizer; ``shared`` is None but on worker 0."""

    @abstractmethod
    def spread(self, about: Any, own: Residuals) -> None:
        """Give all workers what worker 0 has, and this one its own."""


def described(arrays: Mapping[str, Any]) -> dict[str, str]:
    """The shape and dtype of each of ``arrays``, or variables, by name."""
    return {name: f"{tuple(array.shape)} {array.dtype}" for name, array in arrays.items()}


def check_same(what: str, saved: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Raise ``ConfigurationError`` unless ``saved`` describes the arrays of ``what`` by their names as ``own`` does."""
    for text, names in (("lacks", own.keys() - saved.keys()), ("also has", saved.keys() - own.keys())):
        if names:
            raise ConfigurationError(f"it is of another {what}: it {text} {some(sorted(names))}")
    for name, expected in own.items():
        if saved[name] != expected:
            raise ConfigurationError(f"it is of another {what}: {name} is {saved[name]} there, expected {expected}")


def save(face: Face, folder: Any, extra: Any) -> None:
    """Save to ``folder``; raises ``CheckpointError`` on all workers if that fails on one. Collective."""

    def begin() -> tuple[Path, str, int, set[str]]:
        face.check_arguments()
        place = checks.folder(folder).absolute()
        face.check_saving()
        if face.rank == 0:
            archive.check(extra, "extra", face.converter)
        else:
            lock.release(place)  # it was worker 0 before other workers came
        return place, os.urandom(8).hex(), face.steps(), lock.keys(place)

    begun = _together(face, "save", "arguments", begin)
    place, key = begun[face.rank][0], begun[0][1]
    _check_steps([steps for _, _, steps, _ in begun])
    face.flush()
    job = set[str]().union(*(keys for *_, keys in begun))
    of_another = _together(face, "save", "folder", lambda: _open(face, place, job))[0]
    try:
        written = _together(face, "save", "files", lambda: _write(face, place, key, extra))
        digests = {name: digest for one in written for name, digest in one.items()}
        lock.saving(place, key)
        _together(face, "save", "end", lambda: _complete(face, place, key, digests, of_another=of_another))
    except CheckpointError:
        files.remove(_own_files(face, place, key))
        face.gather(None)  # nothing of it is left anywhere when the error is raised
        raise
    lock.remember(place, key, key)


def _check_steps(taken: Sequence[int]) -> None:
    """Raise unless all workers have ``taken`` as many steps: with local steps, only some would have to flush."""
    if other := next((worker for worker, steps in enumerate(taken) if steps != taken[0]), None):
        raise CheckpointError(
            f"cannot save the checkpoint; worker 0 has taken {taken[0]} steps, worker {other} {taken[other]}: expected "
            "as many on all workers. Give all workers the same number of batches"
        )


def _open(face: Face, place: Path, job: Collection[str]) -> bool:
    """Whether ``place`` has checkpoints of another run."""
    place.mkdir(parents=True, exist_ok=True)
    if face.rank != 0:
        return False
    of_another = lock.acquire(place, *face.owner(), job)
    files.sweep_leftovers(place)
    return of_another


def _own_files(face: Face, place: Path, key: str) -> list[Path]:
    """Those that this worker writes."""
    own = files.worker_file(place, key, face.rank)
    return [own] if face.rank else [own, files.shared_file(place, key)]


def _write(face: Face, place: Path, key: str, extra: Any) -> dict[str, Digest]:
    """Write this worker's files, read them back as ``load`` does, and return their digests."""
    own, *shared = _own_files(face, place, key)

    def put(path: Path, values: Callable[[], Mapping[str, Any]]) -> Any:
        files.replace(path, lambda temporary: archive.write(temporary, key, values(), face.converter))
        return archive.read(path, key, face.converter)

    saved = put(own, face.own)
    for path in shared:
        face.check(face.about(put(path, lambda: {**face.shared(), "kind": face.kind, "extra": extra})), saved)
    return {path.name: Digest.of(path) for path in (own, *shared)}


def _complete(face: Face, place: Path, key: str, digests: dict[str, Digest], *, of_another: bool) -> None:
    if face.rank == 0:
        files.await_files(place, digests)
        if of_another:
            apart = files.set_aside(place)
            logger.warning("%s had checkpoints of another run: they are in %s now", place, apart)
        files.complete(place, key, face.workers, face.steps(), digests, lock.good(place), face.framework)


def load(face: Face, folder: Any, *, previous: bool) -> Any:
    """Load from ``folder``; returns ``extra``. Collective.

    Raises ``CheckpointError`` on all workers if that fails on one, before anything was changed.
    """

    def begin() -> tuple[Path, list[Complete]]:
        face.check_arguments()
        place = checks.folder(folder).absolute()
        checks.flag("previous", previous)
        return place, _history(place) if face.rank == 0 else []

    begun = _together(face, "load", "arguments", begin)
    place, history = begun[face.rank][0], begun[0][1]

    def choose() -> Complete | None:
        chosen = _choose(place, history, previous)
        if other := _of_another_framework(place, chosen, face.framework):
            raise ConfigurationError(other)
        return None if face.rank else chosen

    chosen: Any = _together(face, "load", "choice", choose)[0]
    same = chosen.workers == face.workers
    mine: list[Any] = []

    def read() -> tuple[Any, ...]:
        own, shared = _read(face, place, chosen)
        mine.extend([own, shared])
        if shared is None:
            return ()
        return face.about(shared), shared["kind"], archive.dumps(shared["extra"], face.converter)

    try:
        about, kind, extra = _together(face, "load", "files", read)[0]
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_hint('load_checkpoint', history, previous)}") from None
    own, shared = mine

    def check() -> None:
        check_kind(kind, face.kind, "the checkpoint was", "load the weights alone: load_weights()")
        face.check(about, own)

    _together(face, "load", "check", check)
    _take_over(face, shared, about)
    face.spread(about, own)
    lock.remember(place, history[0].key, chosen.key)
    if not same and face.rank == 0:
        logger.warning(OTHER_WORKERS, chosen.workers, face.workers)
    return archive.loads(extra, face.converter)


def _take_over(face: Face, shared: Mapping[str, Any] | None, about: Any) -> None:
    """Put what was read into all workers' models, or into none."""
    undo: list[Callable[[], None]] = []

    def take_over() -> None:
        undo.extend(face.keep())
        face.take_over(shared, about)

    try:
        _together(face, "load", "model", take_over)
    except CheckpointError:
        for give_back in undo:
            with suppress(Exception):  # of a user's hook, say, once more
                give_back()
        raise


def load_alone(
    folder: Any,
    only: Iterable[str],
    check_model: Callable[[], object],
    take_over: Callable[[dict[str, Any]], object],
    face: type[Face],
    *,
    previous: bool,
) -> None:
    """Call ``take_over`` with what a complete checkpoint has of the names ``only`` of ``Face.shared``. Local.

    Raises ``CheckpointArgumentError`` if an argument is wrong, and ``CheckpointError`` if anything else fails.
    """
    try:
        place = checks.folder(folder).absolute()
        checks.flag("previous", previous)
        check_model()
    except ConfigurationError as error:
        raise CheckpointArgumentError(f"cannot load the weights; {error}") from error
    history: Sequence[Complete] = []
    try:
        for last in (False, False, True):
            history = _history(place)
            chosen = _choose(place, history, previous)
            try:
                path = _checked(place, chosen, files.shared_file(place, chosen.key))
                shared = archive.read(path, chosen.key, face.converter, only)
                break
            except FileNotFoundError:  # a job that saves may just have moved it
                if last:
                    raise
        take_over(shared)
    except Exception as error:
        other = _of_another_framework(place, history[previous], face.framework) if len(history) > previous else ""
        hint = f". But {other}" if other else _hint("load_weights", history, previous)
        raise CheckpointError(f"cannot load the weights; {error_text(error)}{hint}") from error


def _hint(call: str, history: Sequence[Complete], previous: bool) -> str:
    """What to do about a checkpoint that cannot be read."""
    if previous or len(history) < 2:
        return ""
    return f". The checkpoint before, of step {history[1].step}, is kept: {call}(..., previous=True)"


def _choose(place: Path, history: Sequence[Complete], previous: bool) -> Complete:
    if previous and len(history) < 2:
        raise FileNotFoundError(f"previous=True: {place} has one checkpoint, of step {history[0].step}")
    return history[previous]


FACES = {"PyTorch": "horovod_onebit.torch", "Keras": "horovod_onebit.tf", "NumPy": "horovod_onebit.checkpoint"}


def _of_another_framework(place: Path, chosen: Complete, framework: str) -> str:
    """What is wrong with a checkpoint that another face than that of ``framework`` saved; "" if this one did."""
    if chosen.framework in ("", framework):
        return ""
    path = files.find(place, files.shared_file(place, chosen.key).name)
    return (
        f"the checkpoint of step {chosen.step} is of {chosen.framework}, expected one of {framework}: load it with "
        f"{FACES.get(chosen.framework, chosen.framework)}, or take the arrays model/... from numpy.load({str(path)!r})"
    )


def _history(place: Path) -> list[Complete]:
    if found := files.history(place):
        return found
    raise FileNotFoundError(f"{place / files.LATEST} does not exist: there is no complete checkpoint")


def _read(face: Face, place: Path, chosen: Complete) -> tuple[Residuals, dict[str, Any] | None]:
    """This worker's share of the checkpoint ``chosen``, and on worker 0 what is for all."""

    def read(path: Path) -> dict[str, Any]:
        return archive.read(_checked(place, chosen, path), chosen.key, face.converter)

    if chosen.workers == face.workers:
        own = read(files.worker_file(place, chosen.key, face.rank))
    else:
        own = face.merge(read(files.worker_file(place, chosen.key, rank)) for rank in range(chosen.workers))
    return own, None if face.rank else read(files.shared_file(place, chosen.key))


def _checked(place: Path, chosen: Complete, path: Path) -> Path:
    """Where a file of ``chosen`` is now, which is as it was saved."""
    name, path = path.name, files.find(place, path.name)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: is this the folder that all workers saved to?")
    if name not in chosen.files:
        raise ValueError(f"{place / files.LATEST} is damaged: it has no digest of {name}")
    files.check(path, chosen.files[name])
    return path


def _together(face: Face, call: str, step: str, action: Callable[[], T]) -> list[T]:
    """Do ``action`` on every worker; returns all results. Collective.

    If it fails on one, raises ``CheckpointError`` on all; or ``CheckpointArgumentError`` if arguments are wrong.
    """
    result, error, kind = None, "", ""
    try:
        result = action()
    except Exception as caught:
        error, kind = error_text(caught), CheckpointError.__name__
        if isinstance(caught, ConfigurationError) and step == "arguments":
            kind = CheckpointArgumentError.__name__
    answers = face.gather((call, step, error, kind, result))
    calls = [answer[:2] for answer in answers]
    if len(set(calls)) > 1:
        who = ", ".join(f"worker {rank}: {call}_checkpoint" for rank, (call, _) in enumerate(calls[:8]))
        raise CheckpointError(f"the workers do not call the same function: {who}")
    failed = [f"worker {rank}: {answer[2]}" for rank, answer in enumerate(answers) if answer[2]]
    if failed:
        arguments = {answer[3] for answer in answers if answer[2]} == {CheckpointArgumentError.__name__}
        more = f" (and {len(failed) - 3} more)" if len(failed) > 3 else ""
        text = f"cannot {call} the checkpoint; {'; '.join(failed[:3])}{more}"
        raise CheckpointArgumentError(text) if arguments else CheckpointError(text)
    return [answer[4] for answer in answers]
