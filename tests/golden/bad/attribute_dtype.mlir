// expected: attribute 'dtype' is tensor<f32>, expected dtype
"builtin.module"() ({
  "func.func"() ({
  ^bb0(%x: tensor<2x3xf32>, %mask: tensor<2x3xi1>):
    %0 = "step.cast"(%x) {dtype = tensor<f32>} : (tensor<2x3xf32>) -> tensor<2x3xf32>
    "func.return"() : () -> ()
  }) {sym_name = "main", function_type = (tensor<2x3xf32>, tensor<2x3xi1>) -> ()} : () -> ()
}) : () -> ()
