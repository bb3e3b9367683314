// expected: but the function declares
"builtin.module"() ({
  "func.func"() ({
  ^bb0(%x: tensor<2x3xf32>):
    "func.return"(%x) : (tensor<2x3xf32>) -> ()
  }) {sym_name = "main", function_type = (tensor<2x3xf32>) -> ()} : () -> ()
}) : () -> ()
