"""The torch engine's numbers: log-probs against a plain forward pass, updates with requests in flight, sampling."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from gyre.config import Model
from gyre.errors import UsageError, WorkFailed
from gyre.rollout.engine import Completion, EngineRefused, EngineRequest, uniform
from gyre.rollout.model import eos_ids, load_model
from gyre.rollout.sampling import cut, sample
from gyre.rollout.torch_engine import TorchEngine
from gyre.types import Sampling, Version
from gyre.weights.snapshot import model_tensors, pack

MakeEngine = Callable[..., TorchEngine]


def prompts(n: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(97) for _ in range(rng.randint(1, longest))] for _ in range(n)]


@pytest.mark.pain(28)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_of_a_plain_forward_pass(torch_engine: MakeEngine, kit: Any, temperature: float) -> None:
    engine = torch_engine(slots=5, queue=20)
    asked = prompts(12)
    futures = [engine.submit(kit.ask(str(i), p, seed=i, temperature=temperature, max_tokens=5 + 3 * i)) for i, p in enumerate(asked)]
    for prompt, future in zip(asked, futures, strict=True):
        done = future.result(30)
        assert done.logprobs == pytest.approx(kit.plain_logprobs(kit.qwen3(0), prompt, done.token_ids, temperature), abs=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
def test_other_families(torch_engine: MakeEngine, kit: Any, family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
    config = AutoConfig.for_model(family, vocab_size=97, intermediate_size=64, initializer_range=0.3, bos_token_id=None, eos_token_id=None, **sizes)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).eval()
    asked = prompts(6, seed=1)
    expected = AutoModelForCausalLM.from_config(config).eval()
    expected.load_state_dict(model.state_dict())
    engine = torch_engine(model)
    futures = [engine.submit(kit.ask(str(i), p, seed=i, max_tokens=12)) for i, p in enumerate(asked)]
    for prompt, future in zip(asked, futures, strict=True):
        done = future.result(30)
        assert done.logprobs == pytest.approx(kit.plain_logprobs(expected, prompt, done.token_ids), abs=1e-4)


def test_a_model_without_attention_interface_keeps_its_own(torch_engine: MakeEngine, kit: Any) -> None:
    model = kit.qwen3(0)
    type(model)._supports_attention_backend = False
    try:
        engine = torch_engine(model)
    finally:
        type(model)._supports_attention_backend = True
    assert not engine._own_attention
    futures = [engine.submit(kit.ask(str(i), p, seed=i, max_tokens=12)) for i, p in enumerate(prompts(6))]
    for prompt, future in zip(prompts(6), futures, strict=True):
        done = future.result(30)
        assert done.logprobs == pytest.approx(kit.plain_logprobs(kit.qwen3(0), prompt, done.token_ids), abs=1e-4)


def test_the_batch_does_not_matter(torch_engine: MakeEngine, kit: Any) -> None:
    asked = prompts(10, seed=3)
    alone, together = torch_engine(slots=1, queue=20), torch_engine(slots=10, queue=20)
    futures = [[e.submit(kit.ask(str(i), p, seed=i, max_tokens=20)) for i, p in enumerate(asked)] for e in (alone, together)]
    for one, other in zip(*futures, strict=True):
        assert one.result(30).token_ids == other.result(30).token_ids
        assert one.result().logprobs == pytest.approx(other.result().logprobs, abs=1e-4)


def test_equal_prompts_are_computed_once_and_differ_by_their_seeds(torch_engine: MakeEngine, kit: Any) -> None:
    engine, prompt = torch_engine(slots=8, queue=20), [7, 8, 9, 10, 11]
    done = [f.result(30) for f in [engine.submit(kit.ask(str(i), prompt, seed=i, max_tokens=10)) for i in range(16)]]
    assert len({tuple(d.token_ids) for d in done}) > 8
    for d in done:
        assert d.logprobs == pytest.approx(kit.plain_logprobs(kit.qwen3(0), prompt, d.token_ids), abs=1e-4)


@pytest.mark.pain(2, 26, 27)
def test_update_with_200_open_requests(torch_engine: MakeEngine, kit: Any) -> None:
    """Pains 2 and 26: it completes, all finish, and every token's log-prob is that of its stamped version given its whole prefix."""
    models = {Version(0, 0): kit.qwen3(0), Version(1, 1): kit.qwen3(1), Version(1, 2): kit.qwen3(2)}
    engine = torch_engine(slots=64, queue=200, eos=frozenset())
    asked = prompts(200, seed=5)
    futures = [engine.submit(kit.ask(str(i), p, seed=i, max_tokens=24)) for i, p in enumerate(asked)]
    for version in (Version(1, 1), Version(1, 2)):
        start = engine.state().generated
        kit.until(lambda start=start: engine.state().generated >= start + 500)
        snapshot = pack(version, model_tensors(models[version]))
        engine.load(version, snapshot.tensors, snapshot.data).result(30)
    done = [f.result(60) for f in futures]
    assert all(kit.covered(d) and d.finish_reason == "length" for d in done)
    assert {len(d.spans) for d in done} > {1}  # some were changed in flight, some never
    assert {s.version for d in done for s in d.spans} == set(models)
    for prompt, d in zip(asked, done, strict=True):
        for s in d.spans:
            expected = kit.plain_logprobs(models[s.version], prompt + d.token_ids[: s.start], d.token_ids[s.start : s.end])
            assert d.logprobs[s.start : s.end] == pytest.approx(expected, abs=1e-4)


