"""Two self-contained HTML pages: the served models, and the API document. They load nothing from other servers."""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import cache
from typing import Final

from inferd import __version__
from inferd.gateway.upstream import ModelStatus

_STYLE: Final = """
:root{color-scheme:light dark;--line:#8884;--soft:#8881}
body{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem}h2{font-size:1.15rem;margin-top:2rem}
code,pre{font:14px/1.45 ui-monospace,monospace}pre{background:var(--soft);padding:.8rem;overflow:auto;border-radius:6px}
details{border:1px solid var(--line);border-radius:6px;margin:.5rem 0;padding:.4rem .8rem}summary{cursor:pointer}
.m{display:inline-block;min-width:4.6rem;font-weight:600}.s{opacity:.75}
table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid var(--line);padding:.25rem .5rem;\
text-align:left;vertical-align:top}
"""

_SCRIPT: Final = """
const el=(tag,text,cls)=>{const e=document.createElement(tag);if(text!=null)e.textContent=text;\
if(cls)e.className=cls;return e};
const kind=(s,all)=>{if(!s)return"";if(s.$ref){return s.$ref.split("/").pop()}
 if(s.anyOf)return s.anyOf.map(x=>kind(x,all)).join(" | ");\
if(s.enum)return s.enum.map(x=>JSON.stringify(x)).join(" | ");
 if(s.type==="array")return"["+kind(s.items,all)+"]";return s.type||"any"};
const table=(name,all)=>{const s=all[name];const t=el("table");const h=el("tr");\
["field","type","default",""].forEach(x=>h.append(el("th",x)));t.append(h);
 for(const[k,v]of Object.entries(s.properties||{})){const r=el("tr");const d=el("td");\
d.append(el("code",k+((s.required||[]).includes(k)?" *":"")));r.append(d);
 r.append(el("td",kind(v,all)),el("td",v.default===undefined?"":JSON.stringify(v.default)),\
el("td",v.description||"","s"));t.append(r)}return t};
fetch("openapi.json").then(r=>r.json()).then(doc=>{const all=doc.components.schemas,\
main=document.getElementById("api"),used=new Set();
 for(const[path,item]of Object.entries(doc.paths))for(const[method,op]of Object.entries(item)){const d=el("details"),\
s=el("summary");
 s.append(el("span",method.toUpperCase(),"m"),el("code",path),el("span"," "+op.summary,"s"));d.append(s);
 const show=(label,schema)=>{if(schema&&schema.$ref){const n=schema.$ref.split("/").pop();\
d.append(el("p",label+": "+n));d.append(table(n,all));used.add(n)}};
 show("request",op.requestBody&&op.requestBody.content["application/json"].schema);
 for(const[code,r]of Object.entries(op.responses))\
if(code==="200"&&r.content&&r.content["application/json"])show("response",r.content["application/json"].schema);
 d.append(el("p","statuses: "+Object.keys(op.responses).join(", "),"s"));main.append(d)}
 const types=document.getElementById("types");
 for(const n of Object.keys(all).sort())if(!used.has(n)&&all[n].properties){const d=el("details");\
d.append(el("summary",n),table(n,all));types.append(d)}
}).catch(e=>{document.getElementById("api").textContent="openapi.json could not be read: "+e});
"""


def _page(title: str, body: str) -> bytes:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>{body}</body></html>"
    ).encode()


@cache
def docs_page() -> bytes:
    """The page of the API's fields and statuses, which its script builds from /openapi.json."""
    return _page(
        "inferd API",
        f"<h1>inferd {html.escape(__version__)}: HTTP API</h1>"
        '<p>The OpenAI API with vLLM\'s extra fields. Machine-readable: <a href="openapi.json">openapi.json</a>. '
        "A star marks a required field.</p>"
        '<div id="api"></div><h2>Types</h2><div id="types"></div>'
        f"<script>{_SCRIPT}</script>",
    )


def start_page(models: Sequence[ModelStatus]) -> bytes:
    """The page of the served models and their states, with a command to try one."""
    rows = "".join(
        f"<tr><td><code>{html.escape(m.name)}</code></td><td>{html.escape(m.state)}</td><td>{m.replicas_ready} of "
        f"{m.replicas}</td></tr>"
        for m in models
    )
    name = html.escape(models[0].name) if models else "MODEL"
    return _page(
        "inferd",
        f"<h1>inferd {html.escape(__version__)}</h1>"
        f"<table><tr><th>model</th><th>state</th><th>replicas ready</th></tr>{rows}</table>"
        '<p><a href="docs">API</a> &middot; <a href="openapi.json">openapi.json</a> &middot; '
        '<a href="metrics">metrics</a> &middot; '
        '<a href="health">health</a></p>'
        '<pre>curl -s "$ADDRESS/v1/chat/completions" -H "content-type: application/json" \\\n'
        f'  -d \'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}\'</pre>'
        '<script>{const line=document.querySelector("pre");'
        'line.textContent=line.textContent.replace("$ADDRESS",location.origin)}</script>',
    )
