"""The LaTeX fragment: its structure, its escapes, and a real compiler where there is one."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from bench.report.latex import escape, render_latex
from bench.report.table import View, build_table
from bench.report.view import apply_view

NASTY = r"""\end{table} {a} $x$ & # % _ ^ ~ <b> | "q" `t` -- [x] * é"""


def test_the_fragment_is_a_booktabs_table(comparison):
    """Rules in their order, a line per row in each panel, as many cells as columns."""
    lines = render_latex(build_table(comparison)).splitlines()
    assert lines.count(r"\toprule") == lines.count(r"\midrule") == lines.count(r"\bottomrule")
    for name in ("table", "tabular", "minipage"):
        begins = [line for line in lines if line.startswith(rf"\begin{{{name}}}")]
        assert len(begins) == lines.count(rf"\end{{{name}}}") >= 1
    start = lines.index(r"\midrule")
    rows = lines[start + 1 : start + 4]
    assert [row.split(" & ")[0] for row in rows] == ["deferred", "early UNSAFE", "polled"]
    assert len({row.count(" & ") for row in rows}) == 1
    assert all(row.endswith(r" \\") for row in rows)


def test_every_special_character_is_escaped():
    """What TeX reads as a command, a comment, a cell or a ligature is the character itself."""
    assert escape(r"\a{}") == r"\textbackslash{}a\{\}"
    assert escape("50 % & $1_#2") == r"50 \% \& \$1\_\#2"
    assert escape("^~<>|") == (
        r"\textasciicircum{}\textasciitilde{}\textless{}\textgreater{}\textbar{}"
    )
    assert escape("a--b-c") == "a-{}-{}b-c"
    assert escape("[x] *\n") == "{[}x] {*} "


def test_groups_are_tabulars_under_their_heading(comparison):
    """The axis is in the heading and no column."""
    text = render_latex(apply_view(build_table(comparison), View(group_by="release")))
    assert r"\textbf{release: polled}" in text
    assert "\nrelease & " not in text


NEEDS_LATEX = pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")


def compile_latex(folder, fragment):
    """What pdflatex says of an article that reads the fragment; fails if it does not compile."""
    (folder / "table.tex").write_text(fragment, encoding="utf-8")
    (folder / "main.tex").write_text(
        r"\documentclass[a4paper]{article}\usepackage[T1]{fontenc}\usepackage{booktabs}"
        r"\begin{document}\input{table}\end{document}",
        encoding="utf-8",
    )
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "main.tex"],
        cwd=folder,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


@NEEDS_LATEX
@pytest.mark.parametrize("group_by", ["", "release"])
def test_a_real_latex_compiles_names_made_of_special_characters(synthetic, tmp_path, group_by):
    """In the caption, in cells, in headings and in notes."""
    run = synthetic(workload=NASTY, notes=(NASTY,), rounds=2)
    for release in (NASTY, "[early", "*late"):
        cell = run.cell({"release": release, "free_order": "reverse"}, baseline=release == NASTY)
        for number in (0, 1):
            run.round(cell, number)
    table = apply_view(build_table(run.end()), View(group_by=group_by))
    assert "Output written" in compile_latex(tmp_path, render_latex(table))


@NEEDS_LATEX
def test_an_ordinary_comparison_fits_the_page(comparison, tmp_path):
    """No line is wider than the text of an A4 article."""
    assert "Overfull" not in compile_latex(tmp_path, render_latex(build_table(comparison)))
