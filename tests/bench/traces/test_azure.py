"""The Azure reader takes the public files as they are and refuses bad rows by line and column."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from bench.traces import read_trace
from bench.traces.azure import parse_ticks, read
from bench.traces.rows import Place
from deepinfer.errors import UserError

TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROWS = [
    "2023-11-16 18:17:03.9799600,4808,10",
    "2023-11-16 18:17:04.0319600,3180,8",
    "2023-11-16 18:17:04.0319601,110,27",
]


@pytest.fixture
def write(tmp_path):
    def write(content) -> Path:
        path = tmp_path / "trace.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize("end", ["\r\n", "\n"])
@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_line_ends_do_not_matter(write, end, final, start):
    """CRLF or LF, a final newline or none, a byte order mark or none: the same requests."""
    text = start + end.join([HEADER, *ROWS]) + (end if final else "")
    requests = list(read(write(text)))
    assert [(r.num_prompt, r.num_output) for r in requests] == [(4808, 10), (3180, 8), (110, 27)]
    assert [r.arrival_s for r in requests] == [0.0, 0.052, 0.0520001]
    assert requests[0].hash_ids is None


@pytest.mark.parametrize(
    ("text", "ticks"),
    [
        ("1970-01-01 00:00:00.0000001", 1),
        ("1970-01-02 00:00:01", 86_401 * 10**7),
        ("1970-01-01T00:00:00.5", 5_000_000),
        ("1970-01-01 00:00:00.000123+00:00", 1230),
        ("2023-11-16 18:17:03.9799601", 17001586239799601),
    ],
)
def test_seven_digits_are_exact(text, ticks):
    """Times are whole numbers of 100 ns; nothing is cut or rounded."""
    assert parse_ticks(Place(Path("t.csv"), 2), text) == ticks


@pytest.mark.parametrize(
    ("row", "part"),
    [
        (
            "2023-11-16 18:17:05.12345678,1,1",
            "TIMESTAMP: not a timestamp (got '2023-11-16 18:17:05.1",
        ),
        ("16.11.2023 18:17:05,1,1", "TIMESTAMP: not a timestamp (got '16.11.2023"),
        ("2023-13-16 18:17:05,1,1", "TIMESTAMP: not a timestamp: month must be in 1..12"),
        ("2023-11-16 18:17:03.9799599,1,1", "TIMESTAMP: out of order"),
        ("2023-11-16 18:17:05,0,1", "ContextTokens: not a token count (got '0'); expected a whole"),
        ("2023-11-16 18:17:05,-3,1", "ContextTokens: not a token count (got '-3')"),
        ("2023-11-16 18:17:05,1,1.5", "GeneratedTokens: not a token count (got '1.5')"),
        ("2023-11-16 18:17:05,1,", "GeneratedTokens: not a token count (got '')"),
        ("2023-11-16 18:17:05,1", "row: 2 fields (got '2023-11-16 18:17:05,1'); expected 3 fields"),
        ("2023-11-16 18:17:05,1,1,1", "row: 4 fields"),
    ],
)
def test_bad_rows_name_line_column_and_value(write, row, part):
    """The error leads to the place in the file and says what is valid there."""
    path = write("\r\n".join([HEADER, ROWS[0], row]))
    with pytest.raises(UserError) as caught:
        list(read(path))
    assert str(caught.value).startswith(f"{path}:3: {part}")
    assert "; expected " in str(caught.value)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "empty file; expected columns TIMESTAMP"),
        (b"\r\n\r\n", "empty file"),
        (HEADER.encode(), "no rows below the header"),
        (b"TIMESTAMP,ContextTokens\n", ":1: GeneratedTokens: no such column"),
        (ROWS[0].encode(), ":1: TIMESTAMP: no such column"),
        (
            HEADER.encode() + b"\n" + ROWS[0].encode() + b"\n\xff,1,1",
            ":3: not UTF-8 (got byte 0xff)",
        ),
    ],
)
def test_bad_files(write, content, part):
    """A file without the columns, without rows or with other bytes than text is refused."""
    path = write(content)
    with pytest.raises(UserError) as caught:
        list(read(path))
    assert str(caught.value).startswith(str(path))
    assert part in str(caught.value)


def test_missing_file(tmp_path):
    """A path that leads nowhere is one line, not a traceback."""
    with pytest.raises(UserError, match=r"none.csv: cannot be read \(No such file"):
        list(read(tmp_path / "none.csv"))


def test_limit_reads_no_further(write):
    """A bad row behind the limit is never seen."""
    path = write("\n".join([HEADER, *ROWS, "rubbish"]))
    assert len(read_trace("azure", path, 3)) == 3
    with pytest.raises(UserError, match=":5: row: 1 fields"):
        read_trace("azure", path, 4)


def test_columns_may_stand_in_any_order(write):
    """Columns are found by name; others are ignored."""
    text = "Model,GeneratedTokens,TIMESTAMP,ContextTokens\nm,5,2024-05-10 00:00:00,7\n"
    (request,) = read(write(text))
    assert (request.num_prompt, request.num_output) == (7, 5)


@pytest.mark.traces
@pytest.mark.parametrize(
    ("kind", "num_rows", "prompt", "output"),
    [
        ("code", 8819, (1469, 5194, 7437), (13, 55, 1899)),
        ("conv", 19366, (1020, 2735, 14050), (129, 424, 1000)),
    ],
)
def test_the_public_files(kind, num_rows, prompt, output):
    """Counts and percentiles (p50, p90, max) are those published with the traces."""
    requests = list(read(TRACES / f"AzureLLMInferenceTrace_{kind}.csv"))
    assert len(requests) == num_rows
    for lengths, expected in (
        ([r.num_prompt for r in requests], prompt),
        ([r.num_output for r in requests], output),
    ):
        found = np.percentile(lengths, [50, 90, 100], method="inverted_cdf")
        assert tuple(found.tolist()) == expected
    assert min(r.num_output for r in requests) > 1
    arrivals = [r.arrival_s for r in requests]
    assert arrivals == sorted(arrivals)
    assert 3400 < arrivals[-1] < 3700  # an hour


@pytest.mark.traces
def test_the_last_row_without_a_newline_is_complete():
    """The code trace ends in the middle of a line as it were; its last row counts all the same."""
    path = TRACES / "AzureLLMInferenceTrace_code.csv"
    assert not path.read_bytes().endswith(b"\n")
    last = list(read(path))[-1]
    assert (last.num_prompt, last.num_output) == (549, 173)
    assert next(islice(read(path), 1, None)).arrival_s == 0.052
