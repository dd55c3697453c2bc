"""Files are read as their writer meant them, or refused with file, line and key."""

from pathlib import Path

import pytest

from bench.yaml_source import (
    MAX_BYTES,
    Position,
    SourceError,
    is_number_in_disguise,
    load,
    parse,
    show_path,
)
from deepinfer.errors import UserError


@pytest.fixture
def write(tmp_path):
    def write(content: str | bytes) -> Path:
        path = tmp_path / "file.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_plain_values_have_plain_types(write):
    """Numbers, booleans, text, lists and mappings arrive as Python's own, dates as text."""
    text = (
        "a: 1\nb: -2.5\nc: true\nd: x y\ne: [1, 1.0e-3]\nf: {g: 'off'}\nh: 2024-01-01\ni: 1_000\n"
    )
    data = load(write(text)).data
    assert data == {
        "a": 1,
        "b": -2.5,
        "c": True,
        "d": "x y",
        "e": [1, 0.001],
        "f": {"g": "off"},
        "h": "2024-01-01",
        "i": 1000,
    }
    assert type(data["a"]) is int
    assert type(data["e"][1]) is float


def test_positions_lead_to_every_value(write):
    """A key path gives the line and column of its key, or of the item in a list."""
    source = load(write("a: 1\nlist:\n  - x: 5\n  -  7\n"))
    assert source.positions[("a",)] == Position(1, 1)
    assert source.positions[("list", 0, "x")] == Position(3, 5)
    assert source.positions[("list", 1)] == Position(4, 6)
    assert source.problem(("list", 0, "nowhere"), "bad").text.endswith(":3: list[0].nowhere: bad")


def test_on_and_off_are_text_where_they_are_names(write):
    """At the keys named, in whatever case; any other word or key is refused as ever."""
    path = write("a: {switch: off}\nswitch: On\nb: off\nc: {switch: yes}\n")
    source = parse(path, ("switch",))
    assert (source.data["a"]["switch"], source.data["switch"]) == ("off", "on")
    assert source.bad_paths == {("b",), ("c", "switch")}


@pytest.mark.parametrize(
    ("value", "part", "hint"),
    [
        ("off", "reads as a boolean (got off)", 'write false, or "off"'),
        ("Yes", "reads as a boolean (got Yes)", 'write true, or "Yes"'),
        ("True", "reads as a boolean (got True)", "write true"),
        ("017", "octal (got 017); expected a decimal number", "write 17"),
        ("08", "octal (got 08)", "write 8"),
        ("-007", "octal (got -007)", "write -7"),
        ("0x1f", "unusual form (got 0x1f)", "decimal"),
        ("1:30", "unusual form (got 1:30)", "decimal"),
        (".inf", "unusual form (got .inf)", "decimal"),
        ("", "no value", None),
        ("~", "no value", None),
        ("!!int '5'", "a YAML tag (got tag:yaml.org,2002:int)", None),
        ("!secret x", "a YAML tag (got !secret)", None),
    ],
)
def test_values_that_yaml_would_misread_are_errors(write, value, part, hint):
    """What YAML 1.1 turns into something else is refused with line, key and remedy."""
    path = write(f"first: 1\nouter:\n  key: {value}\n")
    with pytest.raises(SourceError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:3: outer.key: ")
    assert part in str(caught.value)
    assert hint is None or hint in caught.value.hint


@pytest.mark.parametrize("value", ["'off'", '"017"', "'1e-3'"])
def test_quotes_make_text(write, value):
    """A quoted value is text, whatever it looks like."""
    assert load(write(f"key: {value}")).data["key"] == value[1:-1]


def test_exponents_without_a_sign_stay_text_and_are_recognised(write):
    """`1e-3` is text to YAML 1.1; the schema learns that a number may have been meant."""
    data = load(write("a: 1e-3\nb: 1.5e3\nc: 1.0e-3\nd: e3"))
    assert [is_number_in_disguise(value) for value in data.data.values()] == [
        True,
        True,
        False,
        False,
    ]


def test_a_key_written_twice_is_an_error(write):
    """The second line and the first are named; the first value is kept, not overwritten."""
    source = parse(write("a: {b: 1,\n  c: 2,\n  b: 3}"))
    assert source.data == {"a": {"b": 1, "c": 2}}
    assert [problem.line for problem in source.problems] == [3]
    assert "a.b: key written twice (first in line 1)" in source.problems[0].text


def test_all_problems_are_collected_in_line_order(write):
    """One error carries every problem; its own text is the first with the number of others."""
    with pytest.raises(SourceError) as caught:
        load(write("a: off\nb: 017\nc: 1\nc: 2\n"))
    assert [problem.line for problem in caught.value.problems] == [1, 2, 4]
    assert "(2 more: see `deepinfer-bench validate`)" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "empty file"),
        (b"  \n\n", "empty file"),
        (b"# only a comment\n", "top level is not a mapping (got nothing)"),
        (b"- 1\n- 2\n", ":1: top level is not a mapping (got a list)"),
        (b"\njust text\n", ":2: top level is not a mapping (got a single value)"),
        (b"a: 1\nb: caf\xe9\n", ":2: not UTF-8 (got byte 0xe9)"),
        (b"a: 1\n\tb: 2\n", ":2: "),
        (b"a: [1, 2\nb: 3\n", ":2: "),
        (b"a: 1\n---\nb: 2\n", ":2: more than one document"),
        (b"a: 1\x00\n", "expected YAML"),
        (b"? [x]\n: 1\n", ":1: a key that is not a name"),
        (b"base: &b {x: 1}\nc:\n  <<: *b\n", ":3: c.<<: merge keys are not supported"),
        (b"a: *nowhere\n", ":1: "),
        (b"#" * (MAX_BYTES + 1), "too large"),
    ],
)
def test_files_that_cannot_be_used(write, content, part):
    """Anything but one UTF-8 mapping is refused in one line that names the file."""
    path = write(content)
    with pytest.raises(UserError) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tab_hint(write):
    """Indenting with a tab is answered with what to use instead."""
    with pytest.raises(SourceError) as caught:
        load(write("a:\n\tb: 2\n"))
    assert caught.value.hint == "indent with spaces"


def test_missing_and_unreadable_files(tmp_path):
    """A path without a readable file says why."""
    with pytest.raises(UserError, match=r"none.yaml: cannot be read \(No such file"):
        load(tmp_path / "none.yaml")
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\)"):
        load(tmp_path)


def test_byte_order_mark_is_ignored(write):
    """A UTF-8 file from Windows reads like any other, line ends included."""
    assert load(write(b"\xef\xbb\xbfa: 1\r\nb: x\r\n")).data == {"a": 1, "b": "x"}


def test_aliases_work_within_limits(write):
    """An anchor may be used again; its values know their own lines."""
    source = load(write("a: &one\n  x: 1\nb: *one\n"))
    assert source.data == {"a": {"x": 1}, "b": {"x": 1}}


@pytest.mark.parametrize("kind", ["bomb", "self", "deep"])
def test_alias_bombs_and_deep_nesting_end_early(write, kind):
    """What would grow without end is refused, and quickly."""
    texts = {
        "bomb": "a0: &a0 [1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)),
        "self": "a: &a [*a]\n",
        "deep": "a: " + "[" * 3000 + "]" * 3000,
    }
    with pytest.raises(UserError, match="expected"):
        load(write(texts[kind]))


def test_paths_read_as_in_code():
    """List positions are in brackets, keys after dots."""
    assert show_path(("requests", 0, "fork", "children")) == "requests[0].fork.children"
