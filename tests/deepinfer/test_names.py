"""The registries of names and the code behind them agree."""

from __future__ import annotations

import dataclasses

import pytest

from deepinfer import names
from deepinfer.block_manager import BlockManager
from deepinfer.config import EngineConfig
from deepinfer.policies import ADMISSION, PREEMPTION
from deepinfer.release import POLICIES


def test_every_release_policy_has_code_and_a_description():
    """A listed policy can be run, and a policy in the code is listed."""
    assert tuple(POLICIES) == names.RELEASE_POLICIES


def test_unsafe_policies_are_those_whose_code_says_so():
    """The mark UNSAFE and the code of a policy say the same."""
    assert {name for name, policy in POLICIES.items() if not policy.safe} == names.UNSAFE_POLICIES


def test_admission_and_preemption_names_match_their_code():
    """Admission and preemption plug-ins are exactly those listed."""
    assert tuple(ADMISSION) == names.ADMISSIONS
    assert tuple(PREEMPTION) == names.PREEMPTIONS


@pytest.mark.parametrize("free_order", names.FREE_ORDERS)
@pytest.mark.parametrize("discipline", names.DISCIPLINES)
def test_every_order_and_discipline_makes_a_pool(free_order, discipline):
    """Every listed combination works."""
    blocks = BlockManager(4, free_order=free_order, discipline=discipline)
    blocks.release(blocks.allocate(3))
    assert sorted(blocks.free_ids()) == [1, 2, 3]


def test_every_choice_has_a_title_and_one_line_per_name():
    """Listings have something to show for every choice and every name."""
    assert names.TITLES.keys() == names.DESCRIPTIONS.keys()
    for descriptions in names.DESCRIPTIONS.values():
        assert all(line and "\n" not in line for line in descriptions.values())


def test_default_config_uses_listed_names():
    """The engine's defaults are names a user could have typed."""
    config = dataclasses.asdict(EngineConfig())
    chosen = {key: config[key] for key in names.DESCRIPTIONS if key in config}
    assert all(value in names.DESCRIPTIONS[key] for key, value in chosen.items())
    assert len(chosen) == 11
