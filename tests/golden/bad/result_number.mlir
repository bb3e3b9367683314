// expected: %0 has 2 results; %0#2 is none of them
"builtin.module"() ({
  "func.func"() ({
  ^bb0(%x: tensor<2x3xf32>, %mask: tensor<2x3xi1>):
    %0:2 = "step.topk"(%x) {k = 2 : i64, dim = 1 : i64, largest = true, ordered = true} : (tensor<2x3xf32>) -> (tensor<2x2xf32>, tensor<2x2xi64>)
    %1 = "step.neg"(%0#2) : (tensor<2x2xf32>) -> tensor<2x2xf32>
    "func.return"() : () -> ()
  }) {sym_name = "main", function_type = (tensor<2x3xf32>, tensor<2x3xi1>) -> ()} : () -> ()
}) : () -> ()
