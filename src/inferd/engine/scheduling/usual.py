"""The usual time of a step, by its tokens. Pure: time is an argument.

Steps of about the same composition are compared: their number of tokens of each kind agrees within a factor of two. A
plane over the tokens converts seconds between such steps, and divides them among the tokens:

    seconds = fixed + prefill * tokens of prefill + decode * decodes + context * tokens before the step's

It is fitted to the means of the compositions, each of which counts alike whatever number of steps it had. So the cost
of a token alone is known through hours in which no step has one token. (The scheduler's ``cost.StepCost`` follows the
last steps instead: it plans the next one.)

A step that took much longer than usual is slow: the device is throttled, or other programs take its time. Slow steps
change what is usual little by little, so that a change that stays becomes usual after about ten minutes.
"""

from __future__ import annotations

SLOW = 1.25  # times the usual time: a step that takes longer is slow; below this it is ordinary noise
_SHORT = 512  # tokens of context; fewer make no difference
_YOUNG = 4  # steps of a composition from which its usual time is known
_SHARE = 1.0 / 8  # of an ordinary step in the means of its composition
_ABSORBED_S = 600.0  # seconds after which most of the time of slow steps counts as usual
_FIT_EVERY = 64  # steps; sooner while there are few
_SWEEPS = 32  # over the plane's four numbers in a fit, from the last plane on
_LEAST_S = 1e-9  # of a step, so that no step takes no time


class _Composition:
    """Means over steps of about the same tokens."""

    __slots__ = ("at", "context", "decodes", "num_steps", "prefill_tokens", "seconds")

    def __init__(self) -> None:
        self.at = 0.0  # when the last of them ended
        self.num_steps = 0
        self.seconds = self.prefill_tokens = self.decodes = self.context = 0.0


class UsualCost:
    """``find`` gives the usual seconds of a step; ``record`` learns from it afterwards."""

    __slots__ = (
        "_compositions",
        "_found",
        "_next_fit",
        "_num_steps",
        "context",
        "decode",
        "fixed",
        "plane_s",
        "prefill",
    )

    def __init__(self) -> None:
        self._compositions: dict[tuple[int, int, int], _Composition] = {}
        self._found = _Composition()
        self._num_steps = 0
        self._next_fit = _YOUNG
        # The plane. Before it is known, every token counts alike.
        self.fixed, self.prefill, self.decode, self.context = 0.0, 1.0, 1.0, 0.0
        self.plane_s = 0.0

    def find(self, prefill_tokens: int, decodes: int, context: int) -> float | None:
        """The usual seconds of a step; None: not known. ``context``: the sum of the tokens before the step's.

        Sets ``plane_s``, the seconds in the plane.
        """
        key = (prefill_tokens.bit_length(), decodes.bit_length(), (context // _SHORT).bit_length())
        found = self._compositions.get(key)
        if found is None:
            found = self._compositions[key] = _Composition()
        self._found = found
        self.plane_s = plane_s = self._plane_of(prefill_tokens, decodes, context)
        mean_s = self._plane_of(found.prefill_tokens, found.decodes, found.context)
        return found.seconds * plane_s / mean_s if found.num_steps >= _YOUNG else None

    def record(
        self, prefill_tokens: int, decodes: int, context: int, seconds: float, now: float, *, is_slow: bool
    ) -> None:
        """Learn from the step for which ``find`` was called last, and which ended at ``now``."""
        found = self._found
        since_s, found.at = now - found.at, now
        if is_slow:
            mean_s = self._plane_of(found.prefill_tokens, found.decodes, found.context)
            as_mean_s = seconds * mean_s / self.plane_s
            found.seconds += (as_mean_s - found.seconds) * min(_SHARE, max(since_s, 0.0) / _ABSORBED_S)
            return
        found.num_steps += 1
        share = max(_SHARE, 1.0 / found.num_steps)
        found.seconds += (seconds - found.seconds) * share
        found.prefill_tokens += (prefill_tokens - found.prefill_tokens) * share
        found.decodes += (decodes - found.decodes) * share
        found.context += (context - found.context) * share
        self._num_steps += 1
        if self._num_steps >= self._next_fit:
            self._next_fit += min(self._num_steps, _FIT_EVERY)
            self._fit(now)

    def _fit(self, now: float) -> None:
        """The plane that is nearest to the compositions' means, in shares of their seconds: least squares over numbers
        that are not below 0, by coordinate descent."""
        rows = []
        for found in self._compositions.values():
            if found.num_steps:
                weight = min(found.num_steps, _YOUNG) * _ABSORBED_S / (_ABSORBED_S + now - found.at)
                rows.append((weight / found.seconds**2, found))
        sums = [0.0] * 14  # of the products of the regressors with each other, and with the seconds
        for weight, found in rows:
            prefill, decodes, context, seconds = found.prefill_tokens, found.decodes, found.context, found.seconds
            products = (
                *(1.0, prefill, decodes, context, prefill * prefill, prefill * decodes, prefill * context),
                *(decodes * decodes, decodes * context, context * context),
                *(seconds, prefill * seconds, decodes * seconds, context * seconds),
            )
            sums = [total + weight * product for total, product in zip(sums, products, strict=True)]
        n, p, d, c, pp, pd, pc, dd, dc, cc, y, py, dy, cy = sums
        fixed, prefill, decode, context = self.fixed, self.prefill, self.decode, self.context
        for _ in range(_SWEEPS):
            prefill = max((py - p * fixed - pd * decode - pc * context) / pp, 0.0) if pp else prefill
            decode = max((dy - d * fixed - pd * prefill - dc * context) / dd, 0.0) if dd else decode
            context = max((cy - c * fixed - pc * prefill - dc * decode) / cc, 0.0) if cc else context
            fixed = max((y - p * prefill - d * decode - c * context) / n, _LEAST_S)
        self.fixed, self.prefill, self.decode, self.context = fixed, prefill, decode, context

    def _plane_of(self, prefill_tokens: float, decodes: float, context: float) -> float:
        """The seconds of a step in the plane."""
        return self.fixed + self.prefill * prefill_tokens + self.decode * decodes + self.context * context
