"""One module per command, each with a click command named `command`, and `frame` around them.

Knows only the frame. Nothing else may live in this namespace: importing `bench.commands.list` binds
`list` here, and code in this file would find that module instead of the builtin. Invariant: an
interrupt ends the program in one line even while its own modules are still being imported.
"""

try:
    from bench.commands.frame import COMMANDS, cli, main
except KeyboardInterrupt:
    import sys

    print("error: interrupted", file=sys.stderr)
    raise SystemExit(130) from None  # here, for the console script cannot catch it

__all__ = ["COMMANDS", "cli", "main"]
