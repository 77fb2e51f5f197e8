"""Configuration: the tables of run.toml, and where each value came from.

Invariants
- Precedence is default < [system] of run.workload < file < --set < flag; an unknown key or a value of the wrong type is a `UsageError` naming
  file, key and remedy.
- Every key has a description (`docs/config.md` is generated from them); no key exists that nothing reads.
- Relative paths in a file are relative to that file; in --set and flags, to the working directory. `load` resolves them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from gyre import inputs
from gyre.errors import UsageError
from gyre.rules import workload


def _doc(text: str, *, path: bool = False, **limits: Any) -> Meta:
    """Describe a key; `path` marks values that are resolved against the file they stand in."""
    return Meta(description=text, extra={"path": path}, **limits)


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the configuration tables."""


class Run(Table, frozen=True, kw_only=True):
    """The run as a whole."""

    seed: Annotated[int, _doc("Every random draw of the run derives from it.", ge=0)] = 0
    stall_s: Annotated[float, _doc("No progress for so long, loading aside: an event `stall` says who waits for whom.", gt=0)] = 300.0
    max_infra_failures: Annotated[int, _doc("So many infrastructure failures in a row end the run with exit 1.", ge=1)] = 20
    coord_grace_s: Annotated[float, _doc("A worker that was launched and hears no coordinator for so long ends in order.", gt=0)] = 600.0
    start_timeout_s: Annotated[float, _doc("How long a process waits for its peers at start.", gt=0)] = 180.0
    deterministic: Annotated[
        bool, _doc("Train groups in the order of admission, on policy: a run whose processes were killed ends as one left alone.")
    ] = False
    keep_payloads: Annotated[
        Literal["all", "needed"],
        _doc("Tokens on disk: all, for dumps; or only what may still be trained, if the core goes back to its oldest checkpoint."),
    ] = "all"
    workload: Annotated[str, _doc("For paced parts: the workload file that they play; its [system] counts, below run.toml's.", path=True)] = ""
    compress: Annotated[float, _doc("For paced parts: the workload's time is divided by it.", gt=0)] = 1.0


class Model(Table, frozen=True, kw_only=True):
    """The policy to start from."""

    path: Annotated[str, _doc("Hugging Face model directory (config, safetensors, tokenizer with a chat template).", path=True)] = ""
    dtype: Annotated[Literal["float32", "bfloat16"], _doc("Element type of weights and activations.")] = "float32"
    device: Annotated[Literal["auto", "cpu", "cuda"], _doc("Where the model runs; auto takes a GPU if there is one.")] = "auto"


class Tasks(Table, frozen=True, kw_only=True):
    """What is trained and evaluated on."""

    train: Annotated[str, _doc("Directory of Harbor task directories (or one, or a list in JSON lines) to train on.", path=True)] = ""
    heldout: Annotated[str, _doc('Held-out tasks for evaluation, given likewise; "" for none.', path=True)] = ""
    epochs: Annotated[int, _doc("Passes over the training tasks before the run runs out of queries; 0 for no end.", ge=0)] = 0
    eval_every: Annotated[int, _doc("Evaluate every so many publications, and at the first and the last; 0 for never.", ge=0)] = 0
    eval_tasks: Annotated[int, _doc("Held-out tasks per evaluation (evenly spaced over their names); 0 for all.", ge=0)] = 0


class System(Table, frozen=True, kw_only=True):
    """Sizes and pace; the same table as in workload files."""

    groups_per_step: Annotated[int, _doc("B: groups consumed by an optimizer step.", ge=1)] = 8
    rollouts_per_group: Annotated[int, _doc("N: rollouts of a query admitted together.", ge=1)] = 8
    steps_per_burst: Annotated[int, _doc("mu: optimizer steps between publications.", ge=1)] = 1
    target_staleness: Annotated[float, _doc("Mean staleness to aim at, in optimizer steps; the quota follows from it.", ge=0)] = 1.0
    dispatch: Annotated[Literal["boundary", "continuous"], _doc("Admit at publications, or whenever there is room.")] = "boundary"
    min_group: Annotated[int, _doc("A group with fewer graded executions is discarded.", ge=1)] = 1
    on_discard: Annotated[Literal["shrink", "replace"], _doc("A discarded group: the step closes without it, or a substitute is admitted.")] = (
        "shrink"
    )


