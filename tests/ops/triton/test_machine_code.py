"""What ptxas was seen to get wrong is found, and not in the operators that it was seen in."""

import json

import pytest

from tests.ops.triton.kda_compile import T, launch, meta, results_of, stream
from tests.ops.triton.machine_code import stack_pointer_as_number, upper_words

# As ptxas 12.8 builds two descriptors, each a lower word and an upper one with a carry.
RIGHT = [
    "UMOV UR4, URZ",
    "UIADD3 UR20, UP1, UR8, 0x2, URZ",
    "UIADD3.X UR21, UR4, 0x40000040, URZ, UP1, !UPT",
]
WRONG = ["UIADD3 UR22, UP0, UR5, 0x40, URZ", "UIADD3.X UR23, UR5, -0x7fffffe0, URZ, UP0, !UPT"]
BASE = ["UMOV UR5, 0x400", "ULEA UR5, UR7, UR5, 0x18"]


@pytest.mark.parametrize(
    "lines, wrong",
    [
        (RIGHT, []),
        ([*BASE, *WRONG], WRONG[1:]),
        (["UMOV UR5, URZ", *WRONG], []),
        (["CS2R R2, SRZ", "R2UR UR5, R3", *WRONG], []),
        (["CS2R R2, SRZ", "IADD3 R3, R3, 0x1, RZ", "R2UR UR5, R3", *WRONG], WRONG[1:]),
        (["STL [R1+0x8], RZ", "LDL R6, [R1+0x8]", "R2UR UR5, R6", *WRONG], []),
        (["UMOV UR5, URZ", "UIADD3.64 UR4, UR20, 0x2, URZ", *WRONG], WRONG[1:]),
        (["@!UP0 UMOV UR5, 0x10", *WRONG], WRONG[1:]),
    ],
)
def test_upper_words_are_added_to_zero(lines, wrong):
    assert upper_words(lines) == wrong


def test_the_stack_pointer_is_no_number():
    frame = [
        "IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28]",
        "VIADD R1, R1, 0xffffffe0",
        "STL [R1+0x8], R5",
    ]
    assert stack_pointer_as_number([*frame, "R2UR UR4, R1"]) == ["R2UR UR4, R1"]


@pytest.mark.parametrize("name", ["rwkv7_prepare", "rwkv7_recompute"])
def test_values_that_are_as_narrow_as_a_tile(name, narrow):
    """Where a wrong word was seen: 16 bits, values 32 wide, which the op pads."""
    (kernel,) = narrow[name]
    assert not kernel["wrong"]


@pytest.fixture(scope="module")
def narrow():
    return results_of(__name__)


def main():
    from tests.ops.triton.ahead_of_time import compiled_launches, with_wrong_instructions
    from titan_linear.ops.triton.rwkv7 import RWKV7

    K, V, H = 64, 32, 2
    inputs = [meta(T, H, dim, kind="bfloat16") for dim in (K, K, V, K, K)] + [
        meta(T, H, K, kind="float32")
    ]
    chunks, *_ = stream(H, K, V, False)
    with compiled_launches() as launches:
        untold, none = ([None] * 7, [1.0, 0.0], 0), dict.fromkeys(RWKV7.tiles._fields)
        *_, inverse, _ = launch(RWKV7.prepare, inputs, list(none.values()), chunks, *untold)
        launch(
            RWKV7.recompute, inputs, list((none | {"inverse": inverse}).values()), chunks, *untold
        )
    names = ["rwkv7_prepare", "rwkv7_recompute"]
    print(
        json.dumps(
            with_wrong_instructions(
                {name: [made] for name, made in zip(names, launches, strict=True)}
            )
        )
    )


if __name__ == "__main__":
    main()
