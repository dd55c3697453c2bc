"""The book's labs: their output, and the answers to the experiments of section 4.6."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.labs import (
    BLOCK_SIZE,
    MAX_DRAFTS,
    MAX_PROCESSED,
    SHARE_TITLES,
    _ForkLab,
    blocks_lab,
    share_lab,
)
from deepinfer.names import FREE_ORDERS, RELEASE_POLICIES

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = ROOT / "tests" / "data" / "labs"
BOTH = ("early", "deferred")


def find(lines, text):
    """The one line that begins with `text`."""
    (line,) = [line for line in lines if line.strip().startswith(text)]
    return line


def ids(line, name):
    """The list printed as `name=[...]`."""
    return [int(i) for i in re.findall(r"\d+", re.search(rf"{name}=\[(.*?)\]", line)[1])]


def test_the_first_lab_is_the_books():
    """Without arguments the lines are those of 09_blocks.txt."""
    assert "\n".join(blocks_lab()) + "\n" == (EXPECTED / "09_blocks.txt").read_text()


def test_the_second_lab_is_the_books():
    """Without arguments the two runs are those of 10_share.txt."""
    runs = ["\n".join(share_lab(policy)) + "\n" for policy in SHARE_TITLES]
    assert "\n".join(runs) == (EXPECTED / "10_share.txt").read_text()


@pytest.mark.parametrize(
    ("num_drafts", "label", "table"),
    [
        (0, "A at 11, no drafts reserved", [1, 2, 6]),
        (1, "A at 11, one draft reserved", [1, 2, 6]),
        (2, "A at 11, two drafts reserved", [1, 2, 6, 7]),
        (5, "A at 11, five drafts reserved", [1, 2, 6, 7]),
    ],
)
def test_drafts_reserve_blocks_for_positions_that_do_not_exist_yet(num_drafts, label, table):
    """11 tokens and the drafts need ceil((11 + drafts) / 4) blocks: five drafts still only one."""
    assert ids(find(blocks_lab(num_drafts), label), "A") == table


def test_rejected_drafts_give_their_block_back():
    """Twelve tokens need three blocks, however many drafts there were."""
    for num_drafts in (2, 5):
        line = find(blocks_lab(num_drafts), "drafts rejected; A at 12")
        assert (ids(line, "A"), ids(line, "free")) == ([1, 2, 6], [7])
    assert find(blocks_lab(1), "draft rejected; A at 12")
    assert find(blocks_lab(0), "A reaches 12 tokens")


@pytest.mark.parametrize(("num_drafts", "missing"), [(6, 2), (9, 2), (10, 3), (MAX_DRAFTS, 4)])
def test_drafts_that_do_not_fit_change_nothing(num_drafts, missing):
    """The lab says what is missing, and the table is as it was."""
    lines = list(blocks_lab(num_drafts))
    refused = find(lines, f"A at 11, {num_drafts} drafts do not fit")
    assert (ids(refused, "A"), ids(refused, "free")) == ([1, 2, 6], [7])
    assert f"  {missing} more blocks needed, 1 free: LATER" in lines
    assert find(lines, "A reaches 12 tokens")


@pytest.mark.parametrize(
    ("order", "free"),
    [("reverse", [7, 5, 4, 3]), ("forward", [7, 3, 4, 5]), ("by_id", [7, 3, 4, 5])],
)
def test_the_release_order_decides_which_of_a_tables_blocks_is_reused_first(order, free):
    """B's last block comes back first, or its first."""
    assert ids(find(blocks_lab(release_order=order), "B finishes"), "free") == free


@pytest.mark.parametrize("num_processed", range(1, MAX_PROCESSED + 1))
@pytest.mark.parametrize("policy", BOTH)
def test_early_release_corrupts_exactly_where_a_tail_copy_is_queued(policy, num_processed):
    """A whole number of blocks queues no copy, so nothing can go wrong; a partial tail can."""
    lines = share_lab(policy, num_processed)
    copies_tail = num_processed % BLOCK_SIZE > 0
    assert ("copy=[]" in find(lines, "fork:")) is not copies_tail
    wrong = policy == "early" and copies_tail
    assert find(lines, "child reads").endswith(f"correct={not wrong}")


def test_a_fork_at_a_block_boundary_shares_everything():
    """Eight positions fill two blocks: both shared, none copied, and the writer gets a new one."""
    for policy in BOTH:
        assert share_lab(policy, 8)[1:] == [
            "  fork: parent=[1, 2] child=[1, 2] refs 1:2 2:2 copy=[]",
            "  parent finishes: free=[3]; shared [1, 2] kept",
            "  writer receives block 3; no copy is queued",
            "  child reads [100, 101]...[106, 107]: correct=True",
        ]


def test_short_prefixes_are_shown_whole():
    """Up to four token ids are printed, with no overlap of first and last."""
    lines = share_lab("deferred", 3)
    assert find(lines, "child reads") == "  child reads [100, 101, 102]: correct=True"
    assert find(lines, "parent finishes") == "  parent finishes: free=[]; nothing is shared"


def test_a_release_order_of_ones_own_shows_in_what_the_child_gives_back():
    """The run goes on to the child's end, where forward returns its first block first."""
    lines = share_lab("deferred", release_order="forward")
    assert lines[:-1] == share_lab("deferred")
    assert lines[-1] == "  child finishes: free=[1, 2, 4]"


@pytest.mark.parametrize(
    ("policy", "log"),
    [
        ("early", [("load", "write 3"), ("copy", "copy 3 to 4")]),
        ("deferred", [("copy", "copy 3 to 4"), ("load", "write 3")]),
    ],
)
def test_the_policy_decides_whether_the_copy_runs_before_the_write(policy, log):
    """The device's own log, for the lines that the lab prints about it."""
    lab = _ForkLab(policy, 10, "reverse")
    for act in (lab.fork, lab.finish_parent, lab.let_writer_in):
        act()
    assert lab.device.log == log


def test_the_lab_uses_names_the_engine_has():
    """Policies and free orders are the engine's."""
    assert set(SHARE_TITLES) <= set(RELEASE_POLICIES)
    assert {"forward", "reverse"} <= set(FREE_ORDERS)


def test_the_labs_do_not_load_torch():
    """Token ids move in numpy arrays, so a lab starts at once."""
    code = (
        "import bench.labs as l, sys; [*l.blocks_lab(), *l.share_lab('early')]; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stdout.split()
