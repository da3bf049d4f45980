"""Every message, field, enum, value, service and rpc of the protos has a comment."""

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
PROTOS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").glob("*.proto"))
Path_ = tuple[int, ...]
PACKAGES = {
    "protos/sentencepiece.proto": "weft.sentencepiece",
    "protos/kserve.proto": "inference",
    "protos/smg_common.proto": "smg.grpc.common",
    "protos/vllm_engine.proto": "vllm.grpc.engine",
}
"""The packages of protocols that others have defined; all other protos are of weft.v1."""


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    """The protos as protoc parses them, with comments."""
    out = tmp_path_factory.mktemp("protos") / "descriptors"
    well_known = str(files("grpc_tools") / "_proto")
    arguments = [f"-I{ROOT}", f"-I{well_known}", "--include_source_info", f"--descriptor_set_out={out}"]
    assert protoc.main(["protoc", *arguments, *PROTOS]) == 0
    described = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    return {file.name: file for file in described.file}


def elements(file: descriptor_pb2.FileDescriptorProto) -> Iterator[tuple[str, Path_]]:
    """The name and path (as in SourceCodeInfo) of each element that needs a comment."""
    for i, message in enumerate(file.message_type):
        yield from elements_of_message(message, (4, i), message.name)
    for i, enum in enumerate(file.enum_type):
        yield from elements_of_enum(enum, (5, i), enum.name)
    for i, service in enumerate(file.service):
        yield service.name, (6, i)
        for j, method in enumerate(service.method):
            yield f"{service.name}.{method.name}", (6, i, 2, j)


def elements_of_message(message: descriptor_pb2.DescriptorProto, path: Path_, name: str) -> Iterator[tuple[str, Path_]]:
    if message.options.map_entry:
        return
    yield name, path
    for i, field in enumerate(message.field):
        yield f"{name}.{field.name}", (*path, 2, i)
    synthetic = {field.oneof_index for field in message.field if field.proto3_optional}
    for i, oneof in enumerate(message.oneof_decl):
        if i not in synthetic:
            yield f"{name}.{oneof.name}", (*path, 8, i)
    for i, nested in enumerate(message.nested_type):
        yield from elements_of_message(nested, (*path, 3, i), f"{name}.{nested.name}")
    for i, enum in enumerate(message.enum_type):
        yield from elements_of_enum(enum, (*path, 4, i), f"{name}.{enum.name}")


def elements_of_enum(enum: descriptor_pb2.EnumDescriptorProto, path: Path_, name: str) -> Iterator[tuple[str, Path_]]:
    yield name, path
    for i, value in enumerate(enum.value):
        yield f"{name}.{value.name}", (*path, 2, i)


def uncommented(file: descriptor_pb2.FileDescriptorProto) -> list[str]:
    comments = {tuple(location.path): location.leading_comments.strip() for location in file.source_code_info.location}
    return [name for name, path in elements(file) if not comments.get(path)]


@pytest.mark.parametrize("proto", PROTOS)
def test_every_element_is_commented(parsed: dict[str, descriptor_pb2.FileDescriptorProto], proto: str) -> None:
    assert uncommented(parsed[proto]) == []
    assert parsed[proto].package == PACKAGES.get(proto, "weft.v1")


@pytest.mark.parametrize("proto", [proto for proto in PROTOS if proto not in PACKAGES])
def test_the_zero_of_an_enum_is_unspecified(parsed: dict[str, descriptor_pb2.FileDescriptorProto], proto: str) -> None:
    enums = [*parsed[proto].enum_type, *(enum for message in parsed[proto].message_type for enum in message.enum_type)]
    zeros = {enum.name: enum.value[0] for enum in enums}
    assert all(zero.number == 0 and zero.name.endswith("_UNSPECIFIED") for zero in zeros.values()), zeros


def test_a_missing_comment_is_found(tmp_path: Path) -> None:
    (tmp_path / "bare.proto").write_text(
        """syntax = "proto3";
        // A message.
        message Fox {
          string name = 1;
          // What it does.
          oneof act { int32 run = 2; }
          enum Mood { MOOD_UNSPECIFIED = 0; }
        }
        // A service.
        service Den { rpc Call(Fox) returns (Fox); }"""
    )
    out = tmp_path / "descriptors"
    arguments = [f"-I{tmp_path}", "--include_source_info", f"--descriptor_set_out={out}", "bare.proto"]
    assert protoc.main(["protoc", *arguments]) == 0
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    assert uncommented(file) == ["Fox.name", "Fox.run", "Fox.Mood", "Fox.Mood.MOOD_UNSPECIFIED", "Den.Call"]
