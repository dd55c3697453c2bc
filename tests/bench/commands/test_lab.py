"""`lab` on the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import labs
from bench.commands import lab, main

ROOT = Path(__file__).resolve().parents[3]
EXPECTED = ROOT / "tests" / "data" / "labs"


def run_lab(*args):
    """Run the command; what it raises reaches the test."""
    return CliRunner().invoke(lab.command, [str(arg) for arg in args], catch_exceptions=False)


@pytest.mark.parametrize(("name", "file"), [("blocks", "09_blocks.txt"), ("share", "10_share.txt")])
@pytest.mark.parametrize("options", [(), ("--release-order", "reverse")])
def test_the_output_is_the_books_byte_for_byte(name, file, options):
    """Without options, and with those that name the default."""
    done = run_lab(name, *options)
    assert (done.exit_code, done.stdout_bytes) == (0, (EXPECTED / file).read_bytes())


def test_the_options_reach_the_first_lab():
    """Drafts and order change what is printed, together."""
    done = run_lab("blocks", "--drafts", 6, "--release-order", "forward")
    assert done.stdout.splitlines() == list(labs.blocks_lab(6, "forward"))


def test_one_policy_prints_one_run():
    """With --policy the other run and the empty line between them are gone."""
    for policy in lab.POLICIES:
        done = run_lab("share", "--policy", policy, "--processed", 5, "--release-order", "forward")
        assert done.stdout.splitlines() == labs.share_lab(policy, 5, "forward")


def test_the_command_offers_what_the_lab_can_do():
    """The limits and names written down for --help are those of the lab."""
    assert lab.MAX_DRAFTS == labs.MAX_DRAFTS
    assert lab.MAX_PROCESSED == labs.MAX_PROCESSED
    assert tuple(labs.SHARE_TITLES) == lab.POLICIES


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("blocks", "--drafts", "-1"), ("--drafts", "-1", "0<=x<=17")),
        (("blocks", "--drafts", "18"), ("--drafts", "18", "0<=x<=17")),
        (("blocks", "--drafts", "two"), ("--drafts", "two")),
        (("share", "--processed", "0"), ("--processed", "0", "1<=x<=12")),
        (("share", "--processed", "13"), ("--processed", "13", "1<=x<=12")),
        (("share", "--policy", "defered"), ("--policy", "defered", "deferred")),
        (("share", "--release-order", "by_id"), ("--release-order", "by_id", "forward")),
        (("shares",), ("shares", "share")),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, named, capsys):
    """The line names the option, the value and what is valid; nothing goes to stdout."""
    assert main(["lab", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    error, *hints = captured.err.splitlines()
    assert all(text in error for text in named)
    assert all(line.startswith("hint:") for line in hints)


def test_help_is_cheap():
    """Importing the command loads neither numpy nor torch."""
    code = "import bench.commands.lab, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert not {"numpy", "torch"} & set(done.stdout.split())
