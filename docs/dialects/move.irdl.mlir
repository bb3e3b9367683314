// The move dialect for mlir-opt 22, generated from its declaration: do not edit.
irdl.dialect @move {
  irdl.type @buffer {
  }
  irdl.type @memory {
  }
  irdl.type @token {
  }
  irdl.attribute @space {
    %c0 = irdl.base "#builtin.string"
    %c1 = irdl.base "#builtin.integer"
    irdl.parameters(kind: %c0, index: %c1)
  }
  irdl.operation @alloc {
    %c0 = irdl.base @move::@memory
    %c1 = irdl.base @move::@buffer
    %c2 = irdl.base "#builtin.type"
    %c3 = irdl.base @move::@space
    %c4 = irdl.is "grad"
    %c5 = irdl.is "activation"
    %c6 = irdl.is "transient"
    %c7 = irdl.is "output"
    %c8 = irdl.is "workspace"
    %c9 = irdl.any_of(%c4, %c5, %c6, %c7, %c8)
    %c10 = irdl.base "#builtin.integer"
    irdl.operands(arena: optional %c0)
    irdl.results(buffer: %c1)
    irdl.attributes { "type" = %c2, "space" = %c3, "lifetime" = %c9, "offset" = %c10 }
  }
  irdl.operation @arena {
    %c0 = irdl.base @move::@memory
    %c1 = irdl.base @move::@space
    %c2 = irdl.base "#builtin.integer"
    %c3 = irdl.base "#builtin.integer"
    irdl.results(arena: %c0)
    irdl.attributes { "space" = %c1, "size" = %c2, "alignment" = %c3 }
  }
  irdl.operation @collective {
    %c0 = irdl.base @move::@buffer
    %c1 = irdl.base @move::@buffer
    %c2 = irdl.base @move::@token
    %c3 = irdl.base @move::@token
    %c4 = irdl.is "all_reduce"
    %c5 = irdl.is "all_gather"
    %c6 = irdl.is "reduce_scatter"
    %c7 = irdl.is "broadcast"
    %c8 = irdl.is "all_to_all"
    %c9 = irdl.any_of(%c4, %c5, %c6, %c7, %c8)
    %c10 = irdl.is "none"
    %c11 = irdl.is "sum"
    %c12 = irdl.is "mean"
    %c13 = irdl.is "max"
    %c14 = irdl.is "min"
    %c15 = irdl.any_of(%c10, %c11, %c12, %c13, %c14)
    %c16 = irdl.base "#builtin.dense_array"
    %c17 = irdl.base "#builtin.integer"
    %c18 = irdl.base "#builtin.dense_array"
    irdl.operands(reads: variadic %c0, writes: variadic %c1, tokens: variadic %c2)
    irdl.results(token: %c3)
    irdl.attributes { "kind" = %c9, "reduction" = %c15, "group" = %c16, "stream" = %c17, "in_place" = %c18 }
  }
  irdl.operation @copy {
    %c0 = irdl.base @move::@buffer
    %c1 = irdl.base @move::@buffer
    %c2 = irdl.base @move::@token
    %c3 = irdl.base @move::@token
    %c4 = irdl.base "#builtin.integer"
    irdl.operands(source: %c0, target: %c1, tokens: variadic %c2)
    irdl.results(token: %c3)
    irdl.attributes { "stream" = %c4 }
  }
  irdl.operation @external {
    %c0 = irdl.base @move::@buffer
    %c1 = irdl.base "#builtin.type"
    %c2 = irdl.base @move::@space
    %c3 = irdl.is "param"
    %c4 = irdl.is "opt_state"
    %c5 = irdl.is "state"
    %c6 = irdl.is "grad"
    %c7 = irdl.is "batch"
    %c8 = irdl.is "constant"
    %c9 = irdl.is "output"
    %c10 = irdl.any_of(%c3, %c4, %c5, %c6, %c7, %c8, %c9)
    %c11 = irdl.base "#builtin.string"
    %c12 = irdl.base "#builtin.integer"
    irdl.results(buffer: %c0)
    irdl.attributes { "type" = %c1, "space" = %c2, "lifetime" = %c10, "slot" = %c11, "index" = %c12 }
  }
  irdl.operation @launch {
    %c0 = irdl.base @move::@buffer
    %c1 = irdl.base @move::@buffer
    %c2 = irdl.base @move::@token
    %c3 = irdl.base @move::@token
    %c4 = irdl.base "#builtin.dense_array"
    %c5 = irdl.base "#builtin.string"
    %c6 = irdl.base "#builtin.integer"
    %c7 = irdl.base "#builtin.dense_array"
    irdl.operands(reads: variadic %c0, writes: variadic %c1, tokens: variadic %c2)
    irdl.results(token: %c3)
    irdl.attributes { "ops" = %c4, "provider" = %c5, "stream" = %c6, "in_place" = %c7 }
  }
  irdl.operation @recv {
    %c0 = irdl.base @move::@buffer
    %c1 = irdl.base @move::@token
    %c2 = irdl.base @move::@token
    %c3 = irdl.base "#builtin.integer"
    %c4 = irdl.base "#builtin.integer"
    %c5 = irdl.base "#builtin.integer"
    irdl.operands(buffer: %c0, tokens: variadic %c1)
    irdl.results(token: %c2)
    irdl.attributes { "peer" = %c3, "tag" = %c4, "stream" = %c5 }
  }
  irdl.operation @result {
    %c0 = irdl.base @move::@buffer
    irdl.operands(buffers: variadic %c0)
  }
  irdl.operation @reuse {
    %c0 = irdl.base @move::@buffer
    %c1 = irdl.base @move::@buffer
    %c2 = irdl.base "#builtin.type"
    %c3 = irdl.is "param"
    %c4 = irdl.is "opt_state"
    %c5 = irdl.is "state"
    %c6 = irdl.is "grad"
    %c7 = irdl.is "batch"
    %c8 = irdl.is "constant"
    %c9 = irdl.is "output"
    %c10 = irdl.is "activation"
    %c11 = irdl.is "transient"
    %c12 = irdl.is "workspace"
    %c13 = irdl.any_of(%c3, %c4, %c5, %c6, %c7, %c8, %c9, %c10, %c11, %c12)
    irdl.operands(old: %c0)
    irdl.results(buffer: %c1)
    irdl.attributes { "type" = %c2, "lifetime" = %c13 }
  }
  irdl.operation @send {
    %c0 = irdl.base @move::@buffer
    %c1 = irdl.base @move::@token
    %c2 = irdl.base @move::@token
    %c3 = irdl.base "#builtin.integer"
    %c4 = irdl.base "#builtin.integer"
    %c5 = irdl.base "#builtin.integer"
    irdl.operands(buffer: %c0, tokens: variadic %c1)
    irdl.results(token: %c2)
    irdl.attributes { "peer" = %c3, "tag" = %c4, "stream" = %c5 }
  }
  irdl.operation @view {
    %c0 = irdl.base @move::@buffer
    %c1 = irdl.base @move::@buffer
    %c2 = irdl.base "#builtin.type"
    %c3 = irdl.base "#builtin.integer"
    irdl.operands(base: %c0)
    irdl.results(buffer: %c1)
    irdl.attributes { "type" = %c2, "offset" = %c3 }
  }
  irdl.operation @wait {
    %c0 = irdl.base @move::@token
    %c1 = irdl.base "#builtin.integer"
    irdl.operands(tokens: variadic %c0)
    irdl.attributes { "stream" = %c1 }
  }
}
