"""Task directories: what loads, and the one line for what does not."""

import pytest

from gyre.errors import UsageError
from gyre.inputs import task_dirs
from gyre.sandbox.backends.base import Limits
from gyre.sandbox.task import load_task, script_argv, tighter_s

TOML = """
version = "1.0"
[task]
name = "org/thing"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 30
[verifier]
timeout_sec = 20.5
env = { LEVEL = "2" }
[environment]
memory_mb = 512
storage_mb = 1000
workdir = "/app"
cpus = 1
"""


def test_a_task_as_loaded(make_task):
    task = load_task(make_task(toml=TOML, file="text"))
    assert (task.name, task.instruction, task.workdir) == ("org/thing", "Write yes to the file `answer`.", "/app")
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.verifier_env) == (30, 20.5, {"LEVEL": "2"})
    assert task.workspace == task.path / "environment" / "workspace"
    assert task.limits(Limits(memory_mb=1024, workspace_mb=256)) == Limits(memory_mb=512, workspace_mb=256, cpus=1)
    assert (tighter_s(60, task.agent_timeout_s), tighter_s(5, task.agent_timeout_s), tighter_s(60, None)) == (30, 5, 60)


def test_a_bare_task(make_task):
    task = load_task(make_task("bare", solve=None))
    assert (task.name, task.workspace, task.has_solution, task.memory_mb) == ("bare", None, False, None)
    with pytest.raises(UsageError, match=r"solve\.sh: no such file; add the solution"):
        task.oracle_argv()


def test_scripts_run_as_they_say(make_task):
    path = make_task(test="#!/usr/bin/env -S python3 -IS\n", solve="echo yes\n")
    assert load_task(path).verifier_argv() == ["/usr/bin/env", "-S", "python3", "-IS", "/tests/test.sh"]
    assert load_task(path).oracle_argv() == ["/bin/sh", "/solution/solve.sh"]
    (path / "tests" / "test.sh").chmod(0o755)
    assert load_task(path).verifier_argv() == ["/tests/test.sh"]


BAD_TOML = [
    ("x = [", "not TOML", ""),
    ('[agent]\ntimeout_sec = "long"', "'long' will not do; give a positive number", "agent.timeout_sec"),
    ("[agent]\ntimeout_sec = -1", "-1 will not do", "agent.timeout_sec"),
    ("[agent]\ntimeout_sec = nan", "nan will not do", "agent.timeout_sec"),
    ("[environment]\nmemory_mb = true", "give a positive integer", "environment.memory_mb"),
    ("[environment]\nmemory_mb = 1.5", "give a positive integer", "environment.memory_mb"),
    ("[verifier]\nenv = { A = 1 }", "give a table of strings", "verifier.env"),
    ("agent = 3", "not a table; write [agent]", "agent"),
    ('[environment]\nworkdir = "/usr/src"', "cannot hold a workspace", "environment.workdir"),
    ('[environment]\nworkdir = "//usr"', "cannot hold a workspace", "environment.workdir"),
    ('[environment]\nworkdir = "/w\\u0000--bind"', "will not do", "environment.workdir"),
    ('[environment]\nenv = { A = "1\\u0000--bind" }', "will not do", "environment.env"),
    ('[environment]\nenv = { "A=B" = "1" }', "will not do", "environment.env"),
    ('[environment]\nworkdir = "/"', "cannot hold a workspace", "environment.workdir"),
    ('[environment]\nworkdir = "work"', "cannot hold a workspace", "environment.workdir"),
    ('[environment]\nworkdir = "/tests/../x"', "cannot hold a workspace", "environment.workdir"),
]


@pytest.mark.parametrize(("toml", "says", "key"), BAD_TOML)
def test_bad_toml_is_one_line(make_task, toml, says, key):
    with pytest.raises(UsageError) as e:
        load_task(make_task(toml=toml))
    text = str(e.value)
    assert "task.toml" in text and says in text and key in text and "\n" not in text


def test_missing_parts_are_named(make_task, tmp_path):
    for part, says in [("tests/test.sh", "a task needs tests"), ("instruction.md", "needs an instruction"), ("task.toml", "Harbor task directory")]:
        path = make_task(part.replace("/", "-"))
        (path / part).unlink()
        with pytest.raises(UsageError, match=says) as e:
            load_task(path)
        assert part in str(e.value)
    with pytest.raises(UsageError, match="no such directory"):
        load_task(tmp_path / "none")
    empty = make_task("empty")
    (empty / "instruction.md").write_text(" \n")
    with pytest.raises(UsageError, match=r"instruction\.md: empty"):
        load_task(empty)
    (empty / "instruction.md").write_bytes(b"a\0b")
    with pytest.raises(UsageError, match="NUL"):
        load_task(empty)
    (empty / "instruction.md").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="UTF-8"):
        load_task(empty)


def test_finding_tasks(make_task, tmp_path):
    b, a = make_task("b"), make_task("a")
    (tmp_path / "other").mkdir()
    assert task_dirs(tmp_path) == [a, b]
    assert task_dirs(a) == [a]
    for nothing in (tmp_path / "other", tmp_path / "none"):
        with pytest.raises(UsageError, match="give a Harbor task directory"):
            task_dirs(nothing)


