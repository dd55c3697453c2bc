"""Small worlds worth exploring: a pool of a few blocks, a few requests, and what happens to them.

Each scenario is a program of `actions` for a few users and a pool in which it is tight; what it is
about is one line. Knows no policy: the explorer runs each under all of them. Invariant: the names
are unique, and `races` says whether something other than the engine reads or writes blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer.testing.explorer.actions import Action, Program

STEP = (Action("submit"), Action("collect"))
TWO_AHEAD = (Action("submit"), *STEP)  # and one of them is collected
ADD_A = Action("add", "a", tokens=3, max_tokens=2)
STOP_OF_A = 8  # the third token that it says
VERIFYING: dict[str, int | str] = {"overlap": "on", "drafts": 3}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A program and its pool.

    Attributes:
        about: what happens, in one line.
        num_blocks: of the pool, block 0 included.
        settings: further fields of `EngineConfig`.
    """

    name: str
    about: str
    num_blocks: int
    program: Program
    block_size: int = 2
    settings: dict[str, int | str] = field(default_factory=dict)

    @property
    def races(self) -> bool:
        """Whether transfers are part of it."""
        return any(action.do in ("load", "save") for action in self.program.actions)


_ALL = (
    Scenario(
        "abort",
        "a request is aborted at any moment; the next one takes its blocks",
        num_blocks=4,
        program=Program(
            (ADD_A, Action("add", "b", tokens=1, max_tokens=3)),
            (2 * STEP, (Action("abort", "a"), Action("add", "c", tokens=3, max_tokens=2))),
        ),
    ),
    Scenario(
        "fork",
        "two children copy a tail; their parent is aborted at any moment, also with it queued",
        num_blocks=7,
        program=Program(
            (Action("add", "a", tokens=3, max_tokens=4), *STEP),
            (
                2 * STEP,
                (
                    Action("fork", "b", of="a", max_tokens=2),
                    Action("fork", "c", of="a", shared=3, tokens=2, max_tokens=2),
                    Action("abort", "a"),
                    Action("add", "d", tokens=4, max_tokens=1),
                ),
            ),
        ),
    ),
    Scenario(
        "fork-state",
        "children copy a state slot; their parent steps on or is aborted, and slots are short",
        num_blocks=9,
        program=Program(
            (Action("add", "a", tokens=3, max_tokens=4), *STEP),
            (
                3 * STEP,
                (
                    Action("fork", "b", of="a", max_tokens=2),
                    Action("fork", "c", of="a", tokens=1, max_tokens=2),
                    Action("abort", "a"),
                    Action("add", "d", tokens=2, max_tokens=1),
                ),
            ),
        ),
        settings={"num_state_slots": 4},
    ),
    Scenario(
        "preempt",
        "requests outgrow the pool; the newest gives its blocks back and starts again",
        num_blocks=5,
        program=Program(
            (
                Action("add", "a", tokens=3, max_tokens=4),
                Action("add", "b", tokens=3, max_tokens=4),
                *STEP,
            ),
            (2 * STEP, (Action("add", "c", tokens=1, max_tokens=2), Action("abort", "a"))),
        ),
    ),
    Scenario(
        "load-after-abort",
        "a load takes the blocks of a request aborted with a step in flight",
        num_blocks=3,
        program=Program(
            (ADD_A,),
            (
                2 * STEP,
                (Action("abort", "a"),),
                (Action("load", "x", tokens=4), Action("use", "x")),
            ),
        ),
    ),
    Scenario(
        "save-at-finish",
        "a request ends while its rows are being saved; the next one takes the blocks",
        num_blocks=3,
        program=Program(
            (ADD_A, *STEP),
            (
                2 * STEP,
                (Action("save", "s", of="a"), Action("add", "b", tokens=3, max_tokens=1)),
            ),
        ),
    ),
    Scenario(
        "save-at-preempt",
        "the newest request is preempted while its rows are being saved",
        num_blocks=5,
        program=Program(
            (
                Action("add", "a", tokens=3, max_tokens=4),
                Action("add", "b", tokens=3, max_tokens=2),
                *STEP,
            ),
            (3 * STEP, (Action("save", "s", of="b"), Action("save", "t", of="a"))),
        ),
    ),
    Scenario(
        "fork-and-load",
        "a load takes the source of a copy that is still queued",
        num_blocks=4,
        program=Program(
            (
                Action("add", "a", tokens=3, max_tokens=4),
                *STEP,
                Action("fork", "b", of="a", max_tokens=2),
            ),
            (
                2 * STEP,
                (Action("abort", "a"),),
                (Action("load", "x", tokens=2), Action("use", "x")),
            ),
        ),
    ),
    Scenario(
        "load-dropped",
        "a load is given up before it has run; a request and a fork take its blocks",
        num_blocks=6,
        program=Program(
            (),
            (
                (Action("load", "x", tokens=6), Action("drop", "x")),
                (ADD_A, *STEP, Action("fork", "b", of="a", max_tokens=2), *STEP),
            ),
        ),
    ),
    Scenario(
        "load-to-load",
        "a second load takes the blocks of a first whose reader is still queued",
        num_blocks=3,
        program=Program(
            (),
            (
                (Action("load", "x", tokens=3), Action("use", "x")),
                (Action("load", "y", tokens=3), Action("use", "y")),
                (ADD_A, *STEP),
            ),
        ),
    ),
    Scenario(
        "finish-ahead",
        "a request says its stop token with the next step in flight; another takes its blocks",
        num_blocks=6,
        program=Program(
            (Action("add", "a", tokens=3, max_tokens=6, stop=STOP_OF_A),),
            (
                (*TWO_AHEAD, *STEP, *STEP, *STEP),
                (Action("add", "b", tokens=4, max_tokens=2),),
            ),
        ),
        settings={"overlap": "on"},
    ),
    Scenario(
        "abort-ahead",
        "a request is aborted with three steps in flight; a load takes its blocks",
        num_blocks=4,
        program=Program(
            (Action("add", "a", tokens=2, max_tokens=5), Action("submit"), Action("submit")),
            (
                (Action("submit"), Action("collect")),
                (Action("abort", "a"),),
                (Action("load", "x", tokens=4), Action("use", "x")),
            ),
        ),
        settings={"overlap": "2"},
    ),
    Scenario(
        "preempt-ahead",
        "a request is preempted and comes back to its row while results of before are on their way",
        num_blocks=5,
        program=Program(
            (
                Action("add", "a", tokens=3, max_tokens=4),
                Action("add", "b", tokens=3, max_tokens=4),
                *(Action("submit"), *TWO_AHEAD),
            ),
            (3 * STEP, (Action("abort", "a"),)),
        ),
        settings={"overlap": "2", "max_num_seqs": 2},
    ),
    Scenario(
        "reject-ahead",
        "drafts are rejected with the next step in flight; another request takes what they held",
        num_blocks=9,
        program=Program(
            (Action("add", "a", tokens=3, max_tokens=12),),
            (
                (*TWO_AHEAD, *STEP, *STEP, *STEP),
                (Action("add", "b", tokens=3, max_tokens=2),),
            ),
        ),
        settings=VERIFYING,
    ),
    Scenario(
        "fork-ahead",
        "a parent that verifies drafts is forked and aborted; a load takes the source of the copy",
        num_blocks=5,
        program=Program(
            (Action("add", "a", tokens=3, max_tokens=6), *TWO_AHEAD),
            (
                STEP,
                (Action("fork", "b", of="a", max_tokens=2), Action("abort", "a")),
                (Action("load", "x", tokens=4), Action("use", "x")),
            ),
        ),
        settings=VERIFYING,
    ),
    Scenario(
        "mixed",
        "forks, aborts, preemption, loads and saves in one pool",
        num_blocks=8,
        program=Program(
            (
                Action("add", "a", tokens=3, max_tokens=5),
                Action("add", "b", tokens=4, max_tokens=4),
                *STEP,
            ),
            (
                3 * STEP,
                (Action("fork", "c", of="a", max_tokens=3), Action("abort", "b")),
                (Action("save", "s", of="b"), Action("save", "t", of="c")),
                (Action("load", "x", tokens=4), Action("use", "x")),
            ),
        ),
    ),
)

SCENARIOS = {scenario.name: scenario for scenario in _ALL}
