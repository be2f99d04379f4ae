"""What every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# One compute thread per test process: the suite runs in parallel, and results repeat.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("everyday", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "everyday"))

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real models, tokenizers and texts that lie beside some checkouts; skips where they do not."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the folder ../shared/data is not beside this checkout")
    return SHARED_DATA
