"""KServe's protocol over gRPC, as its clients call it: inference, streams, metadata, health, reflection, keys."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.served import NAME, Served, served

grpc = pytest.importorskip("grpc")
health_pb2 = pytest.importorskip("grpc_health.v1.health_pb2")
health_pb2_grpc = pytest.importorskip("grpc_health.v1.health_pb2_grpc")
reflection = pytest.importorskip("grpc_reflection.v1alpha.proto_reflection_descriptor_database")
messages = pytest.importorskip("penstock.server.kserve.messages")

KEY = (("authorization", "Bearer secret"),)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("canary", "--max-model-len", "512", "--grpc-port", "0", "--api-key", "secret") as server:
        server.http.headers["authorization"] = "Bearer secret"
        yield server


@pytest.fixture(scope="module")
def channel(server: Served) -> Iterator[Any]:
    found = re.search(r"gRPC at 127.0.0.1:([0-9]+)", server.log)
    assert found, server.log
    with grpc.insecure_channel(f"127.0.0.1:{found[1]}") as channel:
        yield channel


def call(channel: Any, method: str, request: Any = None, metadata: Any = KEY) -> Any:
    kind = messages.message(messages.request_of(method))
    made = channel.unary_unary(f"/{messages.SERVICE}/{method}", request_serializer=kind.SerializeToString,
                               response_deserializer=messages.message(f"{method}Response").FromString)
    return made(request if request is not None else kind(), metadata=metadata, timeout=30)


def ask(texts: list[str], raw: bool = False, **fields: Any) -> Any:
    request = messages.message("ModelInferRequest")(model_name=NAME, id="mine")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)])
    if raw:
        request.raw_input_contents.append(b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts))
    else:
        tensor.contents.bytes_contents.extend(text.encode() for text in texts)
    for name, value in fields.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return request


@pytest.mark.parametrize("raw", [False, True])
def test_inference_is_that_of_the_route(server: Served, channel: Any, raw: bool) -> None:
    texts, fields = ["Once upon", "Das Gedächtnis"], {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    wanted = server.post("/v1/completions", prompt=texts, **fields).json()
    answer = call(channel, "ModelInfer", ask(texts, raw, **fields))
    outputs = {tensor.name: tensor for tensor in answer.outputs}
    assert (answer.id, answer.model_name, list(outputs)) == ("mine", NAME, ["text_output", "finish_reason"])
    assert answer.parameters["completion_tokens"].int64_param == 12
    said = [choice["text"].encode() for choice in wanted["choices"]]
    if raw:
        assert answer.raw_output_contents[0] == b"".join(struct.pack("<I", len(text)) + text for text in said)
    else:
        assert list(outputs["text_output"].contents.bytes_contents) == said
        assert list(outputs["finish_reason"].contents.bytes_contents) == [b"length"] * 2
    assert list(outputs["text_output"].shape) == [2]


def test_a_stream_goes_on_after_an_error(channel: Any) -> None:
    stream = channel.stream_stream(f"/{messages.SERVICE}/ModelStreamInfer",
                                   request_serializer=messages.message("ModelInferRequest").SerializeToString,
                                   response_deserializer=messages.message("ModelStreamInferResponse").FromString)
    asks = [ask(["Once"], max_tokens=5, temperature=0.0, ignore_eos=True), ask(["Once"], max_tokens=-1),
            ask(["Once"], max_tokens=2, temperature=0.0, ignore_eos=True)]
    found = list(stream(iter(asks), metadata=KEY, timeout=30))
    errors = [place for place, one in enumerate(found) if one.error_message]
    assert len(errors) == 1 and "max_tokens" in found[errors[0]].error_message
    texts = [b"".join(one.infer_response.outputs[0].contents.bytes_contents[0] for one in part)
             for part in (found[:errors[0]], found[errors[0] + 1:])]
    whole = [call(channel, "ModelInfer", one).outputs[0].contents.bytes_contents[0] for one in (asks[0], asks[2])]
    assert texts == whole and errors[0] > 1


def test_a_call_that_is_cancelled_ends_its_request(server: Served, channel: Any) -> None:
    kind = messages.message("ModelInferRequest")
    made = channel.unary_unary(f"/{messages.SERVICE}/ModelInfer", request_serializer=kind.SerializeToString,
                               response_deserializer=messages.message("ModelInferResponse").FromString)
    with pytest.raises(grpc.RpcError) as failed:
        made(ask(["Once"], max_tokens=500, n=64, ignore_eos=True), metadata=KEY, timeout=0.3)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert server.settle()["penstock:requests_live"] == 0


@pytest.mark.parametrize(("request_", "metadata", "code", "words"), [
    (ask(["Once"]), (), "UNAUTHENTICATED", "key"),
    (ask(["Once"], best=1), KEY, "INVALID_ARGUMENT", "best"),
    (ask(["Once"], stream=True), KEY, "INVALID_ARGUMENT", "ModelStreamInfer"),
    (messages.message("ModelInferRequest")(model_name=NAME), KEY, "INVALID_ARGUMENT", "text_input"),
    (messages.message("ModelInferRequest")(model_name="other", inputs=ask(["a"]).inputs), KEY, "NOT_FOUND", "other"),
    (messages.message("ModelInferRequest")(model_name=NAME, inputs=ask(["a"]).inputs, raw_input_contents=[b"\x09\0\0\0a"]),
     KEY, "INVALID_ARGUMENT", "lengths"),
    (messages.message("ModelInferRequest")(model_name=NAME, inputs=ask(["a"]).inputs, model_version="1"), KEY,
     "INVALID_ARGUMENT", "version"),
])
def test_refusals(channel: Any, request_: Any, metadata: Any, code: str, words: str) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        call(channel, "ModelInfer", request_, metadata)
    assert failed.value.code().name == code and words in failed.value.details()


def test_what_is_known_without_inference(channel: Any) -> None:
    assert call(channel, "ServerLive", metadata=()).live and call(channel, "ServerReady", metadata=()).ready
    named = messages.message("ModelMetadataRequest")(name=NAME)
    assert [one.name for one in call(channel, "ModelMetadata", named).outputs] == ["text_output", "finish_reason"]
    assert call(channel, "ModelReady", messages.message("ModelReadyRequest")(name=NAME)).ready
    assert call(channel, "ServerMetadata").name == "penstock"
    health = health_pb2_grpc.HealthStub(channel)
    assert health.Check(health_pb2.HealthCheckRequest(service=messages.SERVICE), timeout=10).status == 1
    assert next(health.Watch(health_pb2.HealthCheckRequest(), timeout=10)).status == 1
    with pytest.raises(grpc.RpcError, match="no service"):
        health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=10)
    known = reflection.ProtoReflectionDescriptorDatabase(channel)
    assert {messages.SERVICE, "grpc.health.v1.Health"} <= {*known.get_services()}
    described = known.FindFileContainingSymbol(messages.SERVICE)
    assert {method.name for method in described.service[0].method} == {*messages.METHODS}


def test_health_says_that_the_server_drains(server: Served) -> None:
    with served("canary", "--grpc-port", "0", "--max-model-len", "64") as other:
        port = re.search(r"gRPC at 127.0.0.1:([0-9]+)", other.log)
        assert port
        with grpc.insecure_channel(f"127.0.0.1:{port[1]}") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=20)
            assert next(watch).status == 1
            began = time.monotonic()
            other.signal()
            with pytest.raises(grpc.RpcError):
                while next(watch):
                    pass
            assert other.ended() == 0 and time.monotonic() - began < 10


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed, which makes the certificate")
@pytest.mark.parametrize("mutual", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_tls_with_a_key_in_the_certificates_file(tmp_path: Path, mutual: bool) -> None:
    key, certificate, both = (tmp_path / name for name in ("key.pem", "certificate.pem", "both.pem"))
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(certificate),
                    "-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
                   check=True, capture_output=True)
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    asked = ("--ssl-ca-certs", str(certificate), "--ssl-cert-reqs", "2") if mutual else ()
    with served("canary", "--grpc-port", "0", "--ssl-certfile", str(both), *asked, wait=False) as server:
        until = time.monotonic() + 60
        while "ready at https://" not in server.log and time.monotonic() < until:
            assert server.process.poll() is None, server.log
            time.sleep(0.05)
        found = re.search(r"gRPC at (127.0.0.1:[0-9]+)", server.log)
        assert found, server.log
        own = (key.read_bytes(), certificate.read_bytes()) if mutual else (None, None)
        with grpc.secure_channel(found[1], grpc.ssl_channel_credentials(certificate.read_bytes(), *own)) as channel:
            assert call(channel, "ServerReady", metadata=()).ready
            assert call(channel, "ModelInfer", ask(["Once"], max_tokens=2), metadata=()).outputs
        refused = [grpc.insecure_channel(found[1])]
        if mutual:
            refused.append(grpc.secure_channel(found[1], grpc.ssl_channel_credentials(certificate.read_bytes())))
        for channel in refused:
            with channel, pytest.raises(grpc.RpcError) as error:
                call(channel, "ServerReady", metadata=())
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE
