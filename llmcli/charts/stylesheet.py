"""The CSS of the HTML report, for light and dark mode, wide screens, phones and print. It contains
no URL, because the page must not load any file.
"""

LIGHT_COLORS = """--paper:#ffffff;--ink:#1b1f24;--soft:#57606a;--grid:#dde2e7;--panel:#f5f7f9;
--c0:#0b5cad;--c1:#b4460f;--c2:#0a7a5c;--c3:#8b3fa8;--c4:#7d6200;--c5:#57606a"""
DARK_COLORS = """--paper:#14171b;--ink:#e6e9ed;--soft:#a3adb8;--grid:#30373f;--panel:#1c2126;
--c0:#6cb2ff;--c1:#ff9a5c;--c2:#4cd3a6;--c3:#d79bf0;--c4:#e0c24a;--c5:#a3adb8"""

STYLESHEET = f"""
:root{{color-scheme:light dark;{LIGHT_COLORS}}}
@media (prefers-color-scheme:dark){{:root{{{DARK_COLORS}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}}
main{{max-width:760px;margin:0 auto;padding:24px 16px 48px}}
h1{{font-size:1.6rem;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}}
h2{{font-size:1.15rem;margin:40px 0 4px}}
p{{margin:4px 0 12px;overflow-wrap:anywhere}}
.soft{{color:var(--soft)}}
ul{{margin:12px 0;padding:12px 16px 12px 34px;background:var(--panel);border-radius:6px}}
figure{{margin:12px 0}}
.chart{{display:block;max-width:100%;height:auto}}
.slim{{display:none}}
.chart text{{font:12px system-ui,sans-serif;fill:var(--ink)}}
.chart .tick,.chart .title{{fill:var(--soft)}}
.chart .label{{paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}}
.grid{{stroke:var(--grid);stroke-width:1}}
.axis{{stroke:var(--soft);stroke-width:1}}
.rule{{stroke:var(--ink);stroke-width:1.25;stroke-dasharray:5 4;fill:none}}
.rule.under{{stroke:var(--paper);stroke-width:3;stroke-dasharray:none;opacity:.7}}
.lead,.stem{{stroke:var(--soft);stroke-width:1}}
.span{{stroke:var(--ink);stroke-width:1.5;fill:none}}
.line{{fill:none;stroke-width:2}}
.mark{{stroke:var(--paper);stroke-width:1}}
.mark.open{{fill:none;stroke-width:2.5}}
.mark.hollow{{fill:var(--paper);stroke-width:2}}
.part{{stroke:var(--ink);stroke-width:1}}
.hatch{{stroke:var(--paper);stroke-width:1.6;fill:none}}
.h6,.h7{{stroke:var(--ink);stroke-width:.8}}
.f0{{fill:var(--c0)}}.f1{{fill:var(--c1)}}.f2{{fill:var(--c2)}}.f3{{fill:var(--c3)}}
.f4{{fill:var(--c4)}}.f5{{fill:var(--c5)}}.f6,.f7{{fill:var(--paper)}}
.c0{{color:var(--c0)}}.c1{{color:var(--c1)}}.c2{{color:var(--c2)}}
.c3{{color:var(--c3)}}.c4{{color:var(--c4)}}.c5{{color:var(--c5)}}
.line,.mark.open,.mark.hollow{{stroke:currentColor}}
.mark{{fill:currentColor}}
.mark.hollow{{fill:var(--paper)}}.mark.open{{fill:none}}
summary{{cursor:pointer;color:var(--soft)}}
.scroll{{overflow-x:auto}}
td:not(.n),tbody th{{min-width:9em;overflow-wrap:anywhere}}
table{{border-collapse:collapse;font-size:.85rem;margin:8px 0;font-variant-numeric:tabular-nums}}
th,td{{text-align:left;vertical-align:top;padding:3px 14px 3px 0}}
th,td{{border-bottom:1px solid var(--grid);unicode-bidi:isolate}}
th{{font-weight:600;color:var(--soft)}}tbody th{{font-weight:400;color:var(--ink)}}
.n{{text-align:right}}td.n{{white-space:nowrap}}
dl{{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;margin:8px 0}}
dt{{color:var(--soft)}}
dd{{margin:0;overflow-wrap:anywhere;unicode-bidi:isolate}}
@media (max-width:640px){{.wide{{display:none}}.slim{{display:block}}}}
@media (max-width:640px){{dl{{grid-template-columns:1fr}}dd{{margin-bottom:6px}}}}
@media print{{
:root{{color-scheme:light;{LIGHT_COLORS}}}
body{{font-size:11pt}}main{{max-width:none;padding:0}}
.wide{{display:block}}.slim{{display:none}}
figure,tr{{break-inside:avoid}}h2,summary{{break-after:avoid}}
.scroll{{overflow:visible}}table{{font-size:7.5pt}}td:not(.n),tbody th{{min-width:0}}
details::details-content{{content-visibility:visible;block-size:auto}}
*{{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
}}
"""
