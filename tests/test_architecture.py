"""The import graph is the architecture: a module imports only from layers below its own.

Layers list modules and packages, lowest first. A package stands for all its modules, which may
import one another as long as the whole graph has no cycle; a new file of a listed package needs no
edit here, a new module outside of one does.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LAYERS = [
    {"deepinfer.errors"},
    {
        *("deepinfer.names", "deepinfer.config", "deepinfer.plan", "deepinfer.free_list"),
        *("deepinfer.observer", "deepinfer.sizing", "deepinfer.validity"),
    },
    {"deepinfer.block_manager", "deepinfer.sequence", "deepinfer.device", "deepinfer.hashing"},
    {"deepinfer.prefix_cache", "deepinfer.drafters", "deepinfer.step_inputs"},
    {"deepinfer.checks"},
    {"deepinfer.store"},
    {
        *("deepinfer.release", "deepinfer.fork", "deepinfer.policies", "deepinfer.planning"),
        *("deepinfer.cache_engine", "deepinfer.sampling", "deepinfer.waiting", "deepinfer.results"),
        *("deepinfer.live", "deepinfer.entry_bytes", "deepinfer.transfer_times"),
    },
    {"deepinfer.slots"},
    {
        *("deepinfer.outputs", "deepinfer.models", "deepinfer.stopping", "deepinfer.block_tables"),
        *("deepinfer.state_slots", "deepinfer.lookahead", "deepinfer.carry"),
        *("deepinfer.records", "deepinfer.prefix_reuse"),
    },
    {"deepinfer.store_reuse"},
    {"deepinfer.holdings", "deepinfer.pools"},
    {"deepinfer.fitting", "deepinfer.admission", "deepinfer.fork_sources"},
    {"deepinfer.scheduler"},
    {"deepinfer.worker", "deepinfer.step_sampling"},
    {"deepinfer.model_runner", "deepinfer.hybrid_runner", "deepinfer.transfers"},
    {"deepinfer.runners", "deepinfer.step_account", "deepinfer.planner"},
    {"deepinfer.engine"},
    {"deepinfer.testing"},
    {"deepinfer"},  # its __init__: the public names
    {"bench"},  # its __init__: nothing
    {"bench.disk", "bench.strict", "bench.nearest"},
    {"bench.model_schema"},
    {
        *("bench.stats", "bench.yaml_source", "bench.schema", "bench.samples", "bench.provenance"),
    },
    {"bench.rounds", "bench.step_metrics"},
    {
        *("bench.validation", "bench.catalog", "bench.metrics", "bench.collect", "bench.traces"),
        *("bench.resume", "bench.dense"),
    },
    {
        *("bench.spec", "bench.arrivals", "bench.verify", "bench.verdicts"),
        *("bench.diff", "bench.history", "bench.json_schema"),
    },
    {"bench.references", "bench.agenda"},
    {
        *("bench.runner", "bench.labs", "bench.report", "bench.estimate", "bench.cache_geometry"),
        "bench.prefix_replay",
    },
    {"bench.matrix", "bench.recording", "bench.power", "bench.probes", "bench.observer"},
    {"bench.instrument"},
    {"bench.commands"},
    {"cli"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

HOST_CORE = [
    *("deepinfer", "deepinfer.errors", "deepinfer.names", "deepinfer.config", "deepinfer.plan"),
    *("deepinfer.free_list", "deepinfer.block_manager", "deepinfer.prefix_cache"),
    *("deepinfer.release", "deepinfer.sequence"),
    *("deepinfer.fork", "deepinfer.planning", "deepinfer.policies", "deepinfer.scheduler"),
    *(
        "deepinfer.live",
        "deepinfer.waiting",
        "deepinfer.results",
        "deepinfer.block_tables",
        "deepinfer.state_slots",
        "deepinfer.lookahead",
        "deepinfer.records",
        "deepinfer.slots",
        "deepinfer.holdings",
        "deepinfer.fitting",
        "deepinfer.admission",
        "deepinfer.prefix_reuse",
        "deepinfer.pools",
    ),
    *("deepinfer.outputs", "deepinfer.sizing", "deepinfer.validity"),
    "deepinfer.drafters.acceptance",
    *("deepinfer.models.hybrid.layer_plan", "deepinfer.models.hybrid.geometry"),
    "deepinfer.models.hybrid.draft_plan",
    *("deepinfer.models.hybrid.released", "deepinfer.models.hybrid.stored"),
    *("deepinfer.store.keys", "deepinfer.store.memory", "deepinfer.store.directory"),
    *("deepinfer.store.tiers", "deepinfer.store_reuse", "deepinfer.fork_sources"),
    "deepinfer.transfer_times",
]
# What runs or measures a device may load torch; everything else of the toolkit may not.
ON_DEVICE = {
    *("bench.runner", "bench.matrix", "bench.verify", "bench.labs", "bench.power"),
    *("bench.probes", "bench.collect", "bench.observer", "bench.instrument"),
    *("bench.recording", "bench.dense", "bench.references"),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    module_name(path): path
    for path in [*ROOT.glob("deepinfer/**/*.py"), *ROOT.glob("bench/**/*.py"), ROOT / "cli.py"]
}


def entry_of(module: str) -> str | None:
    """The layer entry that stands for a module: itself, or the nearest package that is listed.

    The two top packages stand for their `__init__` only.
    """
    name = module
    while name not in RANK:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name if name == module or "." in name else None


def imported(source: str, modules: set[str]) -> set[str]:
    """Our modules that a source imports, in whatever form, also inside functions and for types."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "absolute imports only"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules else str(node.module))
    return found & modules


