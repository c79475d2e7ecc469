"""The Grafana dashboard: what it asks for is there."""

import importlib.resources
import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

OF_PROMQL = {"sum", "max", "by", "rate", "increase", "histogram_quantile", "label_values", "le", "s", "m"}


@pytest.fixture(scope="module")
def dashboard():
    return json.loads(importlib.resources.files("jaxinfer.http").joinpath("grafana.json").read_text())


@pytest.fixture
def samples(server):
    """Labels of each sample that a server shows, by name."""
    server.complete(n=2)
    found = {}
    for family in text_string_to_metric_families(server.metrics()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions(dashboard):
    yield from (variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable)
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ()))


def test_every_metric_and_label_of_the_dashboard_is_one_of_the_servers(dashboard, samples):
    """O5."""
    asked = set()
    for expression in expressions(dashboard):
        bare = re.sub(r"\[[^\]]*\]", "", re.sub(r'"[^"]*"', "", expression))
        words = set(re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", bare)) - OF_PROMQL
        names = {word for word in words if word in samples}
        assert len(names) in (1, 2), expression
        for label in words - names:
            assert all(label in samples[name] for name in names), f"{label} in {expression}"
        asked |= names
    assert len(asked) > 25 and any(name.startswith("http_") for name in asked)


def test_a_name_that_does_not_exist_would_be_found(dashboard, samples):
    dashboard = json.loads(json.dumps(dashboard).replace("jaxinfer:num_requests_waiting", "jaxinfer:num_waiting"))
    with pytest.raises(AssertionError):
        test_every_metric_and_label_of_the_dashboard_is_one_of_the_servers(dashboard, samples)


def test_dashboard_can_be_loaded(dashboard):
    """O5: what Grafana needs of a file: ids of its own for each panel, panels that do not overlap, known variables."""
    panels = dashboard["panels"]
    assert dashboard["title"] and dashboard["uid"] and dashboard["schemaVersion"] >= 36
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z_]+)\}?", json.dumps(dashboard)))
    assert variables <= used and used - variables <= {"__rate_interval", "__all"}
    for panel in panels:
        assert panel["type"] == "row" or {target["refId"] for target in panel["targets"]}
        assert panel["type"] == "row" or panel["fieldConfig"]["defaults"]["unit"]
