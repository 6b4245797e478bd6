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
    # int32 arithmetic is repeated in int64, for an assertion that is one of debugging
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)

    call_quickly(tl, semantic, interpreter)
    remember_types(tl, semantic, interpreter)
    pass_over_checks(tl, semantic, interpreter)


def call_quickly(tl: Any, semantic: Any, interpreter: Any) -> None:
    """A kernel's launch makes tl's functions the interpreter's; so did each call of a function inside, again."""
    patch_lang, unwrap, modules_of = interpreter._patch_lang, tl.core._unwrap_if_constexpr, {}
    own = semantic.TritonSemantic(interpreter.interpreter_builder)
    as_they_are = {tl.core.tensor, tl.core.dtype, tl.core.block_type, int, float, bool, type(None)}

    def patch_once(fn):
        names = fn.__globals__
        if id(names) not in modules_of:  # with `names`, whose id no other shall have
            modules_of[id(names)] = [m for m in names.values() if m is tl or m is tl.core], names
        modules, _ = modules_of[id(names)]
        todo = any(tl.core.is_builtin(module.load) for module in modules)
        return patch_lang(fn) if todo or not modules else interpreter._LangPatchScope()

    def patch_attribute(obj, name, member, builder, scope):
        # without the question whether it has a `_semantic`
        fn = getattr(member, "__wrapped__", member)

        def call(*args, **kwargs):
            kwargs["_semantic"] = own
            return fn(*args, **kwargs)

        scope.set_attr(obj, name, call)

    def unwrap_quickly(x):
        return x if type(x) in as_they_are else unwrap(x)

    interpreter._patch_lang, interpreter._patch_attr = patch_once, patch_attribute
    tl.core._unwrap_if_constexpr = unwrap_quickly


def pass_over_checks(tl: Any, semantic: Any, interpreter: Any) -> None:
    """Of two tensors of one type, or a pointer and an offset, which need no cast; and the numbers in a kernel are made
    into tensors once."""
    check, make_constant, constants = (
        semantic.TritonSemantic.binary_op_type_checking_impl,
        semantic.TritonSemantic.scalar_constant,
        {},
    )
    tensor, half = tl.core.tensor, (tl.float16, tl.bfloat16)

    def alike(
        self,
        lhs,
        rhs,
        allow_lhs_ptr=False,
        allow_rhs_ptr=False,
        arithmetic_check=True,
        div_or_mod=False,
    ):
        if type(lhs) is tensor and type(rhs) is tensor:
            a, b = lhs.dtype, rhs.dtype
            if a.is_ptr():
                passes = allow_lhs_ptr and b.is_int()
            else:
                passes = a is b and not (div_or_mod and a in half)
            if passes:
                return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def constant(self, value, dtype):
        key = type(value), value, dtype and dtype.name
        if key not in constants:
            handle = make_constant(self, value, dtype).handle
            handle.data.flags.writeable = False
            constants[key] = handle.data, handle.dtype
        return self.tensor(interpreter.TensorHandle(*constants[key]), dtype)

    semantic.TritonSemantic.binary_op_type_checking_impl = alike
    semantic.TritonSemantic.scalar_constant = constant


def remember_types(tl: Any, semantic: Any, interpreter: Any) -> None:
    """For each operation Triton makes types anew, with their names and shapes of compile-time numbers, and goes through
    the steps of broadcasting where shapes are the same."""
    core, np_dtype, of_shape, of_element = tl.core, interpreter._get_np_dtype, {}, {}
    scalar = core.constexpr(1), core.tuple([])

    def block(self, element_ty, shape):
        sizes = tuple(map(core._unwrap_if_constexpr, shape))
        if sizes not in of_shape:
            make_block(self, element_ty, shape)
            of_tensor = core.constexpr(self.numel), core.tuple([core.constexpr(n) for n in sizes])
            of_shape[sizes] = self.shape, self.numel, of_tensor
        self.element_ty = element_ty
        self.shape, self.numel, self.of_tensor = of_shape[sizes]

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensor if type.is_block() else scalar

    def numpy_dtype(type):
        type = type.scalar
        key = "pointer" if type.is_ptr() else type.name
        if key not in of_element:
            of_element[key] = np_dtype(type)
        return of_element[key]

    def broadcast(self, lhs, rhs):
        same = (
            lhs.type.is_block()
            and rhs.type.is_block()
            and lhs.type.shape.values == rhs.type.shape.values
        )
        return (lhs, rhs) if same else make_alike(self, lhs, rhs)

    make_block, make_alike = core.block_type.__init__, semantic.TritonSemantic.broadcast_impl_value
    core.block_type.__init__, core.tensor.__init__ = block, tensor
    core.block_type.name = property(
        lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, name: None
    )
    interpreter._get_np_dtype, semantic.TritonSemantic.broadcast_impl_value = numpy_dtype, broadcast
