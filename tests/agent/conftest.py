"""The published tokenizer and template that the agent is tested with."""

import pytest

from tests.text.conftest import published


@pytest.fixture(scope="session")
def qwen3():
    return published("qwen3")
