// expected: attribute 'keepdim' is 1 : i64, expected bool
"builtin.module"() ({
  "func.func"() ({
  ^bb0(%x: tensor<2x3xf32>, %mask: tensor<2x3xi1>):
    %0 = "step.sum"(%x) {dims = array<i64: 0>, keepdim = 1 : i64} : (tensor<2x3xf32>) -> tensor<3xf32>
    "func.return"() : () -> ()
  }) {sym_name = "main", function_type = (tensor<2x3xf32>, tensor<2x3xi1>) -> ()} : () -> ()
}) : () -> ()
