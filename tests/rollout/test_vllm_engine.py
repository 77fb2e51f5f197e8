"""The vLLM engine's numbers: log-probs against a plain forward pass, updates with requests in flight, draws; and its processes.

Run by `make test-vllm`, in an environment that has vLLM; elsewhere all of it is skipped.
"""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gyre.errors import UsageError, WorkFailed
from gyre.rollout.engine import EngineRefused
from gyre.rollout.sampling import cut
from gyre.types import Sampling, Version
from gyre.weights.snapshot import model_tensors, pack

MakeEngine = Callable[..., Any]
NO_EOS: dict[str, Any] = {"eos": frozenset()}


def prompts(n: int, seed: int = 0, longest: int = 80) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(97) for _ in range(rng.randint(1, longest))] for _ in range(n)]


def publish(engine: Any, version: Version, model: Any) -> None:
    snapshot = pack(version, model_tensors(model))
    engine.load(version, snapshot.tensors, snapshot.data).result(60)


def worst(kit: Any, models: dict[Version, Any], prompt: list[int], done: Any) -> float:
    """The largest difference to what the trainer's model computes for each token, under its whole prefix, by the version that it bears."""
    found = 0.0
    for s in done.spans:
        expected = kit.plain_logprobs(models[s.version], prompt + done.token_ids[: s.start], done.token_ids[s.start : s.end])
        found = max(found, *(abs(a - b) for a, b in zip(expected, done.logprobs[s.start : s.end], strict=True)))
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_of_a_plain_forward_pass(vllm_engine: MakeEngine, kit: Any, temperature: float) -> None:
    engine, asked = vllm_engine(slots=5, queue=20), prompts(12)
    futures = [engine.submit(kit.ask(str(i), p, seed=i, temperature=temperature, max_tokens=5 + 3 * i)) for i, p in enumerate(asked)]
    for prompt, future in zip(asked, futures, strict=True):
        done = future.result(30)
        assert done.logprobs == pytest.approx(kit.plain_logprobs(kit.qwen3(0), prompt, done.token_ids, temperature), abs=1e-4)


def test_top_p_top_k_and_temperature_are_in_the_logprob(vllm_engine: MakeEngine, kit: Any) -> None:
    engine, prompt = vllm_engine(**NO_EOS), [3, 1, 4, 1, 5]
    done = engine.submit(kit.ask("a", prompt, temperature=0.8, top_p=0.7, top_k=20, max_tokens=30)).result(30)
    logits = kit.qwen3(0)(input_ids=torch.tensor([prompt + done.token_ids])).logits[0, len(prompt) - 1 : -1].detach()
    expected = torch.log_softmax(cut(logits / 0.8, [Sampling(top_p=0.7, top_k=20)] * len(logits)), -1)
    assert done.logprobs == pytest.approx([expected[i, t].item() for i, t in enumerate(done.token_ids)], abs=1e-4)


def test_greedy_is_the_point_mass(vllm_engine: MakeEngine, kit: Any) -> None:
    engine, prompt = vllm_engine(**NO_EOS), [3, 1, 4, 1, 5]
    mixed = [engine.submit(kit.ask(str(i), prompt, temperature=float(i), max_tokens=8)) for i in range(2)]  # in one batch
    done = mixed[0].result(30)
    logits = kit.qwen3(0)(input_ids=torch.tensor([prompt + done.token_ids])).logits[0, len(prompt) - 1 : -1]
    assert done.token_ids == logits.argmax(-1).tolist() and done.logprobs == [0.0] * 8
    assert all(x < 0 for x in mixed[1].result(30).logprobs)


