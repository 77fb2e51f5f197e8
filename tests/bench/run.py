"""Speed, as ratios to a peer or a physical limit measured in the same run. `make bench`, or `python tests/bench/run.py [NAME…]`.

Each benchmark runs gyre's part and its yardstick alternately, three times, and reports the medians: other load on the machine falls on both.
No test asserts these figures.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

ROUNDS = 3
ROWS, PROMPT, NEW = 64, 50, 24
Figure = tuple[str, str, float, str, float]  # name, unit, gyre's rate, yardstick, its rate


def alternate(ours: Callable[[], float], theirs: Callable[[], float]) -> tuple[float, float]:
    """Medians of two rates measured in turn."""
    pairs = [(ours(), theirs()) for _ in range(ROUNDS)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


# --- wire: requests over gyre.net against a bare ZeroMQ echo -------------------------------------------------------------------------------


def wire() -> Figure:
    import zmq

    from gyre.net.sockets import Client, Peer, Server, mint
    from gyre.types import Sampling, Version
    from gyre.wire import messages as w
    from gyre.wire.arrays import f32, i32
    from gyre.wire.codec import Arrays

    n, ids = 2000, i32(range(200))
    folder = tempfile.mkdtemp(prefix="gyre-bench-")

    async def requests() -> float:
        server = Server.bind(f"ipc://{folder}/e", w.ToRollout, kind="rollout", name="cell", run_id="b")

        def handle(peer: Peer, message: w.Message, arrays: Arrays) -> None:
            assert isinstance(message, w.Generate)
            reply = w.Generated(id=mint(), cause=message.id, request_id=message.request_id, finish_reason="stop", spans=[], cell="c")
            server.send(peer, reply, {"token_ids": arrays["prompt_ids"], "logprobs": f32([0.0] * len(ids))})

        serving = asyncio.create_task(server.serve(handle))
        client = Client.connect(server.address, w.FromRollout, kind="sandbox", name="s", incarnation="1")
        await client.ready(10, "the server")
        started = time.perf_counter()
        for batch in range(n // 50):
            ask = [
                w.Generate(id=mint(), request_id=f"{batch}.{i}", rollout_id="r", min_version=Version(0, 0), sampling=Sampling(), seed=i)
                for i in range(50)
            ]
            await asyncio.gather(*[client.request(m, {"prompt_ids": ids}, deadline_s=30, what="an echo") for m in ask])
        rate = n / (time.perf_counter() - started)
        client.close()
        serving.cancel()
        server.close()
        return rate

    def bare() -> float:
        context = zmq.Context()
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        router.bind(f"ipc://{folder}/z")
        dealer.connect(f"ipc://{folder}/z")
        payload = bytes(ids)
        started = time.perf_counter()
        for _ in range(n // 50):
            for _ in range(50):
                dealer.send_multipart([b"request", payload])
            for _ in range(50):
                router.send_multipart([*router.recv_multipart(), payload])
            for _ in range(50):
                dealer.recv_multipart()
        rate = n / (time.perf_counter() - started)
        for s in (router, dealer):
            s.close(0)
        context.term()
        return rate

    ours, theirs = alternate(lambda: asyncio.run(requests()), bare)
    shutil.rmtree(folder)
    return "wire: requests with 200 tokens", "/s", ours, "bare ZeroMQ frames", theirs


def _named(rates: tuple[float, float], yardstick: str) -> tuple[float, str, float]:
    return rates[0], yardstick, rates[1]


# --- engine: sampled tokens against transformers' generate -----------------------------------------------------------------------------------


def tiny(seed: int = 0) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=668, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=32, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=2, pad_token_id=0,
        )
    ).eval()  # fmt: skip


def engine() -> Figure:
    """Requests of one length, so that a closed batch, which is all `generate` can do, loses nothing to stragglers."""
    import torch

    from gyre.rollout.engine import EngineRequest
    from gyre.rollout.torch_engine import TorchEngine
    from gyre.types import Sampling, Version
    from gyre.weights.snapshot import model_tensors, pack

    torch.set_num_threads(1)
    torch.manual_seed(1)
    prompts = torch.randint(3, 668, (ROWS, PROMPT))
    model = tiny()
    peer = tiny()
    gyre = TorchEngine(model, eos=frozenset(), slots=ROWS, queue=ROWS, context=512, threads=1)

    initial = pack(Version(0, 0), model_tensors(model))
    gyre.load(initial.version, initial.tensors, initial.data).result(60)

    def ours() -> float:
        started = time.perf_counter()
        futures = [gyre.submit(EngineRequest(f"{started}.{i}", "r", prompts[i].tolist(), Sampling(max_tokens=NEW), seed=i)) for i in range(ROWS)]
        done = sum(len(f.result(120).token_ids) for f in futures)
        return done / (time.perf_counter() - started)

    def theirs() -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            out = peer.generate(
                input_ids=prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=NEW, min_new_tokens=NEW,
                output_scores=True, return_dict_in_generate=True,
            )  # fmt: skip
            peer.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        return ROWS * NEW / (time.perf_counter() - started)

    try:
        return (
            f"engine: tokens sampled with log-probs, {ROWS} requests, one thread",
            "tok/s",
            *_named(alternate(ours, theirs), "transformers generate"),
        )
    finally:
        gyre.close()


# --- sandbox: a command contained against the same command bare ---------------------------------------------------------------------------------


def sandbox() -> Figure:
    """A fresh workspace, `true` in a sandbox, and the workspace dropped, against bwrap alone."""

    def theirs() -> float:
        argv = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "true"]
        started = time.perf_counter()
        for _ in range(60):
            subprocess.run(argv, check=True, timeout=30)
        return 60 / (time.perf_counter() - started)

    return _sandboxes("bubblewrap", theirs, "bwrap alone, no workspace, no limits")


def sandbox_docker() -> Figure:
    """The same in containers, two for a workspace with a command, against as many bare ones of the same SDK."""
    import docker

    client = docker.from_env()

    def theirs() -> float:
        started = time.perf_counter()
        for _ in range(10):
            client.containers.run(os.environ["GYRE_IMAGE"], "true", network_mode="none", remove=True)
        return 5 / (time.perf_counter() - started)

    try:
        return _sandboxes("docker", theirs, "pairs of bare containers")
    finally:
        client.close()


def _sandboxes(backend: str, theirs: Callable[[], float], yardstick: str) -> Figure:
    """A rate against another; the title tells the phases too."""
    script = Path(__file__).with_name("sandbox_rate.py")
    seen: list[dict[str, float]] = []

    def ours() -> float:
        done = subprocess.run([sys.executable, str(script), backend], stdout=subprocess.PIPE, text=True, check=True, timeout=300)
        seen.append(json.loads(done.stdout))
        return seen[-1]["rate"]

    rates = alternate(ours, theirs)
    m = {key: statistics.median(s[key] for s in seen) for key in seen[0]}
    phases = f"set-up {m['setup_ms']:.0f} ms, run {m['exec_ms']:.0f} ms, drop {m['teardown_ms']:.0f} ms, 32 at once {m['at_once_s']:.1f} s"
    return f"sandbox, {backend}: {phases}", "/s", *_named(rates, yardstick)


# --- simulator: heap events against a bare heap ------------------------------------------------------------------------------------------------


def _world(file: str, *sets: str) -> tuple[int, float]:
    """Heap events and seconds of a checked run by the paper's rule."""
    from gyre.rules.named import parse_rule
    from gyre.rules.workload import load
    from gyre.sim.compare import simulate

    workload = load(Path(__file__).parents[2] / "examples" / "workloads" / file, ["workload.seeds=[0]", "system.target_staleness=1.0", *sets])
    started = time.perf_counter()
    world = simulate(workload, parse_rule("elastic"), 1.0, 0)
    return world.events, time.perf_counter() - started


