"""A run with one recorded execution, made with the real graph, choice and ledger: a tool call, a retry, a compaction, a sub-agent, an aborted call.

`python tests/report/recorded.py DIR` writes one to draw. The tokenizer knows single bytes and the control tokens of a family, so tokens are letters.
Valid, not sampled.
"""

from __future__ import annotations

import random
import sys
from array import array
from pathlib import Path

from msgspec import structs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gyre.buffer.ledger import Ledger
from gyre.trajectory.graph import PrefixGraph
from gyre.trajectory.select import select
from gyre.types import CallRecord, CallStatus, Ending, LeafClass, Purpose, RolloutState
from gyre.wire.arrays import f32, i32
from gyre.wire.messages import RolloutEnded
from gyre.wire.rows import GroupRow, GroupState, Item, MetaRow, QueryRow, RolloutRow, StepRow, StepState

SECRET = "The harness's own prompt."
HOSTILE = "</text><script>alert(1)</script>\x1b]0;owned\x07\x1b[31m & \u202egnp"
CHATML = ("<|im_start|>", "<|im_end|>")
LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TOOL = '<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"}}\n</tool_call>'


def tokenizer(control: tuple[str, ...] = CHATML) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(control))
    return made


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def calls(more: str) -> list[tuple[str, str, LeafClass, CallStatus]]:
    """Prompt, completion, class, status of each call."""
    main, ask = turn("system", SECRET), "<|im_start|>assistant\n"
    first = main + turn("user", f"List the files.{more}") + ask
    told = first + TOOL + "<|im_end|>\n" + turn("user", "<tool_response>\na.txt\n</tool_response>") + ask
    compact = turn("system", SECRET) + turn("user", "Summary: it listed a.txt.") + turn("assistant", "I go on.") + turn("user", "Go on.") + ask
    sub = turn("system", "You search.") + turn("user", "Find a.txt") + ask
    done = CallStatus.COMPLETE
    return [
        (first, TOOL + "<|im_end|>", LeafClass.MAIN, done), (told, "Retried.<|im_end|>", LeafClass.MAIN, CallStatus.ABORTED),
        (told, "There is a.txt.<|im_end|>", LeafClass.MAIN, done), (sub, "Found.<|im_end|>", LeafClass.SUB_AGENT, done),
        (compact, "<think>\nhm\n</think>\nDone.<|im_end|>", LeafClass.MAIN, done),
    ]  # fmt: skip


def write(folder: Path, control: tuple[str, ...] = CHATML, j_max: int = 3, more: str = f" {HOSTILE}") -> Path:
    """A run directory with its model's tokenizer beside it. `more`: what else the user says."""
    run, model = folder / "run", folder / "model"
    model.mkdir(parents=True)
    words = tokenizer(control)
    words.save(str(model / "tokenizer.json"))
    graph, asked = PrefixGraph(), calls(more)
    records = []
    for i, (prompt, completion, leaf, status) in enumerate(asked, 1):
        n = _insert(graph, f"c{i}", i32(words.encode(prompt).ids), i32(words.encode(completion).ids))
        records.append(CallRecord(f"c{i}", -1, -1, status, "stop", leaf, "cell0", float(i), i + 0.5, *n))
    _finish(run, graph, records, {"c1"}, j_max, model)
    return run


def large(folder: Path, n_calls: int = 500, tokens: int = 1_000_000) -> Path:
    """An execution of so many calls whose graph has so many tokens: it compacts every 50 calls, and every tenth call has a sub-agent's of its own."""
    run, model = folder / "run", folder / "model"
    model.mkdir(parents=True)
    words, draw = tokenizer(), random.Random(1)
    words.save(str(model / "tokenizer.json"))
    graph, records, n_each = PrefixGraph(), [], tokens // n_calls // 2

    def said(role: str, n: int = n_each) -> array[int]:
        return i32(words.encode(turn(role, "".join(draw.choices("abcdefgh \n", k=n)))).ids)

    ask = i32(words.encode("<|im_start|>assistant\n").ids)
    main, helper = said("system", 500), said("system", 100)
    for i in range(n_calls):
        if i % 50 == 0:
            main = main[:500] + said("user")
        sub = i % 10 == 9
        prompt = (helper + said("user") if sub else main) + ask
        completion = said("x")[3:]
        n = _insert(graph, f"c{i}", prompt, completion)
        leaf = LeafClass.SUB_AGENT if sub else LeafClass.MAIN
        records.append(CallRecord(f"c{i}", -1, -1, CallStatus.COMPLETE, "stop", leaf, "cell0", float(i), i + 0.5, *n))
        if not sub:
            main = (main if i % 7 == 3 else prompt + completion) + said("user")  # now and then a reply is dropped
    _finish(run, graph, records, {r.call_id for r in records}, 5, model)
    return run


def _insert(graph: PrefixGraph, call_id: str, prompt: array[int], completion: array[int]) -> tuple[int, int]:
    graph.insert(call_id, prompt, completion, f32([-0.5] * len(completion)), i32([0] * len(completion)))
    return len(prompt), len(completion)


def _finish(run: Path, graph: PrefixGraph, records: list[CallRecord], adopted: set[str], j_max: int, model: Path) -> None:
    out = graph.export()
    records = [structs.replace(r, prompt_node=out.calls[r.call_id].prompt_node, node=out.calls[r.call_id].node) for r in records]
    trajectories = select(out.nodes, records, adopted, j_max, random.Random(0))
    message = RolloutEnded(id="m", rollout_id="g0.0", epoch=0, ending=Ending.FINISHED, reward=1.0, rewards={"reward": 1.0}, nodes=out.nodes,
                           calls=records, trajectories=trajectories, cells=["cell0"], harness="mini -t x")  # fmt: skip
    _store(run, message, out.arrays())
    (run / "run.toml").write_text(f'[model]\npath = "{model}"\n')


def _store(run: Path, message: RolloutEnded, arrays: dict[str, array[int] | array[float]]) -> None:
    items = [Item("g0.0", t.index, t.n_tokens, t.n_trainable, leaf_class=t.leaf_class.value) for t in message.trajectories]
    rollout = RolloutRow("g0.0", "g0", "q0", Purpose.TRAIN, 0, "/t", 1, 1, 0, 0, 10.0, state=RolloutState.CONSUMED, ending=Ending.FINISHED,
                         reward=1.0, advantage=0.0, rewards={"reward": 1.0}, items=items, cells=["cell0"], harness=message.harness,
                         n_calls=len(message.calls), ended_at=11.0)  # fmt: skip
    ledger = Ledger(run)
    ledger.store(rollout, message, arrays)
    rows = [
        MetaRow(run_id="r", term=1, committed=1, total_steps=1), QueryRow("q0", Purpose.TRAIN, "/t", "k", 0, 0), rollout,
        GroupRow("g0", "q0", 1, 0, 0, 10.0, state=GroupState.CONSUMED, step=1, reward_mean=1.0, graded=1),
        StepRow(1, 1, 10.0, state=StepState.COMMITTED, closed=True, groups=["g0"], manifest={"stats": {"reward_mean": 1.0}}, committed_at=12.0),
    ]  # fmt: skip
    ledger.commit(rows, [], []).result()
    ledger.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), more="")
