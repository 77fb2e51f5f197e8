"""Tiny models and engines for the rollout's tests. Everything is random weights made on the spot; one thread each."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from gyre.rollout.engine import INITIAL, Completion, Engine, EngineRequest
from gyre.rollout.paced import PacedEngine
from gyre.rollout.scripted import ScriptedEngine, load_script
from gyre.rollout.torch_engine import TorchEngine
from gyre.types import Sampling, Version
from gyre.weights.snapshot import model_tensors, pack

VOCABULARY = 97
EOS = 5


def qwen3(seed: int, **more: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,  # the least that vLLM computes on a CPU
            initializer_range=0.3,
            eos_token_id=EOS,
            **{"max_position_embeddings": 512, "num_hidden_layers": 2, "tie_word_embeddings": True, **more},
        )
    ).eval()


def plain_logprobs(model: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> list[float]:
    """Of each token of the completion, by one forward pass without a cache."""
    ids = torch.tensor([prompt + completion])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()


def ask(request_id: str, prompt: list[int], *, seed: int = 1, drawn: int = 0, stop: tuple[int, ...] = (), **more: Any) -> EngineRequest:
    sampling = {k: more.pop(k) for k in ("temperature", "top_p", "top_k", "max_tokens") if k in more}
    return EngineRequest(request_id, "rollout", prompt, Sampling(**sampling), seed=seed, drawn=drawn, stop_ids=stop, **more)


def until(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    """Wait for another thread; fails instead of hanging."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        time.sleep(0.001)


def covered(completion: Completion) -> bool:
    """The spans cover the tokens without gap or overlap, each token has a log-prob, versions do not go back."""
    at, version = 0, Version(-1, 0)
    for span in completion.spans:
        if span.start != at or span.end <= at or span.version < version:
            return False
        at, version = span.end, span.version
    return at == len(completion.token_ids) == len(completion.logprobs)


class Kit:
    """What test modules share (they cannot import each other)."""

    VOCABULARY, EOS = VOCABULARY, EOS
    qwen3 = staticmethod(qwen3)
    plain_logprobs = staticmethod(plain_logprobs)
    ask = staticmethod(ask)
    until = staticmethod(until)
    covered = staticmethod(covered)


@pytest.fixture(scope="session")
def kit() -> Kit:
    torch.set_num_threads(1)
    return Kit()


@pytest.fixture
def torch_engine(kit: Kit) -> Iterator[Callable[..., TorchEngine]]:
    """A factory of engines of the model with seed 0 (or the model given), serving (0, 0) unless `version` is None."""
    opened: list[TorchEngine] = []

    def make(model: Any = None, *, version: Version | None = INITIAL, eos: frozenset[int] = frozenset({EOS}), **limits: int) -> TorchEngine:
        sizes = {"context": 256, "slots": 8, "queue": 8, "threads": 1, **limits}
        engine = TorchEngine(model or qwen3(0), eos=eos, **sizes)
        opened.append(engine)
        if version is not None:
            engine.load(version, [], memoryview(b"")).result(30)
        return engine

    yield make
    for engine in opened:
        engine.close()


@pytest.fixture
def scripted_engine(kit: Kit, tmp_path: Path) -> Iterator[Callable[..., ScriptedEngine]]:
    """A factory of engines that recite one long line of a pace that tests can interrupt, or the lines given."""
    opened: list[ScriptedEngine] = []

    def make(*lines: dict[str, Any], version: Version | None = INITIAL, tokenizer: Any = None, **limits: int) -> ScriptedEngine:
        long = {"token_ids": [10 + i % 80 for i in range(1000)], "token_delay_s": 0.001}
        file = tmp_path / "script.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines or (long,)))
        sizes = {"context": 256, "slots": 8, "queue": 8, **limits}
        engine = ScriptedEngine(load_script(file, tokenizer, frozenset({EOS})), eos=frozenset({EOS}), **sizes)
        opened.append(engine)
        if version is not None:
            engine.load(version, [], memoryview(b"")).result(30)
        return engine

    yield make
    for engine in opened:
        engine.close()


@pytest.fixture
def paced_engine(kit: Kit) -> Iterator[Callable[..., PacedEngine]]:
    """A factory of engines whose every row has a token each 2 ms, or each `token_s(rows)`."""
    opened: list[PacedEngine] = []

    def make(*, version: Version | None = INITIAL, token_s: Callable[[int], float] = lambda rows: 0.002, **limits: int) -> PacedEngine:
        engine = PacedEngine(token_s, **{"context": 256, "slots": 8, "queue": 8, **limits})
        opened.append(engine)
        if version is not None:
            engine.load(version, [], memoryview(b"")).result(30)
        return engine

    yield make
    for engine in opened:
        engine.close()


@pytest.fixture(scope="session")
def vllm_hosts(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """The AsyncLLMs of this session, with the model of seed 0, while nobody uses them. Each takes seconds to start, so engines borrow them."""
    if importlib.util.find_spec("vllm") is None:
        if "vllm" in os.environ.get("GYRE_REQUIRE", "").split(","):
            pytest.fail("GYRE_REQUIRE=vllm, but vLLM is not installed")
        pytest.skip("vLLM is not installed: make test-vllm")
    idle: list[Any] = []
    yield idle
    for host in idle:
        host.close()


@pytest.fixture(scope="session")
def vllm_model(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vllm") / "model"
    qwen3(0).save_pretrained(path)
    return path


@pytest.fixture
def vllm_engine(kit: Kit, vllm_hosts: list[Any], vllm_model: Path) -> Iterator[Callable[..., Any]]:
    """A factory of engines of the model with seed 0, serving (0, 0) unless `version` is None."""
    from gyre.config import Config, Model, Rollout
    from gyre.rollout.model import model_shapes
    from gyre.rollout.vllm_engine import VllmEngine
    from gyre.rollout.vllm_host import Host, arguments

    opened: list[tuple[VllmEngine, Host]] = []
    initial = pack(INITIAL, model_tensors(qwen3(0)))
    config = Config(model=Model(path=str(vllm_model)), rollout=Rollout(engine="vllm", slots=64, threads=1, kv_memory_mb=64))

    def make(*, version: Version | None = INITIAL, eos: frozenset[int] = frozenset({EOS}), **limits: int) -> VllmEngine:
        host = vllm_hosts.pop() if vllm_hosts else Host(arguments(config, 512))
        host.wake()
        host.update(INITIAL, initial.tensors, initial.data)  # whoever had it may have left other weights
        engine = VllmEngine(host, model_shapes(vllm_model), eos=eos, owned=False, **{"context": 256, "slots": 8, "queue": 8, **limits})
        opened.append((engine, host))
        if version is not None:
            engine.load(version, [], memoryview(b"")).result(30)
        return engine

    yield make
    for engine, host in opened:
        engine.close()
        vllm_hosts.append(host)


@pytest.fixture(params=["torch", "vllm", "scripted", "paced"])
def make_engine(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """A factory of either engine: what holds for one must hold for the other."""
    factory: Callable[..., Engine] = request.getfixturevalue(f"{request.param}_engine")
    return factory
