"""`schema` at the command line."""

import pytest

from bench.commands import main
from tests.bench.tiny import ROOT


@pytest.mark.parametrize("kind", ["workload", "profile"])
def test_it_prints_what_lies_beside_the_shipped_files(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """So `schema workload > workloads/workload.schema.json` regenerates it."""
    assert main(["schema", kind]) == 0
    path = ROOT / f"{kind}s" / f"{kind}.schema.json"
    assert capsys.readouterr().out == path.read_text(encoding="utf-8")
