"""A run on loopback tcp with a proxy between every two of its processes, and every fault at every connection, two at a time: exactly completed."""

from __future__ import annotations

import os
import random
import socket
import time

from proxy import Fault, Proxy
from test_losses import check_nothing_twice
from whole_run import RIGHT, WRONG, Run

STEPS = 24
LONG_S = 5.0  # longer than a lease (3 s), a claim and the patience with an engine (4 s)


def free_ports(n: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def committed(run: Run) -> int:
    """Steps so far, without a process that reads them: there is no time for it here."""
    events = run.dir / "events.jsonl"
    return events.read_text().count('"kind":"step",') if events.exists() else 0


def test_every_fault_at_every_connection(run: Run) -> None:
    seed = int(os.environ.get("GYRE_SEED") or random.SystemRandom().randrange(10**6))
    print(f"seed {seed}: GYRE_SEED={seed} repeats the faults")
    rng = random.Random(seed)
    text = run.config.read_text().replace("steps = 4", f"steps = {STEPS}").replace("claim_ttl_s = 5", "claim_ttl_s = 4")
    run.config.write_text(text.replace("[net]", "[net]\nengine_timeout_s = 4"))
    run.script(RIGHT, WRONG, delay_s=0.05)
    buffer, core, engine = free_ports(3)
    proxy = Proxy(
        core_buffer=buffer, satellite_buffer=buffer, sandbox_buffer=buffer, satellite_core=core, engine_core=core, sandbox_engine=engine
    )  # fmt: skip
    via = {name: f"tcp://127.0.0.1:{link.port}" for name, link in proxy.links.items()}
    orders = {name: rng.sample([f for f in Fault if f is not Fault.NONE], len(Fault) - 1) for name in via}
    rounds = [rng.sample([(name, order[n]) for name, order in orders.items()], len(via)) for n in range(len(Fault) - 1)]
    pairs = [pair for faults in rounds for pair in zip(faults[::2], faults[1::2], strict=True)]
    try:
        run.start("buffer", "--bind", f"tcp://127.0.0.1:{buffer}")
        run.start("train", "--cell", "core", "--bind", f"tcp://127.0.0.1:{core}", "--buffer", via["core_buffer"])
        satellite = ("--role", "satellite", "--cell", "sat", "--train", via["satellite_core"], "--buffer", via["satellite_buffer"])
        run.start("train", *satellite, name="sat")
        run.start("rollout", "--bind", f"tcp://127.0.0.1:{engine}", "--train", via["engine_core"])
        run.start("sandbox", "--buffer", via["sandbox_buffer"], "--rollout", via["sandbox_engine"])
        run.until(lambda: committed(run) >= 1, "the first step")
        for n, (one, two) in enumerate(pairs):
            for name, fault in (one, two):
                proxy.links[name].fault = fault
            time.sleep(LONG_S if n % 4 == 0 else rng.uniform(0.3, 1.5))
            for name in via:
                proxy.links[name].fault = Fault.NONE
            before = committed(run)
            assert before < STEPS, f"a machine so quick that the run ended before {one} and {two}"
            if n % 4 == 0:
                run.until(lambda before=before: committed(run) > before, f"a step after {one} and {two}")  # type: ignore[misc]
        assert all(link.passed > 0 for link in proxy.links.values())
        for command in ("train", "sat", "sandbox", "buffer"):
            run.wait(command)
        run.processes["rollout"].terminate()
        run.wait("rollout", 143)
    finally:
        proxy.close()
    check_nothing_twice(run, STEPS)
    assert run.left_behind() == []
