"""The messages and the service of KServe's open inference protocol (and Triton's streams) as protobuf classes.

They are made from the tables below, as the protocol's .proto file describes them, so that no generated code is kept."""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"
_NAMED = "string name; string version"
_TENSOR = "string name; string datatype; *int64 shape; %InferParameter parameters; InferTensorContents contents"
_MESSAGES = {
    "ServerLiveRequest": "", "ServerLiveResponse": "bool live",
    "ServerReadyRequest": "", "ServerReadyResponse": "bool ready",
    "ModelReadyRequest": _NAMED, "ModelReadyResponse": "bool ready",
    "ServerMetadataRequest": "", "ServerMetadataResponse": "string name; string version; *string extensions",
    "ModelMetadataRequest": _NAMED,
    "ModelMetadataResponse": "string name; *string versions; string platform; *ModelMetadataResponse.TensorMetadata inputs; "
                             "*ModelMetadataResponse.TensorMetadata outputs",
    "ModelMetadataResponse.TensorMetadata": "string name; string datatype; *int64 shape",
    "InferParameter": "|bool bool_param; |int64 int64_param; |string string_param; |double double_param; |uint64 uint64_param",
    "InferTensorContents": "*bool bool_contents; *int32 int_contents; *int64 int64_contents; *uint32 uint_contents; "
                           "*uint64 uint64_contents; *float fp32_contents; *double fp64_contents; *bytes bytes_contents",
    "ModelInferRequest": "string model_name; string model_version; string id; %InferParameter parameters; "
                         "*ModelInferRequest.InferInputTensor inputs; *ModelInferRequest.InferRequestedOutputTensor outputs; "
                         "*bytes raw_input_contents",
    "ModelInferRequest.InferInputTensor": _TENSOR,
    "ModelInferRequest.InferRequestedOutputTensor": "string name; %InferParameter parameters",
    "ModelInferResponse": "string model_name; string model_version; string id; %InferParameter parameters; "
                          "*ModelInferResponse.InferOutputTensor outputs; *bytes raw_output_contents",
    "ModelInferResponse.InferOutputTensor": _TENSOR,
    "ModelStreamInferResponse": "string error_message; ModelInferResponse infer_response"}
"""Fields in the order of their numbers: * repeated, % a map from strings, | one of several."""

METHODS = {"ServerLive": False, "ServerReady": False, "ModelReady": False, "ServerMetadata": False, "ModelMetadata": False,
           "ModelInfer": False, "ModelStreamInfer": True}
"""The service's methods, and whether requests and answers are streams."""

_Field = descriptor_pb2.FieldDescriptorProto
_KINDS = {"bool": _Field.TYPE_BOOL, "int32": _Field.TYPE_INT32, "int64": _Field.TYPE_INT64, "uint32": _Field.TYPE_UINT32,
          "uint64": _Field.TYPE_UINT64, "float": _Field.TYPE_FLOAT, "double": _Field.TYPE_DOUBLE, "string": _Field.TYPE_STRING,
          "bytes": _Field.TYPE_BYTES}


def request_of(method: str) -> str:
    return "ModelInferRequest" if method == "ModelStreamInfer" else f"{method}Request"


def _described() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="penstock/open_inference.proto", package=PACKAGE, syntax="proto3")
    made: dict[str, Any] = {}
    for name, fields in _MESSAGES.items():
        parent, _, own = name.rpartition(".")
        made[name] = message = made[parent].nested_type.add(name=own) if parent else file.message_type.add(name=own)
        for number, text in enumerate(filter(None, fields.split("; ")), 1):
            _add(message, name, number, text)
    service = file.service.add(name=SERVICE.removeprefix(f"{PACKAGE}."))
    for method, streams in METHODS.items():
        service.method.add(name=method, input_type=f".{PACKAGE}.{request_of(method)}", client_streaming=streams,
                           output_type=f".{PACKAGE}.{method}Response", server_streaming=streams)
    return file


def _add(message: Any, path: str, number: int, text: str) -> None:
    kind, name = text.lstrip("*%|").split()
    mark = text[0] if text[0] in "*%|" else ""
    field = message.field.add(name=name, number=number, label=_Field.LABEL_REPEATED if mark in ("*", "%") else
                              _Field.LABEL_OPTIONAL)
    if mark == "|":
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    if mark == "%":
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
        entry.field.add(name="value", number=2, type=_Field.TYPE_MESSAGE, type_name=f".{PACKAGE}.{kind}",
                        label=_Field.LABEL_OPTIONAL)
        kind = f"{path}.{entry.name}"
    if kind in _KINDS:
        field.type = _KINDS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"


_POOL = descriptor_pool.Default()
_POOL.Add(_described())


def message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
