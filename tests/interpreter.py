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
    from triton.language import semantic
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
    remember_types(tl, semantic, interpreter)


def remember_types(tl: Any, semantic: Any, interpreter: Any) -> None:
    """For each operation Triton makes types anew, with their names and shapes of compile-time numbers, and goes through
    the steps of broadcasting where shapes are the same."""
    core, np_dtype, of_shape, of_element = tl.core, interpreter._get_np_dtype, {}, {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(map(core._unwrap_if_constexpr, shape))
        if sizes not in of_shape:
            make_block(self, element_ty, shape)
            of_shape[sizes] = self.shape, self.numel, core.tuple([core.constexpr(n) for n in sizes])
        self.element_ty = element_ty
        self.shape, self.numel, _ = of_shape[sizes]

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in of_shape:
            assert not sizes
            of_shape[()] = (), 1, core.tuple([])
        _, numel, self.shape = of_shape[sizes]
        self.numel = core.constexpr(numel)

    def numpy_dtype(type: Any) -> Any:
        type = type.scalar
        key = "pointer" if type.is_ptr() else type.name
        if key not in of_element:
            of_element[key] = np_dtype(type)
        return of_element[key]

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        same = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values
        return (lhs, rhs) if same else make_alike(self, lhs, rhs)

    make_block, make_alike = core.block_type.__init__, semantic.TritonSemantic.broadcast_impl_value
    core.block_type.__init__, core.tensor.__init__ = block, tensor
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, name: None)
    interpreter._get_np_dtype, semantic.TritonSemantic.broadcast_impl_value = numpy_dtype, broadcast
