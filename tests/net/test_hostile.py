"""Whatever a process with a key may send, at every kind of server: it is taken, refused or dropped, and never a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hostile import TO, Victim, frames
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.wire.speakers import MAY


@pytest.mark.parametrize("kind", TO)
def test_messages_of_any_content(kind: str, tmp_path: Path) -> None:
    victim, passed = Victim(kind, tmp_path), 0

    allowed = st.sampled_from(list(MAY[kind])).flatmap(lambda speaker: st.tuples(st.just(speaker), frames(MAY[kind][speaker])))

    @settings(max_examples=400, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(allowed | st.tuples(st.sampled_from(list(victim.peers)), frames(TO[kind])))
    def one(said: tuple[str, list[Any]]) -> None:
        nonlocal passed
        passed += victim.take(*said)

    try:
        one()
    finally:
        victim.close()
    assert passed > 20, "what never gets in shows nothing"