@pytest.mark.pain(27)
def test_tied_embeddings_change_with_an_update(torch_engine: MakeEngine, kit: Any) -> None:
    """A→B, both tied, never back to A: the output embedding must be B's."""
    b = kit.qwen3(11)
    assert "lm_head.weight" in b.state_dict() and "lm_head.weight" not in model_tensors(b)
    engine = torch_engine(kit.qwen3(10))
    snapshot = pack(Version(1, 1), model_tensors(b))
    engine.load(snapshot.version, snapshot.tensors, snapshot.data).result(30)
    done = engine.submit(kit.ask("a", [1, 2, 3], max_tokens=20)).result(30)
    assert done.logprobs == pytest.approx(kit.plain_logprobs(b, [1, 2, 3], done.token_ids), abs=1e-4)


def test_untied_embeddings_too(torch_engine: MakeEngine, kit: Any) -> None:
    b = kit.qwen3(11, tie_word_embeddings=False)
    engine = torch_engine(kit.qwen3(10, tie_word_embeddings=False))
    snapshot = pack(Version(1, 1), model_tensors(b))
    engine.load(snapshot.version, snapshot.tensors, snapshot.data).result(30)
    done = engine.submit(kit.ask("a", [1, 2, 3], max_tokens=20)).result(30)
    assert done.logprobs == pytest.approx(kit.plain_logprobs(b, [1, 2, 3], done.token_ids), abs=1e-4)


def test_weights_of_another_model_are_refused_and_change_nothing(torch_engine: MakeEngine, kit: Any) -> None:
    engine = torch_engine(kit.qwen3(0))
    snapshot = pack(Version(1, 1), model_tensors(kit.qwen3(0, num_hidden_layers=3)))
    with pytest.raises(WorkFailed, match=r"model\.layers\.2\..* start both from one model\.path"):
        engine.load(snapshot.version, snapshot.tensors, snapshot.data).result(30)
    assert engine.state().version == Version(0, 0)
    done = engine.submit(kit.ask("a", [1, 2, 3], max_tokens=8)).result(30)
    assert done.logprobs == pytest.approx(kit.plain_logprobs(kit.qwen3(0), [1, 2, 3], done.token_ids), abs=1e-4)


@pytest.mark.pain(26)
def test_a_diverged_policy_ends_the_engine_and_says_so(torch_engine: MakeEngine, kit: Any) -> None:
    bad = kit.qwen3(0)
    with torch.no_grad():
        bad.model.norm.weight.fill_(math.nan)
    engine = torch_engine(kit.qwen3(0))
    snapshot = pack(Version(1, 1), model_tensors(bad))
    engine.load(snapshot.version, snapshot.tensors, snapshot.data).result(30)
    future: Future[Completion] = engine.submit(kit.ask("a", [1, 2, 3]))
    with pytest.raises(WorkFailed, match="the policy has diverged"):
        future.result(30)
    with pytest.raises(WorkFailed):
        engine.stopped.result(30)


def test_ids_outside_the_vocabulary_are_refused(torch_engine: MakeEngine, kit: Any) -> None:
    engine = torch_engine()
    for ids in ([1, 97], [-1, 2]):
        with pytest.raises(EngineRefused, match=r"0\.\.96"):
            engine.submit(kit.ask("a", ids))


