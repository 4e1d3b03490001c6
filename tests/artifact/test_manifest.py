"""Tests of manifests and their JSON form."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from dynaxla.artifact.manifest import ArraySpec, CheckSpec, DamagedModelError, Manifest, decode, encode
from dynaxla.artifact.structures import ARRAY, sequence

MANIFEST = Manifest(
    name="model",
    platforms=("cpu", "tpu"),
    dimensions={"batch": (2, None), "length": (1, 8)},
    weights=(ArraySpec("weight", (3,), "bfloat16"), ArraySpec("mean", (), "float32")),
    inputs=(ArraySpec("x", ("batch", 3, "2*length"), "int64"),),
    outputs=(ArraySpec("out", ("batch",), "float32"),),
    arguments=sequence("tuple", [sequence("tuple", [ARRAY]), {"kind": "dict", "keys": [], "items": []}]),
    results=ARRAY,
    updates=("mean",),
    checks=(CheckSpec("IndexError", "out of range"),),
    draws_random=True,
    calling_convention=10,
    is_polymorphic=True,
    made_with={"torch": "2.13"},
)
FILES = {"program": b"abc", "weights": b""}


def test_decoded_manifest_equals_the_encoded_one() -> None:
    assert decode(encode(MANIFEST, FILES), FILES) == MANIFEST


def test_order_of_program_inputs_and_outputs() -> None:
    assert [spec.name for spec in MANIFEST.program_inputs()] == ["weight", "mean", "key", "x"]
    assert [spec.name for spec in MANIFEST.program_outputs()] == ["out", "mean", "failed_check"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": None}, "incomplete"),
        ({"files": None}, "incomplete"),
        ({"dimensions": []}, "incomplete"),
        ({"updates": ["other"]}, r"updates of \['other'\], which are not weights"),
        ({"results": sequence("list", [])}, "its results have 0 arrays, and it lists 1 outputs"),
        ({"inputs": [{"name": "x", "shape": [1.5], "dtype": "int64"}]}, "an unknown dtype or an invalid size"),
        ({"inputs": [{"name": "x", "shape": [1], "dtype": "object"}]}, "an unknown dtype or an invalid size"),
    ],
)
def test_inconsistent_manifest_with_a_valid_hash_is_refused(changes: dict[str, Any], message: str) -> None:
    facts = json.loads(encode(MANIFEST, FILES)) | changes
    del facts["sha256"]
    facts["sha256"] = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    with pytest.raises(DamagedModelError, match=message):
        decode(json.dumps(facts).encode(), FILES)


def test_missing_additional_and_changed_files_are_refused() -> None:
    data = encode(MANIFEST, FILES)
    for files, message in (
        ({"program": b"abc"}, "weights is missing"),
        ({**FILES, "more": b""}, "more is not in the manifest"),
        ({**FILES, "program": b"abd"}, "its hash differs"),
    ):
        with pytest.raises(DamagedModelError, match=message):
            decode(data, files)
