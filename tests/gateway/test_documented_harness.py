"""The harness printed in docs/harness.md works as printed."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

from gyre.types import CallStatus

PAGE = Path(__file__).resolve().parents[2] / "docs" / "harness.md"


def test_the_example_of_the_documentation(gateway: Any, renderer: Any, sampled: Any, tmp_path: Path) -> None:
    """Two turns, a tool call between them; one trajectory of both replies."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    (tmp_path / "agent.py").write_text("".join(blocks))
    (tmp_path / "instruction.md").write_text("Write yes to the file answer.\n")
    texts = iter(['<tool_call>\n{"name": "bash", "arguments": {"command": "echo yes > answer; echo written"}}\n</tool_call>', "Done."])

    def script(request: Any, prompt: list[int]) -> Any:
        return sampled([*renderer.template.tokenizer.encode(next(texts)).ids, renderer.end_id])

    async def run() -> None:
        async with gateway(script) as g:
            work = tmp_path / "work"
            work.mkdir()
            env = {"PATH": os.environ["PATH"], "GYRE_MODEL_SOCKET": str(g.socket), "GYRE_INSTRUCTION": str(tmp_path / "instruction.md")}
            agent = await asyncio.create_subprocess_exec(
                sys.executable, "-I", str(tmp_path / "agent.py"), cwd=work, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            out, _ = await asyncio.wait_for(agent.communicate(), 30)
            assert (agent.returncode, out) == (0, b""), out.decode()
            assert (work / "answer").read_text() == "yes\n"
            outcome = await g.close()
            assert [c.status for c in outcome.calls] == [CallStatus.COMPLETE] * 2
            (trajectory,) = outcome.trajectories
            assert trajectory.n_trainable == sum(c.n_completion for c in outcome.calls)
            assert "written\n" in renderer.template.decode(outcome.graph.token_ids)

    asyncio.run(run())
