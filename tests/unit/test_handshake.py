"""What workers ask each other: every one hears what each has said, and all raise alike."""

import numpy as np
import pytest

from horovod_onebit import handshake, replicas, simulation
from horovod_onebit.errors import DesyncError
from horovod_onebit.handshake import Finite, Mismatch, ask
from horovod_onebit.tasks import run


def test_every_worker_hears_what_each_has_said():
    def worker(collectives):
        rank = collectives.rank
        said = {"skipped": rank == 2, "host": -7 * rank, "recipe": "robust", "model": f"model {rank}"}
        answers = run(ask(collectives, "test", **said))
        return answers.where("skipped"), answers.any("host"), answers.same("recipe"), answers.same("model")

    assert simulation.run(worker, 3) == 3 * [([2], True, True, False)]


def test_workers_that_say_other_fields_are_told():
    def worker(collectives):
        with pytest.raises(DesyncError, match="cannot talk to each other"):
            run(ask(collectives, "test", **({"a": 1} if collectives.rank else {"a": 1, "b": 2})))

    simulation.run(worker, 2)


def test_all_raise_what_differs():
    def worker(collectives):
        answers = run(ask(collectives, "test", step=collectives.rank // 2))
        with pytest.raises(Mismatch, match="the count differs between workers: worker 2 from worker 0"):
            answers.compare({"step": "the count"})

    simulation.run(worker, 3)


def test_replicas_that_differ_are_named_on_all_workers():
    def worker(collectives):
        found = {f"weight {i}": i for i in range(6)}
        run(replicas.check(found, collectives, "test"))
        if collectives.rank == 2:
            found |= {f"weight {i}": 9 for i in range(1, 6)}
        with pytest.raises(DesyncError) as caught:
            run(replicas.check(found, collectives, "test"))
        return str(caught.value)

    (text,) = set(simulation.run(worker, 3))
    for number in (1, 2, 3):
        assert f"weight {number} of worker 2 differs from that of worker 0" in text
    assert "; and 2 more. Broadcast the weights" in text
    simulation.run(lambda collectives: run(replicas.check({"weight": 1}, collectives, "test")), 1)


def test_another_version_is_no_mismatch_that_facts_explain():
    first = handshake.agreement(0, 2, setup="a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "__version__", "0.0.1")
        second = handshake.agreement(1, 2, setup="b")
    with pytest.raises(DesyncError, match="the version of horovod_onebit differs") as caught:
        handshake.read_agreement(first + second, 2)
    assert not isinstance(caught.value, Mismatch)
    assert "Install the same version" in str(caught.value)


def test_a_worker_that_has_left_is_named():
    with pytest.raises(DesyncError, match="worker 1 called"):
        handshake.read_agreement(handshake.agreement(0, 2, setup="a"), 2)


def test_what_an_agreement_says():
    own = [{"finite": Finite(i), "edited": i == 1, "replicas": 0 if i else "x"} for i in range(3)]
    rows = [handshake.agreement(i, 3, setup="a", **said) for i, said in enumerate(own)]
    verdict = handshake.read_agreement(np.sum(rows, axis=0, dtype=np.int32), 3)
    assert [verdict.finite, verdict.certain, verdict.early, verdict.fresh, verdict.loaded] == 5 * [False]
    assert verdict.edited == (1,)


def test_of_replicas_that_some_workers_compare_those_that_differ_are_named():
    rows = [handshake.agreement(i, 4, replicas=said) for i, said in enumerate((0, "x", 0, "y"))]
    with pytest.raises(Mismatch, match="differs between workers: worker 3 from worker 1"):
        handshake.read_agreement(np.sum(rows, axis=0, dtype=np.int32), 4)


def test_facts_that_are_too_many_are_compared_by_a_digest(monkeypatch):
    monkeypatch.setattr(handshake, "MOST_FACTS", 30)

    def facts(**changed):
        shapes = {f"the shape of w{i}": 8 for i in range(100)}
        return {"call": {"what the workers do": "step"}, "trained": shapes | changed}

    rows = [handshake.packed(facts(**{"the shape of w3": 9}), 3), *(handshake.packed(facts(), 3) for _ in range(2))]
    assert max(map(len, rows)) < 1000
    assert handshake.differences("", rows).startswith("the shape of w3 differs between workers: 9 on worker 0, 8 on")
    rows[0] = handshake.packed(facts(**{"the shape of w99": 9}), 3)
    found = handshake.differences("", rows)
    assert found.startswith("what is not listed, the shape of w10 and 89 more, differs between workers")
    assert handshake.differences("nothing", rows[1:]) == "nothing"
