"""In which order waiting requests of a tenant are served: by priority, which grows while they wait. Pure.

A request's effective priority is its priority plus one for every `AGEING_S` it has waited. All grow at the
same rate, so the order between two requests never changes, and a number that is fixed on arrival gives it.
"""

#: Waiting this long makes up for one level of priority: nothing waits for ever behind later requests.
AGEING_S = 10.0


def rank(priority: int, arrived_s: float) -> float:
    """The lowest is served first. `arrived_s`: seconds on any clock that those compared have in common."""
    return arrived_s - AGEING_S * priority
