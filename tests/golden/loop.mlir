"builtin.module"() ({
  "func.func"() ({
  ^bb0(%arg0: tensor<4x8xbf16>, %arg1: tensor<4x8xbf16>):
    "loop.space"() {sizes = array<i64: 4, 8>} : () -> ()
    %0 = "loop.load"(%arg0) {map = [[1 : i64, 0 : i64, 0 : i64], [0 : i64, 1 : i64, 0 : i64]], dynamic = array<i64>, guarded = false, checked = false} : (tensor<4x8xbf16>) -> bf16
    %1 = "loop.apply"(%0) {fn = "cast", dtype = f32} : (bf16) -> f32
    %2 = "loop.reduce"(%1) {kind = "max", dims = array<i64: 1>, dtype = f32} : (f32) -> f32
    %3 = "loop.apply"(%1, %2) {fn = "sub", dtype = f32} : (f32, f32) -> f32
    %4 = "loop.apply"(%3) {fn = "exp", dtype = f32} : (f32) -> f32
    %5 = "loop.reduce"(%4) {kind = "sum", dims = array<i64: 1>, dtype = f32} : (f32) -> f32
    %6 = "loop.apply"(%4, %5) {fn = "div", dtype = f32} : (f32, f32) -> f32
    %7 = "loop.apply"(%6) {fn = "cast", dtype = bf16} : (f32) -> bf16
    "loop.store"(%7, %arg1) {map = [[1 : i64, 0 : i64, 0 : i64], [0 : i64, 1 : i64, 0 : i64]], dynamic = array<i64>} : (bf16, tensor<4x8xbf16>) -> ()
    "func.return"() : () -> ()
  }) {sym_name = "softmax", function_type = (tensor<4x8xbf16>, tensor<4x8xbf16>) -> ()} : () -> ()
  "func.func"() ({
  ^bb0(%arg0: tensor<4x8xf32>, %arg1: tensor<8xf32>, %arg2: tensor<4x8xf32>, %arg3: tensor<8xf32>, %arg4: tensor<4xf32>):
    "loop.space"() {sizes = array<i64: 4, 8>} : () -> ()
    %0 = "loop.load"(%arg0) {map = [[1 : i64, 0 : i64, 0 : i64], [0 : i64, 1 : i64, 0 : i64]], dynamic = array<i64>, guarded = false, checked = false} : (tensor<4x8xf32>) -> f32
    %1 = "loop.load"(%arg1) {map = [[0 : i64, 1 : i64, 0 : i64]], dynamic = array<i64>, guarded = false, checked = false} : (tensor<8xf32>) -> f32
    %2 = "loop.apply"(%0, %1) {fn = "mul", dtype = f32} : (f32, f32) -> f32
    %3 = "loop.reduce"(%0) {kind = "sum", dims = array<i64: 0>, dtype = f32} : (f32) -> f32
    %4 = "loop.reduce"(%0) {kind = "sum", dims = array<i64: 1>, dtype = f32} : (f32) -> f32
    "loop.store"(%2, %arg2) {map = [[1 : i64, 0 : i64, 0 : i64], [0 : i64, 1 : i64, 0 : i64]], dynamic = array<i64>} : (f32, tensor<4x8xf32>) -> ()
    "loop.store"(%3, %arg3) {map = [[0 : i64, 1 : i64, 0 : i64]], dynamic = array<i64>} : (f32, tensor<8xf32>) -> ()
    "loop.store"(%4, %arg4) {map = [[1 : i64, 0 : i64, 0 : i64]], dynamic = array<i64>} : (f32, tensor<4xf32>) -> ()
    "func.return"() : () -> ()
  }) {sym_name = "row_and_column_sums", function_type = (tensor<4x8xf32>, tensor<8xf32>, tensor<4x8xf32>, tensor<8xf32>, tensor<4xf32>) -> ()} : () -> ()
  "func.func"() ({
  ^bb0(%arg0: tensor<4x6xf32>, %arg1: tensor<4x2xf32>, %arg2: tensor<5x10xf32>):
    "loop.space"() {sizes = array<i64: 5, 10>} : () -> ()
    %0 = "loop.index"() {dim = 0 : i64} : () -> i64
    %1 = "loop.constant"() {value = 1 : i64, dtype = i64} : () -> i64
    %2 = "loop.apply"(%0, %1) {fn = "lt", dtype = i1} : (i64, i64) -> i1
    %3 = "loop.apply"(%2) {fn = "bit_not", dtype = i1} : (i1) -> i1
    %4 = "loop.index"() {dim = 1 : i64} : () -> i64
    %5 = "loop.constant"() {value = 8 : i64, dtype = i64} : () -> i64
    %6 = "loop.apply"(%4, %5) {fn = "lt", dtype = i1} : (i64, i64) -> i1
    %7 = "loop.apply"(%3, %6) {fn = "bit_and", dtype = i1} : (i1, i1) -> i1
    %8 = "loop.constant"() {value = 6 : i64, dtype = i64} : () -> i64
    %9 = "loop.apply"(%4, %8) {fn = "lt", dtype = i1} : (i64, i64) -> i1
    %10 = "loop.load"(%arg1) {map = [[1 : i64, 0 : i64, -1 : i64], [0 : i64, 1 : i64, -6 : i64]], dynamic = array<i64>, guarded = true, checked = false} : (tensor<4x2xf32>) -> f32
    %11 = "loop.load"(%arg0) {map = [[1 : i64, 0 : i64, -1 : i64], [0 : i64, 1 : i64, 0 : i64]], dynamic = array<i64>, guarded = true, checked = false} : (tensor<4x6xf32>) -> f32
    %12 = "loop.apply"(%9, %11, %10) {fn = "select", dtype = f32} : (i1, f32, f32) -> f32
    %13 = "loop.constant"() {value = 1.5 : f64, dtype = f32} : () -> f32
    %14 = "loop.apply"(%7, %12, %13) {fn = "select", dtype = f32} : (i1, f32, f32) -> f32
    "loop.store"(%14, %arg2) {map = [[1 : i64, 0 : i64, 0 : i64], [0 : i64, 1 : i64, 0 : i64]], dynamic = array<i64>} : (f32, tensor<5x10xf32>) -> ()
    "func.return"() : () -> ()
  }) {sym_name = "padded", function_type = (tensor<4x6xf32>, tensor<4x2xf32>, tensor<5x10xf32>) -> ()} : () -> ()
  "func.func"() ({
  ^bb0(%arg0: tensor<10x8xf32>, %arg1: tensor<3xi64>, %arg2: tensor<3x8xf32>):
    "loop.space"() {sizes = array<i64: 3, 8>} : () -> ()
    %0 = "loop.load"(%arg1) {map = [[1 : i64, 0 : i64, 0 : i64]], dynamic = array<i64>, guarded = false, checked = false} : (tensor<3xi64>) -> i64
    %1 = "loop.load"(%arg0, %0) {map = [[0 : i64, 0 : i64, 0 : i64], [0 : i64, 1 : i64, 0 : i64]], dynamic = array<i64: 0>, guarded = true, checked = true} : (tensor<10x8xf32>, i64) -> f32
    "loop.store"(%1, %arg2) {map = [[1 : i64, 0 : i64, 0 : i64], [0 : i64, 1 : i64, 0 : i64]], dynamic = array<i64>} : (f32, tensor<3x8xf32>) -> ()
    "func.return"() : () -> ()
  }) {sym_name = "lookup", function_type = (tensor<10x8xf32>, tensor<3xi64>, tensor<3x8xf32>) -> ()} : () -> ()
  "func.func"() ({
  ^bb0(%arg0: tensor<3xi64>, %arg1: tensor<4x8xf32>, %arg2: tensor<4x8xf32>):
    "loop.space"() {sizes = array<i64: 4, 8>} : () -> ()
    %0 = "loop.load"(%arg0) {map = [[0 : i64, 0 : i64, 0 : i64]], dynamic = array<i64>, guarded = false, checked = false} : (tensor<3xi64>) -> i64
    %1 = "loop.load"(%arg0) {map = [[0 : i64, 0 : i64, 1 : i64]], dynamic = array<i64>, guarded = false, checked = false} : (tensor<3xi64>) -> i64
    %2 = "loop.load"(%arg0) {map = [[0 : i64, 0 : i64, 2 : i64]], dynamic = array<i64>, guarded = false, checked = false} : (tensor<3xi64>) -> i64
    %3 = "loop.index"() {dim = 0 : i64} : () -> i64
    %4 = "loop.constant"() {value = 8 : i64, dtype = i64} : () -> i64
    %5 = "loop.apply"(%3, %4) {fn = "mul", dtype = i64} : (i64, i64) -> i64
    %6 = "loop.index"() {dim = 1 : i64} : () -> i64
    %7 = "loop.apply"(%5, %6) {fn = "add", dtype = i64} : (i64, i64) -> i64
    %8 = "loop.constant"() {value = 3 : i64, dtype = i64} : () -> i64
    %9 = "loop.random"(%0, %1, %2, %7, %8) {digits = 24 : i64} : (i64, i64, i64, i64, i64) -> f32
    %10 = "loop.constant"() {value = 0.9 : f64, dtype = f32} : () -> f32
    %11 = "loop.apply"(%9, %10) {fn = "lt", dtype = i1} : (f32, f32) -> i1
    %12 = "loop.load"(%arg1) {map = [[1 : i64, 0 : i64, 0 : i64], [0 : i64, 1 : i64, 0 : i64]], dynamic = array<i64>, guarded = false, checked = false} : (tensor<4x8xf32>) -> f32
    %13 = "loop.constant"() {value = 1.1111111111111112 : f64, dtype = f32} : () -> f32
    %14 = "loop.apply"(%12, %13) {fn = "mul", dtype = f32} : (f32, f32) -> f32
    %15 = "loop.constant"() {value = 0.0 : f64, dtype = f32} : () -> f32
    %16 = "loop.apply"(%11, %14, %15) {fn = "select", dtype = f32} : (i1, f32, f32) -> f32
    "loop.store"(%16, %arg2) {map = [[1 : i64, 0 : i64, 0 : i64], [0 : i64, 1 : i64, 0 : i64]], dynamic = array<i64>} : (f32, tensor<4x8xf32>) -> ()
    "func.return"() : () -> ()
  }) {sym_name = "dropout", function_type = (tensor<3xi64>, tensor<4x8xf32>, tensor<4x8xf32>) -> ()} : () -> ()
}) : () -> ()
