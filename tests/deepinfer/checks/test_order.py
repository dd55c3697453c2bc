"""Happens-before: each kind of hazard found once, and nothing said of what is ordered."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from deepinfer.block_manager import BlockManager
from deepinfer.checks.findings import Findings
from deepinfer.checks.order import OrderChecker
from deepinfer.observer import RECORD, STAGING, STATE, Access
from tests.deepinfer.checks.books import SIZE, RunningHost, kv

READ_BY_A = "which reads it for 'a'"


class Device:
    """Drives a checker as an engine would, with requests `a` and `b` on the rows 0 and 1."""

    def __init__(self) -> None:
        self.findings = Findings()
        self.checker = OrderChecker(SIZE, self.findings)
        self.host = RunningHost()
        self.checker.bind(self.host)
        self.host.run("a", "b")

    def give(self, owner: str, *ids: int) -> None:
        self.checker.allocated(list(ids))
        self.checker.took(owner, list(ids), "admit")

    def let_go(self, owner: str, *ids: int, path: str = "finish", fenced: bool = False) -> None:
        self.checker.giving_up(list(ids), self.host.num_steps, owner, path)
        self.checker.released(list(ids), list(ids), fenced)

    def submit(self, stream: str, label: str, reads=(), writes=()) -> None:
        self.checker.submitted(stream, label, reads, writes)

    def record(self, stream: str, event: int) -> None:
        self.checker.recorded(stream, event)

    @property
    def said(self) -> list[str]:
        return [finding.message for finding in self.findings.first]


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def reused(device):
    """`a` was read by forward 1 and ended; its block 3 is b's by now, too early."""
    device.give("a", 3)
    device.submit("compute", "forward 1", [kv(3, rows=(0, 2), holder=0)])
    device.record("compute", 1)
    device.let_go("a", 3)
    device.give("b", 3)
    return device


def test_a_block_reused_early_by_another_stream_is_one_hazard(reused):
    """The finding names operations, streams, block, owners and the release that let it through."""
    reused.submit("load", "load 1", writes=[kv(3, rows=(3, 4), holder=1)])
    assert reused.said == [
        "'load 1' on load writes block 3 for 'b', and nothing orders it behind "
        "'forward 1' on compute, which reads it for 'a'; block given up by 'a' (finish) behind "
        "step 1, not withheld for it, policy early"
    ]


def test_reuse_on_the_same_stream_is_ordered(reused):
    """Early release is safe while the only writer comes behind the reader."""
    reused.submit("compute", "forward 2", [kv(3, holder=1)], [kv(3, rows=(0, 1), holder=1)])
    assert not reused.said


def test_reuse_behind_a_wait_or_a_passed_event_is_ordered(device):
    """A wait of the stream, of the host, or of the host for everything, or a look that passed."""
    orders = [
        lambda: device.checker.waited("load", 1),
        lambda: device.checker.synchronized(1),
        lambda: device.checker.synchronized(None),
        lambda: device.checker.queried(1, True),
    ]
    for block_id, order in enumerate(orders, start=1):
        device.give("a", block_id)
        device.submit("compute", "forward", [kv(block_id, holder=0)])
        device.record("compute", 1)
        device.let_go("a", block_id)
        order()
        device.give("b", block_id)
        device.submit("load", "load", writes=[kv(block_id, holder=1)])
    assert not device.said


def test_an_event_that_has_not_passed_orders_nothing(reused):
    """A look at it is no wait."""
    reused.checker.queried(1, False)
    reused.submit("load", "load 1", writes=[kv(3, holder=1)])
    assert len(reused.said) == 1


def test_a_wait_for_the_wrong_event_is_a_hazard(reused):
    """An event recorded before the read does not cover it."""
    reused.record("copy", 2)
    reused.checker.waited("load", 2)
    reused.submit("load", "load 1", writes=[kv(3, holder=1)])
    assert len(reused.said) == 1
    assert READ_BY_A in reused.said[0]


@pytest.mark.parametrize("how", ["recorded again", "recycled"])
def test_an_event_changed_while_its_fence_waits_is_a_hazard(reused, how):
    """The fence refers to the event; what it stood for is forgotten."""
    reused.checker.recycled(1)
    if how == "recorded again":
        reused.record("copy", 1)
    reused.checker.synchronized(1)
    reused.submit("load", "load 1", writes=[kv(3, holder=1)])
    assert len(reused.said) == 1


def test_an_event_recorded_before_the_copies_is_a_hazard(device):
    """It passes while the copy still reads its source."""
    device.give("a", 3)
    device.record("copy", 1)
    device.submit("copy", "copy 1", [kv(3)])
    device.let_go("a", 3, path="fork source", fenced=True)
    device.checker.synchronized(1)
    device.give("b", 3)
    device.submit("compute", "forward 2", writes=[kv(3, rows=(0, 1), holder=1)])
    (message,) = device.said
    assert "behind 'copy 1' on copy, which reads it for 'a'" in message
    assert "given up by 'a' (fork source) behind step 1, withheld for it" in message


