"""Whatever a process with a key may send, at every kind of server: it is taken, refused or dropped, and never a crash."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hostile import TO, Victim, frames
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.wire.codec import encode
from gyre.wire.messages import LeaseTickets
from gyre.wire.speakers import MAY

ENDED = {"op": "RolloutEnded", "id": "e", "rollout_id": "g000000.0", "epoch": 0, "ending": "finished", "reward": 1.0}
NOTE = {"op": "Note", "id": "n", "event": "x"}
NODES = [{"parent": -1, "n_tokens": 1}, {"parent": 0, "n_tokens": 1}]
PATH = {"index": 0, "leaf_class": "main", "trainable": [], "n_tokens": 2, "n_trainable": 0}
ONCE_DEADLY: list[tuple[str, str, dict[str, Any]]] = [
    ("buffer", "sandbox", {**ENDED, "harness_exit": 2**63}),
    ("buffer", "sandbox", {**ENDED, "left_tokens": 2**64 - 1}),
    ("buffer", "sandbox", {**NOTE, "fields": {"a": msgspec.msgpack.Ext(5, b"")}}),
    ("buffer", "sandbox", {**NOTE, "fields": {"a": {None: 1}}}),
    ("buffer", "sandbox", {"op": "LeaseTickets", "id": "l", "n": 1, "wait_s": math.nan}),
    ("buffer", "observer", {"op": "Subscribe", "id": "s", "min_interval_s": math.nan}),
    ("train", "train", {"op": "JoinStep", "id": "j", "cell": "c", "incarnation": "1", "host": "", "wait_s": math.nan}),
    ("train", "rollout", {"op": "PolicyLoaded", "id": "p", "version": [1, 0], "cell": "c", "seconds": math.nan}),
]


@pytest.mark.parametrize(("kind", "speaker", "fields"), ONCE_DEADLY)
def test_what_once_ended_a_server(kind: str, speaker: str, fields: dict[str, Any], tmp_path: Path) -> None:
    victim = Victim(kind, tmp_path)
    arrays = [b""] * 3 if fields["op"] == "RolloutEnded" else []
    try:
        assert not victim.take(speaker, [msgspec.msgpack.encode(fields), *arrays])
        assert victim.server.refusals.counts == {"garbage": 1}
    finally:
        victim.close()


@pytest.mark.parametrize("nodes", [[1, 0], [0, 0], [1]])
def test_a_path_that_is_none_is_refused_before_it_is_kept(nodes: list[int], tmp_path: Path) -> None:
    """It would end the buffer when it is claimed, and again whenever the buffer is started again."""
    victim = Victim("buffer", tmp_path)
    path = {**PATH, "nodes": nodes, "n_tokens": len(nodes)}
    try:
        assert victim.take("sandbox", encode(LeaseTickets(id="l", n=64, wait_s=0.0)))
        assert victim.take("sandbox", [msgspec.msgpack.encode({**ENDED, "nodes": NODES, "trajectories": [path]}), *[bytes(8)] * 3])
        assert victim.ledger.payloads._fds == {} and not list((tmp_path / "run" / "payload").iterdir())
    finally:
        victim.close()


@pytest.mark.parametrize("kind", TO)
def test_messages_of_any_content(kind: str, tmp_path: Path) -> None:
    victim, passed = Victim(kind, tmp_path), 0

    allowed = st.sampled_from(list(MAY[kind])).flatmap(lambda speaker: st.tuples(st.just(speaker), frames(MAY[kind][speaker])))

    @settings(max_examples=400, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(allowed | st.tuples(st.sampled_from(list(victim.peers)), frames(TO[kind])))
    def one(said: tuple[str, list[Any]]) -> None:
        nonlocal passed
        passed += victim.take(*said)
        victim.take(*said)  # the same again

    try:
        one()
    finally:
        victim.close()
    assert passed > 20, "what never gets in shows nothing"
