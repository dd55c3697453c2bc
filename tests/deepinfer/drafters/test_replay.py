"""Replayed drafts: right as often as asked, wrong by another token, the same in every run."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.device.base import Device
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.drafters.acceptance import Acceptance, parse_acceptance
from deepinfer.drafters.base import Asked
from deepinfer.drafters.replay import ReplayDrafter
from deepinfer.errors import UnknownRequestError, UserError
from deepinfer.plan import Int32
from tests.deepinfer.drafters.batches import ask

ROOT = Path(__file__).resolve().parents[3]
VOCAB = 100
LENGTH = 400
NUM_DRAFTS = 5
DEVICE = SteppedCpuDevice()


def reference(seed: int = 0, length: int = LENGTH) -> Int32:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def prepared(
    references: Mapping[str, Int32],
    acceptance: Acceptance,
    *,
    seed: int = 0,
    vocab_size: int = VOCAB,
    max_model_len: int = LENGTH,
    device: Device = DEVICE,
) -> ReplayDrafter:
    """A drafter with eight slots, none of them given to anybody."""
    drafter = ReplayDrafter(references, acceptance, seed, vocab_size)
    drafter.prepare(device, 8, max_model_len)
    return drafter


def replay(acceptance: object, *, seed: int = 0, num_requests: int = 1) -> ReplayDrafter:
    """A drafter for requests r0, r1, ..., each started in the slot of its number."""
    references = {f"r{i}": reference(i) for i in range(num_requests)}
    drafter = prepared(references, parse_acceptance(acceptance), seed=seed)
    for i in range(num_requests):
        drafter.start(i, f"r{i}", 10)
    return drafter


def propose(drafter: ReplayDrafter, slot: int, length: int, num_drafts: int) -> list[int]:
    """The proposal for the one request of a slot, whose tokens are all 0."""
    (drafts,) = ask(drafter, [[0] * length], [num_drafts], slots=[slot])
    return drafts


def rights(drafter: ReplayDrafter, num_proposals: int, slots: range = range(1)) -> np.ndarray:
    """Whether each draft is true: bool [slots, num_proposals, NUM_DRAFTS], at advancing ends.

    All slots are asked for in one batch.
    """
    true = np.stack([reference(slot) for slot in slots])
    found = np.zeros((len(slots), num_proposals, NUM_DRAFTS), bool)
    tokens = torch.zeros(8, LENGTH, dtype=torch.int32)
    fixed = torch.tensor(list(slots)), torch.full((len(slots),), NUM_DRAFTS)
    for number in range(num_proposals):
        length = 10 + number % (LENGTH - NUM_DRAFTS - 10)
        lengths = torch.full((len(slots),), length)
        drafts, counts = drafter.propose(
            Asked(fixed[0], tokens, lengths, fixed[1], fixed[0][:0], NUM_DRAFTS, length)
        )
        assert (counts == NUM_DRAFTS).all()
        found[:, number] = drafts.numpy() == true[:, length : length + NUM_DRAFTS]
    return found


def within(successes: int, trials: int, probability: float) -> bool:
    """Whether a binomial count is within 4.5 standard deviations: 7 in a million are not."""
    deviation = math.sqrt(trials * probability * (1 - probability))
    return abs(successes - trials * probability) <= 4.5 * deviation


@pytest.mark.parametrize("acceptance", [0.3, 0.7, [0.9, 0.9, 0.1], [0.0, 1.0, 0.5]])
def test_each_position_is_right_as_often_as_asked(acceptance: object) -> None:
    """Over 8,000 proposals the true tokens at each position are within binomial bounds."""
    found = rights(replay(acceptance, num_requests=4), 2000, range(4)).reshape(8000, NUM_DRAFTS)
    schedule = parse_acceptance(acceptance)
    for k in range(NUM_DRAFTS):
        assert within(int(found[:, k].sum()), len(found), schedule.probability(0, k))


def test_positions_and_proposals_are_independent() -> None:
    """Whether a draft is right says nothing of the next position, proposal or request."""
    first, second = rights(replay(0.5, num_requests=2), 4000, range(2))
    pairs = [
        (first[:, 0], first[:, 1]),
        (first[1:, 0], first[:-1, 1]),  # the same position of the sequence, proposed again
        (first[1:, 0], first[:-1, 0]),
        (first[:, 0], second[:, 0]),
    ]
    for left, right in pairs:
        assert within(int((left == right).sum()), len(left), 0.5)


def test_which_token_is_wrong_says_nothing_of_whether() -> None:
    """At any acceptance below 1 the replaced tokens are spread over the whole vocabulary."""
    true = np.zeros(3010, np.int32)
    drafter = prepared({"r": true}, Acceptance(((0.9,),)), vocab_size=5, max_model_len=3010)
    drafter.start(0, "r", 1)
    counts = np.zeros(5, int)
    for _ in range(10):
        counts += np.bincount(propose(drafter, 0, 10, 3000), minlength=5)
    assert within(int(counts[0]), 30_000, 0.9)
    assert all(within(int(count), 30_000, 0.1 / 4) for count in counts[1:])


@given(st.integers(0, 5))
def test_certainties_are_certain(num_drafts: int) -> None:
    """At 1 every draft is true, at 0 none is."""
    true, right, wrong = reference().tolist(), replay("all-accept"), replay("all-reject")
    for length in range(10, 40):
        expected = true[length : length + num_drafts]
        assert propose(right, 0, length, num_drafts) == expected
        replaced = propose(wrong, 0, length, num_drafts)
        assert len(replaced) == num_drafts
        assert all(a != b for a, b in zip(replaced, expected, strict=True))


def test_certainties_hold_for_the_lowest_hash() -> None:
    """With this seed the hash of position 692 is 0: not even that is below a probability of 0."""
    true = np.zeros(1000, np.int32)
    drafter = prepared({"r": true}, Acceptance(((0.0,),)), seed=1_715_595, max_model_len=1000)
    drafter.start(0, "r", 1)
    assert drafter._owners is not None
    keys = drafter._owners.keys[:1]
    zero, where = torch.tensor([0]), torch.tensor([[692]])
    assert drafter._hashes(keys, zero, where)[0].tolist() == [[0]]
    assert propose(drafter, 0, 692, 1) != [0]


@pytest.mark.parametrize(
    ("acceptance", "expected"),
    [
        ("alternate", [True, False] * 8),
        ({"pattern": "bursts", "length": 3}, ([True] * 3 + [False] * 3) * 3),
        ({"over_time": [1, 0, 0]}, [True, False, False] * 4),
    ],
)
def test_schedules_over_time_are_exact(acceptance: object, expected: list[bool]) -> None:
    """Bursts and alternation of certain drafts follow the count of proposals to the letter."""
    (found,) = rights(replay(acceptance), len(expected))
    assert found.tolist() == [[right] * NUM_DRAFTS for right in expected]


def test_entries_of_different_lengths_hold_by_position() -> None:
    """In a schedule of lists each entry goes on with its own last value."""
    acceptance = {"over_time": [1, [0, 1], [1, 1, 0]], "length": 2}
    (found,) = rights(replay(acceptance), 12)
    once = [[True] * 5, [False, *[True] * 4], [True, True, *[False] * 3]]
    assert found.tolist() == [right for right in once for _ in range(2)] * 2


def test_proposals_are_counted_per_request() -> None:
    """Another request's proposals do not move a request along its schedule."""
    drafter = replay("alternate", num_requests=2)
    assert rights(drafter, 3)[0, :, 0].tolist() == [True, False, True]
    assert rights(drafter, 2, range(1, 2))[0, :, 0].tolist() == [True, False]
    assert rights(drafter, 1)[0, :, 0].tolist() == [False]


