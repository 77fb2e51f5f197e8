"""What all commands share: options, logging, and how errors become exit codes.

A command's file parses its own options on top of `common`, and imports the heavy parts after parsing. Data goes to stdout, all else to stderr.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import importlib.metadata
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, TypeVar

import click
import msgspec

from gyre import config as configuration
from gyre.config import Config
from gyre.errors import EXIT_BUG, EXIT_FAILED, EXIT_OK, EXIT_USAGE, GyreError, UsageError, WorkFailed

if TYPE_CHECKING:
    from gyre.net.keys import Keys
    from gyre.net.worker import Worker

F = TypeVar("F", bound=Callable[..., Any])


def _in_one_line(self: click.UsageError, file: Any = None) -> None:
    """What click says in three lines."""
    command = self.ctx.command_path if self.ctx is not None else "gyre"
    text = self.format_message().removesuffix(".")
    click.echo(f"error: {command}: {text[:1].lower()}{text[1:]}; {command} --help lists what it takes", err=True)


click.UsageError.show = _in_one_line  # type: ignore[method-assign]


def keys_to_set(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    """For shells that complete --set: the keys of run.toml."""
    return [f"{key.dotted}=" for key in configuration.all_keys() if key.dotted.startswith(begun)]


def metrics_port(f: F) -> F:
    """The option of commands that run for long."""
    words = "Serve Prometheus metrics at this port of the loopback (extra gyre[metrics])."
    return click.option("--metrics-port", type=click.IntRange(1, 65535), metavar="PORT", help=words)(f)


def rules(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    """For shells that complete --rule."""
    from gyre.rules.named import RULES

    return [name for name in sorted((*RULES, "async", "async+stream")) if name.startswith(begun)]


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is told at its start: the run, its configuration, where its peers are. Addresses are never empty but `coord` and `bind`."""

    run_dir: Path
    config: Config
    buffer: str
    train: str
    rollouts: list[str]
    coord: str | None
    bind: str | None
    name: str
    resolved: configuration.Resolved
    cell: str = ""  # engines and trainers: the cell they belong to, "" for one of the process's name
    keys: Keys | None = None
    metrics_port: int | None = None

    @property
    def run_id(self) -> str:
        return self.run_dir.name


