"""Whole runs whose engine is vLLM. Run by `make test-vllm`, in an environment that has it; elsewhere skipped."""

from __future__ import annotations

import importlib.util
import os

import pytest
from whole_run import Run, step_groups

STEPS = 4


@pytest.fixture
def vllm(run: Run) -> Run:
    if importlib.util.find_spec("vllm") is None:
        if "vllm" in os.environ.get("GYRE_REQUIRE", "").split(","):
            pytest.fail("GYRE_REQUIRE=vllm, but vLLM is not installed")
        pytest.skip("vLLM is not installed: make test-vllm")
    text = run.config.read_text()
    for old, new in (
        ('engine = "scripted"\nscript = "script.jsonl"\nmax_tokens = 64', 'engine = "vllm"\nkv_memory_mb = 64\nmax_tokens = 16'),
        ("[net]", "[net]\nengine_timeout_s = 5"),  # far less than vLLM takes to start
    ):
        assert old in text, old
        text = text.replace(old, new)
    run.config.write_text(text)
    return run


@pytest.mark.pain(12, 13)
def test_an_engine_that_is_killed_comes_back(vllm: Run) -> None:
    """pains 12, 13: it loads for longer than any ping may take and is not given up; it is asked only once it acknowledged the policy of now."""
    run = vllm
    run.start_all()
    run.until(lambda: (run.dir / "ledger.db").exists() and len(run.dump("--kind", "steps")) >= 1, "the first step")
    run.processes["rollout"].kill()
    run.processes["rollout"].wait(30)
    run.start("rollout")
    run.finish()
    assert [s["step"] for s in run.dump("--kind", "steps")] == list(range(1, STEPS + 1))
    groups = step_groups(run)
    assert len(groups) == len(set(groups)) == 2 * STEPS
    records = run.dump()
    assert records
    for t in records:
        assert all(v is None or v >= t["version_at_dispatch"] for v in t["versions"])  # type: ignore[attr-defined]
    assert max(s["metrics"]["logprob_diff_current_max"] or 0.0 for s in run.dump("--kind", "steps")) < 1e-3  # type: ignore[index]
    run.until(lambda: run.left_behind() == [], "the end of all processes")
