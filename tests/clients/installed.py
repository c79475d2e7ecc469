"""Packages that only these tests need."""

import os
import warnings
from types import ModuleType

import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks a server for prices when imported


def client(name: str) -> ModuleType:
    """The package of a client. Where it is not installed, the tests of the module that asks are skipped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports in its turn
        return pytest.importorskip(name, reason=f"{name} is not installed; the extra 'clients' has it")
