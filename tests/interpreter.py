"""Triton's interpreter without work whose results it does not use, which is most of the time of a kernel's test.

The kernels' numbers and the interpreter's own checks stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any


def quicken() -> None:
    """For this process, whose kernels are interpreted (TRITON_INTERPRET=1)."""
    if not find_spec("triton"):
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # int32 arithmetic is repeated in int64, for an assertion that is one of debugging
        builder.options = replace(builder.options, sanitize_overflow=False)

    patch_lang = interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        """A kernel's launch makes tl's functions the interpreter's; so did each call of a function inside, again."""
        modules = [module for module in fn.__globals__.values() if module is tl or module is tl.core]
        todo = any(tl.core.is_builtin(module.load) for module in modules)
        return patch_lang(fn) if todo or not modules else interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