def _bare_heap() -> float:
    """Pops and pushes of (time, number) on a heap of a thousand."""
    from heapq import heapify, heapreplace

    heap = [(float(i * 7919 % 1000), i) for i in range(1000)]
    heapify(heap)
    n = 200_000
    started = time.perf_counter()
    for i in range(n):
        heapreplace(heap, (heap[0][0] + i * 7919 % 1000, i))
    return n / (time.perf_counter() - started)


def simulator() -> Figure:
    """Shared engines: the densest in events."""

    def ours() -> float:
        events, seconds = _world("shared-rate.toml")
        return events / seconds

    return "simulator: heap events, shared engines, checked", "/s", *_named(alternate(ours, _bare_heap), "a bare heap")


def simulator_large() -> Figure:
    """192 cells x 48 steps, B = 64, N = 16, slots: it prints the seconds too, which should be below ten."""
    took: list[float] = []

    def ours() -> float:
        large = ("system.cells=192", "system.groups_per_step=64", "system.slots_per_cell=18", "workload.bursts=16")
        events, seconds = _world("nl2repo-122b.toml", *large)
        took.append(seconds)
        return events / seconds

    rates = alternate(ours, _bare_heap)
    return f"simulator: 192 cells, 48 steps in {statistics.median(took):.1f} s", "/s", *_named(rates, "a bare heap")


