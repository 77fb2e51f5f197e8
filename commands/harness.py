"""gyre-harness: install harnesses, list them."""

from __future__ import annotations

from typing import Any

import click

from gyre import cli


@click.group()
@click.version_option(package_name="gyre", prog_name="gyre")
def main() -> None:
    """Harnesses that gyre runs by name: sandbox.harness = "preset:NAME"."""


@main.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--accept-licence", is_flag=True, help="Accept the terms of one whose licence is not open.")
@cli.common(run=False)
def install(names: tuple[str, ...], accept_licence: bool, **options: Any) -> None:
    """Fetch harnesses from their registries, with what they run on, into $GYRE_CACHE (default: ~/.cache/gyre).

    One that is there is not fetched again.
    """

    def body() -> None:
        from gyre.sandbox.harness import install as installer
        from gyre.sandbox.harness.presets import preset

        for wanted in [preset(name, "gyre-harness") for name in names]:
            installer.install(wanted, accept=accept_licence, say=lambda line: click.echo(line, err=True))

    cli.guarded(body)


@main.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per harness.")
@cli.common(run=False)
def list_(as_json: bool, **options: Any) -> None:
    """Name, pinned version, protocol, licence, and the size of those that are installed."""

    def body() -> None:
        import msgspec

        from gyre.sandbox.harness import install as installer
        from gyre.sandbox.harness.presets import PRESETS

        row = "{:<12} {:<9} {:<10} {:<12} {}"
        if not as_json:
            click.echo(row.format("name", "version", "protocol", "licence", "installed"))
        for p in PRESETS.values():
            found = installer.find(p)
            size = found.bytes if found else None
            if as_json:
                fields = {"name": p.name, "version": p.version, "protocol": p.protocol, "licence": p.licence, "terms": p.terms or None, "bytes": size}
                click.echo(msgspec.json.encode(fields))
            else:
                click.echo(row.format(p.name, p.version, p.protocol, p.licence, "no" if size is None else f"{size >> 20} MB"))

    cli.guarded(body)


if __name__ == "__main__":
    main()
