"""The folder of the sockets between the frontend and the engine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import zmq

from penstock.core.child import own_folder


@pytest.mark.parametrize("length", [0, 90, 200])
def test_a_socket_fits_however_long_tmpdir_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    place = tmp_path / ("d" * length) if length else Path("/tmp")
    place.mkdir(exist_ok=True)
    monkeypatch.setattr("tempfile.tempdir", str(place))
    folder = own_folder()
    try:
        assert Path(folder).name.startswith(f"penstock-{os.getpid()}-")
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.bind(f"ipc://{folder}/engine-out")
    finally:
        shutil.rmtree(folder)
