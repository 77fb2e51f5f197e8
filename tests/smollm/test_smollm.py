"""examples/smollm: its tasks and demonstrations, its chat template in the gateway, its warm start; no download, no sandbox, no run."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gyre.rollout.model import eos_ids, model_shapes
from gyre.sandbox.gateway.parse import parse
from gyre.sandbox.gateway.render import Recorded, Renderer
from gyre.sandbox.gateway.template import ChatTemplate
from gyre.sandbox.task import load_task
from gyre.train import tree as trees

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smollm"
WORD = {"type": "string"}
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": {"path": WORD, "content": WORD}}}}]


def load(name: str) -> Any:
    """A script under a name of its own: other examples have scripts that are called alike."""
    spec = importlib.util.spec_from_file_location(f"smollm_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


make_tasks, fetch_model, warm_start = load("make_tasks"), load("fetch_model"), load("warm_start")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tasks")
    for name in ("a", "b"):
        few = ["--base", "b:1", "--demonstrated", "6", "--train", "6", "--heldout", "6"]
        subprocess.run([sys.executable, EXAMPLE / "make_tasks.py", "--out", out / name, *few], check=True, timeout=60)
    return out


def test_the_same_seed_gives_the_same_bytes(tasks: Path) -> None:
    a, b = ({p.relative_to(tasks / n): p.read_bytes() for p in (tasks / n).rglob("*") if p.is_file()} for n in "ab")
    assert a == b and len(a) > 100


def test_the_solution_gets_1_and_doing_nothing_0(tasks: Path, tmp_path: Path) -> None:
    for n, folder in enumerate(sorted((tasks / "a" / "heldout").iterdir())):
        task = load_task(folder)
        assert task.workspace is not None and "FROM b:1\n" in (folder / "environment" / "Dockerfile").read_text()
        work, logs = tmp_path / f"work{n}", tmp_path / f"logs{n}"
        work.mkdir()
        logs.mkdir()
        for path in (p for p in task.workspace.iterdir() if p.is_file()):
            (work / path.name).write_bytes(path.read_bytes())
        env = {"PATH": "/usr/bin:/bin", "GYRE_WORK": str(work), "GYRE_TESTS": str(task.tests), "GYRE_LOGS": str(logs)}
        for solved in (False, True):
            if solved:
                subprocess.run([task.solution / "solve.sh"], env=env, check=True, timeout=60)
            subprocess.run([sys.executable, task.tests / "test.sh"], env=env, check=True, timeout=60)
            assert (logs / "reward.txt").read_text() == f"{solved:d}\n", folder


def test_demonstrations_make_the_solution_s_calls_and_then_stop(tasks: Path) -> None:
    lines = [json.loads(line) for line in (tasks / "a" / "demonstrations.jsonl").read_text().splitlines()]
    for task in make_tasks.draw(0, "demonstrated", 6):
        prompt, said = f"<|im_start|>user\n{task.instruction}<|im_end|>\n", []
        for _ in range(len(task.right) + 1):
            said.append(next(line["text"] for line in lines if re.search(line["match"], prompt)))
            prompt += f"<|im_start|>assistant\n{said[-1]}<|im_end|>\n<|im_start|>tool\nfine<|im_end|>\n"
        assert said[-1] == make_tasks.FAREWELL
        calls = [parse(text, "c", offered={"bash": {}, "write": {}})["tool_calls"][0]["function"] for text in said[:-1]]
        for call, right in zip(calls, task.right, strict=True):
            assert list(json.loads(call["arguments"]).values()) == list(right.arguments.values())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What fetch_model.py writes, of a model whose weights were quantized and a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(specials + alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=specials[1], eos_token=specials[2], pad_token=specials[2])
    config = LlamaConfig(vocab_size=len(specials + alphabet), max_position_embeddings=1024, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    torch.manual_seed(0)
    model = fetch_model.nobody(config)
    model.config.quantization_config = {"quant_method": "gguf"}
    out = tmp_path_factory.mktemp("model")
    fetch_model.save(model, fast, out)
    return out


def test_what_is_written_is_a_model_directory(saved: Path) -> None:
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    assert eos_ids(saved) == {2} and model_shapes(saved)
    assert LlamaForCausalLM.from_pretrained(saved, local_files_only=True).config.tie_word_embeddings


def test_the_template_shows_tools_and_is_continued_exactly(saved: Path) -> None:
    renderer = Renderer(ChatTemplate.load(saved))
    assert (renderer.form, renderer.end_text, renderer.opening) == ("hermes", "<|im_end|>", "<|im_start|>assistant\n")
    shown = renderer.shown(TOOLS)
    asked = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    first = renderer.full(asked, shown, None, 1000)
    text = renderer.template.tokenizer.decode(list(first.ids), skip_special_tokens=False)
    assert text == "<|im_start|>system\nTools: write(path, content)\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    call = {"id": "c", "type": "function", "function": {"name": "write", "arguments": '{"path": "a", "content": "b"}'}}
    later = [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "fine"}]
    reply = renderer.template.encode('<tool_call>\n{"name": "write", "arguments": {"path": "a", "content": "b"}}\n</tool_call><|im_end|>', 1000)
    stand_ins = [renderer.stand_in(m, False) if m["role"] == "assistant" else m for m in later]
    bridged = renderer.bridge(stand_ins, shown, first.draft, Recorded(first.ids + reply, first.draft.before, False, True), 1000)
    assert bridged is not None and bridged.ids == renderer.full(later, shown, None, 1000).ids


def test_imitation_is_cross_entropy_of_what_was_said_and_goes_down(saved: Path) -> None:
    rows = [{"token_ids": [3, 4, 5, n, 7, n], "loss_mask": [0, 0, 0, 1, 0, 1], "reward": float(n != 9)} for n in (8, 9, 10, 11)]
    examples = warm_start.read([json.dumps(row) for row in rows])
    assert len(examples) == 3  # not the one that the verifier did not like
    model: Any = LlamaForCausalLM.from_pretrained(saved, local_files_only=True)
    plain = []
    for ids, spoken in examples:
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)
        plain += [-logprobs[at - 1, ids[at]] for at in spoken.tolist()]
    trees.install(model)
    before = warm_start.loss_of(model, examples)
    torch.testing.assert_close(before, torch.stack(plain).mean())
    warm_start.imitate(model, examples, epochs=20, batch=2, lr=1e-2, seed=0)
    assert warm_start.loss_of(model, examples) < before