def test_a_copy_the_forward_does_not_wait_for_is_a_hazard(device):
    """Read after write in one ownership: no release is to blame, and none is named."""
    device.give("a", 1, 2)
    device.submit("copy", "copy 1", [kv(1)], [kv(2)])
    device.submit("compute", "forward 1", [kv(2, rows=(0, 3), holder=0)])
    (message,) = device.said
    assert message.startswith("'forward 1' on compute reads block 2 row 0 for 'a'")
    assert message.endswith("behind 'copy 1' on copy, which writes it for 'a'")


def test_two_unordered_reads_are_no_hazard(device):
    """Readers do not disturb one another."""
    device.give("a", 1)
    device.submit("copy", "copy 1", [kv(1)])
    device.submit("compute", "forward 1", [kv(1, holder=0)])
    assert not device.said


@pytest.mark.parametrize(("written", "hazards"), [((3, 4), 0), ((2, 3), 1)])
def test_rows_count_within_one_ownership(device, written, hazards):
    """A shared partial block is read below the row that another stream writes."""
    device.give("a", 1)
    device.submit("copy", "offload 1", [kv(1, rows=(0, 3))])
    device.submit("compute", "forward 1", writes=[kv(1, rows=written, holder=0)])
    assert len(device.said) == hazards


def test_the_block_counts_between_ownerships(reused):
    """Another row of the block is too early as well, but only for a write."""
    reused.submit("load", "look 1", [kv(3, rows=(3, 4), holder=1)])
    assert not reused.said
    reused.submit("load", "load 1", writes=[kv(3, rows=(3, 4), holder=1)])
    assert len(reused.said) == 1


def test_one_bad_release_is_one_finding_per_block_and_pair(device):
    """Many rows, reads and writes of the same two operations on two blocks are two findings."""
    device.give("a", 1, 2)
    rows = kv(1, 1, 2, 2, rows=(0, 4), holder=0)
    device.submit("compute", "forward 1", [rows], [rows])
    device.let_go("a", 1, 2)
    device.give("b", 1, 2)
    device.submit("load", "load 1", [kv(1, 2, holder=1)], [kv(1, 2, holder=1)])
    assert len(device.findings) == 2


def test_a_stale_table_row_is_found_once(device):
    """An operation on behalf of a request for a block that has another owner by now."""
    device.give("a", 3)
    device.let_go("a", 3)
    device.give("b", 3)
    for step in (1, 2):
        device.submit("compute", f"forward {step}", [kv(3, rows=(0, 1), holder=0)])
    assert device.said == ["'forward 1' on compute reads block 3 for 'a', which belongs to 'b'"]


def test_shared_blocks_belong_to_each_of_their_owners(device):
    """Parent and fork may both read; a third request may not."""
    device.host.run("a", "b", "c")
    device.give("a", 3)
    device.checker.pinned([3])
    device.checker.forked("b", "a", [3])
    for row in (0, 1):
        device.submit("compute", "forward 1", [kv(3, holder=row)])
    assert not device.said
    device.submit("compute", "forward 2", [kv(3, holder=2)])
    assert device.said == [
        "'forward 2' on compute reads block 3 for 'c', which belongs to 'a' and 'b'"
    ]


def test_an_owner_without_a_name_may_be_anybody(device):
    """With a pin that nobody gave a name to, nothing is certain, so nothing is said."""
    device.give("a", 3)
    device.checker.pinned([3])
    device.submit("compute", "forward 1", [kv(3, holder=1)])
    assert not device.said


@pytest.mark.parametrize("fenced", [True, False])
def test_a_block_that_nobody_owns_is_not_to_be_touched(device, fenced):
    """Free or withheld: whoever queues an access now has no right to it."""
    device.give("a", 3)
    device.let_go("a", 3, path="preempt", fenced=fenced)
    device.submit("compute", "forward 1", writes=[kv(3, rows=(0, 1), holder=0)])
    (message,) = device.said
    assert "writes block 3 for 'a', which belongs to nobody: given up by 'a' (preempt)" in message


def test_block_zero_is_padding_and_no_other_id_is(device):
    """Padded rows may go to block 0; -1 and ids behind the pool are found."""
    device.submit("compute", "forward 1", [kv(0)], [kv(0)])
    device.submit("load", "load 1", [kv(0)], [kv(0)])
    assert not device.said
    device.submit("compute", "forward 2", writes=[kv(-1, 9)])
    assert [message.split(";")[0] for message in device.said] == [
        "'forward 2' on compute writes block -1",
        "'forward 2' on compute writes block 9",
    ]


@pytest.mark.parametrize("kind", [STAGING, RECORD])
@pytest.mark.parametrize("waits", [True, False])
def test_the_host_waits_before_it_touches_what_a_step_uses(device, kind, waits):
    """Host arrays are not rewritten, results not read, while the step may still run."""
    number = Access(kind, np.array([1]))
    if kind == STAGING:
        device.submit("compute", "forward 1", reads=[number])
    else:
        device.submit("compute", "forward 1", writes=[number])
    device.record("compute", 1)
    if waits:
        device.checker.synchronized(1)
    device.checker.on_host("host", *(([], [number]) if kind == STAGING else ([number], [])))
    assert len(device.said) == (not waits)
    if not waits:
        assert device.said[0].startswith("'host' on host ")
        assert "step 1, and nothing orders it behind 'forward 1'" in device.said[0]


