"""Requests that a coverage-guided fuzzer makes up, against the gateway's endpoint: an answer or an error of the protocol, never a traceback, never a
lost rollout.

`pip install atheris`, then `python tests/fuzz/run.py [SECONDS] [FOLDER]`. The corpus is kept in FOLDER, as is the input that failed. The first byte
of an input says for which request it is and how it is read: as the body itself, or as the choices of the strategies of `test_protocol_fuzz`, which
make of them requests that are nearly right.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import atheris

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "gateway"), str(ROOT / "bench")]
with atheris.instrument_imports(include=["gyre.sandbox.gateway", "gyre.trajectory"]):
    from gyre.sandbox.gateway.endpoint import Endpoint
    from gyre.sandbox.gateway.http import Request, Response
    from gyre.sandbox.gateway.render import Renderer
    from gyre.sandbox.gateway.route import Completion, Job
    from gyre.sandbox.gateway.session import Limits, Session
from gateway_calls import make_renderer
from hypothesis import HealthCheck, given, settings
from test_protocol_fuzz import ENDPOINTS, check, request

from gyre.types import Purpose, Sampling, Ticket, Version

PER_ROLLOUT = 500
TEXT = '<think>\nhm\n</think>\n\nso <tool_call>{"name": "f", "arguments": {"input": "x"}}</tool_call>'


class Rollout:
    """One rollout's endpoint, with an engine that always says the same at once."""

    def __init__(self, renderer: Renderer) -> None:
        self.ids = array("i", [*renderer.template.tokenizer.encode(TEXT).ids, renderer.end_id or 0])
        ticket = Ticket("q/0/0", 0, "q/0", "q", 0, "/task", Purpose.TRAIN, Version(1, 0), 7, 30.0)
        limits = Limits(Sampling(max_tokens=512), 20_000, 1 << 30, 4, time.monotonic() + 1e9)
        self.session = Session(ticket, renderer, self, limits)  # type: ignore[arg-type]
        self.endpoint = Endpoint(self.session)
        self.n = 0

    async def generate(self, job: Job) -> Completion:
        n = len(self.ids)
        return Completion(self.ids, array("f", [-0.5] * n), array("i", [0] * n), "stop", ["c"])

    async def ask(self, path: str, body: bytes) -> tuple[int, bytes]:
        self.n += 1
        response: Response = await self.endpoint(Request("POST", path, {}, body))
        assert isinstance(response.body, bytes)
        return response.status, response.body

    async def end(self) -> None:
        """It is whole: an ordinary call is answered, and all that was sampled is in the graph."""
        status, _ = await self.ask("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "still there?"}]}')
        outcome = await self.session.close()
        assert status == 200 and outcome.trajectories and not self.session.ending.done()
        assert all(c.n_completion == len(self.ids) and c.node >= 0 for c in outcome.calls if c.status.value == "complete")


class Fuzz:
    """What atheris calls with each input."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.renderer = make_renderer()
        self.rollout = self.runner.run(self._begin())
        self.n_done = 0
        self.nearly_right = {path: self._strategy(path, key) for path, key in ENDPOINTS.items()}

    async def _begin(self) -> Rollout:
        return Rollout(self.renderer)

    def _strategy(self, path: str, key: str) -> Any:
        @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(request(key))
        def one(body: bytes) -> None:
            self._one(path, body)

        return one.hypothesis.fuzz_one_input  # type: ignore[attr-defined]

    def _one(self, path: str, body: bytes) -> None:
        check(path, *self.runner.run(asyncio.wait_for(self.rollout.ask(path, body), 60)))
        self.n_done += 1

    def __call__(self, data: bytes) -> None:
        if not data:
            return
        path = list(ENDPOINTS)[data[0] % len(ENDPOINTS)]
        if data[0] & 0x80:
            self._one(path, data[1:])
        else:
            self.nearly_right[path](data[1:])
        if self.rollout.n > PER_ROLLOUT:
            self.runner.run(self.rollout.end())
            self.rollout = self.runner.run(self._begin())


def main() -> None:
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp(prefix="gyre-fuzz-"))
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    argv = [sys.argv[0], str(folder / "corpus"), f"-max_total_time={seconds}", "-max_len=4096", f"-artifact_prefix={folder}/", "-timeout=120"]
    print(f"gyre-fuzz: {seconds} s, corpus and failures in {folder}", file=sys.stderr)
    atheris.Setup(argv, Fuzz())
    atheris.Fuzz()


if __name__ == "__main__":
    main()
