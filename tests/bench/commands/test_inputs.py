"""The options that name a workload, a profile and what to change in them."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from bench.commands import profile
from bench.commands.inputs import INPUT_OPTIONS, resolve_input, with_options
from deepinfer.errors import UserError


@click.command()
@click.argument("workload")
@with_options(INPUT_OPTIONS)
def show(workload, **options):
    """Print what the options resolve to."""
    resolved = resolve_input(workload, **options)
    engine = resolved.engine
    click.echo(f"{resolved.device} {engine.block_size} {engine.release} {engine.seed}")
    click.echo(f"{resolved.workload.length_scale:g}")


def run(*args):
    """The printed lines."""
    done = CliRunner().invoke(show, ["fork-batch", "--profile", "cpu-tiny", *args])
    if done.exception:
        raise done.exception
    return done.stdout.split()


def test_what_is_not_given_is_the_files():
    """The profile's block size and device, the default's policy."""
    assert run() == ["cpu", "16", "deferred", "0", "1"]


def test_flags_win():
    """Each option reaches what it names."""
    given = ["--device", "cpu-stepped", "--seed", "7", "-s", "block_size=32", "-s", "release=step"]
    assert run(*given, "--scale-lengths", "0.5") == ["cpu-stepped", "32", "step", "7", "0.5"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("device=cpu", "expected --device"),
        ("block_size=16,32", "several values"),
        ("blok_size=16", "block_size"),
    ],
)
def test_a_bad_setting_is_refused(setting, message):
    """One line that names it and what is valid."""
    with pytest.raises(UserError, match=message):
        run("-s", setting)


@pytest.mark.parametrize("name", ["step", "memory", "trace"])
def test_every_profile_of_a_workload_has_them(name):
    """The same options as `run`, by name."""
    taken = {parameter.name for parameter in profile.command.commands[name].params}
    here = {parameter.name for parameter in show.params}
    assert here <= taken