def test_a_proposal_counts_if_there_was_room() -> None:
    """Who wants no draft stays where it is in its schedule, though others in the batch go on."""
    true = [reference(i).tolist() for i in range(2)]
    drafter = replay("alternate", num_requests=2)
    history, nothing = [0] * 20, [[], []]
    assert ask(drafter, [history] * 2, [0, 0], num_drafts=3) == nothing
    first = ask(drafter, [history] * 2, [3, 0])
    second = ask(drafter, [history] * 2, [3, 3])
    assert first == [true[0][20:23], []]
    assert second[0] != true[0][20:23]
    assert second[1] == true[1][20:23]


def test_each_request_has_its_own_room() -> None:
    """A request gets as many drafts as it wants, if its reference has as many."""
    drafter = replay("all-accept", num_requests=4)
    lengths, room = [20, 30, LENGTH - 2, LENGTH], [2, 0, 5, 4]
    drafts = ask(drafter, [[0] * length for length in lengths], room)
    true = [reference(i).tolist() for i in range(4)]
    assert drafts == [true[0][20:22], [], true[2][-2:], []]


@pytest.mark.parametrize("vocab_size", [2, 3, 50])
def test_a_wrong_token_is_another_of_the_vocabulary(vocab_size: int) -> None:
    """Replaced tokens are spread over the vocabulary, and the true one is never among them."""
    true = np.full(3000, vocab_size - 1, np.int32)
    acceptance = Acceptance(((0.0,),))
    drafter = prepared({"r": true}, acceptance, vocab_size=vocab_size, max_model_len=3000)
    drafter.start(0, "r", 1)
    counts = np.bincount(propose(drafter, 0, 10, 2990), minlength=vocab_size)
    assert counts[vocab_size - 1] == 0
    assert len(counts) == vocab_size
    assert all(within(int(count), 2990, 1 / (vocab_size - 1)) for count in counts[:-1])


