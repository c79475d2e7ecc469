"""What is packed, and what the image is made of."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def locked(name: str) -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements" / f"{name}.txt").read_text(), re.M))


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_the_image_is_made_of_files_that_are_there_and_of_all_that_the_package_needs(cuda):
    text = (ROOT / "scripts" / "Dockerfile").read_text()
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.M)
        for source in line.replace("${CUDA}", cuda).split()[:-1]
    ]
    assert set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) < set(copied)
    assert [source for source in copied if not (ROOT / source).exists()] == []
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"][f"cuda{cuda}"]]
    names = {re.match(r"[A-Za-z0-9-]+", one).group().lower() for one in wanted}
    assert names - locked(f"cuda{cuda}") == set()


def test_wheel_and_sdist_hold_the_same_three_packages():
    targets = PROJECT["tool"]["hatch"]["build"]["targets"]
    packages = ["jaxinfer", "pallas_kernels", "checkpoints"]
    assert (targets["wheel"]["packages"], targets["sdist"]["only-include"]) == (packages, packages)


def test_a_python_that_does_not_run_is_refused_by_the_package_check_before_anything_is_built(tmp_path):
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "check_package.sh"), str(tmp_path)],
        env=os.environ | {"UV": sys.executable, "JAXINFER_PYTHON": "/no/such/python"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "check_package: /no/such/python does not run; set JAXINFER_PYTHON to a Python that does"
    )
    assert not any(tmp_path.iterdir())
