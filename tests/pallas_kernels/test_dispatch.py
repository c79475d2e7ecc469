"""How an op picks the way that it runs, and what it says of the others."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels.dispatch import CPU, Route, Target, dispatch, gpu_route, plan

HOPPER = Target("gpu", 90)


def taking(name: str, most: int) -> Route:
    """A route that takes numbers up to `most`, and doubles a plan's."""

    def run(x: int, *, target: Target) -> str:
        if x > most:
            raise NotImplementedError(f"{x} on a {target.platform}; it takes {most} at most")
        return f"{name}: {x}"

    def plan_it(x: int, *, target: Target) -> int:
        run(x, target=target)
        return 2 * x

    return Route(name, run, plan_it)


ROUTES = (taking("small", 1), taking("medium", 10), taking("large", 100))


@pytest.mark.parametrize(("x", "name"), [(1, "small"), (10, "medium"), (100, "large")])
def test_the_first_route_that_can_runs(x, name):
    assert dispatch("op", ROUTES, x, target=CPU) == f"{name}: {x}"


def test_when_no_route_can_all_reasons_are_listed():
    reasons = "; ".join(
        f"{name}: 101 on a gpu; it takes {most} at most"
        for name, most in (("small", 1), ("medium", 10), ("large", 100))
    )
    with pytest.raises(NotImplementedError, match=f"^no route for op: {reasons}$"):
        dispatch("op", ROUTES, 101, target=HOPPER)


def test_an_error_that_is_no_refusal_is_not_taken_for_one():
    def run(*, target: Target) -> None:
        raise ValueError(f"a mistake on {target.platform}")

    with pytest.raises(ValueError, match="a mistake on cpu"):
        dispatch("op", (Route("broken", run), *ROUTES), target=CPU)


def test_the_chosen_route_and_the_refusals_before_it_are_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="pallas_kernels.dispatch"):
        for _ in range(3):
            dispatch("logged", ROUTES, 7, target=CPU)
    assert caplog.messages == ["logged runs on the medium route (small: 7 on a cpu; it takes 1 at most)"]


def test_a_plan_holds_what_each_route_that_can_prepares_and_leaves_out_who_refuses():
    assert plan((*ROUTES, Route("planless", lambda: None)), 10, target=CPU) == {"medium": 20, "large": 20}
    assert plan(ROUTES, 101, target=CPU) == {}


def test_a_route_for_gpus_refuses_a_cpu_without_loading_its_module():
    route = gpu_route("triton", "pallas_kernels.no_such_module")
    for function in (route.run, route.plan):
        with pytest.raises(NotImplementedError, match="^the target is a cpu$"):
            function(target=CPU)


def test_a_route_for_gpus_names_the_package_that_it_lacks(tmp_path, monkeypatch):
    (tmp_path / "needs_a_package.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NotImplementedError, match="^the package a_package_that_nobody_has is not installed$"):
        gpu_route("triton", "needs_a_package").run(target=HOPPER)


def test_a_route_for_gpus_runs_the_functions_of_its_module(tmp_path, monkeypatch):
    (tmp_path / "a_gpu_route.py").write_text(
        "def run(x, *, target):\n    return x, target\n\n\ndef plan(*, target):\n    return target.platform\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    route = gpu_route("triton", "a_gpu_route")
    assert route.run(3, target=HOPPER) == (3, HOPPER)
    assert route.plan(target=HOPPER) == "gpu"


@pytest.mark.parametrize(("version", "number"), [("8.0", 80), ("8.9", 89), ("9.0", 90), ("12.1", 121)])
def test_the_target_of_a_gpu_is_its_compute_capability_times_ten(version, number):
    assert Target.of(SimpleNamespace(platform="cuda", compute_capability=version)) == Target("gpu", number)


def test_the_target_of_a_cpu_has_no_compute_capability():
    assert Target.of(jax.devices("cpu")[0]) == CPU == Target("cpu", 0)


def test_a_gpu_that_gets_the_reference_is_a_warning(caplog):
    routes = (gpu_route("fast", "no_such_package.fast"), Route("reference", lambda *_, **__: 1))
    with caplog.at_level(logging.INFO, logger="pallas_kernels.dispatch"):
        dispatch("slow op", routes, target=Target("gpu", 90))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message == "slow op runs on the reference route (fast: the package no_such_package is not installed)"
