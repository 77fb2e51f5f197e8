"""What pyproject.toml cannot say: manual pages and shell completions, made from the commands when a wheel is built, installed under share/.

Nothing of it is kept in the repository. An editable installation, which is what `make setup` makes, has them too.
"""

import importlib
import sys
from pathlib import Path

from setuptools import Distribution, setup

ROOT = Path(__file__).resolve().parent
COMPLETIONS = {
    "bash": "share/bash-completion/completions/{}",
    "zsh": "share/zsh/site-functions/_{}",
    "fish": "share/fish/vendor_completions.d/{}.fish",
}


def first_sentences(command):  # type: ignore[no-untyped-def]
    """Else NAME and COMMANDS of a page are cut at 45 letters."""
    command.short_help = " ".join((command.help or "").split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
    for one in getattr(command, "commands", {}).values():
        first_sentences(one)


class WithShare(Distribution().get_command_class("install_data")):  # type: ignore[misc]
    """Writes into the wheel, or the environment, directly."""

    def run(self) -> None:
        self.run_command("egg_info")  # the commands ask for gyre's version
        sys.path.insert(0, str(ROOT))
        import click
        from click.shell_completion import get_completion_class
        from click_man.core import write_man_pages

        man = Path(self.install_dir, "share/man/man1")
        man.mkdir(parents=True, exist_ok=True)
        for line in self.distribution.entry_points["console_scripts"]:
            script, module = (part.strip() for part in line.partition(":")[0].split("="))
            command: click.Command = importlib.import_module(module.replace("gyre_commands", "commands")).main
            first_sentences(command)
            write_man_pages(script, command, version=self.distribution.get_version(), target_dir=str(man))
            for shell, where in COMPLETIONS.items():
                file = Path(self.install_dir, where.format(script))
                file.parent.mkdir(parents=True, exist_ok=True)
                variable = f"_{script}_COMPLETE".replace("-", "_").upper()
                file.write_text(get_completion_class(shell)(command, {}, script, variable).source(), encoding="utf-8")
                self.outfiles.append(str(file))
        self.outfiles += map(str, man.iterdir())


class WithData(Distribution):
    has_data = Distribution.has_data_files  # asked for by editable installations under this name


setup(distclass=WithData, cmdclass={"install_data": WithShare}, data_files=[("share", [])])
