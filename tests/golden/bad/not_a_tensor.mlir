// expected: result 'y' is f32, expected any tensor
"builtin.module"() ({
  "func.func"() ({
  ^bb0(%x: tensor<2x3xf32>, %mask: tensor<2x3xi1>):
    %0 = "step.exp"(%x) : (tensor<2x3xf32>) -> f32
    "func.return"() : () -> ()
  }) {sym_name = "main", function_type = (tensor<2x3xf32>, tensor<2x3xi1>) -> ()} : () -> ()
}) : () -> ()
