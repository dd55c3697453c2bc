"""Names lead to files: the user's path, the checkout, the packaged copy."""

import pytest

from bench import catalog
from bench.catalog import find_profile, find_workload, list_profiles, list_workloads
from deepinfer.errors import UserError


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """An installed layout: `bench/` with a packaged copy, and a checkout around it."""
    here = tmp_path / "bench"
    for folder in (tmp_path / "workloads", here / "_packaged" / "workloads"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(catalog, "_HERE", here)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, description="x"):
    path.write_text(f"description: {description}\n")
    return path


def test_the_checkout_comes_before_the_packaged_copy(tree):
    """Of two files of one name the checkout's is found; without it, the packaged one."""
    packaged = write(tree / "bench" / "_packaged" / "workloads" / "a.yaml")
    assert find_workload("a") == packaged
    checkout = write(tree / "workloads" / "a.yaml")
    assert find_workload("a") == checkout


def test_a_path_is_taken_as_it_is(tree):
    """A path wins over a known name, with or without the folder."""
    write(tree / "workloads" / "a.yaml")
    mine = write(tree / "a.yaml")
    assert find_workload("a.yaml").resolve() == mine
    assert find_workload(str(mine)) == mine
    assert find_workload("a") == tree / "workloads" / "a.yaml"


def test_a_file_without_a_suffix_is_found_after_names(tree):
    """A file in the current folder never hides a name."""
    write(tree / "a")
    assert find_workload("a").name == "a"
    named = write(tree / "workloads" / "a.yaml")
    assert find_workload("a") == named


def test_unknown_names_get_the_nearest():
    """The error lists what there is and puts the likely one first."""
    with pytest.raises(UserError) as caught:
        find_workload("fork-bach")
    assert str(caught.value).startswith("workload 'fork-bach': unknown name; expected 'fork-batch'")
    assert "list workloads" in caught.value.hint
    with pytest.raises(UserError, match="profile 'cpu': unknown name; expected"):
        find_profile("cpu")


def test_missing_paths_are_not_taken_for_names():
    """A path that leads nowhere is called a file that does not exist."""
    with pytest.raises(UserError, match=r"workload ./fork-batch.yaml: no such file"):
        find_workload("./fork-batch.yaml")


def test_shipped_names_are_listed_with_descriptions():
    """Every shipped file has a name and one line that describes it."""
    workloads, profiles = dict(list_workloads()), dict(list_profiles())
    assert set(workloads) >= {
        "azure-code",
        "azure-conv",
        "fork-batch",
        "fork-prompt",
        "long-chunked-prompt",
        "mixed-chat",
        "mooncake",
        "preemption-pressure",
    }
    assert set(profiles) >= {"cpu-small", "cpu-tiny", "h200"}
    for text in (*workloads.values(), *profiles.values()):
        assert 20 < len(text) < 100
        assert not text.startswith("(")


def test_broken_files_are_listed_as_broken(tree):
    """One bad file does not hide the others, nor itself."""
    write(tree / "workloads" / "good.yaml", "fine\n")
    (tree / "workloads" / "bad.yaml").write_text("a: [1\n")
    (tree / "workloads" / "plain.yaml").write_text("a: 1\n")
    listed = dict(list_workloads())
    assert listed["good"] == "fine"
    assert listed["bad"].startswith("(broken: ")
    assert listed["plain"] == "(no description)"
