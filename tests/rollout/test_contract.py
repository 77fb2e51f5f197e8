"""What every engine promises (gyre/rollout/engine.py), run against every engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import pytest

from gyre.rollout.engine import Completion, Engine, EngineRefused, EngineRequest, check, uniform
from gyre.types import Sampling, Version
from gyre.weights.snapshot import model_tensors, pack

MakeEngine = Callable[..., Engine]
PROMPT = [11, 12, 13, 14, 15]
NOTHING = memoryview(b"")


def refusal(engine: Engine, request: Any) -> str:
    with pytest.raises(EngineRefused) as refused:
        engine.submit(request)
    return refused.value.reason


def test_length(make_engine: MakeEngine, kit: Any) -> None:
    engine = make_engine()
    done = engine.submit(kit.ask("a", PROMPT, max_tokens=4, stop=())).result(30)
    assert done.request_id == "a" and kit.covered(done)
    assert done.finish_reason == ("stop" if done.token_ids[-1] == kit.EOS else "length")
    assert [(s.version, s.start, s.end) for s in done.spans] == [(Version(0, 0), 0, len(done.token_ids))]
    assert all(x <= 0 for x in done.logprobs)


def test_no_budget_is_a_completion_without_tokens(make_engine: MakeEngine, kit: Any) -> None:
    done = make_engine().submit(kit.ask("a", PROMPT, max_tokens=0)).result(30)
    assert done == Completion("a", "length", [], [], [])


def test_stop_id_ends_and_is_kept(make_engine: MakeEngine, kit: Any) -> None:
    engine = make_engine()
    free = engine.submit(kit.ask("a", PROMPT, max_tokens=6)).result(30)
    stop = free.token_ids[2]
    done = engine.submit(kit.ask("b", PROMPT, max_tokens=6, stop=(stop,))).result(30)
    assert done.finish_reason == "stop"
    assert done.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_context_ends_a_request(make_engine: MakeEngine, kit: Any) -> None:
    engine = make_engine(context=12)
    seed = next(s for s in range(100) if _length_without_eos(engine, kit, s) == 7)
    done = engine.submit(kit.ask("a", PROMPT, seed=seed, max_tokens=100)).result(30)
    assert (done.finish_reason, len(done.token_ids)) == ("context", 7)


def _length_without_eos(engine: Engine, kit: Any, seed: int) -> int:
    done = engine.submit(kit.ask(f"probe-{seed}", PROMPT, seed=seed, max_tokens=7)).result(30)
    return len(done.token_ids) if done.finish_reason != "stop" else 0


def test_refusals(make_engine: MakeEngine, kit: Any) -> None:
    engine = make_engine(context=12, slots=1, queue=1)
    assert refusal(engine, kit.ask("a", PROMPT, min_version=Version(0, 1))) == "behind"
    assert refusal(engine, kit.ask("a", list(range(20, 32)))) == "context"
    assert refusal(engine, kit.ask("a", [])) == "error"
    assert refusal(engine, kit.ask("a", PROMPT, drawn=6)) == "error"
    assert refusal(engine, kit.ask("a", PROMPT, top_p=0.0)) == "error"
    assert refusal(engine, kit.ask("a", PROMPT, temperature=float("nan"))) == "error"
    engine.close()
    assert refusal(engine, kit.ask("a", PROMPT)) == "closing"


def test_full_counts_slots_and_queue() -> None:
    limits: dict[str, Any] = {"version": Version(1, 2), "context": 12, "capacity": 3, "closing": False}
    request = EngineRequest("a", "r", PROMPT, Sampling(), seed=0)
    check(request, open_requests=2, **limits)
    with pytest.raises(EngineRefused, match="3 requests are open") as refused:
        check(request, open_requests=3, **limits)
    assert refused.value.reason == "full"


def test_before_the_first_load_all_is_behind(make_engine: MakeEngine, kit: Any) -> None:
    engine = make_engine(version=None)
    assert engine.state().version is None
    assert refusal(engine, kit.ask("a", PROMPT)) == "behind"
    engine.load(Version(2, 7), [], NOTHING).result(30)
    assert engine.state().version == Version(2, 7)
    done = engine.submit(kit.ask("a", PROMPT, max_tokens=2, min_version=Version(2, 7))).result(30)
    assert done.spans[0].version == Version(2, 7)


def test_abort_returns_what_there_is(make_engine: MakeEngine, kit: Any) -> None:
    engine = make_engine(slots=1, context=500, **_no_eos(make_engine))
    running = engine.submit(kit.ask("running", PROMPT, max_tokens=10_000))
    waiting = engine.submit(kit.ask("waiting", PROMPT, max_tokens=10_000))
    kit.until(lambda: engine.state().generated >= 3)
    engine.abort("waiting")
    engine.abort("running")
    engine.abort("unknown")
    done = running.result(30)
    assert done.finish_reason == "abort" and len(done.token_ids) >= 3 and kit.covered(done)
    assert waiting.result(30) == Completion("waiting", "abort", [], [], [])
    assert engine.state().running == engine.state().queued == 0


def _samples(make_engine: MakeEngine) -> bool:
    """It has a model, and draws from it."""
    return any(name in repr(make_engine) for name in ("torch_engine", "vllm_engine"))


def _no_eos(make_engine: MakeEngine) -> dict[str, Any]:
    """An engine that samples meets its end-of-turn id by chance: tests that need long requests do without."""
    return {"eos": frozenset()} if _samples(make_engine) else {}


def test_continuation_elsewhere_is_what_it_would_have_been(make_engine: MakeEngine, kit: Any) -> None:
    first, second = make_engine(**_no_eos(make_engine)), make_engine(**_no_eos(make_engine))
    whole = first.submit(kit.ask("whole", PROMPT, seed=7, max_tokens=60)).result(30)
    begun = first.submit(kit.ask("begun", PROMPT, seed=7, max_tokens=60))
    start = first.state().generated
    kit.until(lambda: first.state().generated >= start + 5)
    first.abort("begun")
    part = begun.result(30)
    others = [second.submit(kit.ask(f"other-{i}", PROMPT[: 1 + i], seed=i, max_tokens=40)) for i in range(4)]
    k = len(part.token_ids)
    assert part.finish_reason == "abort" and 5 <= k < 60
    rest = second.submit(kit.ask("rest", PROMPT + part.token_ids, seed=7, drawn=k, max_tokens=60 - k)).result(30)
    wait(others, 30)
    assert part.token_ids + rest.token_ids == whole.token_ids
    assert part.logprobs + rest.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


@pytest.mark.pain(26)
def test_a_load_falls_between_two_tokens_of_what_is_in_flight(make_engine: MakeEngine, kit: Any) -> None:
    engine = make_engine(slots=4, queue=8, **_no_eos(make_engine))
    futures = [engine.submit(kit.ask(str(i), PROMPT, seed=i, max_tokens=100)) for i in range(6)]
    for step in (1, 2, 3):
        start = engine.state().generated
        kit.until(lambda start=start: engine.state().generated >= start + 4)
        engine.load(Version(1, step), [], NOTHING).result(30)
    done = [f.result(30) for f in futures]
    assert all(kit.covered(d) and len(d.token_ids) == 100 for d in done)
    assert {s.version for d in done for s in d.spans} == {Version(0, 0), Version(1, 1), Version(1, 2), Version(1, 3)}


def test_close_answers_everything(make_engine: MakeEngine, kit: Any) -> None:
    engine = make_engine(slots=2, queue=8, context=500, **_no_eos(make_engine))
    futures = [engine.submit(kit.ask(str(i), PROMPT, max_tokens=10_000)) for i in range(6)]
    kit.until(lambda: engine.state().generated >= 4)
    engine.close()
    done = [f.result(0) for f in futures]
    assert {d.finish_reason for d in done} == {"abort"} and all(kit.covered(d) for d in done)
    assert engine.stopped.result(0) is None


@pytest.mark.pain(6)
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_submit_abort_load_completes_each_request_once(make_engine: MakeEngine, kit: Any, seed: int) -> None:
    """Cancelling around updates kills no engine (cancel → drain → pause → update → resume)."""
    rng = random.Random(seed)
    engine = make_engine(slots=3, queue=40, **_no_eos(make_engine))
    futures = {}
    for step in range(60):
        match rng.choice(["submit", "submit", "abort", "load", "both"]):
            case "submit":
                futures[str(step)] = engine.submit(kit.ask(str(step), PROMPT[: rng.randint(1, 5)], max_tokens=rng.randint(1, 20)))
            case "abort" if futures:
                engine.abort(rng.choice(list(futures)))
            case "load":
                engine.load(Version(1, step), [], NOTHING)
            case "both":
                engine.load(Version(1, step), [], NOTHING)
                for request_id in futures:
                    engine.abort(request_id)
    engine.load(Version(1, 60), [], NOTHING).result(30)
    done = [f.result(30) for f in futures.values()]
    assert [d.request_id for d in done] == list(futures) and all(kit.covered(d) for d in done), f"seed {seed}"
    assert engine.state().version == Version(1, 60) and engine.state().free == 43


def test_draws_depend_on_seed_and_number_alone() -> None:
    draws = [uniform(3, k) for k in range(2000)]
    assert draws == [uniform(3, k) for k in range(2000)]
    assert draws[0] != uniform(4, 0) and all(0 <= u < 1 for u in draws)
    assert abs(sum(draws) / 2000 - 0.5) < 0.03
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)  # any 64 bits will do as a seed


def weights_of(kit: Any, seed: int, version: Version) -> Any:
    """A snapshot that engines with a model take; the others do not look at it."""
    return pack(version, model_tensors(kit.qwen3(seed)))


@pytest.mark.pain(6)
def test_drain_gives_everything_back_and_refuses_until_it_wakes(make_engine: MakeEngine, kit: Any) -> None:
    engine = make_engine(slots=2, queue=8, context=500, **_no_eos(make_engine))
    futures = [engine.submit(kit.ask(str(i), PROMPT, max_tokens=10_000)) for i in range(6)]
    kit.until(lambda: engine.state().generated >= 4)
    drained = engine.drain()
    assert refusal(engine, kit.ask("late", PROMPT)) == "closing"
    drained.result(30)
    done = [f.result(0) for f in futures]  # before it says that it is drained
    assert {d.finish_reason for d in done} == {"abort"} and all(kit.covered(d) for d in done)
    assert (engine.state().running, engine.state().queued, engine.state().free) == (0, 0, 0)
    engine.wake().result(30)
    assert engine.submit(kit.ask("again", PROMPT, max_tokens=2)).result(30).spans[0].version == Version(0, 0)


def test_asleep_it_has_no_version_and_wakes_without_one(make_engine: MakeEngine, kit: Any) -> None:
    """What it serves after waking is the policy loaded then, as if it had never slept."""
    engine, fresh = make_engine(**_no_eos(make_engine)), make_engine(**_no_eos(make_engine))
    flying = engine.submit(kit.ask("flying", PROMPT, max_tokens=200))
    engine.sleep().result(30)
    assert flying.result(0).finish_reason == "abort"
    assert engine.state().version is None
    assert refusal(engine, kit.ask("a", PROMPT)) == "closing"
    snapshot = weights_of(kit, 1, Version(1, 1))
    with pytest.raises(EngineRefused, match="asleep"):
        engine.load(snapshot.version, snapshot.tensors, snapshot.data).result(30)
    engine.sleep().result(30)  # once more changes nothing
    engine.wake().result(30)
    assert refusal(engine, kit.ask("a", PROMPT)) == "behind"
    for e in (engine, fresh):
        e.load(snapshot.version, snapshot.tensors, snapshot.data).result(30)
    one, other = (e.submit(kit.ask("a", PROMPT, seed=3, max_tokens=30)).result(30) for e in (engine, fresh))
    assert one == other and one.spans[0].version == Version(1, 1)


def test_moved_requests_have_room_kept_for_them_and_join_first(make_engine: MakeEngine, kit: Any) -> None:
    engine = make_engine(slots=1, queue=1, context=500, **_no_eos(make_engine))
    first = [engine.submit(kit.ask("new0", PROMPT, max_tokens=60))]
    kit.until(lambda: engine.state().generated >= 1)
    first.append(engine.submit(kit.ask("new1", PROMPT, max_tokens=60)))
    assert refusal(engine, kit.ask("new2", PROMPT)) == "full"
    moved = [engine.submit(kit.ask(f"moved{i}", PROMPT, max_tokens=3, moved=True)) for i in range(2)]
    assert refusal(engine, kit.ask("moved2", PROMPT, moved=True)) == "full"  # bounded all the same
    ended: list[str] = []
    for future in [*first, *moved]:
        future.add_done_callback(lambda f: ended.append(f.result().request_id))
    wait([*first, *moved], 30)
    kit.until(lambda: len(ended) == 4)
    assert ended == ["new0", "moved0", "moved1", "new1"]


@pytest.mark.pain(27)
def test_stale_keys_do_not_survive_sleep_or_update(make_engine: MakeEngine, kit: Any) -> None:
    """Pains 27: the same prompt under other weights gives those weights' tokens, in flight, after an update and after a sleep."""
    engine = make_engine(**_no_eos(make_engine))
    for step, slept in ((1, False), (2, True), (1, True)):
        snapshot = weights_of(kit, step, Version(1, 10 * step + slept))
        if slept:
            engine.sleep().result(30)
            engine.wake().result(30)
        engine.load(snapshot.version, snapshot.tensors, snapshot.data).result(30)
        done = engine.submit(kit.ask("a", PROMPT, seed=5, max_tokens=20)).result(30)
        assert {s.version for s in done.spans} == {snapshot.version}
        if _samples(make_engine):
            assert done.logprobs == pytest.approx(kit.plain_logprobs(kit.qwen3(step), PROMPT, done.token_ids), abs=1e-4)


