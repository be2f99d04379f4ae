"""Write the generated pages and files, or with --check say which are out of date.

Each page is what a module prints; the page and its command stand side by side below and nowhere else.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "docs/metrics.md": ["-m", "inferd.observe.page"],
    "deploy/metrics-contract.json": ["-m", "inferd.observe.contract"],
    "docs/architectures.md": ["-m", "inferd.cli.reference", "architectures"],
    "docs/configuration.md": ["-m", "inferd.cli.reference", "configuration"],
    "docs/dev/experiments.md": ["-m", "tests.experiments.table"],
    "deploy/prometheus/inferd.rules.yml": ["-m", "inferd", "alerts", "examples/inferd.yaml"],
    "deploy/grafana/overview.json": ["-m", "inferd.observe.dashboards", "overview"],
    "deploy/grafana/model.json": ["-m", "inferd.observe.dashboards", "model"],
}


def generate(arguments: list[str]) -> str:
    """What the page's command prints; its complaint goes to the terminal as it is."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> int:
    is_check = "--check" in sys.argv[1:]
    stale = []
    for name, arguments in PAGES.items():
        page, text = ROOT / name, generate(arguments)
        if page.exists() and page.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not is_check:
            page.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    if is_check and stale:
        print(f"Out of date: {', '.join(stale)}. Run `make docs` and commit the result.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
