"""Tasks: what they wait for, what they are sent, and what becomes of errors."""

import pytest

from horovod_onebit.tasks import run


class Handle:
    def __init__(self, result):
        self.result = result

    def ready(self):
        return True

    def wait(self):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def test_a_task_is_sent_what_it_waits_for():
    def inner(number):
        return (yield Handle(number)) + 1

    def outer():
        one = yield from inner(1)
        return one, (yield Handle("two"))

    assert run(outer()) == (2, "two")


def test_a_task_that_waits_for_nothing():
    def task():
        return 3
        yield

    assert run(task()) == 3


def test_an_error_of_a_collective_is_the_tasks_to_handle():
    cleaned = []

    def task(handles):
        try:
            yield Handle(ValueError("lost"))
        except ValueError:
            cleaned.append(1)
        if handles:
            return (yield Handle("went on"))
        yield Handle(KeyError("again"))

    assert run(task(True)) == "went on"
    with pytest.raises(KeyError, match="again"):
        run(task(False))
    assert cleaned == [1, 1]


def test_an_error_of_the_task_ends_it():
    def task():
        yield Handle(1)
        raise RuntimeError("wrong")

    with pytest.raises(RuntimeError, match="wrong"):
        run(task())