def test_the_draws_are_those_of_the_torch_engine(vllm_engine: MakeEngine, torch_engine: MakeEngine, kit: Any) -> None:
    """So a request that one of them gave back goes on at the other as if it had never moved; and whoever shares its batch does not matter."""
    if torch.cuda.is_available():
        pytest.skip("on a GPU vLLM draws by itself")
    ours, theirs = vllm_engine(slots=8, queue=20, **NO_EOS), torch_engine(slots=8, queue=20, **NO_EOS)
    asked = prompts(16, seed=4)
    for sampling in ({}, {"temperature": 0.7, "top_p": 0.9, "top_k": 30}):
        futures = [[e.submit(kit.ask(str(i), p, seed=i, max_tokens=30, **sampling)) for i, p in enumerate(asked)] for e in (ours, theirs)]
        whole = [f.result(30) for f in futures[1]]
        assert [f.result(30).token_ids for f in futures[0]] == [d.token_ids for d in whole]
    rest = [engine_rest(ours, kit, i, p, d.token_ids, sampling) for i, (p, d) in enumerate(zip(asked, whole, strict=True))]
    assert [f.result(30).token_ids for f in rest] == [d.token_ids[11:] for d in whole]


def engine_rest(engine: Any, kit: Any, seed: int, prompt: list[int], tokens: list[int], sampling: dict[str, Any]) -> Any:
    return engine.submit(kit.ask(f"rest{seed}", prompt + tokens[:11], seed=seed, drawn=11, max_tokens=19, **sampling))


@pytest.mark.pain(2, 28)
def test_ten_publications_with_requests_in_flight(vllm_engine: MakeEngine, kit: Any) -> None:
    """Pains 2, 26, 28: all finish, each token has the log-prob of its version under its whole prefix, within 1e-3 of the trainer's model."""
    models = {Version(0, 0): kit.qwen3(0)} | {Version(1, step): kit.qwen3(step) for step in range(1, 11)}
    engine, asked = vllm_engine(slots=48, queue=200, context=512, **NO_EOS), prompts(200, seed=5)
    futures = [engine.submit(kit.ask(str(i), p, seed=i, max_tokens=60)) for i, p in enumerate(asked)]
    for version in list(models)[1:]:
        start = engine.state().generated
        kit.until(lambda start=start: engine.state().generated >= start + 500)
        publish(engine, version, models[version])
    done = [f.result(120) for f in futures]
    assert all(kit.covered(d) and d.finish_reason == "length" for d in done)
    assert {s.version for d in done for s in d.spans} == set(models) and max(len(d.spans) for d in done) > 2
    assert max(worst(kit, models, p, d) for p, d in zip(asked, done, strict=True)) < 1e-3


@pytest.mark.pain(27)
@pytest.mark.parametrize("slept", [False, True])
def test_tied_embeddings_change_with_an_update(vllm_engine: MakeEngine, kit: Any, slept: bool) -> None:
    """A→B, both tied, never back to A: the output embedding must be B's. The CPU build keeps a copy of it that a reload forgets: 8 to 10 nats."""
    b, engine = kit.qwen3(11), vllm_engine()
    assert "lm_head.weight" in b.state_dict() and "lm_head.weight" not in model_tensors(b)
    assert engine.submit(kit.ask("a", [1, 2, 3], max_tokens=20)).result(30).token_ids
    if slept:
        engine.sleep().result(30)
        engine.wake().result(30)
    publish(engine, Version(1, 1), b)
    done = engine.submit(kit.ask("b", [1, 2, 3], max_tokens=20)).result(30)
    assert worst(kit, {Version(1, 1): b}, [1, 2, 3], done) < 1e-4


@pytest.mark.pain(27)
def test_no_cached_prefix_crosses_a_version(vllm_engine: MakeEngine, kit: Any) -> None:
    """Pains 27: a long prompt is in the prefix cache, and is used, until the next version; then it is computed anew."""
    engine, prompt, b = vllm_engine(**NO_EOS), prompts(1, seed=9)[0] * 20, kit.qwen3(11)
    prompt = (prompt * 20)[:200]
    hits = [engine.submit(kit.ask(str(i), prompt, seed=i, max_tokens=20)).result(30) and cached(engine) for i in range(2)]
    assert hits[1] > hits[0], "the prefix cache is off: this test shows nothing"
    publish(engine, Version(1, 1), b)
    done = engine.submit(kit.ask("b", prompt, max_tokens=20)).result(30)
    assert cached(engine) == hits[1]
    assert worst(kit, {Version(1, 1): b}, prompt, done) < 1e-4


