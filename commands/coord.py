"""gyre-coord: start the processes of a run and see it through."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from gyre import cli

RELOAD_S = 30.0


@click.command()
@cli.common()
@click.option("--cells", "cells", metavar="HOSTS", help='Hosts file; "-" reads it from standard input.')
@click.option(
    "--rule",
    metavar="RULE",
    shell_complete=cli.rules,
    help="Who decides the cells' roles: elastic | lookahead | async[:N][+stream] | colocate.  [default: elastic, if cells can turn]",
)
@click.option("--ssh", metavar="COMMAND", help="How other hosts are reached: ssh with its options (net.ssh).")
@click.option("--steps", type=int, help="Optimizer steps of the run (train.steps).")
@click.option("--resume", is_flag=True, help="Go on with the run that the run directory holds.")
@click.option("--reload", "reload", is_flag=True, help="Have the running coordinator of --run read its hosts file again, and say what came of it.")
@cli.metrics_port
@click.option("--dry-run", is_flag=True, help="Print the command of each process and exit.")
def main(cells: str | None, rule: str | None, ssh: str | None, steps: int | None, resume: bool, reload: bool, dry_run: bool, **options: Any) -> None:
    """Launch all processes of hosts.txt, show the run, and end when every one of them has ended.

    Prints the run directory on stdout. The first Ctrl-C stops everything in order, a second one at once.
    """

    def run() -> int:
        check = options["check"] and cells is not None and not reload  # then the hosts file too
        setup = cli.setup({**options, "check": options["check"] and not check}, {"train.steps": steps, "net.ssh": ssh}, "coord")
        import asyncio

        from gyre.coord import hosts, launch
        from gyre.coord.launcher import Launcher
        from gyre.errors import UsageError
        from gyre.net.endpoints import endpoint

        if reload:
            return tell_to_reload(setup.run_dir)
        if cells is None:
            raise UsageError("--cells", "missing", "give the path of a hosts file")
        path = cells
        lines = hosts.read(path)
        named = rule or launch.default_rule(lines)
        here, net = launch.this_host(lines), setup.config.net
        if here and not (net.keys or net.insecure):
            must_be_set(lines, setup)
        bind = launch.at(here, setup.run_id, "coord") if here else endpoint(setup.run_dir, "coord")

        def plans_of(lines: list[hosts.Line]) -> list[launch.Plan]:
            if not here and launch.this_host(lines):
                raise UsageError("--reload", "the run has been on this host alone", "stop it, and start it with other hosts by --resume")
            return launch.plans(
                lines, setup.run_dir, resume=resume, log_level=options["log_level"], coord=bind, rule=named, slots=setup.config.rollout.slots,
                here=here, keys=bool(net.keys),
            )  # fmt: skip

        async def reread() -> list[launch.Plan]:
            lines = hosts.read(path)
            plans = plans_of(lines)
            must_be_set(lines, setup)
            if here:
                await examine(lines, Launcher(setup.run_dir, net.ssh), setup, True)
            return plans

        plans = plans_of(lines)
        reach = Launcher(setup.run_dir, net.ssh)
        if check:
            must_be_set(lines, setup)
            click.echo("configuration and hosts file ok", err=True)
            return 0
        if resume:
            must_hold_a_run(setup.run_dir, lines)
        if dry_run:
            for plan in plans:
                shown = {k: v if k in launch.OURS else "…" for k, v in plan.env.items()}  # others may be secrets
                click.echo(shlex.join(reach.argv(plan.host, *(f"{k}={v}" for k, v in shown.items()), *plan.argv)))
            return 0
        must_be_set(lines, setup)
        cli.make_run_dir(setup.run_dir)
        from gyre.coord.claim import claimed

        with claimed(setup.run_dir, bind):
            admitted, done = _held(setup.run_dir)
            if not resume and admitted:
                raise UsageError("--run", f"{setup.run_dir} holds a run", "give --resume to go on with it, or another directory")
            if done >= setup.config.train.steps:
                enough = f"{setup.run_dir}: step {done} is done, and train.steps = {setup.config.train.steps}: give more --steps to train on"
                click.echo(enough, err=True)
            if here:
                asyncio.run(examine(lines, reach, setup, resume))
            return see_through(setup, plans, bind, named, reread if path != "-" else None, resume)

    cli.guarded(run)


def must_be_set(lines: list[Any], setup: cli.Setup) -> None:
    """Name all keys that processes of these lines would miss, before any is started. Raises `UsageError`."""
    from gyre.coord import doctor
    from gyre.errors import UsageError

    if missing := doctor.unset(lines, setup.config):
        raise UsageError("run.toml", f"not set: {missing}", "set what is named there, or with --set")


def must_hold_a_run(run_dir: Path, lines: list[Any]) -> None:
    """What is there to go on with, as far as this host can know: with a buffer elsewhere, what an earlier coordinator left. Raises `UsageError`."""
    from gyre.errors import UsageError

    here = all(host.local for line in lines if line.kind == "buffer" for host in line.hosts)
    if not (run_dir / ("ledger.db" if here else "logs")).exists():
        raise UsageError("--run", f"{run_dir} holds no run", "leave --resume out, or give the directory of one")


async def examine(lines: list[Any], reach: Any, setup: cli.Setup, resume: bool) -> None:
    """Look at every host before anything is started. To go on with a run, some may be out of reach. Raises `UsageError`."""
    from gyre.coord import doctor
    from gyre.errors import UsageError

    found = await doctor.examine(lines, reach, setup.config)
    told = doctor.problems(found)
    bad = [text for text, reached in told if reached or not resume]
    for text, _ in told if resume else told[1:]:
        click.echo(text, err=True)
    if bad:
        raise UsageError("--cells", bad[0], "gyre-doctor --cells shows all hosts")


def _held(run_dir: Path) -> tuple[int, int]:
    """Executions admitted and steps committed there. A start that failed before admitted none and is no run."""
    if not (run_dir / "ledger.db").exists():
        return 0, 0
    from gyre.report.read import RunReader

    with RunReader(run_dir) as reader:
        return reader.counts()["admitted"], max((row.step for row in reader.step_rows()), default=0)


def tell_to_reload(run_dir: Path) -> int:
    """Ask, and wait for what came of it; the exit code."""
    import os
    import signal
    import time

    from gyre.coord.claim import holder
    from gyre.coord.shell import RELOADED
    from gyre.errors import EXIT_OK, EXIT_USAGE, DeadlineExceeded

    answer = run_dir / RELOADED
    pid = holder(run_dir)
    answer.unlink(missing_ok=True)
    os.kill(pid, signal.SIGHUP)
    until = time.monotonic() + RELOAD_S
    while not answer.exists():
        if time.monotonic() > until:
            raise DeadlineExceeded(f"process {pid}, the coordinator of {run_dir}, to read its hosts file again", RELOAD_S)
        time.sleep(0.05)
    words = answer.read_text(encoding="utf-8")
    click.echo(words, err=True)
    return EXIT_USAGE if words.startswith("error:") else EXIT_OK


def see_through(setup: cli.Setup, plans: list[Any], bind: str, rule: str, reread: Any, adopt: bool) -> int:
    """Run to the end; the exit code."""
    import asyncio
    import sys

    from gyre.coord import shell
    from gyre.coord.explain import explain

    coordinator = shell.Coordinator(setup, plans, bind, rule, reread, adopt)
    end = asyncio.run(coordinator.run())
    if end.code in (130, 143):
        click.echo(stopped_at(coordinator.window.view.counters), err=True)
    elif end.code != 0:
        explain(end, setup.run_dir / "logs", sys.stderr)
    click.echo(setup.run_dir)
    return end.code


def stopped_at(counters: Any) -> str:
    """The last line of a run that was stopped by a signal. `counters`: what the buffer last said, if it ever did."""
    if counters is None:
        return "stopped before the run had begun; start it again"
    return f"stopped at step {counters.step} of {counters.total_steps}; the same command with --resume goes on"


if __name__ == "__main__":
    main()
