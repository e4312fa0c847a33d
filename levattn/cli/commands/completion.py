"""The command line of ``levattn completion``."""

from typing import Annotated, Literal

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from levattn.cli.program import Command

_Shell = Annotated[Literal["bash", "zsh", "fish", "powershell"], typer.Argument(help="The shell.")]

_HELP = """\
Print the script that completes levattn in your shell.

It completes commands, options and their choices, and file names. The command only prints the script: save it once
where your shell looks for it, and open a new shell.

\b
Examples:
  levattn completion bash > ~/.local/share/bash-completion/completions/levattn
  levattn completion zsh > ~/.zfunc/_levattn
  levattn completion fish > ~/.config/fish/completions/levattn.fish
  levattn completion powershell >> $PROFILE

The folder must exist. bash needs the package bash-completion, and zsh must look for functions in that folder.
Otherwise, add these lines to ~/.bashrc and ~/.zshrc:

\b
  source <(levattn completion bash)
  fpath+=~/.zfunc; autoload -Uz compinit; compinit
"""


def add(app: typer.Typer) -> None:
    """Add the command to the program."""

    @app.command(cls=Command, help=_HELP)
    def completion(shell: _Shell) -> None:
        typer.echo(get_completion_script(prog_name="levattn", complete_var="_LEVATTN_COMPLETE", shell=shell))
