"""vLLM behind gyre against vLLM alone, in an environment that has it: `.venv-vllm/bin/python tests/bench/vllm_throughput.py [tiny|135m]…`.

Prints, for 16 and 64 rollouts at once, tokens a second through gateways, ZeroMQ and the vLLM engine, against the same prompts given to a bare
AsyncLLM; and the seconds of a publication, against copying its bytes once. Each engine is a process of its own; they are measured in turn, three
times. The models have random weights; 135m has the shape of SmolLM2-135M.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from gateway_calls import ROOT, make_renderer, post

from gyre.config import Config, Model, Rollout
from gyre.net.sockets import Server
from gyre.sandbox.gateway.endpoint import Endpoint, body_limit
from gyre.sandbox.gateway.http import HttpServer
from gyre.sandbox.gateway.render import Renderer
from gyre.sandbox.gateway.route import Router
from gyre.sandbox.gateway.session import Limits, Session
from gyre.types import Purpose, Sampling, Ticket, Version
from gyre.wire import messages as w

ROUNDS, CALLS, NEW, SLOTS, CONTEXT = 3, 2, 64, 64, 1024
FIRST = Version(1, 0)
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3},
}
VOCABULARY = {"tiny": 8000, "135m": 49152}


def save_model(name: str, path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {**SHAPES[name], "vocab_size": VOCABULARY[name], "max_position_embeddings": 2048, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(bos_token_id=None, eos_token_id=None, **sizes)).save_pretrained(path)


def config(path: Path) -> Config:
    return Config(model=Model(path=str(path)), rollout=Rollout(engine="vllm", slots=SLOTS, queue=SLOTS, context=CONTEXT, kv_memory_mb=4096))


def serve(path: Path, address: str, pipe: Connection) -> None:
    """The process of gyre's engine: says when it serves; asked, it measures a publication and a copy of the same bytes."""
    import torch

    from gyre.rollout.shell import Desk
    from gyre.rollout.vllm_engine import open_vllm
    from gyre.weights.snapshot import pack

    engine = open_vllm(config(path))
    engine.load(FIRST, [], memoryview(b"")).result(60)

    def publications() -> tuple[float, float, int]:
        from safetensors.torch import load_file

        snapshot = pack(FIRST, load_file(path / "model.safetensors"))
        data = bytearray(snapshot.data)
        took, copied = [], []
        for step in range(1, 6):
            started = time.perf_counter()
            engine.load(Version(1, step), snapshot.tensors, memoryview(data)).result(120)
            took.append(time.perf_counter() - started)
            source, target = torch.frombuffer(data, dtype=torch.uint8), torch.ones(len(data), dtype=torch.uint8)
            started = time.perf_counter()
            target.copy_(source)
            copied.append(time.perf_counter() - started)
        return statistics.median(took), statistics.median(copied), len(data)

    async def main() -> None:
        server = Server.bind(address, w.ToRollout, kind="rollout", name="cell", run_id="r")
        desk = Desk(server, "cell", CONTEXT)
        desk.engine, desk.version = engine, FIRST
        serving = asyncio.create_task(server.serve(desk.handle))
        pipe.send("ready")
        while await asyncio.to_thread(pipe.recv):
            pipe.send(await asyncio.to_thread(publications))
        serving.cancel()
        await desk.close()

    asyncio.run(main())


