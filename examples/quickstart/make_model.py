"""Make the quick start's model: a tiny Qwen3 that imitates a careless coding agent.

    python make_model.py --out DIR [--seed 0] [--steps 1600] [--threads 2]

Writes a Hugging Face directory (weights, configuration, tokenizer with chat template). The model starts from
nothing but two helps, without which a minute or two of imitation on two cores teaches nothing:

1. a mimetic start: in every layer queries agree with keys and the output projection is half the value's
   transpose, so that attention begins by finding equal tokens and copying what it finds;
2. a tokenizer that cuts a name into the same tokens wherever it stands, and knows the fixed strings of the
   format.

The demonstrator is right less than half of the time. Nothing here looks at a reward: what makes the model
reliable afterwards is reinforcement learning from the verifier alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported: threads that spin take a busy machine ten times as long

import torch
import torch.nn.functional as F
from demonstrations import Segment, demonstrate
from kinds import DEMONSTRATED, make_task
from tokenizer import EOS, PAD, build_tokenizer, save_tokenizer
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 128, 4, 4, 2, 32, 384
CONTEXT = 1024
DEMONSTRATIONS = 4000
BATCH = 8  # small: many updates matter more than smooth ones
LEARNING_RATE = 2.5e-3
WARM_UP_STEPS = 30
DECAY_SHARE = 0.4  # the learning rate falls to a tenth over the last part

Example = tuple[list[int], list[int]]  # token ids, and 1 where the demonstrator speaks


def new_model(vocabulary: int, eos: int, pad: int, seed: int) -> Any:
    """A Qwen3 model of about 0.87 M parameters with the mimetic start."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype="float32",
    )
    model: Any = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for layer in model.model.layers:
            mimetic(layer.self_attn)
    return model


def mimetic(attention: Any) -> None:
    """Queries near the keys of their group, output half the value's transpose (Trockman, Kolter 2023)."""
    scale, share = HIDDEN**-0.5, HEADS // KV_HEADS
    keys = torch.randn(KV_HEADS, HEAD_DIM, HIDDEN) * scale
    values = torch.randn(KV_HEADS, HEAD_DIM, HIDDEN) * scale
    queries = keys.repeat_interleave(share, 0) + 0.3 * scale * torch.randn(HEADS, HEAD_DIM, HIDDEN)
    outputs = 0.5 * values.repeat_interleave(share, 0)
    attention.q_proj.weight.copy_(queries.reshape(HEADS * HEAD_DIM, HIDDEN))
    attention.k_proj.weight.copy_(keys.reshape(KV_HEADS * HEAD_DIM, HIDDEN))
    attention.v_proj.weight.copy_(values.reshape(KV_HEADS * HEAD_DIM, HIDDEN))
    attention.o_proj.weight.copy_(outputs.reshape(HEADS * HEAD_DIM, HIDDEN).T)


def encode(tokenizer: Tokenizer, segments: list[Segment]) -> Example:
    """Ids and mask, segment by segment: as the gateway splices what was sampled with what it renders."""
    ids: list[int] = []
    mask: list[int] = []
    for text, spoken in segments:
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        mask += [int(spoken)] * len(piece)
    return ids, mask


def batches(examples: list[Example], rng: random.Random) -> Iterator[list[Example]]:
    """Endless batches; sorted by length within pools of sixteen batches, so that little is padding."""
    pool = 16 * BATCH
    while True:
        order = rng.sample(range(len(examples)), len(examples))
        sort = [i for s in range(0, len(order), pool) for i in sorted(order[s : s + pool], key=lambda i: len(examples[i][0]))]
        cut = [sort[s : s + BATCH] for s in range(0, len(sort), BATCH)]
        rng.shuffle(cut)
        for batch in cut:
            yield [examples[i] for i in batch]


def pad(rows: list[list[int]], value: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def imitate(model: Any, examples: list[Example], pad_id: int, *, steps: int, seed: int) -> None:
    """Cross-entropy on the demonstrator's tokens for `steps` batches."""
    flat = [p for p in model.parameters() if p.ndim < 2]
    wide = [p for p in model.parameters() if p.ndim >= 2]
    groups = [{"params": wide, "weight_decay": 0.01}, {"params": flat, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98), fused=True)
    model.train()
    start = time.monotonic()
    for step, batch in enumerate(batches(examples, random.Random(f"{seed}/batches"))):
        if step == steps:
            return
        done = step / steps
        rate = min(1.0, (step + 1) / WARM_UP_STEPS) * max(0.1, min(1.0, (1 - done) / DECAY_SHARE))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        ids_BT = pad([ids for ids, _ in batch], pad_id)
        mask_BT = pad([mask for _, mask in batch], 0)[:, 1:].bool()
        # Padding is on the right and attention causal: no attention mask is needed.
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits_BTV[mask_BT], ids_BT[:, 1:][mask_BT])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 250 == 0:
            print(
                f"imitation: step {step}, {time.monotonic() - start:.0f} s, loss {loss.item():.3f}",
                flush=True,
            )
    raise AssertionError("batches are endless")


def demonstrations(number: int, seed: int) -> list[list[Segment]]:
    """What the careless demonstrator did on `number` training tasks."""
    made = []
    for i in range(number):
        rng = random.Random(f"{seed}/demonstrations/{i}")
        made.append(demonstrate(make_task(rng, "train", DEMONSTRATED[i % len(DEMONSTRATED)]), rng))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the quick start's tiny, careless model.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model, made if missing")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default 0)")
    parser.add_argument("--steps", type=int, default=1600, help="imitation steps at most (default 1600)")
    parser.add_argument("--demonstrations", type=int, default=DEMONSTRATIONS, help="how many (default 4000)")
    parser.add_argument("--threads", type=int, default=2, help="threads of the arithmetic (default 2)")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, without a traceback
    torch.set_num_threads(options.threads)
    start = time.monotonic()
    shown = demonstrations(options.demonstrations, options.seed)
    shown_s = time.monotonic() - start
    tokenizer = build_tokenizer(["".join(text for text, _ in segments) for segments in shown])
    eos, pad_id = (int(tokenizer.token_to_id(token) or 0) for token in (EOS, PAD))
    examples = [encode(tokenizer, segments) for segments in shown]
    model = new_model(tokenizer.get_vocab_size(), eos, pad_id, options.seed)
    print(f"{len(shown)} demonstrations in {shown_s:.0f} s, {tokenizer.get_vocab_size()} tokens", flush=True)
    imitate(model, examples, pad_id, steps=options.steps, seed=options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {"eos_token_id": eos, "pad_token_id": pad_id, "do_sample": True}
    model.generation_config = GenerationConfig(**settings)  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(options.out)
    save_tokenizer(tokenizer, options.out, CONTEXT)
    summary = {"model": str(options.out), "parameters": model.num_parameters(), "steps": options.steps}
    print(json.dumps({**summary, "seconds": round(time.monotonic() - start, 1)}))


if __name__ == "__main__":
    main()
