"""Messages about a GPU that cannot serve, by torch's facts about it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.platform import facts
from penstock.platform.facts import detect

OLD_DRIVER = ("The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
              "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx")
NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from\nhttp"


def gpus(monkeypatch: pytest.MonkeyPatch, *found: tuple[str, int, int], error: Exception | None = None,
         built: tuple[str, ...] = ("sm_75", "sm_80", "sm_90a", "compute_90")) -> None:
    """Makes torch see these GPUs: (name, major, minor) each."""
    def init() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: found[i][0])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(built))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(
        name=found[i][0], major=found[i][1], minor=found[i][2], total_memory=80 << 30))


def test_a_good_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, ("NVIDIA A100", 8, 0), ("NVIDIA H200", 9, 0))
    assert (detect("cuda").name, detect("cuda:1").capability, detect().kind) == ("NVIDIA A100", (9, 0), "cuda")


@pytest.mark.parametrize(("error", "said"), [
    (RuntimeError(OLD_DRIVER), "too old (found version 11040); install"), (RuntimeError(NO_DRIVER), "Found no NVIDIA driver"),
    (AssertionError("Torch not compiled with CUDA enabled"), "not compiled with CUDA"), (RuntimeError(""), "RuntimeError"),
    (RuntimeError("No CUDA GPUs are available"), "No CUDA GPUs are available")])
def test_torch_cannot(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    gpus(monkeypatch, error=error)
    with pytest.raises(ConfigError) as raised:
        detect("cuda:0")
    message = str(raised.value)
    assert said in message and torch.__version__ in message and "--device cpu" in message and "\n" not in message


def test_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, ("NVIDIA GTX 1080", 6, 1))
    with pytest.raises(ConfigError, match=r"GTX 1080, has compute capability 6\.1, .* built for 7\.5 and later"):
        detect("cuda")


def test_no_such_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, ("NVIDIA H200", 9, 0))
    with pytest.raises(ConfigError, match=r"cuda:3 was asked for, but there is cuda:0 \(NVIDIA H200\)"):
        detect("cuda:3")


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cudalike", ""])
def test_unknown_names(device: str) -> None:
    with pytest.raises(ConfigError, match="possible are auto, cpu, cuda and cuda:N"):
        detect(device)


@pytest.mark.parametrize("driver", [True, False])
def test_auto_falls_back_and_says_so(driver: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     caplog: pytest.LogCaptureFixture) -> None:
    """Where there is a driver there is a GPU, and whoever runs on the CPU instead will want to know why."""
    gpus(monkeypatch, error=RuntimeError(OLD_DRIVER))
    path = tmp_path / "version"
    if driver:
        path.write_text("NVRM version")
    monkeypatch.setattr(facts, "_GPU_DRIVER", path)
    with caplog.at_level(logging.WARNING, "penstock"):
        assert detect("auto").kind == "cpu"
    assert ("too old" in caplog.text) == driver