# --- gateway: a call against the engine's wire alone --------------------------------------------------------------------------------------------


def gateway() -> Figure:
    """`gateway_calls.py` in this process, for the protocol with the largest requests."""
    sys.path.insert(0, str(Path(__file__).parent))
    from gateway_calls import calls, make_renderer

    renderer = make_renderer()
    costs = [asyncio.run(calls(renderer, "chat")) for _ in range(ROUNDS)]
    through, alone, added, cpu = (statistics.median(getattr(c, name) for c in costs) for name in ("through", "alone", "added", "added_cpu"))
    return (
        f"gateway: 10,000 tokens of history ({added * 1e3:+.1f} ms, CPU {cpu * 1e3:+.1f} ms)",
        "/s",
        1 / through,
        "the engine's wire alone",
        1 / alone,
    )


def gateway_throughput() -> Figure:
    """`gateway_throughput.py`: 64 rollouts where the engine is the limit. The ratio should be 0.97 or more."""
    sys.path.insert(0, str(Path(__file__).parent))
    from gateway_calls import make_renderer
    from gateway_throughput import ROLLOUTS, throughput

    renderer = make_renderer()
    rates = [throughput(renderer) for _ in range(ROUNDS)]
    through, alone, cpu = (statistics.median(getattr(r, name) for r in rates) for name in ("through", "alone", "cpu"))
    return f"gateway: {ROLLOUTS} rollouts, a slow engine ({cpu * 1e3:.1f} ms of CPU a call)", "tok/s", through, "the engine's wire alone", alone


# --- training: a step with prefix trees against rows ----------------------------------------------------------------------------------------------


def prefix_tree() -> Figure:
    """`tree_step.py` in this process: five trajectories of an execution that was compacted once and edited twice, per second of one processor."""
    sys.path.insert(0, str(Path(__file__).parent))
    import torch
    from tree_step import micro_step, seconds

    torch.set_num_threads(1)
    data = micro_step("edited")
    tokens = len(data.token_ids_S)
    rates = alternate(lambda: tokens / seconds(data, tree=True), lambda: tokens / seconds(data, tree=False))
    return f"training: prefix trees at J_max = 5, cost {rates[1] / rates[0]:.2f} of rows", "tok/s", *_named(rates, "the same rows apart")


def buffer() -> None:
    """`buffer_rate.py`: rollouts in and out of a buffer, against a plain write and fsync, a Ray queue and TransferQueue."""
    subprocess.run([sys.executable, Path(__file__).with_name("buffer_rate.py")], check=True, timeout=1800)


def vllm() -> None:
    """`vllm_throughput.py`, in the environment that has vLLM: through gateways, ZeroMQ and the engine against a bare AsyncLLM; a publication."""
    python = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        print("vllm: skipped, there is no .venv-vllm (make setup-vllm)")
        return
    subprocess.run([python, Path(__file__).with_name("vllm_throughput.py"), "tiny", "135m"], check=True, timeout=1800, stderr=subprocess.DEVNULL)


BENCHMARKS = {
    "wire": wire, "gateway": gateway, "gateway_throughput": gateway_throughput, "engine": engine, "sandbox": sandbox,
    "sandbox_docker": sandbox_docker,
    "simulator": simulator, "simulator_large": simulator_large, "prefix_tree": prefix_tree,
}  # fmt: skip


def main() -> int:
    names = sys.argv[1:] or [*BENCHMARKS, "buffer", "vllm"]
    print(f"{'':58} {'gyre':>12}   {'yardstick':>12}   ratio")
    for name in names:
        if name in ("buffer", "vllm"):
            buffer() if name == "buffer" else vllm()
            continue
        if name == "sandbox" and not shutil.which("bwrap"):
            print("sandbox: skipped, bwrap is not installed")
            continue
        if name == "sandbox_docker" and not os.environ.get("GYRE_IMAGE"):
            print("sandbox_docker: skipped, run it with python tests/sandbox/engines.py COMMAND…")
            continue
        title, unit, ours, yardstick, theirs = BENCHMARKS[name]()
        print(f"{title:58} {ours:8.0f} {unit:5} {theirs:8.0f} {unit:5} {ours / theirs:6.2f}  ({yardstick})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
