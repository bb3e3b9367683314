// expected: has 2 operands, expected 1 (x)
"builtin.module"() ({
  "func.func"() ({
  ^bb0(%x: tensor<2x3xf32>, %mask: tensor<2x3xi1>):
    %0 = "step.exp"(%x, %x) : (tensor<2x3xf32>, tensor<2x3xf32>) -> tensor<2x3xf32>
    "func.return"() : () -> ()
  }) {sym_name = "main", function_type = (tensor<2x3xf32>, tensor<2x3xi1>) -> ()} : () -> ()
}) : () -> ()