def test_a_run_repeats() -> None:
    """The same seed gives the same drafts whatever slots, other requests and starts there were."""
    plain = replay(0.5)
    busy = replay(0.5, num_requests=3)
    propose(busy, 0, 10, 5)
    busy.start(0, "r2", 10)
    busy.start(2, "r0", 10)
    for length in range(10, 60):
        propose(busy, 0, length, 5)
        assert propose(plain, 0, length, 5) == propose(busy, 2, length, 5)


@given(st.randoms(use_true_random=False))
def test_a_batch_is_its_requests_alone(random: Random) -> None:
    """A storm repeats token for token however its requests are batched, ordered and placed."""
    together, alone = (replay([0.9, 0.5], num_requests=4) for _ in "ab")
    for slot in range(4):
        together.start(7 - slot, f"r{slot}", 10)
    for _ in range(5):
        slots = random.sample(range(4), random.randint(1, 4))
        lengths = [random.randint(1, LENGTH) for _ in slots]
        room = [random.randint(0, NUM_DRAFTS) for _ in slots]
        drafts = ask(
            together,
            [[0] * length for length in lengths],
            room,
            slots=[7 - slot for slot in slots],
            num_drafts=NUM_DRAFTS,
        )
        each = zip(slots, lengths, room, strict=True)
        assert drafts == [propose(alone, *request) for request in each]