def test_full_engine(torch_engine: MakeEngine, kit: Any) -> None:
    engine = torch_engine(slots=2, queue=3, context=500, eos=frozenset())
    futures = [engine.submit(kit.ask(str(i), [1], max_tokens=400)) for i in range(5)]
    with pytest.raises(EngineRefused, match="5 requests are open") as refused:
        engine.submit(kit.ask("one too many", [1]))
    assert refused.value.reason == "full"
    for i in range(5):
        engine.abort(str(i))
    assert [f.result(30).finish_reason for f in futures] == ["abort"] * 5


# --- sampling -----------------------------------------------------------------------------------------------------------------------------


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    n = 20_000
    tokens, logprobs = sample(logits.expand(n, -1), [Sampling()] * n, [uniform(1, k) for k in range(n)])
    expected = logits[0].softmax(0)
    counts = Counter(tokens)
    assert all(abs(counts[i] / n - expected[i].item()) < 0.015 for i in range(4))
    assert logprobs[0] == pytest.approx(expected[tokens[0]].log().item(), abs=1e-6)


def test_each_row_has_its_own_sampling() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]] * 4)
    samplings = [Sampling(temperature=0.0), Sampling(top_k=1), Sampling(temperature=2.0), Sampling(temperature=1e-30)]
    tokens, logprobs = sample(logits, samplings, [0.999999] * 4)
    assert tokens == [1, 1, 3, 1]
    assert logprobs == pytest.approx([0.0, 0.0, torch.log_softmax(logits[2] / 2, 0)[3].item(), 0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), {1, 2}),
        (Sampling(top_k=99), {0, 1, 2, 3}),
        (Sampling(top_p=0.6), {1}),  # 0.64 is the likeliest alone
        (Sampling(top_p=0.65), {1, 2}),
        (Sampling(top_k=3, top_p=0.999), {1, 2, 3}),
        (Sampling(top_p=1.0), {0, 1, 2, 3}),
    ],
)
def test_cut(sampling: Sampling, kept: set[int]) -> None:
    out = cut(torch.tensor([[0.0, 3.0, 2.0, 1.0]]), [sampling])[0]
    assert {i for i in range(4) if out[i] > -math.inf} == kept


def test_top_p_and_temperature_are_in_the_logprob(torch_engine: MakeEngine, kit: Any) -> None:
    engine, prompt = torch_engine(), [3, 1, 4, 1, 5]
    done = engine.submit(kit.ask("a", prompt, temperature=0.8, top_p=0.7, top_k=20, max_tokens=10)).result(30)
    ids = torch.tensor([prompt + done.token_ids])
    logits = kit.qwen3(0)(input_ids=ids).logits[0, len(prompt) - 1 : -1].detach()
    expected = torch.log_softmax(cut(logits / 0.8, [Sampling(top_p=0.7, top_k=20)] * len(logits)), -1)
    assert done.logprobs == pytest.approx([expected[i, t].item() for i, t in enumerate(done.token_ids)], abs=1e-4)


# --- model directories --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["unset", "missing", "empty", "no weights", "not json", "other type"])
def test_bad_model_directories_are_one_line(tmp_path: Path, what: str) -> None:
    path = tmp_path / "model"
    if what not in ("unset", "missing"):
        path.mkdir()
    content = {"no weights": '{"model_type": "qwen3"}', "not json": "{", "other type": '{"model_type": "no-such-model"}'}
    if what in content:
        (path / "config.json").write_text(content[what])
    with pytest.raises(UsageError, match=r"^run\.toml: model\.path: .*; give the directory of a Hugging Face") as error:
        load_model(Model(path="" if what == "unset" else str(path)))
    assert "\n" not in str(error.value)


def test_sliding_windows_are_refused(tmp_path: Path, kit: Any) -> None:
    kit.qwen3(0, use_sliding_window=True, sliding_window=8, max_window_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="sliding_attention"):
        load_model(Model(path=str(tmp_path)))


def test_a_saved_model_loads(tmp_path: Path, kit: Any) -> None:
    kit.qwen3(4).save_pretrained(tmp_path)
    model = load_model(Model(path=str(tmp_path)))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), kit.qwen3(4).state_dict().values(), strict=True))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 90, "content": "<|im_end|>"}]}')
    assert eos_ids(tmp_path) == {kit.EOS, 90}


def test_requests_take_any_sequence_of_ids() -> None:
    view = memoryview(bytes([1, 0, 0, 0, 2, 0, 0, 0])).cast("i")
    assert list(EngineRequest("a", "r", view, Sampling(), seed=0).prompt_ids) == [1, 2]