def cached(engine: Any) -> float:
    return float(engine.state().gauges["prefix_hit_tokens"])


def test_weights_of_another_model_are_refused_and_change_nothing(vllm_engine: MakeEngine, kit: Any) -> None:
    engine = vllm_engine()
    with pytest.raises(WorkFailed, match=r"model\.layers\.2\..* start both from one model\.path"):
        publish(engine, Version(1, 1), kit.qwen3(0, num_hidden_layers=3))
    assert engine.state().version == Version(0, 0)
    done = engine.submit(kit.ask("a", [1, 2, 3], max_tokens=8)).result(30)
    assert worst(kit, {Version(0, 0): kit.qwen3(0)}, [1, 2, 3], done) < 1e-4


@pytest.mark.pain(26)
def test_a_diverged_policy_ends_the_engine_and_says_so(vllm_engine: MakeEngine, kit: Any) -> None:
    bad, engine = kit.qwen3(0), vllm_engine()
    with torch.no_grad():
        bad.model.norm.weight.fill_(math.nan)
    publish(engine, Version(1, 1), bad)
    with pytest.raises(WorkFailed, match="the policy has diverged"):
        engine.submit(kit.ask("a", [1, 2, 3])).result(30)
    with pytest.raises(WorkFailed):
        engine.stopped.result(30)


def test_ids_outside_the_vocabulary_are_refused(vllm_engine: MakeEngine, kit: Any) -> None:
    engine = vllm_engine()
    for ids in ([1, 97], [-1, 2]):
        with pytest.raises(EngineRefused, match=r"0\.\.96"):
            engine.submit(kit.ask("a", ids))


# --- its processes ------------------------------------------------------------------------------------------------------------------------


def test_too_little_memory_is_one_line(vllm_hosts: list[Any], tmp_path: Path, kit: Any) -> None:
    from gyre.config import Config, Model, Rollout
    from gyre.rollout.vllm_engine import open_vllm

    kit.qwen3(0, max_position_embeddings=8192).save_pretrained(tmp_path)
    rollout = Rollout(engine="vllm", context=8192, threads=1, kv_memory_mb=1)  # a request of all the context would need 8
    with pytest.raises(UsageError, match=r"^run\.toml: rollout\.engine: .*; .*raise rollout\.kv_memory_mb") as error:
        open_vllm(Config(model=Model(path=str(tmp_path)), rollout=rollout))
    assert "\n" not in str(error.value)


@pytest.fixture
def rollout(vllm_hosts: list[Any], vllm_model: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """gyre-rollout with a vLLM engine, serving."""
    argv = [sys.executable, "-m", "gyre_commands.rollout", "--run", str(tmp_path / "r"), "--engine", "vllm", "--no-train"]
    sets = [f"model.path={vllm_model}", "rollout.slots=4", "rollout.threads=1", "rollout.kv_memory_mb=64", "rollout.context=256"]
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen([*argv, *(f for s in sets for f in ("--set", s))], stderr=log, stdout=log, text=True, start_new_session=True)
    end = time.monotonic() + 120
    while "serving version 0.0" not in (text := (tmp_path / "log").read_text()):
        assert process.poll() is None and time.monotonic() < end, text
        time.sleep(0.1)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    log.close()


def alive(session: int) -> list[int]:
    """Processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def test_killed_it_leaves_no_process_of_vllm(rollout: Any, kit: Any) -> None:
    assert len(alive(rollout.pid)) > 1
    rollout.kill()
    rollout.wait(30)
    kit.until(lambda: not alive(rollout.pid))


def test_interrupted_in_a_terminal_it_ends_in_order(rollout: Any, kit: Any) -> None:
    """Ctrl-C reaches all processes of the terminal's foreground group, vLLM's too."""
    os.killpg(rollout.pid, signal.SIGINT)
    assert rollout.wait(60) == 130
    kit.until(lambda: not alive(rollout.pid))
