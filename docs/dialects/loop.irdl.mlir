// The loop dialect for mlir-opt 22, generated from its declaration: do not edit.
irdl.dialect @loop {
  irdl.operation @apply {
    %c0 = irdl.any
    %c1 = irdl.any
    %c2 = irdl.any
    %c3 = irdl.is "neg"
    %c4 = irdl.is "abs"
    %c5 = irdl.is "sign"
    %c6 = irdl.is "exp"
    %c7 = irdl.is "exp2"
    %c8 = irdl.is "expm1"
    %c9 = irdl.is "log"
    %c10 = irdl.is "log2"
    %c11 = irdl.is "log1p"
    %c12 = irdl.is "sqrt"
    %c13 = irdl.is "rsqrt"
    %c14 = irdl.is "reciprocal"
    %c15 = irdl.is "sin"
    %c16 = irdl.is "cos"
    %c17 = irdl.is "tanh"
    %c18 = irdl.is "sigmoid"
    %c19 = irdl.is "erf"
    %c20 = irdl.is "relu"
    %c21 = irdl.is "floor"
    %c22 = irdl.is "ceil"
    %c23 = irdl.is "round"
    %c24 = irdl.is "trunc"
    %c25 = irdl.is "isnan"
    %c26 = irdl.is "bit_not"
    %c27 = irdl.is "cast"
    %c28 = irdl.is "rounded"
    %c29 = irdl.is "add"
    %c30 = irdl.is "sub"
    %c31 = irdl.is "mul"
    %c32 = irdl.is "div"
    %c33 = irdl.is "floor_div"
    %c34 = irdl.is "trunc_div"
    %c35 = irdl.is "rem"
    %c36 = irdl.is "fmod"
    %c37 = irdl.is "pow"
    %c38 = irdl.is "atan2"
    %c39 = irdl.is "maximum"
    %c40 = irdl.is "minimum"
    %c41 = irdl.is "eq"
    %c42 = irdl.is "ne"
    %c43 = irdl.is "lt"
    %c44 = irdl.is "le"
    %c45 = irdl.is "gt"
    %c46 = irdl.is "ge"
    %c47 = irdl.is "bit_and"
    %c48 = irdl.is "bit_or"
    %c49 = irdl.is "bit_xor"
    %c50 = irdl.is "select"
    %c51 = irdl.any_of(%c3, %c4, %c5, %c6, %c7, %c8, %c9, %c10, %c11, %c12, %c13, %c14, %c15, %c16, %c17, %c18, %c19, %c20, %c21, %c22, %c23, %c24, %c25, %c26, %c27, %c28, %c29, %c30, %c31, %c32, %c33, %c34, %c35, %c36, %c37, %c38, %c39, %c40, %c41, %c42, %c43, %c44, %c45, %c46, %c47, %c48, %c49, %c50)
    %c52 = irdl.is f64
    %c53 = irdl.is f32
    %c54 = irdl.is bf16
    %c55 = irdl.is f16
    %c56 = irdl.is f8E4M3FN
    %c57 = irdl.is f8E5M2
    %c58 = irdl.is i64
    %c59 = irdl.is i32
    %c60 = irdl.is i16
    %c61 = irdl.is i8
    %c62 = irdl.is ui64
    %c63 = irdl.is ui32
    %c64 = irdl.is ui16
    %c65 = irdl.is ui8
    %c66 = irdl.is i1
    %c67 = irdl.is complex<f32>
    %c68 = irdl.is complex<f64>
    %c69 = irdl.any_of(%c52, %c53, %c54, %c55, %c56, %c57, %c58, %c59, %c60, %c61, %c62, %c63, %c64, %c65, %c66, %c67, %c68)
    irdl.operands(x: %c0, rest: variadic %c1)
    irdl.results(y: %c2)
    irdl.attributes { "fn" = %c51, "dtype" = %c69 }
  }
  irdl.operation @constant {
    %c0 = irdl.any
    %c1 = irdl.base "#builtin.integer"
    %c2 = irdl.base "#builtin.float"
    %c3 = irdl.any_of(%c1, %c2)
    %c4 = irdl.is f64
    %c5 = irdl.is f32
    %c6 = irdl.is bf16
    %c7 = irdl.is f16
    %c8 = irdl.is f8E4M3FN
    %c9 = irdl.is f8E5M2
    %c10 = irdl.is i64
    %c11 = irdl.is i32
    %c12 = irdl.is i16
    %c13 = irdl.is i8
    %c14 = irdl.is ui64
    %c15 = irdl.is ui32
    %c16 = irdl.is ui16
    %c17 = irdl.is ui8
    %c18 = irdl.is i1
    %c19 = irdl.is complex<f32>
    %c20 = irdl.is complex<f64>
    %c21 = irdl.any_of(%c4, %c5, %c6, %c7, %c8, %c9, %c10, %c11, %c12, %c13, %c14, %c15, %c16, %c17, %c18, %c19, %c20)
    irdl.results(y: %c0)
    irdl.attributes { "value" = %c3, "dtype" = %c21 }
  }
  irdl.operation @index {
    %c0 = irdl.any
    %c1 = irdl.base "#builtin.integer"
    irdl.results(y: %c0)
    irdl.attributes { "dim" = %c1 }
  }
  irdl.operation @load {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.any
    %c2 = irdl.any
    %c3 = irdl.base "#builtin.array"
    %c4 = irdl.base "#builtin.dense_array"
    %c5 = irdl.is true
    %c6 = irdl.is false
    %c7 = irdl.any_of(%c5, %c6)
    %c8 = irdl.is true
    %c9 = irdl.is false
    %c10 = irdl.any_of(%c8, %c9)
    irdl.operands(tensor: %c0, indices: variadic %c1)
    irdl.results(y: %c2)
    irdl.attributes { "map" = %c3, "dynamic" = %c4, "guarded" = %c7, "checked" = %c10 }
  }
  irdl.operation @random {
    %c0 = irdl.any
    %c1 = irdl.any
    %c2 = irdl.any
    %c3 = irdl.any
    %c4 = irdl.any
    %c5 = irdl.any
    %c6 = irdl.base "#builtin.integer"
    irdl.operands(seed: %c0, counter: %c1, micro_batch: %c2, element: %c3, stream: %c4)
    irdl.results(y: %c5)
    irdl.attributes { "digits" = %c6 }
  }
  irdl.operation @reduce {
    %c0 = irdl.any
    %c1 = irdl.any
    %c2 = irdl.is "sum"
    %c3 = irdl.is "max"
    %c4 = irdl.is "min"
    %c5 = irdl.is "prod"
    %c6 = irdl.is "or"
    %c7 = irdl.is "and"
    %c8 = irdl.any_of(%c2, %c3, %c4, %c5, %c6, %c7)
    %c9 = irdl.base "#builtin.dense_array"
    %c10 = irdl.is f64
    %c11 = irdl.is f32
    %c12 = irdl.is bf16
    %c13 = irdl.is f16
    %c14 = irdl.is f8E4M3FN
    %c15 = irdl.is f8E5M2
    %c16 = irdl.is i64
    %c17 = irdl.is i32
    %c18 = irdl.is i16
    %c19 = irdl.is i8
    %c20 = irdl.is ui64
    %c21 = irdl.is ui32
    %c22 = irdl.is ui16
    %c23 = irdl.is ui8
    %c24 = irdl.is i1
    %c25 = irdl.is complex<f32>
    %c26 = irdl.is complex<f64>
    %c27 = irdl.any_of(%c10, %c11, %c12, %c13, %c14, %c15, %c16, %c17, %c18, %c19, %c20, %c21, %c22, %c23, %c24, %c25, %c26)
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "kind" = %c8, "dims" = %c9, "dtype" = %c27 }
  }
  irdl.operation @space {
    %c0 = irdl.base "#builtin.dense_array"
    irdl.attributes { "sizes" = %c0 }
  }
  irdl.operation @store {
    %c0 = irdl.any
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.any
    %c3 = irdl.base "#builtin.array"
    %c4 = irdl.base "#builtin.dense_array"
    irdl.operands(value: %c0, tensor: %c1, indices: variadic %c2)
    irdl.attributes { "map" = %c3, "dynamic" = %c4 }
  }
}
