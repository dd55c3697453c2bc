"""One module per command, each with a click command named `command`, and `frame` around them.

Knows only the frame. Nothing else may live in this namespace: importing `bench.commands.list` binds
`list` here, and code in this file would find that module instead of the builtin.
"""

from bench.commands.frame import COMMANDS, cli, main

__all__ = ["COMMANDS", "cli", "main"]
