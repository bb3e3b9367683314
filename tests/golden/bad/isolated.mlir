// expected: %0 is not defined
"builtin.module"() ({
  %0 = "step.constant"() {value = 1.0 : f64, type = tensor<f32>} : () -> tensor<f32>
  "func.func"() ({
    "func.return"(%0) : (tensor<f32>) -> ()
  }) {sym_name = "main", function_type = () -> tensor<f32>} : () -> ()
}) : () -> ()
