"""The simulator's threads take turns: on one core they hand over eight times faster than between two."""

import os


def stay_on_one_core(number=0):
    """Let this process have one core only: the one of that number among those that it has, in turn."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})
