"""The program as a user runs it: one process per run, everything it writes in a temporary folder."""

import pytest


@pytest.fixture(scope="session")
def corpus() -> str:
    """About 10,000 bytes of text."""
    return "".join(f"line {i} of {i * i % 97}\n" for i in range(700))
