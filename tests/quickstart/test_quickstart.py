"""The quick start's tasks, verifiers, harness, tokenizer and warm start; no sandbox, no training."""

from __future__ import annotations

import json
import random
import socketserver
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
sys.path.insert(0, str(EXAMPLE))

import demonstrations  # noqa: E402
import kinds  # noqa: E402
import make_tasks  # noqa: E402
from agent import harness  # noqa: E402

SEED = 7


# ----------------------------------------------------------------------------------------------- tasks


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_same_seed_same_bytes_other_seed_other_tasks(tmp_path: Path) -> None:
    for name, seed in (("a", SEED), ("b", SEED), ("c", SEED + 1)):
        make_tasks.write_split(tmp_path / name, "train", 20, seed)
    assert tree(tmp_path / "a") == tree(tmp_path / "b") != tree(tmp_path / "c")


def names(split: str) -> set[str]:
    """Every name with a digit that a split's tasks show: file stems and functions."""
    found = set()
    for task in kinds.make_split(SEED, split, 300):
        words = f"{task.instruction} {task.start} {task.files} {task.function}"
        cut = "".join(c if c.isalnum() else " " for c in words).split()
        found |= {w for w in cut if w[:-1] in kinds.WORDS and w[-1].isdigit()}
    return found


def test_no_held_out_name_occurs_in_training() -> None:
    train, heldout = names("train"), names("heldout")
    assert len(heldout) > 50
    assert not train & heldout


# ------------------------------------------------------------------------------------------- verifiers


