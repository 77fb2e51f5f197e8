"""Prefix trees: what is packed, what attends to what, and that loss and gradient are those of separate rows."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from gyre.config import Train
from gyre.train import tree as trees
from gyre.train.model import MicroStepData, Policy, micro_batches
from gyre.train.optimizer import Learner
from gyre.train.shards import divide
from gyre.train.tree import Tree, lay_out

MakeMicroStep = Callable[..., Any]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def branching(draw: random.Random, paths: int, longest: int, vocabulary: int = 30) -> list[list[int]]:
    """Random paths, each of which leaves an earlier one somewhere: at its root, in its middle, at its end."""
    found = [[draw.randrange(2, vocabulary) for _ in range(draw.randint(1, longest))]]
    while len(found) < paths:
        origin = draw.choice(found)
        found.append(origin[: draw.randint(0, len(origin))] + [draw.randrange(2, vocabulary) for _ in range(draw.randint(1, longest))])
    return found


def allowed(tree: Tree) -> torch.Tensor:
    """[T, T]: may token q (row) attend to k?"""
    places = torch.arange(len(tree.end_T))
    return (places[None] <= places[:, None]) & (places[:, None] < tree.end_T[None])


def test_each_shared_token_is_once_and_sees_its_own_path_alone() -> None:
    """300 random trees against the set of all prefixes."""
    for seed in range(300):
        draw = random.Random(seed)
        paths = branching(draw, draw.randint(1, 6), 8, vocabulary=draw.choice([4, 30]))
        tree = lay_out([torch.tensor(p, dtype=torch.int32) for p in paths])
        prefixes: dict[int, tuple[int, ...]] = {}
        for path, at in zip(paths, tree.paths, strict=True):
            assert tree.ids_T[at].tolist() == path and tree.depth_T[at].tolist() == list(range(len(path)))
            prefixes |= {place: tuple(path[: i + 1]) for i, place in enumerate(at.tolist())}
        assert len(tree.ids_T) == len(prefixes) == len(set(prefixes.values())), f"seed {seed}"
        expected = [[prefixes[q][: len(prefixes[k])] == prefixes[k] for k in range(len(prefixes))] for q in range(len(prefixes))]
        assert allowed(tree).tolist() == expected, f"seed {seed}"


def test_blocks_of_the_mask_lose_no_pair_and_allow_none() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        tree = lay_out([torch.tensor(p) for p in branching(draw, 5, 400)])
        mask, n = tree.block_mask, -(-len(tree.ids_T) // 128)
        listed: dict[bool, set[tuple[int, int]]] = {}
        for full, counts, blocks in ((False, mask.kv_num_blocks, mask.kv_indices), (True, mask.full_kv_num_blocks, mask.full_kv_indices)):
            listed[full] = {(q, int(k)) for q in range(n) for k in blocks[0, 0, q, : int(counts[0, 0, q])]}
        assert not listed[False] & listed[True]
        pairs = allowed(tree)
        for q in range(n):
            for k in range(n):
                block = pairs[q * 128 : (q + 1) * 128, k * 128 : (k + 1) * 128]
                if (q, k) in listed[True]:
                    assert block.all() and block.shape[1] == 128
                elif block.any():
                    assert (q, k) in listed[False]


def test_flex_attention_and_the_runs_agree_with_a_mask() -> None:
    """What a GPU runs under the block mask, here without its kernel, what a CPU runs, and plain attention under the whole mask; gradients too where a
    CPU has them."""
    tree = lay_out([torch.tensor(p) for p in branching(random.Random(1), 5, 60)])
    draw = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, 4, len(tree.ids_T), 8, generator=draw, requires_grad=True) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow without compilation
        flex = flex_attention(*(x.detach() for x in leaves), block_mask=tree.block_mask)
    place = torch.arange(len(tree.ids_T))
    mask = (place[None] <= place[:, None]) & (place[:, None] < tree.end_T[None])
    plain = scaled_dot_product_attention(*leaves, attn_mask=mask)
    runs = trees._ByRun.apply(*leaves, tree.branches, None)
    torch.testing.assert_close(flex, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(runs, plain, rtol=1e-4, atol=1e-5)
    grad = torch.randn(plain.shape, generator=draw)
    torch.testing.assert_close(torch.autograd.grad(runs, leaves, grad), torch.autograd.grad(plain, leaves, grad), rtol=1e-4, atol=1e-5)


def executions(micro_step: MakeMicroStep, seed: int, n: int = 3) -> MicroStepData:
    """Random executions of several trajectories; a token bears loss in at most one, and first tokens behind a branch point do."""
    draw = random.Random(seed)
    rows, ids = [], []
    for execution in range(n):
        paths = branching(draw, draw.randint(1, 4), 8)
        advantage = draw.choice([-1.0, 0.5, 0.0] if execution else [1.0])
        seen: set[tuple[int, ...]] = set()
        masks = []
        for path in paths:
            new = [tuple(path[: i + 1]) not in seen for i in range(len(path))]
            masks.append([int(i > 0 and fresh and (draw.random() < 0.7 or not new[i - 1])) for i, fresh in enumerate(new)])
            seen |= {tuple(path[: i + 1]) for i in range(len(path))}
        total = max(1, sum(map(sum, masks)))
        rows += [(p, m, advantage, total, None, 0) for p, m in zip(paths, masks, strict=True)]
        ids += [f"e{execution}"] * len(paths)
    data: MicroStepData = micro_step(*rows)
    return replace(data, trajectories=[msgspec.structs.replace(t, rollout_id=r) for t, r in zip(data.trajectories, ids, strict=True)])


def accumulated(model: Any, data: MicroStepData, device: torch.device = CPU, **train: Any) -> tuple[Learner, list[torch.Tensor], int]:
    """Gradient of the numerators with and without trees, and how many tokens went through the model."""
    policy = Policy(copy.deepcopy(model).to(device), Path(), 0.8, tree=train.get("prefix_tree", True))
    one = Learner(policy, Train(**{"ratio_low": 1e-6, "ratio_high": 1e6, "micro_step_tokens": 60, **train}), 10)
    assert policy.tree is train.get("prefix_tree", True)
    one.accumulate(data, 0)
    return one, one.sums, sum(b.ids_RT.numel() for b in micro_batches(data, 60, device, tree=policy.tree))


def models() -> dict[str, Callable[[], Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    return {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).float(),  # type: ignore[no-untyped-call]
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes)).float(),  # type: ignore[no-untyped-call]
    }


@pytest.mark.pain(17)
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_loss_and_gradient_are_those_of_rows(micro_step: MakeMicroStep, kind: str) -> None:
    """On random trees; under gspo too, whose trajectories stay what they are."""
    torch.manual_seed(0)
    model = models()[kind]()
    fewer = 0
    for seed in range(4):
        data = executions(micro_step, seed)
        train = {"objective": ["dis", "gspo"][seed % 2]}
        tree, ours, tokens = accumulated(model, data, **train)
        rows, theirs, row_tokens = accumulated(model, data, **train, prefix_tree=False)
        assert tree.tally.numbers() == pytest.approx(rows.tally.numbers(), rel=1e-4, abs=1e-5), f"seed {seed}"
        assert max(float(t.abs().max()) for t in theirs) > 1e-3, "a gradient that is 0 proves nothing"
        for name, mine, other in zip(tree.masters, ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=lambda m, n=name, s=seed: f"{n}, seed {s}: {m}")
        fewer += tokens < row_tokens
    assert fewer >= 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention's kernel and its gradient need a GPU")
def test_loss_and_gradient_on_a_gpu(micro_step: MakeMicroStep) -> None:
    torch.manual_seed(0)
    model = models()["qwen3"]()
    data = executions(micro_step, 1)
    _, theirs, _ = accumulated(model, data, prefix_tree=False)
    _, ours, _ = accumulated(model, data, torch.device("cuda"))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-3, atol=1e-3)


def test_what_cannot_take_a_tree_trains_rows_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, sliding_window=4
    )
    policy = Policy(MistralForCausalLM(config).float(), Path(), 1.0, tree=True)  # type: ignore[no-untyped-call]
    assert not policy.tree and policy.model.config._attn_implementation != trees.NAME
    assert "train.prefix_tree has no effect: its attention is a sliding window" in caplog.text


def test_a_model_that_hides_its_attention_is_found_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One layer that is not handed the tree is enough."""
    model = models()["llama"]()
    layer = model.model.layers[1].self_attn
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *args, **kwargs: forward(*args, **{k: v for k, v in kwargs.items() if k != trees.NAME}))
    assert not Policy(model, Path(), 1.0, tree=True).tree
    assert "1 of its 2 layers take another attention" in caplog.text


def test_an_execution_stays_with_one_rank(micro_step: MakeMicroStep) -> None:
    data = executions(micro_step, 3, n=7)
    shares = divide(data, 3)
    owners = [{t.rollout_id for t in share.trajectories} for share in shares]
    assert sum(map(len, owners)) == 7 == len(set().union(*owners)) and all(owners)
    assert sum(len(s.token_ids_S) for s in shares) == len(data.token_ids_S)
