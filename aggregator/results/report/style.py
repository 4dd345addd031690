"""The report's style sheet: light, dark and paper, from a telephone to a wide screen.

Series colours are Okabe and Ito's, chosen to be told apart with every common form of colour blindness, a
little calmer on white and lighter on black.
"""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1d2530; --soft: #5b6675; --edge: #dfe4ea; --grid: #e9edf1;
  --c1: #0b6aae; --c2: #c45a0c; --c3: #0c8a67; --c4: #a9588c; --tint: #eaf2f9;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1a2028; --ink: #e4e9ef; --soft: #9aa6b4; --edge: #2c3540; --grid: #262e38;
    --c1: #62b3ea; --c2: #ee9a4d; --c3: #3fc39a; --c4: #d692bd; --tint: #1b2b3a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif;
}
main { max-width: 1060px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 0 0 2px; }
.under, .lead, .note, figcaption + ul { color: var(--soft); }
.under { margin: 0 0 20px; }
.lead { margin: 0 0 14px; }
section, .answer {
  background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 20px 22px;
  margin: 0 0 18px;
}
.answer { border-left: 5px solid var(--c1); }
.answer p { margin: 0 0 10px; max-width: 72ch; }
.answer p:first-child { font-size: 1.18rem; font-weight: 600; line-height: 1.4; }
.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px; margin: 16px
  0 0; padding: 0; list-style: none;
}
.tiles li { background: var(--tint); border-radius: 8px; padding: 10px 14px; }
.tiles b { display: block; font-size: 1.4rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tiles span { font-size: .84rem; color: var(--soft); }
nav { margin: 0 0 20px; font-size: .92rem; line-height: 1.9; }
nav a { color: var(--c1); text-decoration: none; margin-right: 16px; white-space: nowrap; }
nav a:hover { text-decoration: underline; }
.gallery {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 22px
  30px; align-items: start;
}
figure { margin: 0; max-width: 520px; width: 100%; break-inside: avoid; }
figcaption { font-weight: 600; font-size: .95rem; margin-bottom: 4px; }
figure ul { list-style: none; margin: 0 0 6px; padding: 0; font-size: .84rem; }
.key { display: inline-block; margin-right: 16px; white-space: nowrap; }
.key::before {
  content: ""; display: inline-block; width: 18px; height: 0; border-top: 3px solid; vertical-align:
  .26em; margin-right: 6px;
}
.key.dashed::before { border-top-style: dashed; border-top-width: 2px; }
.k1::before { border-color: var(--c1); } .k2::before { border-color: var(--c2); }
.k3::before { border-color: var(--c3); } .k4::before { border-color: var(--c4); }
.note { font-size: .84rem; margin: 4px 0 0; max-width: 62ch; }
.missing {
  color: var(--soft); border: 1px dashed var(--edge); border-radius: 8px; padding: 14px 16px; margin:
  0;
}
.prose p { margin: 0 0 8px; max-width: 60ch; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-family: inherit; }
.t { font-size: 12.5px; fill: var(--ink); font-variant-numeric: tabular-nums; }
.t.soft { fill: var(--soft); } .t.small { font-size: 10.5px; } .t.onfill { fill: var(--card); }
.grid { stroke: var(--grid); stroke-width: 1; } .axis { stroke: var(--soft); stroke-width: 1; }
.axis.guide { stroke-dasharray: 2 4; }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round; stroke-linecap: round; }
.line.dash { stroke-dasharray: 6 5; stroke-width: 1.8; stroke-linecap: butt; }
.line.faint { stroke-width: 1.4; stroke-opacity: .6; }
.joint { stroke-width: 3; stroke-opacity: .38; }
.band { fill-opacity: .2; stroke: none; }
.hollow { fill: var(--card); stroke: var(--soft); stroke-width: 2; }
.l1 { stroke: var(--c1); } .l2 { stroke: var(--c2); } .l3 { stroke: var(--c3); } .l4 { stroke: var(--c4); }
.f1 { fill: var(--c1); } .f2 { fill: var(--c2); } .f3 { fill: var(--c3); } .f4 { fill: var(--c4); }
dl { display: grid; grid-template-columns: 1fr; margin: 0; font-size: .92rem; max-width: 62rem; }
dl div {
  display: grid; grid-template-columns: minmax(120px, 15rem) 1fr; gap: 12px; padding: 5px 0;
  border-top: 1px solid var(--grid);
}
dl div:first-child { border-top: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.gallery > dl { grid-column: 1 / -1; width: 100%; }
.scroll { overflow-x: auto; margin-top: 8px; }
table { border-collapse: collapse; font-size: .88rem; width: 100%; font-variant-numeric: tabular-nums; }
th, td {
  text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--grid); white-space: nowrap;
}
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child, .names-2 td:nth-child(2), .names-2 th:nth-child(2) { text-align: left; }
summary { cursor: pointer; color: var(--c1); }
@media (max-width: 560px) {
  main { padding: 18px 10px 40px; }
  section, .answer { padding: 16px 14px; }
  h1 { font-size: 1.4rem; }
  .t { font-size: 15px; } .t.small { font-size: 12px; }
  .tiles { grid-template-columns: 1fr 1fr; }
  dl div { grid-template-columns: 1fr; gap: 0; }
}
@media print {
  :root {
    --page: #fff; --card: #fff; --ink: #000; --soft: #444; --edge: #ccc; --grid: #ddd;
    --c1: #0b6aae; --c2: #c45a0c; --c3: #0c8a67; --c4: #a9588c; --tint: #f2f2f2;
  }
  body { font-size: 11pt; }
  main { max-width: none; padding: 0; }
  nav { display: none; }
  section, .answer { border-width: 1px 0 0; border-radius: 0; padding: 12px 0; }
  .gallery { grid-template-columns: 1fr 1fr; }
  h2, .lead { break-after: avoid; }
  .scroll { overflow: visible; }
  table { font-size: 8pt; }
  th, td { white-space: normal; padding: 3px 5px; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