def environment(folder: Path) -> dict[str, str]:
    """The task's world as plain folders; the same variables move /work, /tests and /logs/verifier."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    return {"PATH": path, "GYRE_WORK": f"{folder}/work", "GYRE_LOGS": f"{folder}/logs"}


def start(task: kinds.Task, folder: Path) -> tuple[Path, dict[str, str]]:
    make_tasks.write_task(task, folder / "task", "train")
    for name in ("work", "logs"):
        (folder / name).mkdir()
    for path, content in task.start.items():
        (folder / "work" / path).write_text(content)
    return folder / "task", {**environment(folder), "GYRE_TESTS": f"{folder}/task/tests"}


def grade(task: Path, env: dict[str, str]) -> str:
    done = subprocess.run([task / "tests" / "test.sh"], env=env, timeout=20, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (Path(env["GYRE_LOGS"]) / "reward.txt").read_text()


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_oracle_earns_1_and_doing_nothing_0(kind: str, tmp_path: Path) -> None:
    task, env = start(kinds.make_task(random.Random(SEED), "train", kind), tmp_path)
    assert grade(task, env) == "0\n"
    subprocess.run([task / "solution" / "solve.sh"], env=env, check=True, timeout=20, capture_output=True)
    assert grade(task, env) == "1\n"


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_every_mistake_of_the_demonstrator_earns_0(kind: str, tmp_path: Path) -> None:
    made = kinds.make_task(random.Random(SEED), "heldout", kind)
    for i, calls in enumerate(made.mistakes):
        (tmp_path / str(i)).mkdir()
        task, env = start(made, tmp_path / str(i))
        script = "".join(map(make_tasks.shell, calls))
        subprocess.run(["/bin/sh", "-c", script], cwd=env["GYRE_WORK"], timeout=20, capture_output=True)
        assert grade(task, env) == "0\n", calls


RIGHT = "def NAME(a, b):\n    return a + b\n"
FORGERIES = {
    "leaves early": "import sys\nsys.exit(0)",
    "leaves at once": "import os\nos._exit(0)",
    "writes the reward at exit": "import atexit\natexit.register(lambda: open('REWARD', 'w').write('1'))",
    "writes the reward and leaves": "import os\nopen('REWARD', 'w').write('1')\nos._exit(0)",
    "keeps writing from a thread": (
        "import _thread, time\ndef forge():\n    while True: open('REWARD', 'w').write('1')\n_thread.start_new_thread(forge, ())\ntime.sleep(0.2)"
    ),
    "leaves a process behind": ("import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(0.5); open('REWARD', 'w').write('1'); os._exit(0)"),
    "equals everything": "class E:\n    def __eq__(self, o): return True\ndef NAME(a, b): return E()",
    "patches repr": "import builtins\nbuiltins.repr = lambda x: '8'\ndef NAME(a, b): return 0",
    "reads the tests": "def NAME(a, b): return eval(open('TESTS/expected.py').read())['outputs'][0]",
    "looks in the caller": (
        "import sys\n"
        "def NAME(a, b):\n"
        "    f = sys._getframe()\n"
        "    while f:\n"
        "        for v in f.f_locals.values():\n"
        "            if isinstance(v, dict) and 'outputs' in v: return v['outputs'][0]\n"
        "        f = f.f_back"
    ),
    "never ends": "while True: pass",
    "sleeps": "import time\ntime.sleep(60)",
    "floods": ("import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'1\\n' * 100000)\n    except OSError: pass"),
    "answers the example only": "def NAME(a, b): return 8",
}


def function_task() -> kinds.Task:
    tasks = (kinds.make_task(random.Random(i), "train", "func") for i in range(100))
    return next(t for t in tasks if "a plus b" in t.instruction)


@pytest.mark.pain(37)
@pytest.mark.parametrize("forgery", FORGERIES)
def test_code_that_forges_a_reward_earns_0(forgery: str, tmp_path: Path) -> None:
    made = function_task()
    assert made.function is not None
    task, env = start(made, tmp_path)
    source = FORGERIES[forgery].replace("NAME", made.function.name)
    source = source.replace("REWARD", env["GYRE_LOGS"] + "/reward.txt").replace("TESTS", env["GYRE_TESTS"])
    (Path(env["GYRE_WORK"]) / made.function.path).write_text(source + "\n")
    assert grade(task, env) == "0\n"


def test_honest_code_with_imports_and_noise_earns_1(tmp_path: Path) -> None:
    made = function_task()
    assert made.function is not None
    task, env = start(made, tmp_path)
    source = f"import math\nfrom typing import Any\nprint('hello')\n{RIGHT.replace('NAME', made.function.name)}"
    (Path(env["GYRE_WORK"]) / made.function.path).write_text(source)
    assert grade(task, env) == "1\n"


def test_a_link_to_the_expected_text_earns_0(tmp_path: Path) -> None:
    made = kinds.make_task(random.Random(SEED), "train", "create")
    task, env = start(made, tmp_path)
    [(path, text)] = made.files.items()
    (tmp_path / "elsewhere").write_text(text or "")
    (Path(env["GYRE_WORK"]) / path).symlink_to(tmp_path / "elsewhere")
    assert grade(task, env) == "0\n"


# --------------------------------------------------------------------------------------------- harness


class Model(BaseHTTPRequestHandler):
    """An OpenAI endpoint on a Unix socket that says what `script` says and keeps what it was asked."""

    protocol_version = "HTTP/1.1"
    script: ClassVar[list[dict[str, Any] | int]] = []
    asked: ClassVar[list[dict[str, Any]]] = []
    connections: ClassVar[int] = 0

    def setup(self) -> None:
        super().setup()
        type(self).connections += 1

    def log_message(self, format: str, *args: object) -> None:
        pass

    def address_string(self) -> str:
        return "unix"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(request)
        say = self.script[len(self.asked) - 1]
        if isinstance(say, int):
            self.reply(say, "application/json", b'{"error": "no"}')
        elif request.get("stream"):
            self.stream(say)
        else:
            choice = {"index": 0, "message": {"role": "assistant", **say}, "finish_reason": "stop"}
            self.reply(200, "application/json", json.dumps({"choices": [choice]}).encode())

    def reply(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, say: dict[str, Any]) -> None:
        """Chunked server-sent events, one for every three characters, cut without regard to events."""
        parts: list[dict[str, Any]] = [{"role": "assistant"}]
        text = say.get("content") or ""
        parts += [{"content": text[i : i + 3]} for i in range(0, len(text), 3)]
        for i, call in enumerate(say.get("tool_calls", [])):
            empty = {"name": call["function"]["name"], "arguments": ""}
            parts.append({"tool_calls": [{"index": i, "id": call["id"], "type": "function", "function": empty}]})
            raw = call["function"]["arguments"]
            for j in range(0, len(raw), 3):
                piece = {"index": i, "function": {"arguments": raw[j : j + 3]}}
                parts.append({"tool_calls": [piece]})
        events = [json.dumps({"choices": [{"index": 0, "delta": part}]}) for part in parts]
        body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i in range(0, len(body), 100):
            piece_b = body[i : i + 100]
            self.wfile.write(f"{len(piece_b):x}\r\n".encode() + piece_b + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")


def call(name: str, arguments: dict[str, str] | str, call_id: str = "c1") -> dict[str, Any]:
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": raw}}


def drive(tmp_path: Path, script: list[dict[str, Any] | int], *argv: str, turns: int = 4) -> tuple[subprocess.CompletedProcess[str], type[Model]]:
    """The harness as a sandbox starts it, against the script."""

    class Scripted(Model):
        pass

    Scripted.script, Scripted.asked, Scripted.connections = script, [], 0
    (tmp_path / "work").mkdir()
    (tmp_path / "instruction.md").write_text("Do it.\n")
    server = socketserver.ThreadingUnixStreamServer(str(tmp_path / "m.sock"), Scripted)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    env = {
        "PATH": "/usr/bin:/bin",
        "GYRE_INSTRUCTION": str(tmp_path / "instruction.md"),
        "GYRE_MODEL_SOCKET": str(tmp_path / "m.sock"),
        "GYRE_MAX_TURNS": str(turns),
    }
    command = [sys.executable, "-I", "-S", str(EXAMPLE / "agent" / "harness.py"), *argv]
    try:
        done = subprocess.run(command, env=env, cwd=tmp_path / "work", capture_output=True, text=True, timeout=20)
    finally:
        server.shutdown()
        server.server_close()
    return done, Scripted


@pytest.mark.parametrize("argv", [[], ["--stream"]])
def test_harness_runs_tools_and_echoes_what_it_received(tmp_path: Path, argv: list[str]) -> None:
    write = call("write_file", {"path": "a.txt", "content": 'one\ntwo "ü" \\\n'}, "c1")
    look = call("bash", {"cmd": "cat a.txt; wc -l < a.txt > n.txt"}, "c2")
    script: list[dict[str, Any] | int] = [
        {"content": None, "tool_calls": [write]},
        {"content": "Let me look.", "tool_calls": [look]},
        {"content": "Done."},
    ]
    done, model = drive(tmp_path, script, *argv)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "work" / "n.txt").read_text().strip() == "2"
    assert model.connections == 1  # kept alive
    assert [len(request["messages"]) for request in model.asked] == [2, 4, 6]
    assert model.asked[0]["tools"] == harness.TOOLS
    told = model.asked[2]["messages"]
    assert told[:2] == [
        {"role": "system", "content": harness.SYSTEM},
        {"role": "user", "content": "Do it."},
    ]
    assert told[2]["tool_calls"] == [write]
    assert told[3] == {"role": "tool", "tool_call_id": "c1", "content": "ok"}
    assert (told[4]["content"], told[4]["tool_calls"]) == ("Let me look.", [look])
    assert told[5] == {"role": "tool", "tool_call_id": "c2", "content": 'one\ntwo "ü" \\'}


def test_harness_answers_every_kind_of_malformed_call(tmp_path: Path) -> None:
    bad = [
        call("bash", "{not json"),
        call("bash", {"command": "ls"}),
        call("fly", {}),
        call("write_file", {"path": "no/such/folder", "content": ""}),
    ]
    script: list[dict[str, Any] | int] = [
        {"content": None, "tool_calls": bad},
        {"content": "<tool_call>\n{"},
        {"content": "Done."},
    ]
    done, model = drive(tmp_path, script)
    assert done.returncode == 0
    said = [message["content"] for message in model.asked[1]["messages"][3:]]
    assert said == [
        harness.MALFORMED,
        harness.MALFORMED,
        "error: no such tool",
        "error: FileNotFoundError",
    ]
    assert model.asked[2]["messages"][-1] == {"role": "user", "content": harness.MALFORMED}


def test_harness_stops_at_the_turn_limit_and_at_errors(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    again: dict[str, Any] = {"content": None, "tool_calls": [call("bash", {"cmd": "true"})]}
    done, model = drive(tmp_path / "a", [again] * 5, turns=2)
    assert (done.returncode, len(model.asked)) == (0, 2)
    done, _ = drive(tmp_path / "b", [503])
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "503" in done.stderr


def test_bash_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "COMMAND_S", 0.2)
    assert harness.bash("sleep 5 & sleep 5") == "error: took too long"
    assert harness.bash("yes | head -c 1000000") == ("y\n" * 100).strip()
    assert harness.bash("true") == "ok"


@pytest.mark.parametrize("text", ['{"a": [1, 2.5, "\\u00fc\\n", null, true, false, {}]}', ' "x" ', "[]"])
def test_own_json_agrees_with_the_library(text: str) -> None:
    assert harness.loads(text) == json.loads(text)
    assert json.loads(harness.dumps(harness.loads(text))) == json.loads(text)


@pytest.mark.parametrize("text", ["", "{", "{} x", "nul", '{"a": }'])
def test_own_json_refuses_what_the_library_refuses(text: str) -> None:
    with pytest.raises(ValueError):
        harness.loads(text)


# --------------------------------------------------------------------------------- tokenizer and model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    pytest.importorskip("tokenizers")
    from make_model import demonstrations as many
    from tokenizer import build_tokenizer

    return build_tokenizer(["".join(text for text, _ in segments) for segments in many(200, SEED)])


def test_a_name_is_cut_the_same_everywhere(tokenizer: Any) -> None:
    def cut(text: str) -> list[str]:
        tokens: list[str] = tokenizer.encode(text, add_special_tokens=False).tokens
        return tokens

    name = ["fox", "3", ".txt"]
    for before, after in (
        ("Rename `", "` to"),
        ('{"name": "bash", "arguments": {"cmd": "cat ', '"}}'),
        ("a\n", "\n"),
        ("< ", " >"),
    ):
        tokens = cut(f"{before}fox3.txt{after}")
        at = tokens.index("fox")
        assert tokens[at : at + 3] == name, tokens
    assert len(cut(harness.SYSTEM)) == 1
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界!\n").ids) == "Grüße, 世界!\n"


def conversation(segments: list[Any], task: kinds.Task) -> list[dict[str, Any]]:
    """The messages a harness would send for a demonstration."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": harness.SYSTEM},
        {"role": "user", "content": task.instruction},
    ]
    for text, spoken in segments[1:]:
        if not spoken:
            content = text.split("<tool_response>\n")[1].split("\n</tool_response>")[0]
            messages.append({"role": "tool", "tool_call_id": "c", "content": content})
        elif text.startswith("<tool_call>"):
            said = json.loads(text.split("\n")[1])
            function = {"name": said["name"], "arguments": said["arguments"]}
            messages.append({"role": "assistant", "content": None, "tool_calls": [{"function": function}]})
        else:
            messages.append({"role": "assistant", "content": text.removesuffix("<|im_end|>")})
    return messages


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_warm_start_ids_are_what_the_chat_template_gives(kind: str, tokenizer: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from make_model import CONTEXT, encode
    from tokenizer import save_tokenizer

    save_tokenizer(tokenizer, tmp_path, CONTEXT)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    task = kinds.make_task(random.Random(SEED), "train", kind)
    segments = demonstrations.play(task, task.right)
    ids, mask = encode(tokenizer, segments)
    messages = conversation(segments, task)
    rendered = loaded.apply_chat_template(messages, tools=harness.TOOLS, tokenize=False)
    assert tokenizer.encode(rendered, add_special_tokens=False).ids == [*ids, *tokenizer.encode("\n").ids]
    assert loaded(rendered, add_special_tokens=False)["input_ids"][:-1] == ids
    # Every prompt the gateway would send is a prefix that ends where the demonstrator begins to speak.
    starts = [i for i in range(1, len(ids)) if mask[i] and not mask[i - 1]]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for at, turn in zip(starts, turns, strict=True):
        prompt = loaded.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True)
        assert tokenizer.encode(prompt, add_special_tokens=False).ids == ids[:at]
    assert loaded.eos_token == "<|im_end|>"
    assert loaded.pad_token == "<|endoftext|>"


def test_arguments_may_be_a_string_of_json(tokenizer: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizer import save_tokenizer

    save_tokenizer(tokenizer, tmp_path, 512)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    rendered = [
        loaded.apply_chat_template([{"role": "assistant", "content": None, "tool_calls": [call("bash", a)]}], tokenize=False)
        for a in ({"cmd": "echo a >> b"}, '{"cmd": "echo a >> b"}')
    ]
    assert rendered[0] == rendered[1]
    assert '{"name": "bash", "arguments": {"cmd": "echo a >> b"}}' in rendered[0]


def test_make_model_writes_what_transformers_loads(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    argv = ["--out", str(tmp_path / "m"), "--steps", "2", "--demonstrations", "20", "--threads", "1"]
    done = subprocess.run([sys.executable, str(EXAMPLE / "make_model.py"), *argv], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    assert 0.8e6 < model.num_parameters() < 1e6
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