def test_a_list_of_tasks(make_task, tmp_path):
    b, a = make_task("b"), make_task("a")
    file = tmp_path / "some.jsonl"
    file.write_text(f'{{"path": "b", "level": 3}}\n\n{{"path": "{a}"}}\n{{"path": "b"}}\n')
    assert task_dirs(file) == [b, a, b]
    for text, says in [
        ("", "holds no task directories"),
        ('{"path": "c"}', "some.jsonl: tasks.train: .*c is no task directory; paths are relative to the list"),
        ('{"path": "a"}\n{"task": "b"}', "some.jsonl:2: tasks.train: no JSON object with a path; write"),
        ("a\n", "some.jsonl:1"),
        ('["a"]\n', "some.jsonl:1"),
    ]:
        file.write_text(text)
        with pytest.raises(UsageError, match=says):
            task_dirs(file, "tasks.train")


PUBLIC = """
schema_version = "1.1"
artifacts = []
[task]
name = "org/thing"
description = "What it is about."
keywords = ["python"]
[[task.authors]]
name = "Somebody"
[metadata]
difficulty = "hard"
expert_time_estimate_min = 120.0
[verifier]
timeout_sec = 900.0
[agent]
timeout_sec = 900.0
[environment]
build_timeout_sec = 600.0
docker_image = "somebody/thing:1"
cpus = 1
memory = "2G"
storage_mb = 10240
gpus = 0
allow_internet = true
mcp_servers = []
[verifier.env]
[environment.env]
[solution.env]
"""


def test_a_task_of_the_kind_that_is_published(make_task):
    task = load_task(make_task(toml=PUBLIC))
    assert (task.name, task.memory_mb, task.storage_mb, task.agent_timeout_s) == ("org/thing", 2048, 10240, 900)
    assert task.notes == ("environment: network public: sandboxes have none",) and task.needs_image
    assert not load_task(make_task("plain")).needs_image and load_task(make_task("plain2")).notes == ()


def test_what_is_asked_for_and_not_given_is_named(make_task):
    toml = """
artifacts = ["/work/out.txt", "/var/log/x", { source = "/etc/y" }]
colour = "blue"
[agent]
user = "agent"
network_mode = "allowlist"
allowed_hosts = ["example.org"]
[verifier]
user = 0
environment_mode = "separate"
env = { JUDGE = "${JUDGE:-none}", KEY = "${KEY}" }
[[verifier.collect]]
command = "true"
[environment]
network_mode = "no-network"
env = { TOKEN = "x-${TOKEN}", PLAIN = "$PLAIN" }
speed = 3
skills_dir = "/skills"
[[environment.mcp_servers]]
name = "m"
[solution]
env = { HOW = "quick" }
"""
    task = load_task(make_task(toml=toml))
    assert (task.env, task.verifier_env, task.solution_env) == ({"PLAIN": "$PLAIN"}, {"JUDGE": "none"}, {"HOW": "quick"})
    named = sorted(note.partition(":")[0] for note in task.notes)
    assert named == sorted(
        ["agent", "agent.user = 'agent'", "verifier.user = 0", "environment.mcp_servers", "environment.skills_dir", "verifier.collect", "artifacts",
         "artifacts", "colour", "environment.speed", "verifier.env.KEY", "environment.env.TOKEN"]
    )  # fmt: skip


def test_what_no_sandbox_has_is_refused(make_task):
    for n, (toml, file, says) in enumerate(
        [
            ("", "environment/docker-compose.yaml", "several containers"),
            ("", "tests/docker-compose.yml", "several containers"),
            ("[[steps]]\nname = 'one'", "", "several steps"),
            ("[environment]\nos = 'windows'", "", "sandboxes are Linux"),
            ("[environment]\ngpus = 1", "", "environment.gpus: no sandbox has an accelerator"),
            ("[verifier.environment]\ndocker_image = 'x'", "", "an image of its own"),
            ("", "tests/Dockerfile", "an image of its own"),
            ("[environment]\nmemory = 'much'", "", "environment.memory: 'much' is no size"),
            ("[environment.healthcheck]\nretries = 2", "", "environment.healthcheck: .*missing required field `command`"),
            ("[environment.healthcheck]\ncommand = 'true'\nretries = 0", "", "retries of at least 1"),
        ]
    ):
        path = make_task(f"t{n}", toml=toml)
        if file:
            (path / file).parent.mkdir(exist_ok=True)
            (path / file).write_text("")
        with pytest.raises(UsageError, match=says) as e:
            load_task(path)
        assert "\n" not in str(e.value) and str(path) in str(e.value)


@pytest.mark.parametrize(
    ("first", "argv"),
    [
        ("#!/usr/bin/env -S python3 -I\n", ["/usr/bin/env", "-S", "python3", "-I", "/t"]),
        ("echo\n", ["/bin/sh", "/t"]),
        ('#!/bin/sh "x\n', None),
        ("#!\n", None),
        ("#!/bin/\0\n", None),
    ],
)
def test_how_a_script_is_run(tmp_path, first, argv):
    file = tmp_path / "test.sh"
    file.write_text(first)
    if argv is None:
        with pytest.raises(UsageError, match="mend the #! line"):
            script_argv(file, "/t")
        return
    assert script_argv(file, "/t") == argv
    file.chmod(0o755)
    assert script_argv(file, "/t") == ["/t"]
    file.unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        script_argv(file, "/t")
