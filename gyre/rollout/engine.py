"""What an inference engine is to the rest of gyre: token ids in, token ids with log-probs and versions out.

Invariants of every engine (tests/rollout/test_contract.py runs them against each)
- A request is refused at once or completed exactly once, whatever happens: aborted, it is completed with the tokens it has.
- Every token is stamped with the one version whose weights gave its log-prob, under the full prefix, of the distribution it was drawn from: after
  temperature, top-k, top-p (in this order). Greedy (temperature 0) is the point mass: log-prob 0.
- Draw k of a request depends on (seed, k) alone, so a request continued elsewhere, with `drawn` tokens at the end of its prompt, goes on as it would
  have here, and the other requests of a batch do not matter (beyond float noise in the probabilities).
- Requests are bounded: `slots` decode together, `queue` wait, more are refused. Requests that another engine gave back (`moved`) find as much room
  again, kept for them, and join first.
- An update with requests in flight is cancel → drain → pause → update → resume: aborts that have arrived come first, then decoding pauses between
  two tokens, weights change, the keys and values in flight are computed anew with them, and decoding goes on. Nothing is kept across versions.
- Leaving rollout is cancel → drain → pause → sleep: admission closes, everything open is completed as `abort` with what it has, then the weights and
  all keys and values go. Asleep, an engine has no version and refuses everything as `closing`. Awake again it is `behind` until the next load.

Methods may be called from any thread and do not block; futures are completed by the engine's own thread.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final, Literal, Protocol

import msgspec

from gyre.types import Sampling, TensorSpec, Version
from gyre.wire.messages import VersionSpan

FinishReason = Literal["stop", "length", "abort", "context"]
RefuseReason = Literal["full", "closing", "behind", "context", "error"]

INITIAL: Final = Version(0, 0)
"""The weights of model.path, when no trainer publishes any."""


class EngineRequest(msgspec.Struct, frozen=True):
    """Continue `prompt_ids`, whose last `drawn` ids were sampled for this very request elsewhere."""

    request_id: str
    rollout_id: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    seed: int
    drawn: int = 0
    stop_ids: Sequence[int] = ()
    min_version: Version = INITIAL
    moved: bool = False


class Completion(msgspec.Struct, frozen=True):
    """Sampled tokens; `spans` cover them without gaps, in order. The token that ended a `stop` is among them."""

    request_id: str
    finish_reason: FinishReason
    token_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]


class EngineRefused(Exception):
    """The engine does not take a request."""

    def __init__(self, reason: RefuseReason, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason: RefuseReason = reason
        self.detail = detail


class EngineState(msgspec.Struct, frozen=True):
    """A snapshot for gauges and pongs. `generated` counts tokens since the engine began."""

    version: Version | None
    running: int
    queued: int
    free: int  # new requests that would be taken now
    generated: int
    slots: int = 0  # requests decoded together
    gauges: dict[str, float] = {}  # the engine's own, passed on as they are


class Engine(Protocol):
    """The protocol. `context` is the most tokens of prompt and completion together."""

    context: int

    def submit(self, request: EngineRequest) -> Future[Completion]:
        """Take a request. Raises `EngineRefused`."""
        ...

    def abort(self, request_id: str) -> None:
        """Complete a request now, with what it has. Unknown ids are ignored."""
        ...

    def load(self, version: Version, tensors: list[TensorSpec], data: memoryview) -> Future[None]:
        """Serve these weights from now on; done when it is so. The bytes are the engine's until then. An empty list means: those it has."""
        ...

    def drain(self) -> Future[None]:
        """Refuse as `closing` from now on and complete everything open as `abort`; done when nothing is open. Only `wake` opens again."""
        ...

    def sleep(self) -> Future[None]:
        """Drain, then hold neither weights nor keys and values; done when it is so. A `load` before `wake` is refused as `closing`."""
        ...

    def wake(self) -> Future[None]:
        """Make room for weights again and open, `behind` until the next load. Awake already: only open."""
        ...

    def state(self) -> EngineState: ...

    @property
    def stopped(self) -> Future[None]:
        """Done when the engine's thread has ended; its exception is a bug that ended it."""
        ...

    def close(self) -> None:
        """Abort everything and end. Requests after it are refused as `closing`. Blocks until the thread has ended."""
        ...


def check(request: EngineRequest, *, version: Version | None, context: int, open_requests: int, capacity: int, closing: bool) -> None:
    """Refuse what no engine takes. Raises `EngineRefused`, the most lasting reason first."""
    if closing:
        raise EngineRefused("closing", "this engine is closing")
    if not request.prompt_ids or request.drawn < 0 or request.drawn > len(request.prompt_ids):
        raise EngineRefused("error", f"a prompt of {len(request.prompt_ids)} tokens, {request.drawn} of them drawn, cannot be continued")
    if not (0 <= request.sampling.temperature < math.inf and 0 < request.sampling.top_p <= 1):
        raise EngineRefused("error", "temperature must be at least 0 and top_p in (0, 1]")
    if len(request.prompt_ids) >= context:
        raise EngineRefused("context", f"a prompt of {len(request.prompt_ids)} tokens leaves no room in a context of {context}")
    if version is None or version < request.min_version:
        raise EngineRefused("behind", "no version loaded yet" if version is None else f"at version {version.term}.{version.step}")
    if open_requests >= capacity:
        raise EngineRefused("full", f"{open_requests} requests are open")


def uniform(seed: int, k: int) -> float:
    """Draw number k of a request: uniform in [0, 1), from the first 53 bits of blake2b(seed, k)."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed & (2**64 - 1), k), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Transcript:
    """The tokens of one request as they come, and when they are enough."""

    __slots__ = ("_context", "_limit", "logprobs", "request", "spans", "stop_ids", "token_ids")

    def __init__(self, request: EngineRequest, eos_ids: frozenset[int], context: int) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[VersionSpan] = []
        self.stop_ids = eos_ids.union(request.stop_ids) if request.stop_ids else eos_ids
        self._limit = request.sampling.max_tokens
        self._context = context - len(request.prompt_ids)

    @property
    def draws(self) -> int:
        """The number of the next draw."""
        return self.request.drawn + len(self.token_ids)

    @property
    def most(self) -> int:
        """The tokens after which it is finished, whatever they are."""
        return min(self._limit, self._context)

    def add(self, token: int, logprob: float, version: Version) -> FinishReason | None:
        """Append a token; returns why the request is finished, if it is."""
        at = len(self.token_ids)
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = VersionSpan(version, self.spans[-1].start, at + 1)
        else:
            self.spans.append(VersionSpan(version, at, at + 1))
        if token in self.stop_ids:
            return "stop"
        if at + 1 >= self._limit:
            return "length"
        return "context" if at + 1 >= self._context else None

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(self.request.request_id, reason, self.token_ids, self.logprobs, self.spans)
