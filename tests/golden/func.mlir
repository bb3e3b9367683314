"builtin.module"() ({
  "func.func"() ({
  ^bb0(%x: tensor<2x3xf32>, %arg1: tensor<i64>):
    "func.return"(%x, %arg1, %x) : (tensor<2x3xf32>, tensor<i64>, tensor<2x3xf32>) -> ()
  }) {sym_name = "swap", function_type = (tensor<2x3xf32>, tensor<i64>) -> (tensor<2x3xf32>, tensor<i64>, tensor<2x3xf32>), arg_attrs = [{step.role = "param"}, {}], res_attrs = [{}, {step.scale = 0.1 : f64, step.flag}, {step.list = [1 : i64, true, "a\0Ab", array<i64>, array<i64: -1>, unit]}]} : () -> () loc("layer.0"("model.py":3:0))
  "func.func"() ({
    "func.return"() : () -> ()
  }) {sym_name = "empty", function_type = () -> ()} : () -> () loc("model.py":9:0)
}) {sym_name = "golden"} : () -> ()