class Rollout(Table, frozen=True, kw_only=True):
    """The inference engine and how it samples."""

    engine: Annotated[Literal["torch", "vllm", "scripted", "paced"], _doc("Which engine serves the policy; paced sleeps as run.workload says.")] = (
        "torch"
    )
    temperature: Annotated[float, _doc("Sampling temperature of training rollouts; 0 is greedy.", ge=0)] = 1.0
    eval_temperature: Annotated[float, _doc("Sampling temperature of evaluation rollouts.", ge=0)] = 1.0
    top_p: Annotated[float, _doc("Nucleus sampling; 1 is off.", gt=0, le=1)] = 1.0
    top_k: Annotated[int, _doc("Keep the k likeliest tokens; 0 is off.", ge=0)] = 0
    max_tokens: Annotated[int, _doc("Tokens sampled per call at most.", ge=1)] = 256
    context: Annotated[int, _doc("Tokens of prompt and completion together at most.", ge=8)] = 4096
    slots: Annotated[int, _doc("Requests decoded together by one engine.", ge=1)] = 64
    queue: Annotated[int, _doc("Requests an engine holds beside those decoding; more are answered full.", ge=0)] = 256
    threads: Annotated[int, _doc("CPU threads of the engine; 0 leaves the choice to torch.", ge=0)] = 0
    tensor_parallel: Annotated[int, _doc("For the vLLM engine: devices that share the model.", ge=1)] = 1
    kv_memory_mb: Annotated[
        int, _doc("For the vLLM engine: memory of keys and values; 0: 1024 on a CPU, on a GPU what gpu_memory leaves beside the model.", ge=0)
    ] = 0
    gpu_memory: Annotated[float, _doc("For the vLLM engine on a GPU: share of the device's memory that it takes.", gt=0, le=1)] = 0.9
    script: Annotated[str, _doc("For the scripted engine: JSON-lines file of completions.", path=True)] = ""


class Sandbox(Table, frozen=True, kw_only=True):
    """Where executions run, and their limits. A task's own limits win when they are tighter."""

    backend: Annotated[
        Literal["bubblewrap", "docker", "process", "paced"],
        _doc("How executions are contained; process contains nothing and needs unsafe; paced runs none, it sleeps as run.workload says."),
    ] = "bubblewrap"
    unsafe: Annotated[bool, _doc("Accept a backend, or a machine, that cannot contain an execution.")] = False
    slots: Annotated[int, _doc("Executions at once per gyre-sandbox.", ge=1)] = 16
    harness: Annotated[str, _doc("Command of the harness, shell-quoted; it runs in the workspace, files of harness_dir are at /harness.")] = (
        "python3 -I -S /harness/harness.py"
    )
    harness_dir: Annotated[str, _doc('Directory mounted read-only at /harness; "" for none.', path=True)] = ""
    forward_tcp: Annotated[bool, _doc("Give the harness the model at http://127.0.0.1:8080 too (OPENAI_BASE_URL); costs a Python process.")] = False
    models: Annotated[tuple[str, ...], _doc("Names that a harness may ask the model by, others are an error; [] for any name.")] = ()
    max_turns: Annotated[int, _doc("Model calls per execution; the next one ends it as turn_limit.", ge=1)] = 100
    harness_timeout_s: Annotated[float, _doc("The agent's own time; then its workspace is graded as it is.", gt=0)] = 3600.0
    overall_timeout_s: Annotated[float, _doc("Everything's time; then the execution is discarded.", gt=0)] = 7200.0
    setup_timeout_s: Annotated[float, _doc("Time to make a workspace.", gt=0)] = 60.0
    verifier_timeout_s: Annotated[float, _doc("The verifier's time.", gt=0)] = 600.0
    verifier_retries: Annotated[int, _doc("Times a failed verifier is run again on the same workspace.", ge=0)] = 1
    reissues: Annotated[int, _doc("Times a ticket is issued again after a loss, then the execution is discarded.", ge=0)] = 2
    lease_ttl_s: Annotated[float, _doc("A ticket's lease; renewed at a third of it.", gt=0)] = 30.0
    workspace_mb: Annotated[int, _doc("Size of a workspace.", ge=1)] = 256
    memory_mb: Annotated[int, _doc("Memory of all processes of a sandbox together.", ge=16)] = 1024
    pids: Annotated[int, _doc("Processes and threads in a sandbox.", ge=4)] = 128
    cpus: Annotated[float, _doc("Processors' worth of time for a sandbox; 0 is no limit; docker alone has one.", ge=0)] = 0.0
    output_kb: Annotated[int, _doc("Output kept of each process that gyre starts in a sandbox.", ge=1)] = 1024
    image: Annotated[str, _doc("docker: the image of tasks that have neither docker_image nor a Dockerfile.")] = ""
    runtime: Annotated[str, _doc('docker: the OCI runtime, as the daemon knows it (runc, runsc); "" is the daemon\'s default.')] = ""
    starts_per_s: Annotated[float, _doc("docker: containers started per second at most.", gt=0)] = 20.0