def alone(path: Path, pipe: Connection) -> None:
    """The process of a bare AsyncLLM: prompts in, seconds out."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from gyre.rollout.vllm_host import arguments

    given = {k: v for k, v in arguments(config(path), CONTEXT).items() if k not in ("worker_extension_cls", "weight_transfer_config")}

    async def main() -> None:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
        params = SamplingParams(max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)

        async def one(name: str, prompts: list[list[int]]) -> None:
            for i, prompt in enumerate(prompts):
                async for _ in llm.generate(TokensPrompt(prompt_token_ids=prompt), params, f"{name}.{i}"):
                    pass

        pipe.send("ready")
        while (prompts := await asyncio.to_thread(pipe.recv)) is not None:
            started = time.perf_counter()
            await asyncio.gather(*[one(f"{started}.{n}", p) for n, p in enumerate(prompts)])
            pipe.send(time.perf_counter() - started)
        llm.shutdown()

    asyncio.run(main())


async def rollout(renderer: Renderer, router: Router, folder: Path, n: int, texts: list[str]) -> int:
    """All calls of one harness, one after the other; returns the tokens sampled for it."""
    limits = Limits(sampling=Sampling(max_tokens=NEW), context=CONTEXT, max_turns=1000, max_trajectories=1, deadline=time.monotonic() + 600)
    session = Session(Ticket(f"q/0/{n}", 0, "q/0", "q", 0, "/task", Purpose.TRAIN, FIRST, n, 30.0), renderer, router, limits)
    http = HttpServer(Endpoint(session), body_limit(limits.context))
    await http.start(folder / f"{n}.sock")
    reader, writer = await asyncio.open_unix_connection(folder / f"{n}.sock", limit=1 << 24)
    sampled = 0
    for text in texts:
        answer = json.loads(await post(reader, writer, "/v1/chat/completions", json.dumps({"model": "m", "messages": [user(text)]}).encode()))
        sampled += answer["usage"]["completion_tokens"]
    writer.close()
    await http.close()
    await session.close()
    return sampled


def ids(renderer: Renderer, text: str) -> list[int]:
    return list(renderer.template.encode(renderer.template.render([user(text)], None, reply_follows=True), CONTEXT))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def through(renderer: Renderer, router: Router, folder: Path, texts: list[list[str]]) -> float:
    """Tokens a second."""
    started = time.perf_counter()
    tokens = await asyncio.gather(*[rollout(renderer, router, folder, n, t) for n, t in enumerate(texts)])
    return sum(tokens) / (time.perf_counter() - started)


def measure(name: str, renderer: Renderer, folder: Path) -> None:
    save_model(name, folder / name)
    address, spawn = f"ipc://{folder}/{name}.sock", multiprocessing.get_context("spawn")
    ours, served = spawn.Pipe()
    theirs, bare = spawn.Pipe()
    processes = [spawn.Process(target=serve, args=(folder / name, address, served)), spawn.Process(target=alone, args=(folder / name, bare))]
    for process in processes:
        process.start()
    assert (ours.recv(), theirs.recv()) == ("ready", "ready")
    source = (ROOT / "gyre" / "config.py").read_text()

    async def rounds(n: int) -> tuple[float, float]:
        router = Router.connect([address], 5.0, 60.0, name="s", incarnation="i", run_id="r", resend_s=5.0)
        rates = []
        for r in range(ROUNDS + 1):  # the first one warms up
            texts = [[source[(k := 97 * (r * n * CALLS + i * CALLS + c)) % 20_000 :][:600] + str(k) for c in range(CALLS)] for i in range(n)]
            prompts = [[ids(renderer, t) for t in ts] for ts in texts]
            rate = await through(renderer, router, folder, texts)
            theirs.send(prompts)
            rates.append((rate, n * CALLS * NEW / await asyncio.to_thread(theirs.recv)))
        router.close()
        return statistics.median(a for a, _ in rates[1:]), statistics.median(b for _, b in rates[1:])

    for n in (16, 64):
        a, b = asyncio.run(rounds(n))
        print(f"{name}: {n} rollouts: {a:.0f} tok/s through gateways, ZeroMQ and vLLM, {b:.0f} AsyncLLM alone: {a / b:.3f}", flush=True)
    ours.send(True)
    took, copied, nbytes = ours.recv()
    print(
        f"{name}: a publication of {nbytes / 1e6:.0f} MB: {took:.3f} s, {copied / took:.3f} of memcpy's bandwidth ({nbytes / copied / 1e9:.1f} GB/s)",
        flush=True,
    )
    ours.send(False)
    theirs.send(None)
    for process in processes:
        process.join(60)
        process.kill()


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp(prefix="gyre-bench-"))
    try:
        for name in sys.argv[1:] or list(SHAPES):
            measure(name, make_renderer(), folder)
    finally:
        shutil.rmtree(folder)
