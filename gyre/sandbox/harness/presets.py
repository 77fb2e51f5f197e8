"""The harnesses that `sandbox.harness = "preset:NAME"` knows: where each comes from and how it is told its model. A table, no code of theirs.

Words in braces, in arguments, environment and files: {root} is the installed harness as a sandbox sees it, {node} and {python} an interpreter, {arch}
npm's name of this machine, {instruction} the task's instruction, {base_url} the model (without /v1), {model} its name, {context} and {max_tokens} the
run's limits, {eighth} an eighth of the first. Files are written into the sandbox's home before the harness starts.

Versions are pinned; what the packages depend on is resolved by their registry. Other harnesses need no entry here: `sandbox.harness` takes commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from gyre.errors import UsageError

ROOT: Final = "/opt/harness"
NODE_ROOT: Final = "/opt/node"
SPELLING: Final = "preset:"


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """One harness. `memory_mb`, `pids` and `tmp_mb` are what it needs itself: limits of a sandbox are raised to them."""

    name: str
    package: str
    version: str
    registry: Literal["npm", "pypi"]
    protocol: Literal["chat", "responses", "messages"]
    licence: str
    terms: str = ""  # where the terms of one that is not open are; it is installed only if they are accepted
    entry: str  # a file below {root} that must be there
    argv: tuple[str, ...]
    env: Mapping[str, str] = {}
    files: Mapping[str, str] = {}
    least_context: int = 0  # of `rollout.context`; with less it compacts before it begins, again and again
    memory_mb: int = 2048
    pids: int = 256
    tmp_mb: int = 256


NODE: Final = Preset(
    name="node", package="node-linux-{arch}", version="22.23.3", registry="npm", protocol="chat", licence="MIT", argv=(),
    entry="node_modules/node-linux-{arch}/bin/node",
)  # fmt: skip
"""The interpreter of those that are JavaScript; installed with them. npm's package of it, since a sandbox sees only /usr and that may be too old."""

_MODULES: Final = "{root}/node_modules"
_PI_MODELS: Final = """\
{"providers": {"gyre": {"baseUrl": "{base_url}/v1", "api": "openai-completions", "apiKey": "gyre", "models":
 [{"id": "{model}", "reasoning": true, "contextWindow": {context}, "maxTokens": {max_tokens}}]}}}
"""
_PI_SETTINGS: Final = '{"compaction": {"enabled": true, "reserveTokens": {max_tokens}, "keepRecentTokens": {eighth}}}\n'
_CODEX_CONFIG: Final = """\
model = "{model}"
model_provider = "gyre"
model_context_window = {context}
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.gyre]
name = "gyre"
base_url = "{base_url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
_OPENCODE_CONFIG: Final = """\
{"model": "gyre/{model}", "autoupdate": false, "share": "disabled", "provider": {"gyre": {"npm": "@ai-sdk/openai-compatible",
 "options": {"baseURL": "{base_url}/v1", "apiKey": "gyre"},
 "models": {"{model}": {"reasoning": true, "tool_call": true, "limit": {"context": {context}, "output": {max_tokens}}}}}}}
"""
_QWEN_SETTINGS: Final = """\
{"model": {"name": "{model}", "generationConfig": {"contextWindowSize": {context}, "samplingParams": {"max_tokens": {max_tokens}}}},
 "general": {"enableAutoUpdate": false}, "privacy": {"usageStatisticsEnabled": false}, "telemetry": {"enabled": false}}
"""

_ALL: Final = (
    Preset(
        name="mini", package="mini-swe-agent", version="2.4.6", registry="pypi", protocol="chat", licence="MIT",
        entry="site/minisweagent/__init__.py",
        argv=("{python}", "-m", "minisweagent.run.mini", "-y", "--exit-immediately", "-m", "openai/{model}", "-t", "{instruction}",
              "-o", "/tmp/traj.json", "-c", "mini.yaml", "-c", "model.model_kwargs.api_base={base_url}/v1"),
        env={"PYTHONPATH": "{root}/site", "PYTHONDONTWRITEBYTECODE": "1", "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors",
             "MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    Preset(
        name="pi", package="@mariozechner/pi-coding-agent", version="0.73.1", registry="npm", protocol="chat", licence="MIT",
        entry="node_modules/@mariozechner/pi-coding-agent/dist/cli.js",
        argv=("{node}", _MODULES + "/@mariozechner/pi-coding-agent/dist/cli.js", "-p", "--no-session", "--provider", "gyre", "--model", "{model}",
              "{instruction}"),
        env={"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
        files={".pi/agent/models.json": _PI_MODELS, ".pi/agent/settings.json": _PI_SETTINGS},
    ),
    Preset(
        name="opencode", package="opencode-ai", version="1.18.33", registry="npm", protocol="chat", licence="MIT",
        entry="node_modules/opencode-linux-{arch}/bin/opencode",
        argv=(_MODULES + "/opencode-linux-{arch}/bin/opencode", "run", "--format", "json", "{instruction}"),
        env={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
             "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1"},
        files={".config/opencode/opencode.json": _OPENCODE_CONFIG},
    ),
    Preset(
        name="qwen-code", package="@qwen-code/qwen-code", version="0.24.4", registry="npm", protocol="chat", licence="Apache-2.0",
        entry="node_modules/@qwen-code/qwen-code/cli-entry.js",
        argv=("{node}", _MODULES + "/@qwen-code/qwen-code/cli-entry.js", "--auth-type", "openai", "--openai-api-key", "gyre", "--openai-base-url",
              "{base_url}/v1", "-m", "{model}", "-y", "-o", "json", "-p", "{instruction}"),
        files={".qwen/settings.json": _QWEN_SETTINGS}, least_context=50_000,
    ),
    Preset(
        name="codex", package="@openai/codex", version="0.171.0", registry="npm", protocol="responses", licence="Apache-2.0",
        entry="node_modules/@openai/codex/bin/codex.js",
        argv=("{node}", _MODULES + "/@openai/codex/bin/codex.js", "exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check",
              "--json", "{instruction}"),
        files={".codex/config.toml": _CODEX_CONFIG},
    ),
    Preset(
        name="claude-code", package="@anthropic-ai/claude-code", version="2.1.332", registry="npm", protocol="messages", licence="proprietary",
        terms="https://code.claude.com/docs/en/legal-and-compliance", entry="node_modules/@anthropic-ai/claude-code-linux-{arch}/claude",
        argv=(_MODULES + "/@anthropic-ai/claude-code-linux-{arch}/claude", "-p", "{instruction}", "--dangerously-skip-permissions",
              "--output-format", "json"),
        env={"IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "ANTHROPIC_BASE_URL": "{base_url}",
             "ANTHROPIC_AUTH_TOKEN": "gyre", "ANTHROPIC_MODEL": "{model}", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "{max_tokens}",
             "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "{context}", "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "{context}"},
    ),
)  # fmt: skip

PRESETS: Final[Mapping[str, Preset]] = {preset.name: preset for preset in _ALL}


def preset(name: str, where: str, key: str | None = None) -> Preset:
    """The entry of a name. Raises `UsageError` naming all of them."""
    if name not in PRESETS:
        raise UsageError(where, f"no preset is called {name!r}", f"they are {', '.join(PRESETS)}", key)
    return PRESETS[name]
