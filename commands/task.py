"""gyre-task: run a task without a model, or check that tasks are sound."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gyre import cli
from gyre.errors import UsageError

if TYPE_CHECKING:
    from gyre.config import Sandbox
    from gyre.sandbox.backends.base import Backend
    from gyre.sandbox.run_task import Check, Result
    from gyre.sandbox.task import Task

F = TypeVar("F", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)
SHOWN = 40  # rows of a table; beyond, only those that fail


def options(f: F) -> F:
    """Options of both subcommands."""
    for option in reversed(
        [
            click.option("--backend", type=click.Choice(["bubblewrap", "docker", "process"]), help="How executions are contained (sandbox.backend)."),
            click.option("--unsafe", is_flag=True, default=None, help="Accept what cannot contain an execution (sandbox.unsafe)."),
            click.option("--config", "config_file", type=PATH, help="run.toml, for its [sandbox] table."),
            click.option("--set", "sets", multiple=True, metavar="TABLE.KEY=VALUE", help="Override one key; repeatable."),
            click.option("--json", "as_json", is_flag=True, help="One JSON object per task."),
            cli.common(run=False),
        ]
    ):
        f = option(f)
    return f


@click.group()
@click.version_option(package_name="gyre", prog_name="gyre")
def main() -> None:
    """Run or check Harbor task directories, without a model."""


@main.command()
@click.argument("task_dir", type=PATH)
@click.option("--harness", type=click.Choice(["oracle", "nop"]), help="Who plays the agent: the task's solution (the default), or nobody.")
@click.option("--harness-cmd", metavar="CMD", help="A command that plays the agent, shell-quoted; it runs in the workspace.")
@click.option("--fail-under", type=float, metavar="X", help="Exit 1 if the reward is below X.")
@click.option("--show-output", is_flag=True, help="What the agent and the verifier wrote, on stderr.")
@options
def run(
    task_dir: Path, harness: str | None, harness_cmd: str | None, fail_under: float | None, show_output: bool, as_json: bool, **given: Any
) -> None:
    """Run one task and grade it; exit 0 if it was graded."""

    def body() -> int:
        import msgspec

        from gyre.sandbox.run_task import run_task
        from gyre.sandbox.task import command, load_task

        if fail_under is not None and math.isnan(fail_under):
            raise UsageError("--fail-under", "nan compares with nothing", "give a number")
        if harness and harness_cmd:
            raise click.UsageError("--harness and --harness-cmd exclude each other")
        task = load_task(task_dir)
        argv = command(harness_cmd, "--harness-cmd", "") if harness_cmd is not None else []

        async def job(backend: Backend, table: Sandbox) -> Result:
            say_notes(backend, [task])
            return await run_task(backend, task, table, "command" if argv else harness or "oracle", argv)

        result = with_backend(given, job)
        if as_json:
            click.echo(msgspec.json.encode(result))
        else:
            click.echo(line(result))
        if (show_output or result.reward is None) and result.output:
            click.echo(result.output.rstrip(), err=True)
        if result.reward is None:
            click.echo(f"not graded: {result.detail}", err=True)
            return 1
        return int(fail_under is not None and result.reward < fail_under)

    cli.guarded(body)


@main.command()
@click.argument("tasks", nargs=-1, required=True, type=PATH)
@click.option("-j", "--jobs", type=click.IntRange(1, 256), default=2, show_default=True, help="Tasks checked at once.")
@options
def check(tasks: tuple[Path, ...], jobs: int, as_json: bool, **given: Any) -> None:
    """Check that each task's oracle gets 1, that doing nothing gets 0, and that no git repository given to the agent has commits behind its back.

    TASKS are task directories, directories of them, or lists of them (JSON lines with a path). Exit 1 if one is not sound.
    """

    def body() -> int:
        from gyre.sandbox.run_task import check_tasks

        loaded = load(tasks)
        if loaded is None:
            return 2
        checks: list[Check] = []

        async def job(backend: Backend, table: Sandbox) -> None:
            say_notes(backend, loaded)
            with Progress(len(loaded), as_json) as progress:

                def report(done: Check) -> None:
                    checks.append(done)
                    progress.show(done)

                await check_tasks(backend, loaded, table, jobs, report)

        with_backend(given, job)
        return int(not all(c.sound for c in checks))

    cli.guarded(body)


T = TypeVar("T")


def with_backend(given: dict[str, Any], job: Callable[[Backend, Sandbox], Awaitable[T]]) -> T:
    """Run `job` with the backend that options and configuration name; its notes go to stderr."""
    import asyncio

    from gyre import config
    from gyre.sandbox.backends.choose import choose

    cli.start_logging(given["log_level"], given["json_logs"])
    flags = {"sandbox.backend": given["backend"], "sandbox.unsafe": given["unsafe"]}
    table = config.load(given["config_file"], given["sets"], flags).config.sandbox

    async def work() -> T:
        backend = choose(table.backend, unsafe=table.unsafe, table=table)
        try:
            await backend.start()
            for note in backend.notes:
                click.echo(f"{backend.name}: {note}", err=True)
            return await job(backend, table)
        finally:
            await backend.close()

    return asyncio.run(work())


def say_notes(backend: Backend, tasks: list[Task]) -> None:
    """What tasks ask for and are not given, on stderr: one line per kind, with the number of tasks."""
    import collections

    notes = collections.Counter(note for task in tasks for note in task.notes)
    if backend.name != "docker":
        notes[f"an image of its own: {backend.name} has none, its sandboxes see this machine's /usr"] = sum(t.needs_image for t in tasks)
        notes[f"environment.cpus: {backend.name} does not limit processor time"] = sum(t.cpus is not None for t in tasks)
    for note, n in (+notes).items():  # those that are
        click.echo(f"{tasks[0].name if len(tasks) == 1 else f'{n} of {len(tasks)} tasks'}: {note}", err=True)


def load(paths: tuple[Path, ...]) -> list[Task] | None:
    """All tasks, or None after naming every fault."""
    from gyre.inputs import task_dirs
    from gyre.sandbox.task import load_task

    loaded, faults = [], 0
    for path in [task for given in paths for task in task_dirs(given)]:
        try:
            task = load_task(path)
            task.oracle_argv()
            task.verifier_argv()
            loaded.append(task)
        except UsageError as e:
            faults += 1
            click.echo(f"error: {e}", err=True)
    return None if faults else loaded


def line(result: Result) -> str:
    """One line for people and for grep."""
    reward = "-" if result.reward is None else f"{result.reward:g}"
    seconds = " ".join(f"{name} {value:.3f}s" for name, value in result.seconds.items())
    status = "" if result.harness_exit is None else f" exit {result.harness_exit}"
    detail = f" ({result.detail})" if result.detail else ""
    return f"reward {reward}  {result.task}  {result.harness}{status}  {result.ending}{detail}  {seconds}"


class Progress:
    """Checks as they are done: lines in a pipe; on a terminal a bar, then a table."""

    def __init__(self, total: int, as_json: bool) -> None:
        import sys

        self.total = total
        self.as_json = as_json
        self.pretty = sys.stdout.isatty() and not as_json
        self.done: list[Check] = []

    def __enter__(self) -> Progress:
        if self.pretty:
            from rich import progress as rich
            from rich.console import Console

            self.bar = rich.Progress(*rich.Progress.get_default_columns(), rich.MofNCompleteColumn(), console=Console(stderr=True), transient=True)
            self.bar.start()
            self.row = self.bar.add_task("checking", total=self.total)
        return self

    def show(self, check: Check) -> None:
        self.done.append(check)
        if self.pretty:
            self.bar.advance(self.row)
        elif self.as_json:
            import msgspec

            click.echo(
                msgspec.json.encode({"task": check.oracle.task, "sound": check.sound, "leak": check.leak, "oracle": check.oracle, "nop": check.nop})
            )
        else:
            click.echo(f"{'ok  ' if check.sound else 'FAIL'}  {check.oracle.task}  {self._rewards(check)}")

    def __exit__(self, *_: object) -> None:
        sound = sum(c.sound for c in self.done)
        if self.pretty:
            self.bar.stop()
            self._table()
        if not self.as_json:
            click.echo(f"{sound} of {self.total} tasks are sound", err=not self.pretty)

    @staticmethod
    def _rewards(check: Check) -> str:
        said = [
            f"{r.harness} {'-' if r.reward is None else f'{r.reward:g}'}{f' ({r.detail})' if r.detail else ''}" for r in (check.oracle, check.nop)
        ]
        return "  ".join([*said, *filter(None, [check.leak])])

    def _table(self) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        rows = self.done if len(self.done) <= SHOWN else [c for c in self.done if not c.sound]
        if not rows:
            return
        table = Table("task", "oracle", "nop", "", "seconds")
        for c in sorted(rows, key=lambda c: c.oracle.task):
            cells = ["-" if r.reward is None else f"{r.reward:g}" for r in (c.oracle, c.nop)]
            seconds = sum(c.oracle.seconds.values()) + sum(c.nop.seconds.values())
            verdict = Text("sound", "green") if c.sound else Text(c.oracle.detail or c.nop.detail or c.leak or "not sound", "red")
            table.add_row(Text(c.oracle.task), *cells, verdict, f"{seconds:.2f}")
        Console().print(table)


if __name__ == "__main__":
    main()
