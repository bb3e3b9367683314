// expected: needs operandSegmentSizes
"builtin.module"() ({
  "func.func"() ({
  ^bb0(%x: tensor<2x3xf32>, %mask: tensor<2x3xi1>):
    %0 = "step.sgd"(%x, %x, %x, %x) {nesterov = false, maximize = false} : (tensor<2x3xf32>, tensor<2x3xf32>, tensor<2x3xf32>, tensor<2x3xf32>) -> tensor<2x3xf32>
    "func.return"() : () -> ()
  }) {sym_name = "main", function_type = (tensor<2x3xf32>, tensor<2x3xi1>) -> ()} : () -> ()
}) : () -> ()
