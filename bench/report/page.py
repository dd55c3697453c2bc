"""The page around an HTML report: its style, its script, its frame.

Knows no run: `$name` marks what `bench.report.html` fills in. Invariant: loads nothing, and works
as a document with the script switched off.
"""

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --faint: #8a929b;
  --rule: #d8dde2; --mark: #1f5f9e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e6ea; --paper: #16191d; --faint: #8b949e;
  --rule: #353b43; --mark: #7fb4ea; } }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.5rem; }
h2 { margin: 2rem 0 .5rem; font-size: 1.15rem; }
h3 { margin: 0 0 .5rem; font-size: 1rem; }
.subtitle, figcaption, caption { color: var(--ink); font-size: .87rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; }
th, td { padding: .3rem .75rem; border-bottom: 1px solid var(--rule); white-space: nowrap; }
thead th { vertical-align: bottom; border-bottom: 2px solid var(--ink); padding: 0; }
tbody th { font-weight: 600; }
.text { text-align: left; }
.number { text-align: right; }
thead button { all: unset; box-sizing: border-box; position: relative; width: 100%;
  padding: .3rem .75rem; cursor: pointer; font-weight: 600; }
thead button:focus-visible, .scroll:focus-visible, summary:focus-visible {
  outline: 2px solid var(--mark); outline-offset: -2px; }
.arrow { position: absolute; right: .1rem; bottom: .35rem; font-size: .7rem; }
.arrow::after { content: "\\2195"; color: var(--faint); }
th[aria-sort=ascending] .arrow::after { content: "\\2191"; color: var(--ink); }
th[aria-sort=descending] .arrow::after { content: "\\2193"; color: var(--ink); }
figure { margin: 1.5rem 0; max-width: 60rem; break-inside: avoid; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg text.small { font-size: 11px; }
.axis { stroke: var(--ink); }
.grid { stroke: var(--rule); }
.separator { stroke: var(--rule); }
.reference { stroke: var(--ink); stroke-dasharray: 5 3; }
.interval { stroke: var(--mark); stroke-width: 2; }
.dot { fill: var(--mark); stroke: var(--mark); stroke-width: 2; }
.dot.hollow { fill: var(--paper); }
.bar { fill: var(--mark); }
.area { fill: var(--mark); fill-opacity: .3; stroke: var(--mark); }
.median { stroke: var(--ink); stroke-width: 1.5; }
.percentile { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 3 3; }
pre { overflow-x: auto; font-size: .8rem; }
</style>
</head>
<body>
<main>
<h1>$title</h1>
<p class="subtitle">$subtitle</p>
<h2>Table</h2>
$tables
<ul>
$notes
</ul>
<h2>Plots</h2>
$plots
<ul>
$missing
</ul>
<h2>What the columns mean</h2>
<ul>
$legend
</ul>
<details>
<summary>Command, environment and configuration</summary>
<pre>$run</pre>
</details>
</main>
<script>
"use strict";
// A heading's button sorts its table; undefined values stay last in both directions.
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const heading = button.closest("th"), row = heading.parentNode, table = row.closest("table");
    const down = heading.getAttribute("aria-sort") === "ascending";
    for (const other of row.children) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const at = heading.cellIndex, body = table.tBodies[0];
    const value = (tr) => tr.cells[at].dataset.value;
    const compare = (a, b) => {
      if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
      const [x, y] = [Number(a), Number(b)];
      const order = isNaN(x) || isNaN(y) ? a.localeCompare(b) : x - y;
      return down ? -order : order;
    };
    body.append(...[...body.rows].sort((p, q) => compare(value(p), value(q))));
  });
}
</script>
</body>
</html>
"""
