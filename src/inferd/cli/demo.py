"""What ``inferd serve demo`` serves: the bundled models together, as far as the installed packages allow.

The chat model is always among them. A classifier whose packages are missing is left out with a note.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Final

from inferd.config import read_yaml
from inferd.models import BUNDLE

CHAT: Final = "demo"
# For each classifier: the packages it needs, by their import names, and the extra that installs them.
_NEEDS: Final[Mapping[str, Mapping[str, str]]] = {
    "digits": {"onnxruntime": "onnx", "PIL": "vision"},
    "intents": {"onnxruntime": "onnx"},
}


def demo_models() -> tuple[dict[str, dict[str, object]], list[str]]:
    """The settings of the models that can be served here, the chat model first; and a sentence about those that
    cannot."""
    found: dict[str, dict[str, object]] = {}
    left_out: dict[str, list[str]] = {}
    models = read_yaml(BUNDLE)["models"]
    assert isinstance(models, dict)
    for name, settings in models.items():
        missing = [extra for module, extra in _NEEDS.get(name, {}).items() if importlib.util.find_spec(module) is None]
        if missing:
            left_out[name] = missing
        else:
            found[name] = settings
    if not left_out:
        return found, []
    extras = ",".join(dict.fromkeys(extra for missing in left_out.values() for extra in missing))
    verb = "is" if len(left_out) == 1 else "are"
    sentence = f"{' and '.join(left_out)} {verb} left out, as packages are missing: pip install 'inferd[{extras}]'"
    return found, [sentence]