def test_drafts_follow_their_definition() -> None:
    """The drafts equal the definition in Python's integers, so stored results can be repeated."""
    low = 0xFFFFFFFF

    def lowbias32(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & low
        x ^= x >> 15
        x = x * 0x846CA68B & low
        return x ^ x >> 16

    key = hashlib.blake2b(b"3\0r0", digest_size=8).digest()
    halves = [int.from_bytes(key[i : i + 4], "little") for i in (0, 4)]

    def draft(true: int, position: int, number: int) -> int:
        whether, which = (
            lowbias32(half ^ lowbias32(position + number * 0x9E3779B9 & low)) for half in halves
        )
        return true if whether / 2**32 < 0.7 else (true + 1 + which % (VOCAB - 1)) % VOCAB

    true, drafter = reference().tolist(), replay(0.7, seed=3)
    for number in range(4):
        expected = [draft(true[position], position, number) for position in range(20, 84)]
        assert propose(drafter, 0, 20, 64) == expected


def test_another_process_draws_the_same() -> None:
    """Nothing of Python's own hash, which differs between processes, goes into a draft."""
    code = (
        "from tests.deepinfer.drafters.test_replay import propose, replay\n"
        "print(propose(replay(0.5), 0, 10, 64))"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(propose(replay(0.5), 0, 10, 64))


@pytest.mark.parametrize("changed", ["seed", "request", "position", "proposal"])
def test_every_part_of_the_key_counts(changed: str) -> None:
    """Another seed, request, position or proposal number replaces others of the tokens."""
    true = np.zeros(300, np.int32)

    def right(seed: int = 0, request: str = "a", start: int = 10, number: int = 0) -> list[bool]:
        drafter = prepared({"a": true, "b": true}, parse_acceptance(0.5), seed=seed)
        drafter.start(0, request, 1)
        for _ in range(number):
            propose(drafter, 0, start, 1)
        return [token_id == 0 for token_id in propose(drafter, 0, start, 64)]

    other = {
        "seed": {"seed": 1},
        "request": {"request": "b"},
        "position": {"start": 74},
        "proposal": {"number": 1},
    }
    assert right() == right()
    assert right(**other[changed]) != right()  # type: ignore[arg-type]


def test_a_run_that_left_its_reference_gets_the_references_tokens() -> None:
    """Whatever the history says, the tokens that the reference has next are proposed."""
    true = reference().tolist()
    for history in (true[:50], [0] * 50):
        assert ask(replay("all-accept"), [history], [3]) == [true[50:53]]


@pytest.mark.parametrize(("length", "num"), [(LENGTH - 2, 2), (LENGTH, 0), (LENGTH + 7, 0)])
def test_nothing_is_proposed_beyond_the_reference(length: int, num: int) -> None:
    """At the reference's end proposals get shorter, and behind it empty."""
    drafter = prepared({"r0": reference()}, parse_acceptance(0.5), max_model_len=LENGTH + 20)
    drafter.start(0, "r0", 10)
    assert len(propose(drafter, 0, length, NUM_DRAFTS)) == num


def test_a_slot_forgets_its_last_owner() -> None:
    """Of a longer reference nothing is left in the slot, and proposals count from 0 again."""
    long, short = reference(0), reference(1, 30)
    drafter = prepared({"long": long, "short": short}, parse_acceptance("alternate"))
    drafter.start(3, "long", 10)
    assert propose(drafter, 3, 28, 5) == long[28:33].tolist()
    drafter.start(3, "short", 10)
    assert propose(drafter, 3, 28, 5) == short[28:].tolist()
    assert propose(drafter, 3, 30, 5) == []
    drafter.start(3, "short", 10)
    assert propose(drafter, 3, 28, 5) == short[28:].tolist()


@pytest.mark.parametrize("max_model_len", [20, 32, 33])
def test_a_reference_may_be_longer_than_a_history_may_get(max_model_len: int) -> None:
    """Only as much of it is replayed, and its beginning is."""
    drafter = prepared({"r": reference()}, Acceptance(((1.0,),)), max_model_len=max_model_len)
    drafter.start(7, "r", 10)
    for length in range(10, max_model_len + 1):
        expected = reference()[length : min(length + 5, max_model_len)].tolist()
        assert propose(drafter, 7, length, 5) == expected


def test_references_are_neither_written_nor_kept() -> None:
    """What is proposed is a copy, of what the reference was when the request started."""
    true = reference()
    true.setflags(write=False)
    references = {"r": true.copy(), "fixed": true}
    drafter = prepared(references, parse_acceptance("alternate"))
    for slot, request_id in enumerate(references):
        drafter.start(slot, request_id, 1)
    references["r"][:] = 0
    first = ask(drafter, [[0] * 10] * 2, [5, 5])
    ask(drafter, [[0] * 10] * 2, [5, 5])
    assert first == [true[10:15].tolist()] * 2
    assert not references["r"].any()
    assert np.array_equal(true, reference())


def test_a_request_without_reference_is_refused() -> None:
    """A storm that would silently propose nothing does not start; the slot keeps its owner."""
    drafter = replay("all-accept")
    with pytest.raises(UnknownRequestError, match="no reference for request 'r9'"):
        drafter.start(0, "r9", 10)
    assert propose(drafter, 0, 10, 5) == reference()[10:15].tolist()


def test_a_vocabulary_of_one_leaves_no_wrong_token() -> None:
    """There must be another token to replace one by."""
    with pytest.raises(UserError, match="vocab_size: 1; at least 2"):
        ReplayDrafter({}, parse_acceptance(0.5), 0, 1)


class _NoValues(SteppedCpuDevice):
    """A device whose tensors have shapes and no values: whoever asks for one gets an error."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("meta")

    def upload(self, array: np.ndarray) -> torch.Tensor:
        return super().upload(array).to("meta")


def test_no_value_is_asked_of_the_device() -> None:
    """All is computed from shapes, so on CUDA the host never waits."""
    device = _NoValues()
    drafter = prepared({"r": reference()}, parse_acceptance("bursts"), device=device)
    drafter.start(3, "r", 1)
    with torch.device("meta"):
        tokens, of_each = torch.empty(8, 200, dtype=torch.int32), torch.empty(6, dtype=torch.int64)
        asked = Asked(of_each, tokens, of_each, of_each, of_each[:0], 5, 176)
    assert drafter.propose(asked).token_ids.shape == (6, 5)
    device.close()


@pytest.mark.cuda
def test_the_host_does_not_wait_on_cuda() -> None:
    """On a GPU neither a start nor a proposal asks anything of it; the drafts are the CPU's."""
    from deepinfer.device.cuda import CudaDevice

    device, references = CudaDevice(), {f"r{i}": reference(i) for i in range(4)}
    acceptance = parse_acceptance({"over_time": [0.5, [0.9, 0.1]]})
    here, there = (prepared(references, acceptance, device=on) for on in (DEVICE, device))
    parts = torch.arange(4), torch.zeros(8, LENGTH, dtype=torch.int32), torch.arange(4) * 132 + 1
    room = torch.tensor([5, 0, 5, 3])
    asked = Asked(*parts, room, room[:0], 5, LENGTH)
    on_gpu = Asked(*(part.cuda() for part in (*parts, room, room[:0])), 5, LENGTH)
    for _ in range(2):
        for slot, request_id in enumerate(references):
            here.start(slot, request_id, 1)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for slot, request_id in enumerate(references):
                there.start(slot, request_id, 1)
            gpu_drafts = there.propose(on_gpu)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for cpu, gpu in zip(here.propose(asked), gpu_drafts, strict=True):
            assert gpu.tolist() == cpu.tolist()
    device.close()
