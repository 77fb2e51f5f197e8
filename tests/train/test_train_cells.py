"""A core with satellites, in one process, against a core alone: the update is the same, whoever adds the gradients."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cells import Cluster, until

from gyre.config import Config
from gyre.wire.messages import NothingToClaim


def config(steps: int = 4, groups: int = 3, mu: int = 1, **train: Any) -> Config:
    return msgspec.convert(
        {
            "system": {
                "groups_per_step": groups, "rollouts_per_group": 2, "steps_per_burst": mu, "target_staleness": 1.0 + (mu - 1) / 2,
            },
            "train": {
                "steps": steps, "lr": 1e-2, "ratio_low": 1e-9, "ratio_high": 1e9, "micro_step_tokens": 1, "claim_ttl_s": 20.0,
                "reduce_timeout_s": 5.0, "checkpoint_every": 0, "logprob_alarm": 1e9, **train,
            },
        },
        Config,
    )  # fmt: skip


async def whole_run(model: Path, cfg: Config, satellites: int, compute_s: float = 0.001) -> Cluster:
    async with Cluster(model, cfg, compute_s=compute_s) as cluster:
        for i in range(satellites):
            cluster.satellite(f"sat{i}")
        cluster.start()
        await cluster.end()
        cluster.final = cluster.weights()  # type: ignore[attr-defined]
    return cluster


def same(a: Cluster, b: Cluster, model: Path) -> None:
    for x, y in zip(a.final, b.final, strict=True):  # type: ignore[attr-defined]
        torch.testing.assert_close(x, y, rtol=0, atol=1e-4)  # a step moves by 1e-2; AdamW divides rounding by itself where a gradient is nearly 0
    start = Cluster(model, a.config).learner().weights
    assert max(float((x - y).abs().max()) for x, y in zip(start, a.final, strict=True)) > 1e-2, "weights that do not move prove nothing"  # type: ignore[attr-defined]


@pytest.mark.pain(18, 30)
@pytest.mark.parametrize(("mu", "groups"), [(1, 3), (2, 3), (3, 1), (2, 5)])
def test_the_update_is_that_of_one_cell(tiny_model: Path, mu: int, groups: int) -> None:
    """pains 18, 30: 1, 2 and 4 cells, sizes that they do not divide, mu in 1, 2, 3: equal weights, and metrics of the whole step."""
    cfg = config(steps=4, groups=groups, mu=mu)
    alone = asyncio.run(whole_run(tiny_model, cfg, 0))
    for satellites in (1, 3):
        cluster = asyncio.run(whole_run(tiny_model, cfg, satellites))
        same(alone, cluster, tiny_model)
        helped = {cell for step in range(1, 5) for cell in cluster.parts(step)}
        assert helped <= {"core", *cluster.cells} and len(helped) > 1, helped  # who is quick enough to claim is left to the machine
        for step in range(1, 5):
            assert sum(cluster.parts(step).values()) == groups * 2
            mine, whole = cluster.board.written[step], alone.board.written[step]
            for name in ("loss", "grad_norm", "entropy", "trainable_tokens", "logprob_diff_mean", "logprob_diff_max", "clip_fraction"):
                assert mine[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), (step, name)
        assert {e["step"] for e in cluster.noted("reduced")} == {
            s for s in range(1, 5) if len(cluster.parts(s)) > 1 or "core" not in cluster.parts(s)
        }


@pytest.mark.pain(18)
def test_a_satellite_that_accumulated_nothing(tiny_model: Path) -> None:
    """It is in no manifest and no reduction, and gets the new weights all the same. A core with nothing updates with what the others have."""

    async def main() -> None:
        async with Cluster(tiny_model, config(steps=2), compute_s=0.1) as cluster:
            idle, busy = cluster.satellite("idle"), cluster.satellite("busy")
            idle.ledger.claim = too_late  # type: ignore[method-assign]
            cluster.core.ledger.claim = too_late  # type: ignore[method-assign]
            cluster.start()
            await cluster.end()
            assert cluster.parts(1) == cluster.parts(2) == {"busy": 6}
            assert all(e["cells"] == ["core", "busy"] for e in cluster.noted("reduced"))
            assert cluster.noted("broadcast")[0]["cells"] == ["busy", "idle"]
            assert (idle.accumulated, cluster.core.accumulated, busy.accumulated) == (0, 0, 12)
            cluster.final = cluster.weights()  # type: ignore[attr-defined]
        same(await whole_run(tiny_model, config(steps=2), 0), cluster, tiny_model)

    asyncio.run(main())


async def too_late(step: int) -> Any:
    """The claim of a cell so slow that all is claimed when it asks."""
    await asyncio.sleep(0.2)
    return NothingToClaim(id="", drained=True)


def test_a_reduction_that_fails_is_done_again(tiny_model: Path) -> None:
    """All cells are there: nobody is voided, nothing is computed again, the accumulators are as they were."""

    async def main() -> None:
        async with Cluster(tiny_model, config(steps=2, reduce_timeout_s=0.3), compute_s=0.003) as cluster:
            cluster.satellite("sat").collective.fails = 1
            cluster.start()
            await cluster.end()
            cluster.final = cluster.weights()  # type: ignore[attr-defined]
            assert [e["attempt"] for e in cluster.noted("reduced")] == [2, 1]
            assert sum(c.accumulated for c in cluster.cells.values()) == 12 and not cluster.buffer.machine.state.meta.voided
        same(await whole_run(tiny_model, config(steps=2), 0), cluster, tiny_model)

    asyncio.run(main())


def test_a_satellite_that_dies_in_the_reduction(tiny_model: Path) -> None:
    """Exactly its micro-steps are computed again; the survivor keeps its own."""

    async def main() -> None:
        async with Cluster(tiny_model, config(steps=2, reduce_timeout_s=0.3, claim_ttl_s=0.6), compute_s=0.003) as cluster:
            cluster.satellite("sat")
            dying = cluster.satellite("dying")

            async def die(*_: Any) -> None:
                cluster.tasks.pop("dying").cancel()
                await asyncio.sleep(60)

            dying.collective.reduce = die  # type: ignore[method-assign]
            cluster.start()
            await cluster.end()
            cluster.final = cluster.weights()  # type: ignore[attr-defined]
            assert cluster.noted("reduced")[0]["attempt"] > 1
            assert [v for v in cluster.buffer.machine.state.meta.voided if not v.startswith("dying")] == []
            assert cluster.cells["sat"].accumulated + cluster.core.accumulated == 12
        same(await whole_run(tiny_model, config(steps=2), 0), cluster, tiny_model)

    asyncio.run(main())


def test_to_rollout_and_back(tiny_model: Path) -> None:
    """Satellites leave in an open step and give back what they hold, join again; the core rests and goes on: the same weights."""

    async def main() -> None:
        async with Cluster(tiny_model, config(steps=3), pace_s=0.01, compute_s=0.003) as cluster:
            sat, core = cluster.satellite("sat"), cluster.core
            cluster.start()
            await until(lambda: sat.accumulated > 0)
            sat.told.turn(False)
            await sat.told.until("idle")
            core.told.turn(False)
            await core.told.until("idle")
            step = cluster.loop.step
            await asyncio.sleep(0.1)
            assert cluster.loop.step == step, "a step does not end without its core"
            sat.told.turn(True)
            await sat.told.until("training")
            await until(lambda: sat.accumulated >= 4)  # it takes part while the core rests: snapshots go on being lent
            core.told.turn(True)
            await core.told.until("training")
            await cluster.end()
            cluster.final = cluster.weights()  # type: ignore[attr-defined]
            assert sat.told.phases[:3] == ["joining", "training", "leaving"] and core.told.phases == ["training", "idle", "joining", "training"]
            assert len(cluster.noted("joined")) >= 2 and cluster.noted("left")[0]["cell"] == "sat"
        same(await whole_run(tiny_model, config(steps=3), 0), cluster, tiny_model)

    asyncio.run(main())


def test_leaving_where_the_step_cannot_end_gives_back(tiny_model: Path) -> None:
    """The core rolls out: a satellite that is to leave does not wait for it."""

    async def main() -> None:
        async with Cluster(tiny_model, config(steps=1), compute_s=0.002) as cluster:
            cluster.core.told.turn(False)
            sat = cluster.satellite("sat")
            cluster.start()
            await until(lambda: sat.accumulated == 6)
            sat.told.turn(False)
            await sat.told.until("idle")
            assert len(cluster.buffer.machine.state.meta.voided) == 1
            cluster.core.told.turn(True)
            await until(lambda: cluster.loop.step == 1)
            assert cluster.parts(1) == {"core": 6}
            sat.told.turn(True)
            await cluster.end()

    asyncio.run(main())


def test_a_satellite_told_to_end_gives_back_at_once(tiny_model: Path) -> None:
    """Nobody waits for its lease."""

    async def main() -> None:
        async with Cluster(tiny_model, config(steps=1, claim_ttl_s=1e6), compute_s=0.002) as cluster:
            cluster.core.told.turn(False)
            sat = cluster.satellite("sat")
            cluster.start()
            await until(lambda: sat.accumulated == 6)
            cluster.tasks.pop("sat").cancel()
            await until(lambda: len(cluster.buffer.machine.state.meta.voided) == 1)
            cluster.core.told.turn(True)
            await cluster.end()
            assert cluster.parts(1) == {"core": 6}

    asyncio.run(main())


def test_a_satellite_outlives_its_core(tiny_model: Path) -> None:
    """A new core under a new term: what was accumulated under the old one is refused, the satellite zeroes and joins again."""

    async def main() -> None:
        async with Cluster(tiny_model, config(steps=2), compute_s=0.002) as cluster:
            cluster.core.told.turn(False)
            sat = cluster.satellite("sat")
            cluster.start()
            await until(lambda: sat.accumulated == 6)
            cluster.tasks.pop("core").cancel()
            await cluster.restart_core()
            cluster.start()
            await cluster.end()
            cluster.final = cluster.weights()  # type: ignore[attr-defined]
            assert cluster.core.ledger.term == 2 and len(cluster.noted("joined")) >= 2
            assert all(e.incarnation != "sat.1" for m in cluster.buffer.manifests.values() for e in m.entries), "nothing of the old term counts"
        same(await whole_run(tiny_model, config(steps=2), 0), cluster, tiny_model)

    asyncio.run(main())