def common(*, run: bool = True, addresses: tuple[str, ...] = (), named: str | None = None) -> Callable[[F], F]:
    """Options of every command. `addresses`: which of buffer, train, rollout, coord, bind it takes. `named`: its default name."""
    options: list[Callable[[F], F]] = []
    if run:
        options += [
            click.option("--run", "run_dir", type=click.Path(path_type=Path), default=Path("runs/default"), show_default=True,
                         help="Run directory; its name is the run's id, local addresses derive from it."),
            click.option("--config", "config_file", type=click.Path(path_type=Path),
                         help="run.toml; without it, the one in the run directory if there is one."),
            click.option("--set", "sets", multiple=True, metavar="TABLE.KEY=VALUE", help="Override one key; repeatable.",
                         shell_complete=keys_to_set),
            click.option("--check", is_flag=True, help="Check the configuration and exit."),
            click.option("--print-config", is_flag=True, help="Print the configuration with the origin of each value and exit."),
        ]  # fmt: skip
    helps = {
        "buffer": "Address of gyre-buffer.",
        "train": "Address of the core's gyre-train.",
        "coord": "Address of gyre-coord; without it the process is on its own.",
        "bind": "Address to listen on; default: the run directory's socket.",
    }
    for name in addresses:
        if name == "rollout":
            options.append(click.option("--rollout", "rollouts", multiple=True, metavar="ADDRESS", help="Address of a gyre-rollout; repeatable."))
        else:
            options.append(click.option(f"--{name}", name, metavar="ADDRESS", help=helps[name]))
    if "bind" in addresses:
        options.append(click.option("--insecure", is_flag=True, help="Allow addresses that others can reach, without keys."))
    if named is not None:
        options.append(click.option("--name", default=named, help="Name of this process in its run; default: its cell's."))
        options.append(click.option("--cell", default="", help="Name of the cell it belongs to; default: its own."))
        options.append(metrics_port)
    options += [
        click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True),
        click.option("--json-logs", is_flag=True, help="Log JSON lines."),
        click.version_option(importlib.metadata.version("gyre"), prog_name="gyre"),
    ]

    def decorate(f: F) -> F:
        for option in reversed(options):
            f = option(f)
        return f

    return decorate


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"t": round(record.created, 3), "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def start_logging(level: str, json_logs: bool) -> None:
    """Log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    plain.converter = time.gmtime
    handler.setFormatter(_JsonFormatter() if json_logs else plain)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def setup(options: dict[str, Any], flags: dict[str, Any] | None = None, kind: str = "") -> Setup:
    """From the options of `common` (and `flags`, dotted key → value or None) to a `Setup`, with the keys of `kind` if the run has any. May end the
    process (--check, --print-config)."""
    from gyre.net.endpoints import check_peer, endpoint

    start_logging(options["log_level"], options["json_logs"])
    try:
        run_dir: Path = options["run_dir"].expanduser().resolve()
        (run_dir / "run.toml").exists()
    except (OSError, RuntimeError, ValueError) as e:
        raise UsageError("--run", f"{str(options['run_dir'])!r} is no path ({e})", "give a directory that can be made") from None
    file: Path | None = options["config_file"]
    if file is None and (run_dir / "run.toml").is_file():
        file = run_dir / "run.toml"
    peers = {name: check_peer(f"--{name}", options[name]) for name in ("buffer", "train", "coord") if options.get(name)}
    rollouts = [check_peer("--rollout", address) for address in options.get("rollouts") or ()]
    given = dict(flags or {})
    if options.get("insecure"):
        given["net.insecure"] = True
    resolved = configuration.load(file, options["sets"], given)
    if options["print_config"]:
        click.echo(resolved.toml(with_origins=True), nl=False)
        sys.exit(EXIT_OK)
    if options["check"]:
        click.echo("configuration ok", err=True)
        sys.exit(EXIT_OK)
    keys = None
    if kind and resolved.config.net.keys:
        from gyre.net.keys import load

        keys = load(Path(resolved.config.net.keys), kind)
    return Setup(
        run_dir=run_dir,
        config=resolved.config,
        buffer=peers.get("buffer") or endpoint(run_dir, "buffer"),
        train=peers.get("train") or endpoint(run_dir, "train"),
        rollouts=rollouts or [endpoint(run_dir, "rollout")],
        coord=peers.get("coord"),
        bind=options.get("bind"),
        name=options.get("name") or options.get("cell") or "",
        resolved=resolved,
        cell=options.get("cell") or "",
        keys=keys,
        metrics_port=options.get("metrics_port"),
    )


def make_run_dir(path: Path) -> None:
    """Create a run directory. Raises `UsageError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise UsageError("--run", f"{path} is not writable ({e.strerror})", "give a directory that this user can write") from None


EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "safetensors", "numpy"), "train"),
    **dict.fromkeys(("h11", "jinja2", "tokenizers", "pyseccomp"), "sandbox"),
    "matplotlib": "report",
    "pyarrow": "dump",
    "prometheus_client": "metrics",
    "vllm": "vllm",
}
"""Packages that the base installation lacks, and the extra that brings each."""


def writable(path: Path) -> None:
    """Check that an output file can be written before the work begins. Raises `UsageError`."""
    new = not path.exists()
    try:
        path.open("ab").close()
        if new:
            path.unlink()  # there may be nothing to write
    except OSError as e:
        raise UsageError("-o", f"{path} cannot be written ({e.strerror})", "give a file in a directory that this user can write") from None


def stdout() -> BinaryIO:
    """Where data goes. Raises `WorkFailed` when the process was started with it closed."""
    stream: BinaryIO | None = getattr(sys.stdout, "buffer", None)
    if stream is None:
        raise WorkFailed("stdout is closed; redirect it, or name a file with -o")
    return stream


def guarded(body: Callable[[], int | None]) -> NoReturn:
    """Run a command's body and exit: errors become one line and their code, a closed pipe is quiet, bugs show their traceback."""
    try:
        code = body() or EXIT_OK
        if sys.stdout is not None:  # it may have been closed at the start
            sys.stdout.flush()
    except GyreError as e:
        click.echo(f"error: {e}", err=True)
        code = e.exit_code
    except ModuleNotFoundError as e:
        missing = (e.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        remedy = f"install gyre with its extra: pip install 'gyre[{EXTRAS[missing]}]'"
        click.echo(f"error: {missing}: this command needs it and it is not installed; {remedy}", err=True)
        code = EXIT_USAGE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter's last flush must not complain
        code = EXIT_OK
    except KeyboardInterrupt:
        code = 130
    except (click.ClickException, click.exceptions.Exit):
        raise
    except OSError as e:  # the machine's fault or a path's, and it says which; one without a file name is ours
        if e.filename is None and e.errno not in (errno.ENOSPC, errno.EDQUOT):
            traceback.print_exc()
        click.echo(f"error: {e.filename or 'disk'}: {e.strerror}; mend it, or name another", err=True)
        code = EXIT_USAGE if e.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.ENOTDIR) else EXIT_FAILED
    except Exception as e:
        if type(e).__module__ == "sqlite3":
            click.echo(f"error: ledger.db: {e}; it is damaged, restore it from a copy", err=True)
            sys.exit(EXIT_FAILED)
        traceback.print_exc()
        click.echo("this is a bug in gyre", err=True)
        code = EXIT_BUG
    sys.exit(code)


def work(kind: str, options: dict[str, Any], flags: dict[str, Any], body: Callable[[Setup, Worker], Awaitable[None]]) -> NoReturn:
    """Run one of the five kinds of process until it is done or told to stop."""

    def run() -> int:
        s = setup(options, flags, kind)
        from gyre.net.worker import Worker

        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin starve the other processes of a shared machine

        async def main() -> int:
            grace_s = s.config.run.coord_grace_s
            async with Worker(s.coord, kind=kind, name=s.name or kind, run_id=s.run_id, grace_s=grace_s, keys=s.keys) as worker:
                if s.metrics_port is not None:
                    from gyre.report import metrics

                    metrics.serve(s.metrics_port, lambda: [*metrics.of_process(worker.seen()), *metrics.of_run(worker.counters, worker.stats)])
                await body(s, worker)
            return worker.exit_code

        code = asyncio.run(main())
        gc.freeze()  # the interpreter looks through all objects at its end: with torch loaded, most of a second for nothing
        return code

    guarded(run)
