from __future__ import annotations

import pytest

from titan_linear.ops.triton import rules


@pytest.fixture(params=["kda", "gdn"])
def op(request: pytest.FixtureRequest) -> str:
    """A delta rule; other recurrences where a test names them."""
    return request.param


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scans are cut into segments of one chunk."""
    monkeypatch.setattr(rules, "segment_length", lambda *_: 64)
