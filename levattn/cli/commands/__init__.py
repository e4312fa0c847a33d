"""The command lines: options, help, and errors. The modules of `levattn.cli` have the commands' code."""

import typer

from levattn.cli.commands import contexts, demo, models, scores, universal_set

__all__ = ["add_commands"]


def add_commands(app: typer.Typer) -> None:
    """Add all commands to the program."""
    demo.add(app)
    universal_set.add(app)
    scores.add(app)
    models.add(app)
    contexts.add(app)
    demo.add_warmup(app)
    demo.add_completion(app)