def test_what_the_host_knows_to_be_over_is_forgotten(device):
    """The log holds what may still be running, however long the run."""
    device.give("a", 1)
    for step in range(100):
        device.submit("compute", f"forward {step}", [kv(1, holder=0)])
        device.record("compute", 1)
        if step % 10 == 9:
            device.checker.synchronized(1)
    assert not device.checker._logs["compute"]


# -- state slots -----------------------------------------------------------------------------------


class DeviceWithStates(Device):
    """Slots 1 to 3 beside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.host.states = SimpleNamespace(slots=BlockManager(4))
        self.checker.bind(self.host)

    def give_slot(self, owner: str, slot: int) -> None:
        self.checker.states.allocated([slot])
        self.checker.states.took(owner, [slot], "admit")

    def let_slot_go(self, owner: str, slot: int) -> None:
        self.checker.states.giving_up([slot], self.host.num_steps, owner, "finish")
        self.checker.states.released([slot], [slot], False)


def states(*ids: int, holder: int | None = None) -> Access:
    """State slots, on behalf of one row."""
    holders = None if holder is None else np.full(len(ids), holder)
    return Access(STATE, np.array(ids), holders=holders)


def test_a_slot_reused_under_an_open_copy_is_a_hazard():
    """Blocks and slots of one number are different things."""
    device = DeviceWithStates()
    device.give("a", 1)
    device.give_slot("a", 1)
    device.submit("copy", "copy_states 1", [states(1)])
    device.let_slot_go("a", 1)
    device.give_slot("b", 1)
    device.submit("compute", "forward 1", [kv(1, holder=0)])
    assert not device.said
    device.submit("compute", "forward 2", [], [states(1, holder=1)])
    assert device.said == [
        "'forward 2' on compute writes state slot 1 for 'b', and nothing orders it behind "
        "'copy_states 1' on copy, which reads it for 'a'; state slot given up by 'a' (finish) "
        "behind step 1, not withheld for it, policy early"
    ]


def test_a_slot_of_another_request_is_no_place_to_write():
    """Nor one that nobody has, nor one that there is not."""
    device = DeviceWithStates()
    device.give_slot("a", 1)
    device.submit("compute", "forward 1", [], [states(1, holder=1)])
    device.submit("compute", "forward 2", [], [states(2, holder=1)])
    device.submit("compute", "forward 3", [], [states(7, holder=1)])
    assert device.said == [
        "'forward 1' on compute writes state slot 1 for 'b', which belongs to 'a'",
        "'forward 2' on compute writes state slot 2 for 'b', which belongs to nobody: "
        "never handed out",
        "'forward 3' on compute writes state slot 7; state slots run from 0 to 3",
    ]


# -- drafts ----------------------------------------------------------------------------------------


@pytest.fixture
def verifying(device):
    """Behind step 1, which verifies drafts, step 2 may write the positions 5 to 7 for `a`."""
    device.give("a", 7, 3)
    device.submit("compute", "forward 2", writes=[kv(3, rows=(1, 4), holder=0)])
    return device


def save(device, num_rows):
    """Rows of the second block are read on a stream of its own."""
    device.submit("load", f"save {num_rows}", [kv(3, rows=(0, num_rows))])


def test_before_the_step_before_is_committed_all_that_may_be_written_counts(verifying):
    """The drafts in flight may all be rejected."""
    save(verifying, 1)
    assert not verifying.said
    save(verifying, 2)
    assert len(verifying.said) == 1


def test_what_is_committed_is_written_by_no_step_in_flight(verifying):
    """One draft was accepted: step 2 begins behind it, and the rows before may be read."""
    verifying.checker.committed(kv(7, 3, rows=(0, 3), holder=0))
    save(verifying, 3)
    assert not verifying.said
    save(verifying, 4)
    assert len(verifying.said) == 1


def test_another_request_and_another_ownership_commit_nothing_of_it(verifying):
    """Who writes rows of others writes them still, and a block begins anew with its owner."""
    verifying.checker.committed(kv(3, rows=(0, 3), holder=1))
    verifying.let_go("a", 3)
    verifying.give("a", 3)
    verifying.checker.committed(kv(3, rows=(0, 3), holder=0))
    save(verifying, 2)
    assert len(verifying.said) == 1


def test_accesses_without_holders_are_narrowed_by_rows_without_holders(device):
    """As a replayed log has them."""
    device.give("a", 3)
    device.submit("compute", "forward 2", writes=[kv(3, rows=(1, 4))])
    device.checker.committed(kv(3, rows=(0, 3)))
    save(device, 3)
    assert not device.said
    save(device, 4)
    assert len(device.said) == 1