@pytest.mark.pain(6)
@pytest.mark.parametrize("seed", range(4))
def test_any_order_with_sleep_and_wake_completes_each_request_once(make_engine: MakeEngine, kit: Any, seed: int) -> None:
    """Pains 6, as a property: whatever the order of submit, abort, load, drain, sleep and wake, no engine dies and each is answered once."""
    rng, snapshot = random.Random(seed), weights_of(kit, 0, Version(1, 0))
    engine = make_engine(slots=3, queue=40, **_no_eos(make_engine))
    futures: dict[str, Any] = {}
    orders: list[Any] = []
    refused: set[str] = set()
    for step in range(80):
        match rng.choice(["submit", "submit", "submit", "abort", "load", "drain", "sleep", "wake", "wake"]):
            case "submit":
                try:
                    futures[str(step)] = engine.submit(kit.ask(str(step), PROMPT[: rng.randint(1, 5)], max_tokens=rng.randint(1, 20)))
                except EngineRefused as e:
                    refused.add(e.reason)
            case "abort" if futures:
                engine.abort(rng.choice(list(futures)))
            case "load":
                orders.append(engine.load(Version(1, step), snapshot.tensors, snapshot.data))
            case "drain":
                orders.append(engine.drain())
            case "sleep":
                orders.append(engine.sleep())
            case "wake":
                orders.append(engine.wake())
        if rng.random() < 0.3:
            wait(orders, 30)
    engine.wake().result(30)
    engine.load(Version(1, 80), snapshot.tensors, snapshot.data).result(30)
    assert all(o.done() and (o.exception() is None or isinstance(o.exception(), EngineRefused)) for o in orders), f"seed {seed}"
    done = [f.result(30) for f in futures.values()]
    assert [d.request_id for d in done] == list(futures) and all(kit.covered(d) for d in done), f"seed {seed}"
    assert refused <= {"closing", "behind"}
    assert engine.state().version == Version(1, 80) and engine.state().free == 43
