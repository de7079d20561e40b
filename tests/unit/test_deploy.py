"""The files in deploy/: manifests validate, flags and copied paths exist, and the dashboard asks for metrics that there are."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import parser_of
from penstock.core.request import EngineInfo, TierStats
from penstock.engine.async_llm import AsyncLLM
from penstock.server.connections import Counts
from penstock.server.fleet import Fleet, Slot
from penstock.server.metrics import metrics_page

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def manifests() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return [one for file in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for one in yaml.safe_load_all(file.read_text())]


def test_manifests_validate() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    kinds = [one["kind"] for one in manifests()]
    assert {"Deployment", "Service", "PersistentVolumeClaim"} <= set(kinds)
    for one in manifests():
        validator.validate(one, "1.31", strict=True)
    broken = manifests()[kinds.index("Deployment")]
    broken["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"] = "http"
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, "1.31", strict=True)


def machines() -> list[dict[str, Any]]:
    """The pod templates of the LeaderWorkerSet, of the leader and of the workers."""
    yaml = pytest.importorskip("yaml")
    whole = yaml.safe_load((DEPLOY / "leaderworkerset" / "penstock.yaml").read_text())["spec"]["leaderWorkerTemplate"]
    assert whole["size"] == 2
    return [whole["leaderTemplate"], whole["workerTemplate"]]


def test_the_pods_of_several_machines_validate() -> None:
    """The set itself is of a kind that Kubernetes' own schemas do not have."""
    validator = pytest.importorskip("kubernetes_validate")
    for template in machines():
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
        validator.validate(pod, "1.31", strict=True)


def test_the_set_of_machines_has_known_fields() -> None:
    """The fields are those of LeaderWorkerSet's v1: Kubernetes drops one that it does not know, in silence."""
    yaml = pytest.importorskip("yaml")
    whole = yaml.safe_load((DEPLOY / "leaderworkerset" / "penstock.yaml").read_text())
    assert (whole["apiVersion"], whole["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    spec, template = whole["spec"], whole["spec"]["leaderWorkerTemplate"]
    assert spec.keys() <= {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy", "networkConfig"}
    assert {"size", "workerTemplate"} <= template.keys() <= {"leaderTemplate", "workerTemplate", "size", "restartPolicy"}
    assert template["restartPolicy"] in {"RecreateGroupOnPodRestart", "None"}


def commands() -> list[list[str]]:
    """The words after `penstock serve` in each of the files."""
    found = []
    for name in ("Dockerfile.cpu", "Dockerfile.cuda"):
        lines = dict(re.findall(r"^(ENTRYPOINT|CMD) (\[.*\])$", (DEPLOY / name).read_text(), re.MULTILINE))
        entry = json.loads(lines["ENTRYPOINT"])
        assert entry[:2] == ["penstock", "serve"]
        found.append([*json.loads(lines["CMD"]), *entry[2:]])
        pod = next(one for one in manifests() if one["kind"] == "Deployment")["spec"]["template"]["spec"]
        found.append([*pod["containers"][0]["args"], *entry[2:]])
    start = re.search(r"^ExecStart=\S+/penstock serve (.*)$", (DEPLOY / "penstock.service").read_text(), re.MULTILINE)
    assert start is not None
    several = [[re.sub(r"\$\(.*\)", "1", word) for word in one["spec"]["containers"][0]["args"]] for one in machines()]
    return [*found, *several, shlex.split(start[1])]


def test_the_commands_parse() -> None:
    for words in commands():
        assert parser_of("serve").parse_args(words).model


def test_dockerfiles_copy_what_there_is() -> None:
    for name in ("Dockerfile.cpu", "Dockerfile.cuda"):
        copied = re.findall(r"^COPY (.*) \S+$", (DEPLOY / name).read_text(), re.MULTILINE)
        assert copied
        for path in " ".join(copied).split():
            assert (ROOT / path).exists(), path


def test_a_pod_has_time_to_drain() -> None:
    """Of several machines all have, as requests need the ranks of each."""
    for one in (next(one for one in manifests() if one["kind"] == "Deployment")["spec"]["template"], *machines()):
        args = one["spec"]["containers"][0]["args"]
        assert one["spec"]["terminationGracePeriodSeconds"] > float(args[args.index("--shutdown-timeout") + 1])


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    llm = AsyncLLM("canary")
    llm.info = EngineInfo("canary", "Qwen3ForCausalLM", 4096, 4096, 8, 512, 16, 4096, 256, "bfloat16", "cpu", 1, 1, 1)
    llm.stats.tiers = [TierStats("device", 1, 1, 1, 1, 1, 1, 1, 1)]
    page = metrics_page(Fleet([Slot(["canary"], llm, state="ready")]), Counts)().decode()
    samples = set(re.findall(r"^([a-z0-9_:]+)[ {]", page, re.MULTILINE))
    board = json.loads((DEPLOY / "grafana/penstock.json").read_text())
    asked = {name for panel in board["panels"] for target in panel["targets"]
             for name in re.findall(r"(?:vllm|penstock):[a-z0-9_]+", target["expr"])}
    assert len(board["panels"]) >= 12 and len(asked) >= 18
    assert asked <= samples, asked - samples
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places) and all(panel["description"] for panel in board["panels"])
