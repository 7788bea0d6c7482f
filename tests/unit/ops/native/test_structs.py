"""The structures shared with the compiled kernels are the same on both sides, or nothing is called."""

from __future__ import annotations

from ctypes import Structure, c_char_p, c_int32, c_int64, c_void_p

import pytest

from eagle_server.ops.native import structs as native_structs
from eagle_server.ops.native.build import BuildError, library
from eagle_server.ops.native.structs import AcceptedStruct, check_layout


def table() -> str:
    try:
        loaded = library()
    except BuildError as error:
        pytest.skip(str(error))
    loaded.eagle_layout.restype = c_char_p
    return loaded.eagle_layout().decode()


def test_every_structure_is_compared_and_agrees() -> None:
    declared = {cls for cls in vars(native_structs).values() if isinstance(cls, type) and issubclass(cls, Structure)}
    assert set(native_structs._STRUCTS) == declared - {Structure}
    check_layout(table())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (AcceptedStruct._fields_[:-1], r"Accepted: 4 fields in 24 bytes here, 5 in 32 there"),
        ((*AcceptedStruct._fields_, ("more", c_int32)), r"Accepted\.more: .*the kernels have nothing"),
        (
            (("tokens", c_void_p), ("features", c_void_p), ("width", c_int64)),
            r"Accepted\.width: offset 16 and size 8 here, but the kernels have features_are_bf16:16:4",
        ),
    ],
    ids=["lost", "added", "another type"],
)
def test_a_difference_is_named(fields: tuple[tuple[str, type], ...], message: str) -> None:
    damaged = type("AcceptedStruct", (Structure,), {"_fields_": fields})
    (line,) = [line for line in table().splitlines() if line.startswith("Accepted ")]
    with pytest.raises(RuntimeError, match=f"kernels/cpu: {message}"):
        check_layout(line, [damaged])


def test_a_structure_of_one_side_alone_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"Another: not in native_structs\.py"):
        check_layout("Another 8 field:0:8", [])
