"""The mean of all residuals, counted apart from ``horovod_onebit.world``."""


def total_residuals(everybody, *, servers):
    """By name, from what ``Engine.residuals`` gave on each worker; ``servers`` also counts those of servers."""
    total = {}
    for own in everybody:
        for name, value in own["feedback"].items():
            if not name.startswith("onebit.server."):
                total[name] = total.get(name, 0) + value / len(everybody)
    for own in everybody if servers else []:
        for key, places in own["served"].items():
            start = 0
            for name, lo, hi in places:
                total[name][lo:hi] += own["feedback"][key][start : start + hi - lo]
                start += hi - lo
    return total
