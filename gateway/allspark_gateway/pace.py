"""How often a stream is answered while many are read.

An answer costs a good part of a millisecond of CPU whether it carries one token or ten, and the engine may
share that CPU. So beyond a rate of answers, tokens are gathered, and all streams are answered in one tick:
their looks at Redis then share a round trip and their answers a turn of the loop.
"""

ANSWERS_PER_S = 50
SHORTEST_S = 0.01  # gathering for less is not worth a timer


class Pace:
    """Counts the streams that are read and spaces their answers; `gather_s` bounds the space."""

    def __init__(self, gather_s: float) -> None:
        self._gather_s = gather_s
        self._second = 0
        self._num_streams = 0  # read in this second so far
        self._num_before = 0  # read in the second before

    def enter(self, last_call_s: float, now_s: float) -> None:
        """A stream is read again; `last_call_s` is when it was read before."""
        second = int(now_s)
        if second != self._second:
            self._num_before = self._num_streams if second == self._second + 1 else 0
            self._second, self._num_streams = second, 0
        if last_call_s < second:
            self._num_streams += 1

    def pause_s(self, last_answer_s: float, now_s: float) -> float:
        """Seconds from now until a stream that was answered then is due again; 0 or less: it is."""
        num_streams = max(self._num_streams, self._num_before)
        wanted_s = min(self._gather_s, num_streams / ANSWERS_PER_S)
        if wanted_s < SHORTEST_S or last_answer_s + wanted_s <= now_s:
            return 0.0
        tick_s = SHORTEST_S
        while tick_s * 2 <= wanted_s:
            tick_s *= 2
        # The first common tick that is more than half a tick after the last answer.
        return (last_answer_s + tick_s / 2) // tick_s * tick_s + tick_s - now_s