IMPORTS = {
    module: imported(path.read_text(encoding="utf-8"), set(FILES)) - {module}
    for module, path in FILES.items()
}


def points_down(module: str, target: str) -> bool:
    own, other = entry_of(module), entry_of(target)
    assert own is not None
    assert other is not None
    return RANK[other] < RANK[own] or (own == other and own != module.partition(".")[0])


@pytest.mark.parametrize(
    "source",
    [
        "import deepinfer.engine",
        "from deepinfer.engine import LLMEngine",
        "from deepinfer import engine",
        "def f():\n    import deepinfer.engine as e",
        "if TYPE_CHECKING:\n    from deepinfer.engine import LLMEngine",
    ],
)
def test_every_form_of_import_is_seen(source):
    """No spelling of an upward import goes unnoticed."""
    assert imported(source, {"deepinfer", "deepinfer.engine"}) == {"deepinfer.engine"}


def test_the_rule_tells_up_from_down():
    """A layer below is fine, the own package is fine, the own or a higher layer is not."""
    assert points_down("deepinfer.engine", "deepinfer.worker")
    assert points_down("bench.report.text", "bench.report.table")
    assert not points_down("deepinfer.worker", "deepinfer.engine")
    assert not points_down("deepinfer.release", "deepinfer.fork")
    assert not points_down("deepinfer.worker", "bench.stats")
    assert entry_of("deepinfer.new_module") is None


@pytest.mark.parametrize("module", sorted(FILES))
def test_every_module_has_a_layer(module):
    """A new module outside the listed packages must be placed."""
    assert entry_of(module) is not None


def test_every_layer_entry_exists():
    """The list above describes this tree, not an older one."""
    assert set(RANK) <= set(FILES)


@pytest.mark.parametrize("module", sorted(FILES))
def test_imports_point_down(module):
    """Nothing is imported from the same layer or above, except within one package."""
    assert not {target for target in IMPORTS[module] if not points_down(module, target)}


def test_no_import_cycles():
    """Within a package, too, there is an order."""
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {error.args[1]}")


def test_the_engine_never_imports_the_toolkit():
    """deepinfer can be used and shipped without bench."""
    users = {m for m, targets in IMPORTS.items() if any(t.startswith("bench") for t in targets)}
    assert not {module for module in users if module.startswith("deepinfer")}


TOOLKIT_HOST = sorted(
    module for module in FILES if module.startswith("bench") and entry_of(module) not in ON_DEVICE
)


@pytest.mark.parametrize(
    "modules", [HOST_CORE, TOOLKIT_HOST, ["cli"]], ids=["engine", "toolkit", "cli"]
)
def test_host_modules_never_load_torch_or_nvml(modules):
    """Importing them, one after the other in a fresh interpreter, loads neither."""
    code = (
        "import importlib, sys\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module(module)\n"
        "    loaded = {'torch', 'pynvml'} & sys.modules.keys()\n"
        "    if loaded: sys.exit(f'{module} loads {loaded}')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
