"""Pace: how many prompt tokens a step may have, and how long a wait will be, by the time that steps have taken."""

MIN_PROMPT_TOKENS = 16  # of a step, however slow it is: prompts always go on
MARGIN = 0.9  # of the time between tokens, used by steps with prompt tokens
GROWTH = 1.1  # of the budget, after a step that kept well within the time
TELLING = 256  # prompt tokens of a step from which on they are what it spends its time on
MEMORY = 0.9  # weight of the past in the running means


class Pace:
    """`prompt_tokens`: how many a step with decoding rows may have, at most `most`, so that it takes `tpot_slo`.

    Times are seconds of the scheduler's clock.
    """

    def __init__(self, most: int, tpot_slo: float | None):
        self.prompt_tokens = most
        self._most = most
        self._tpot_slo = tpot_slo
        self._prompt_seconds = self._prompt_tokens = 0.0  # of recent steps, the older the less
        self._seconds_per_admission: float | None = None
        self._last_admission: float | None = None  # after which others waited

    def step_took(self, seconds: float, prompt_tokens: int, decoding: int) -> None:
        """A step's result has come `seconds` after the one before, or after its launch if nothing was in flight."""
        if not prompt_tokens:
            return
        if prompt_tokens >= TELLING:
            self._prompt_seconds = MEMORY * self._prompt_seconds + seconds
            self._prompt_tokens = MEMORY * self._prompt_tokens + prompt_tokens
        if self._tpot_slo is None or not decoding:
            return
        aim = MARGIN * self._tpot_slo
        if seconds > aim:
            self.prompt_tokens = max(MIN_PROMPT_TOKENS, int(min(prompt_tokens, self.prompt_tokens) * aim / seconds))
        elif seconds < MARGIN * aim and prompt_tokens >= self.prompt_tokens / GROWTH:
            self.prompt_tokens = min(self._most, int(self.prompt_tokens * GROWTH) + 1)

    def admitted(self, count: int, now: float, queued: bool) -> None:
        """`count` sequences were admitted; `queued`: others still wait, and the next admission is as soon as can be."""
        if self._last_admission is not None:
            seconds = (now - self._last_admission) / count
            mean = seconds if self._seconds_per_admission is None else self._seconds_per_admission
            self._seconds_per_admission = mean + (1 - MEMORY) * (seconds - mean)
        self._last_admission = now if queued else None

    def prompt_time(self, prompt_tokens: int) -> float:
        """Seconds to compute a prompt; 0 as long as nothing is known."""
        return prompt_tokens * self._prompt_seconds / self._prompt_tokens if self._prompt_tokens else 0.0

    def queue_time(self, ahead: int) -> float:
        """Seconds until as many as are ahead have been admitted; 0 as long as nothing is known."""
        return ahead * (self._seconds_per_admission or 0.0)
