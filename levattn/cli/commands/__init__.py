"""The command lines: options, help, and errors. The modules of `levattn.cli` have the commands' code."""

from typing import get_type_hints

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
    for command in app.registered_commands:
        for hint in get_type_hints(command.callback, include_extras=True).values():
            for option in getattr(hint, "__metadata__", ()):
                option.readable = False  # the code that opens a file says why it cannot, with status 1