class TrajectoryTable(Table, frozen=True, kw_only=True):
    """From calls to trajectories."""

    max_per_execution: Annotated[int, _doc("J_max: trajectories trained per execution at most.", ge=1)] = 1
    choice: Annotated[
        Literal["priority", "greedy"],
        _doc("priority: the best leaf class first, drawn in proportion to tokens not yet trained; greedy: always the path with the most of them."),
    ] = "priority"
    leaf_rules: Annotated[
        tuple[str, ...], _doc("Leaf classes of calls: lines CLASS PLACE REGEX, before those of the harness (docs/harness.md).")
    ] = ()


class Train(Table, frozen=True, kw_only=True):
    """The optimizer and its objective."""

    engine: Annotated[Literal["torch", "paced"], _doc("What computes gradients; paced sleeps as run.workload says.")] = "torch"
    steps: Annotated[int, _doc("Optimizer steps of the run.", ge=1)] = 100
    objective: Annotated[
        Literal["dis", "grpo", "dapo", "dr_grpo", "gspo", "cispo", "tis"],
        _doc("The loss and its denominator; objectives.md has formulas and sources. dis: double-sided importance sampling."),
    ] = "dis"
    advantage: Annotated[
        Literal["mean", "grpo", "rloo"],
        _doc("mean: R - mean; grpo: also divided by the standard deviation (ddof 0); rloo: R - mean of the others."),
    ] = "mean"
    ratio_low: Annotated[float, _doc("Lower end of the objective's region of ratios (clip: 1 - epsilon); negative: the objective's own.")] = -1.0
    ratio_high: Annotated[float, _doc("Upper end of the objective's region of ratios (clip: 1 + epsilon); negative: the objective's own.")] = -1.0
    constant_tokens: Annotated[int, _doc("dr_grpo: an execution's loss is divided by so many tokens, however many it has.", ge=1)] = 4096
    drop_uniform: Annotated[bool, _doc("Discard groups whose rewards are all equal: they teach nothing.")] = False
    max_version_lag: Annotated[
        int, _doc("Tokens sampled by a policy more than so many steps older than the weights bear no loss and are counted; 0 is off.", ge=0)
    ] = 0
    lr: Annotated[float, _doc("Peak learning rate.", gt=0)] = 1e-6
    lr_schedule: Annotated[Literal["constant", "linear", "cosine"], _doc("Decay after warm-up, to lr_min at the last step.")] = "constant"
    lr_min: Annotated[float, _doc("Learning rate at the end of a decay.", ge=0)] = 0.0
    warmup_steps: Annotated[int, _doc("Steps of linear warm-up.", ge=0)] = 0
    beta1: Annotated[float, _doc("AdamW's first beta.", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, _doc("AdamW's second beta.", ge=0, lt=1)] = 0.95
    eps: Annotated[float, _doc("AdamW's epsilon: elements whose gradients are far below it hardly move.", gt=0)] = 1e-8
    weight_decay: Annotated[float, _doc("AdamW's decoupled weight decay.", ge=0)] = 0.0
    clip_norm: Annotated[float, _doc("Gradient norm is clipped to it; 0 is off.", ge=0)] = 1.0
    micro_step_tokens: Annotated[int, _doc("Token budget of a micro-step; a longer trajectory gets one of its own.", ge=1)] = 16384
    prefix_tree: Annotated[bool, _doc("Compute what the trajectories of an execution share once, for models whose attention allows it.")] = True
    claim_ttl_s: Annotated[float, _doc("Lease of a claimed micro-step; renewed at a third of it.", gt=0)] = 60.0
    backend: Annotated[Literal["auto", "gloo", "nccl"], _doc("How cells reduce; auto: gloo on the CPU, nccl where the model is on a GPU.")] = "auto"
    reduce_timeout_s: Annotated[float, _doc("A reduction or broadcast between cells that takes longer is given up.", gt=0)] = 120.0
    core_timeout_s: Annotated[float, _doc("How long a satellite waits for a core that is away.", gt=0)] = 600.0
    checkpoint_every: Annotated[int, _doc("Checkpoint every so many steps, and at the end; 0 for only at the end.", ge=0)] = 20
    keep_checkpoints: Annotated[int, _doc("Checkpoints kept.", ge=1)] = 2
    logprob_alarm: Annotated[float, _doc("Warn when trainer and engine differ by more than this on tokens of the current version.", gt=0)] = 0.1
    threads: Annotated[int, _doc("CPU threads of the trainer; 0 leaves the choice to torch.", ge=0)] = 0
    ranks: Annotated[int, _doc("Processes of a cell that share its model (FSDP2), each with a device; 1 needs no process group.", ge=1, le=1024)] = 1
    ranks_timeout_s: Annotated[float, _doc("How long a rank waits for the others of its cell before all of them end.", gt=0)] = 600.0


class Net(Table, frozen=True, kw_only=True):
    """Sockets and their patience."""

    insecure: Annotated[bool, _doc("Allow sockets on addresses other than loopback and ipc without keys.")] = False
    keys: Annotated[str, _doc("Directory of CURVE keys (gyre-keys); with it every tcp socket is encrypted and authenticated.", path=True)] = ""
    ssh: Annotated[str, _doc("The command by which gyre-coord and gyre-doctor reach other hosts, with its options, shell-quoted.")] = "ssh"
    request_timeout_s: Annotated[float, _doc("How long a request is repeated before its sender gives up.", gt=0)] = 120.0
    resend_s: Annotated[float, _doc("A request without an answer is sent again after so long.", gt=0)] = 5.0
    engine_timeout_s: Annotated[float, _doc("An engine that does not answer a ping for so long is given up.", gt=0)] = 20.0


class Config(Table, frozen=True, kw_only=True):
    """run.toml."""

    run: Run = Run()
    model: Model = Model()
    tasks: Tasks = Tasks()
    system: System = System()
    rollout: Rollout = Rollout()
    sandbox: Sandbox = Sandbox()
    trajectory: TrajectoryTable = TrajectoryTable()
    train: Train = Train()
    net: Net = Net()


class Key(msgspec.Struct, frozen=True):
    """One key of the configuration, for help, documentation and messages."""

    table: str
    name: str
    annotation: Any
    default: Any
    description: str
    is_path: bool

    @property
    def dotted(self) -> str:
        return f"{self.table}.{self.name}"

    @property
    def type_text(self) -> str:
        inner = get_args(self.annotation)[0]
        if get_origin(inner) is Literal:
            return " | ".join(get_args(inner))
        return {str: "string", int: "integer", float: "number", bool: "true | false", tuple[str, ...]: "list of strings"}[inner]


def all_keys() -> Iterator[Key]:
    """All keys in the order of the tables."""
    for table in msgspec.structs.fields(Config):
        hints = get_type_hints(table.type, include_extras=True)
        for field in msgspec.structs.fields(table.type):
            meta = next(m for m in get_args(hints[field.name]) if isinstance(m, Meta))
            yield Key(table.name, field.name, hints[field.name], field.default, meta.description or "", bool((meta.extra or {}).get("path")))


def _key(where: str, dotted: str, prefix: str = "") -> Key:
    known = {k.dotted: k for k in all_keys()}
    if dotted in known:
        return known[dotted]
    close = difflib.get_close_matches(dotted, known, n=1)
    raise UsageError(where, "unknown key", f"did you mean {prefix}{close[0]}?" if close else "docs/config.md lists the keys", prefix + dotted)


def _checked(where: str, key: Key, value: Any, base: Path, prefix: str = "") -> Any:
    try:
        value = msgspec.convert(value, key.annotation)
    except msgspec.ValidationError as e:
        raise UsageError(where, str(e).lower().removesuffix("."), f"give {key.type_text}", prefix + key.dotted) from None
    if key.is_path and value:
        try:
            value = str((base / Path(value).expanduser()).resolve())
        except (OSError, RuntimeError, ValueError) as e:
            raise UsageError(where, f"{value!r} is no path ({e})", "give a path", prefix + key.dotted) from None
    return value


class Resolved(msgspec.Struct, frozen=True):
    """A configuration with the origin of every value."""

    config: Config
    origins: dict[str, str]

    def toml(self, with_origins: bool = False) -> str:
        """The configuration as TOML; reading it back gives the same configuration."""
        lines: list[str] = []
        for k in all_keys():
            if f"[{k.table}]" not in lines:
                lines += ["", f"[{k.table}]"]
            value = getattr(getattr(self.config, k.table), k.name)
            text = f"{k.name} = {'inf' if value == math.inf else msgspec.json.encode(value).decode()}"  # which JSON has not
            lines.append(f"{text}  # {self.origins[k.dotted]}" if with_origins else text)
        return "\n".join(lines[1:]) + "\n"


def load(file: Path | None, sets: Sequence[str] = (), flags: Mapping[str, Any] | None = None) -> Resolved:
    """Resolve a configuration.

    `flags` maps dotted keys to values given on the command line (None: not given). Raises `UsageError`.
    """
    values: dict[str, Any] = {}
    origins = {k.dotted: "default" for k in all_keys()}

    def put(where: str, dotted: str, value: Any, base: Path, origin: str) -> None:
        values[dotted] = _checked(where, _key(where, dotted), value, base)
        origins[dotted] = origin

    if file is not None:
        for dotted, value in _read(file):
            put(str(file), dotted, value, file.resolve().parent, str(file))
    for item in sets:
        dotted, value = inputs.assignment(item, "train.lr=1e-5")
        put("--set", dotted, value, Path.cwd(), "--set")
    for dotted, value in (flags or {}).items():
        if value is not None:
            put("command line", dotted, value, Path.cwd(), "flag")
    for dotted, value in _workload(values.get("run.workload")):
        if dotted not in values:
            put(values["run.workload"], dotted, value, Path.cwd(), values["run.workload"])
    tables: dict[str, dict[str, Any]] = {}
    for dotted, value in values.items():
        table, name = dotted.split(".")
        tables.setdefault(table, {})[name] = value
    return Resolved(msgspec.convert(tables, Config), origins)


def overlaid(config: Config, sets: Sequence[str], where: str) -> Config:
    """A configuration with what a line of hosts.txt sets for its processes on top. Raises `UsageError` naming set.TABLE.KEY."""
    for item in sets:
        dotted, value = inputs.assignment(item, "train.lr=1e-5")
        key = _key(where, dotted, "set.")
        table = msgspec.structs.replace(getattr(config, key.table), **{key.name: _checked(where, key, value, Path.cwd(), "set.")})
        config = msgspec.structs.replace(config, **{key.table: table})
    return config


def _workload(file: str | None) -> Iterator[tuple[str, Any]]:
    """The keys of a workload file's [system] that a run has too, slots_per_cell as rollout.slots; of several targets the first."""
    if file:
        system = workload.load(Path(file)).system
        for name in sorted({f.name for f in msgspec.structs.fields(System)} & {f.name for f in msgspec.structs.fields(type(system))}):
            yield f"system.{name}", system.targets[0] if name == "target_staleness" else getattr(system, name)
        yield "rollout.slots", system.slots_per_cell


def _read(file: Path) -> Iterator[tuple[str, Any]]:
    data = inputs.toml(file, "give the path of a run.toml to --config")
    known = {f.name for f in msgspec.structs.fields(Config)}
    for table, content in data.items():
        if table not in known:
            close = difflib.get_close_matches(table, known, n=1)
            remedy = f"did you mean [{close[0]}]?" if close else f"the tables are {', '.join(sorted(known))}"
            raise UsageError(str(file), "unknown table", remedy, table)
        if not isinstance(content, dict):
            raise UsageError(str(file), "not a table", f"write [{table}] and keys below it", table)
        for name, value in content.items():
            yield f"{table}.{name}", value
