"""Triton's interpreter with bfloat16 as a GPU has it: cast to nearest, computed in float32.

The interpreter keeps bfloat16 numbers as 16-bit integers and computes with these: its products are garbage, and its
casts cut bits off.
"""

from __future__ import annotations

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype


def _widened(x: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(x).astype(np.uint32) << 16).view(np.float32)


def _rounded(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _is_bfloat16(x: TensorHandle) -> bool:
    return x.dtype.scalar == tl.bfloat16


def interpret_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """For casts, arithmetic and products, which is what the kernels of the delta rules do with bfloat16."""
    cast_others, binary_others = InterpreterBuilder.cast_impl, InterpreterBuilder.binary_op
    unary_others, dot_others = InterpreterBuilder.unary_op, InterpreterBuilder.create_dot

    def cast(self, x, dtype):
        if _is_bfloat16(x) and dtype.scalar != tl.bfloat16:
            return TensorHandle(_widened(x.data).astype(_get_np_dtype(dtype)), dtype.scalar)
        if dtype.scalar == tl.bfloat16 and not _is_bfloat16(x):
            return TensorHandle(_rounded(x.data.astype(np.float32)), tl.bfloat16)
        return cast_others(self, x, dtype)

    def binary(self, a, b, op):
        if not _is_bfloat16(a):
            return binary_others(self, a, b, op)
        x = op(_widened(a.data), _widened(b.data))
        return (
            TensorHandle(x, tl.int1) if x.dtype == bool else TensorHandle(_rounded(x), tl.bfloat16)
        )

    def unary(self, a, op):
        if not _is_bfloat16(a):
            return unary_others(self, a, op)
        return TensorHandle(_rounded(op(_widened(a.data))), tl.bfloat16)

    def dot(self, a, b, *others):
        if _is_bfloat16(a):
            a, b = (TensorHandle(_widened(x.data), tl.float32) for x in (a, b))
        return dot_others(self, a, b, *others)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast)
    monkeypatch.setattr(
        InterpreterBuilder, "create_fp_to_fp", lambda self, x, dtype, rounding: cast(self, x, dtype)
    )
    monkeypatch.setattr(InterpreterBuilder, "binary_op", binary)
    monkeypatch.setattr(InterpreterBuilder, "unary_op", unary)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
