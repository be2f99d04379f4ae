"""Lints the chart and installs it with Helm's own library: helm_install.py CHART URL, values as a line of JSON each.

Runs in an environment of its own, as the library needs Python 3.12. Prints a line for each line that it reads.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import helm_sdkpy  # type: ignore[import-not-found]

KUBECONFIG = """apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: URL}}]
users: [{name: u, user: {}}]
contexts: [{name: x, context: {cluster: c, user: u, namespace: default}}]
current-context: x
"""


async def main() -> None:
    chart, url = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        kubeconfig = Path(folder) / "kubeconfig"
        kubeconfig.write_text(KUBECONFIG.replace("URL", url))
        config = helm_sdkpy.Configuration(namespace="default", kubeconfig=str(kubeconfig))
        print(json.dumps(await helm_sdkpy.Lint(config).run(chart)), flush=True)
        install = helm_sdkpy.Install(config)
        for line in sys.stdin:
            try:
                await install.run("inferd", chart, values=json.loads(line), wait=False)
                print(json.dumps({"error": None}), flush=True)
            except helm_sdkpy.HelmError as error:
                print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
