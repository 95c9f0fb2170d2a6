"""How the run report looks: one column on a phone, light or dark as the reader's system is."""

STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --ink: #1d2129; --soft: #5f6673; --line: #dfe1e6; --card: #fff;
  --c0: #2563b8; --c1: #c2541b; --c2: #26835a; --c3: #7b4bb3; --good: #1c7a4c; --bad: #b3362b; }
@media (prefers-color-scheme: dark) { :root { --page: #14161a; --ink: #e6e8ec; --soft: #9aa2b1; --line: #2d323b;
  --card: #1b1e24; --c0: #6ea8f0; --c1: #f0955c; --c2: #5cc394; --c3: #b894e8; --good: #5cc394; --bad: #f08a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; margin: .5rem 0 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.verdict { font-size: 1.1rem; border-left: .3rem solid var(--good); padding: .4rem .8rem; margin: .8rem 0; }
.verdict.no { border-color: var(--bad); }
.soft, figcaption, th { color: var(--soft); font-weight: normal; }
.numbers, .charts { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 14rem), 1fr)); }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
.number, figure, .sample { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .7rem; }
.number b { display: block; font-size: 1.5rem; } figure { margin: 0; } svg { width: 100%; height: auto; }
.range { height: .4rem; background: var(--line); border-radius: .2rem; position: relative; margin-top: .4rem; }
.range i { position: absolute; top: 0; bottom: 0; min-width: .2rem; background: var(--c0); border-radius: .2rem; }
.scroll { overflow-x: auto; margin: .8rem 0; } table { border-collapse: collapse; font-size: .92rem; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.sample { margin: .6rem 0; } .sample p { margin: 0 0 .5rem; overflow-wrap: anywhere; white-space: pre-wrap; }
.two { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr)); }
.tag { font-size: .8rem; color: var(--soft); display: block; } .win { color: var(--good); } .loss { color: var(--bad); }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; } svg text.title { fill: var(--ink); font-size: 13px; }
svg .axis { fill: none; stroke: var(--line); } svg polyline { fill: none; stroke-width: 1.8; }
svg polyline.grey { stroke: var(--soft); stroke-dasharray: 3 4; stroke-width: 1; }
polyline.c0 { stroke: var(--c0); } polyline.c1 { stroke: var(--c1); } polyline.c2 { stroke: var(--c2); }
polyline.c3 { stroke: var(--c3); } circle.c0, rect.c0 { fill: var(--c0); } circle.c1 { fill: var(--c1); }
circle.c2 { fill: var(--c2); } circle.c3 { fill: var(--c3); }
figcaption { font-size: .8rem; display: flex; gap: 1rem; flex-wrap: wrap; }
figcaption span::before { content: "\\25A0  "; } .k0::before { color: var(--c0); } .k1::before { color: var(--c1); }
.k2::before { color: var(--c2); } .k3::before { color: var(--c3); }
.links { margin: .3rem 0; display: flex; gap: 1.2rem; flex-wrap: wrap; } a { color: var(--c0); }
code { font-size: .85em; overflow-wrap: anywhere; } details { margin: .5rem 0; }
"""
