"""Loads and stores of global memory by address, four numbers at a time where addresses are multiples of 16 bytes."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from horovod_onebit.kernels.toolchain import intrinsic

GLOBAL = 1  # the address space
FLOAT, HALF = ir.FloatType(), ir.HalfType()
SHORT, INT, LONG, BYTE = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.IntType(8)
FOUR = types.UniTuple(types.float32, 4)


def _pointer(builder: Any, address: Any, index: Any, element: Any) -> Any:
    start = builder.inttoptr(address, ir.PointerType(element, GLOBAL))
    return builder.gep(start, [index])


def _storer(value: Any, element: Any) -> Any:
    def store(typing_context, address, index, number):
        def code(context, builder, signature, args):
            builder.store(args[2], _pointer(builder, args[0], args[1], element))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, value), code

    return intrinsic(store)


def _constant(result: Any, element: Any) -> Any:
    """A load of what nobody writes to while the kernel runs, which the compiler may do once and early."""

    def load(typing_context, address, index):
        def code(context, builder, signature, args):
            value = builder.load(_pointer(builder, args[0], args[1], element))
            value.set_metadata("invariant.load", builder.module.add_metadata([]))
            return value

        return result(types.int64, types.int64), code

    return intrinsic(load)


constant_i64 = _constant(types.int64, LONG)
constant_f32 = _constant(types.float32, FLOAT)
constant_u8 = _constant(types.uint8, BYTE)
store_u8 = _storer(types.uint8, BYTE)
store_f32 = _storer(types.float32, FLOAT)
store_f64 = _storer(types.float64, ir.DoubleType())


def _widen(builder: Any, value: Any, element: Any) -> Any:
    """float32 of a float16, or of the bits of a bfloat16, which are the upper half of a float32's."""
    if element is HALF:
        return builder.fpext(value, FLOAT)
    if element is SHORT:
        return builder.bitcast(builder.shl(builder.zext(value, INT), ir.Constant(INT, 16)), FLOAT)
    return value


def _by_kind(builder: Any, kind: Any, load: Any, result: Any) -> Any:
    """``load(element type)`` of the kind of numbers that ``kind`` says; a branch that a whole kernel takes alike."""
    blocks, ends, values = [], [], []
    join = builder.append_basic_block("loaded")
    switch = builder.switch(kind, join)
    for number, element in enumerate((FLOAT, HALF, SHORT)):
        block = builder.append_basic_block(f"kind{number}")
        switch.add_case(ir.Constant(kind.type, number), block)
        blocks.append(block)
        with builder.goto_block(block):
            values.append(load(element))
            ends.append(builder.block)
            builder.branch(join)
    before = builder.block
    builder.position_at_end(join)
    merged = builder.phi(result)
    merged.add_incoming(ir.Constant(result, ir.Undefined), before)
    for value, end in zip(values, ends, strict=True):
        merged.add_incoming(value, end)
    return merged


@intrinsic
def load_f32(typing_context, address, index, kind):
    def code(context, builder, signature, args):
        def load(element):
            return _widen(builder, builder.load(_pointer(builder, args[0], args[1], element)), element)

        return _by_kind(builder, args[2], load, FLOAT)

    return types.float32(types.int64, types.int64, types.int64), code


@intrinsic
def load_vector(typing_context, address, index, kind):
    def code(context, builder, signature, args):
        result = context.get_value_type(FOUR)

        def load(element):
            vector = ir.VectorType(element, 4)
            pointer = _pointer(builder, args[0], args[1], element)
            wide = builder.load(builder.bitcast(pointer, ir.PointerType(vector, GLOBAL)))
            wide.align = 16 if element is FLOAT else 8
            numbers = [builder.extract_element(wide, ir.Constant(INT, i)) for i in range(4)]
            return context.make_tuple(builder, FOUR, [_widen(builder, number, element) for number in numbers])

        return _by_kind(builder, args[2], load, result)

    return FOUR(types.int64, types.int64, types.int64), code


@intrinsic
def store_vector(typing_context, address, index, values):
    def code(context, builder, signature, args):
        vector = ir.VectorType(FLOAT, 4)
        wide = ir.Constant(vector, ir.Undefined)
        for i in range(4):
            wide = builder.insert_element(wide, builder.extract_value(args[2], i), ir.Constant(INT, i))
        pointer = _pointer(builder, args[0], args[1], FLOAT)
        builder.store(wide, builder.bitcast(pointer, ir.PointerType(vector, GLOBAL)), align=16)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, FOUR), code


@intrinsic
def byte_of(typing_context, low, high):
    """Two nibbles as one byte."""

    def code(context, builder, signature, args):
        return builder.trunc(builder.or_(args[0], builder.shl(args[1], ir.Constant(INT, 4))), BYTE)

    return types.uint8(types.int32, types.int32), code
