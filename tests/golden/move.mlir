"builtin.module"() ({
  "func.func"() ({
  ^bb0(%x: tensor<4x8xf32>, %weight: tensor<16x8xf32>, %lr: tensor<f32>, %momentum: tensor<f32>):
    // ---- forward ----
    %0 = "step.contract"(%x, %weight) {spec = "mk,nk->mn", phase = "forward"} : (tensor<4x8xf32>, tensor<16x8xf32>) -> tensor<4x16xf32> loc("fc"("model.py":12:0))
    %1 = "step.gelu"(%0) {approximate = "tanh", phase = "forward"} : (tensor<4x16xf32>) -> tensor<4x16xf32> loc("fc"("model.py":12:0))
    // ---- loss ----
    %2 = "step.mean"(%1) {dims = array<i64: 0, 1>, keepdim = false, phase = "loss"} : (tensor<4x16xf32>) -> tensor<f32> loc("loss"("train.py":30:0))
    // ---- backward ----
    %3 = "step.broadcast"(%2) {shape = array<i64: 4, 16>, phase = "backward"} : (tensor<f32>) -> tensor<4x16xf32> loc("fc"("model.py":12:0))
    %4 = "step.gelu_grad"(%3, %0) {approximate = "tanh", phase = "backward"} : (tensor<4x16xf32>, tensor<4x16xf32>) -> tensor<4x16xf32> loc("fc"("model.py":12:0))
    %5 = "step.contract"(%4, %x) {spec = "mn,mk->nk", phase = "backward"} : (tensor<4x16xf32>, tensor<4x8xf32>) -> tensor<16x8xf32> loc("fc"("model.py":12:0))
    // ---- update ----
    %6 = "step.sgd"(%weight, %5, %lr, %momentum) {nesterov = false, maximize = false, operandSegmentSizes = array<i32: 1, 1, 0, 1, 1, 0, 0, 0>, phase = "update"} : (tensor<16x8xf32>, tensor<16x8xf32>, tensor<f32>, tensor<f32>) -> tensor<16x8xf32> loc("optimizer")
    "func.return"(%2, %6) : (tensor<f32>, tensor<16x8xf32>) -> ()
  }) {sym_name = "step", function_type = (tensor<4x8xf32>, tensor<16x8xf32>, tensor<f32>, tensor<f32>) -> (tensor<f32>, tensor<16x8xf32>)} : () -> ()
  "func.func"() ({
    %0 = "move.arena"() {space = #move.space<"hbm", 0 : i64>, size = 4096 : i64, alignment = 64 : i64} : () -> !move.memory
    %x_host = "move.external"() {type = tensor<4x8xf32>, space = #move.space<"pinned", 0 : i64>, lifetime = "batch", slot = "x_host", index = 0 : i64} : () -> !move.buffer
    %fc.weight = "move.external"() {type = tensor<16x8xf32>, space = #move.space<"hbm", 0 : i64>, lifetime = "param", slot = "fc.weight", index = 1 : i64} : () -> !move.buffer
    %lr = "move.external"() {type = tensor<f32>, space = #move.space<"hbm", 0 : i64>, lifetime = "constant", slot = "lr", index = 2 : i64} : () -> !move.buffer
    %momentum = "move.external"() {type = tensor<f32>, space = #move.space<"hbm", 0 : i64>, lifetime = "constant", slot = "momentum", index = 3 : i64} : () -> !move.buffer
    %loss = "move.external"() {type = tensor<f32>, space = #move.space<"hbm", 0 : i64>, lifetime = "output", slot = "loss", index = 4 : i64} : () -> !move.buffer
    %x = "move.alloc"(%0) {type = tensor<4x8xf32>, space = #move.space<"hbm", 0 : i64>, lifetime = "activation", offset = 0 : i64} : (!move.memory) -> !move.buffer
    %h = "move.alloc"(%0) {type = tensor<4x16xf32>, space = #move.space<"hbm", 0 : i64>, lifetime = "activation", offset = 128 : i64} : (!move.memory) -> !move.buffer
    %a = "move.alloc"(%0) {type = tensor<4x16xf32>, space = #move.space<"hbm", 0 : i64>, lifetime = "transient", offset = 384 : i64} : (!move.memory) -> !move.buffer
    %a_flat = "move.view"(%a) {type = tensor<64xf32>, offset = 0 : i64} : (!move.buffer) -> !move.buffer
    %da = "move.view"(%loss) {type = tensor<4x16xf32>, strides = array<i64: 0, 0>, offset = 0 : i64} : (!move.buffer) -> !move.buffer
    %dh = "move.reuse"(%h) {type = tensor<4x16xf32>, lifetime = "transient"} : (!move.buffer) -> !move.buffer
    %dw = "move.alloc"(%0) {type = tensor<16x8xf32>, space = #move.space<"hbm", 0 : i64>, lifetime = "grad", offset = 384 : i64} : (!move.memory) -> !move.buffer
    %dw_sum = "move.reuse"(%dw) {type = tensor<16x8xf32>, lifetime = "grad"} : (!move.buffer) -> !move.buffer
    %weight_new = "move.reuse"(%fc.weight) {type = tensor<16x8xf32>, lifetime = "param"} : (!move.buffer) -> !move.buffer
    %workspace = "move.alloc"(%0) {type = tensor<64xf32>, space = #move.space<"hbm", 0 : i64>, lifetime = "workspace", offset = 1024 : i64} : (!move.memory) -> !move.buffer
    %1 = "move.copy"(%x_host, %x) {stream = 1 : i64} : (!move.buffer, !move.buffer) -> !move.token
    "move.wait"(%1) {stream = 0 : i64} : (!move.token) -> ()
    // ---- forward ----
    %2 = "move.launch"(%x, %fc.weight, %h, %workspace) {callee = @step, ops = array<i64: 0>, provider = "aten", stream = 0 : i64, in_place = array<i64>, operandSegmentSizes = array<i32: 2, 2, 0>, phase = "forward"} : (!move.buffer, !move.buffer, !move.buffer, !move.buffer) -> !move.token loc("fc"("model.py":12:0))
    %3 = "move.launch"(%h, %a) {callee = @step, ops = array<i64: 1>, provider = "aten", stream = 0 : i64, in_place = array<i64>, operandSegmentSizes = array<i32: 1, 1, 0>, phase = "forward"} : (!move.buffer, !move.buffer) -> !move.token loc("fc"("model.py":12:0))
    // ---- loss ----
    %4 = "move.launch"(%a_flat, %loss) {callee = @step, ops = array<i64: 2>, provider = "aten", stream = 0 : i64, in_place = array<i64>, operandSegmentSizes = array<i32: 1, 1, 0>, phase = "loss"} : (!move.buffer, !move.buffer) -> !move.token loc("loss"("train.py":30:0))
    // ---- backward ----
    %5 = "move.launch"(%da, %h, %dh) {callee = @step, ops = array<i64: 3, 4>, provider = "aten", stream = 0 : i64, in_place = array<i64: 0, 1>, operandSegmentSizes = array<i32: 2, 1, 0>, phase = "backward"} : (!move.buffer, !move.buffer, !move.buffer) -> !move.token loc("fc"("model.py":12:0))
    %6 = "move.launch"(%dh, %x, %dw) {callee = @step, ops = array<i64: 5>, provider = "aten", stream = 0 : i64, in_place = array<i64>, operandSegmentSizes = array<i32: 2, 1, 0>, phase = "backward"} : (!move.buffer, !move.buffer, !move.buffer) -> !move.token loc("fc"("model.py":12:0))
    %7 = "move.collective"(%dw, %dw_sum, %6) {kind = "all_reduce", reduction = "mean", group = array<i64: 0, 1>, stream = 1 : i64, in_place = array<i64: 0, 0>, operandSegmentSizes = array<i32: 1, 1, 1>} : (!move.buffer, !move.buffer, !move.token) -> !move.token
    // ---- update ----
    %8 = "move.launch"(%fc.weight, %dw_sum, %lr, %momentum, %weight_new, %7) {callee = @step, ops = array<i64: 6>, provider = "aten", stream = 0 : i64, in_place = array<i64: 0, 0>, operandSegmentSizes = array<i32: 4, 1, 1>, phase = "update"} : (!move.buffer, !move.buffer, !move.buffer, !move.buffer, !move.buffer, !move.token) -> !move.token loc("optimizer")
    %left = "move.alloc"(%0) {type = tensor<4x2xf32>, space = #move.space<"hbm", 0 : i64>, lifetime = "transient", offset = 2048 : i64} : (!move.memory) -> !move.buffer
    %both = "move.alloc"(%0) {type = tensor<4x4xf32>, space = #move.space<"hbm", 0 : i64>, lifetime = "output", offset = 2304 : i64} : (!move.memory) -> !move.buffer
    %half = "move.view"(%both) {type = tensor<4x2xf32>, strides = array<i64: 4, 1>, offset = 0 : i64} : (!move.buffer) -> !move.buffer
    %other_half = "move.view"(%both) {type = tensor<4x2xf32>, strides = array<i64: 4, 1>, offset = 8 : i64} : (!move.buffer) -> !move.buffer
    %9 = "move.recv"(%left) {peer = 1 : i64, tag = 7 : i64, stream = 0 : i64} : (!move.buffer) -> !move.token
    %10 = "move.copy"(%left, %half) {stream = 0 : i64} : (!move.buffer, !move.buffer) -> !move.token
    %11 = "move.copy"(%left, %other_half) {stream = 0 : i64} : (!move.buffer, !move.buffer) -> !move.token
    %12 = "move.send"(%both, %10, %11) {peer = 1 : i64, tag = 8 : i64, stream = 1 : i64} : (!move.buffer, !move.token, !move.token) -> !move.token
    %seen = "move.external"() {type = tensor<3xf32>, space = #move.space<"host", 0 : i64>, lifetime = "state", slot = "seen", index = 5 : i64, strides = array<i64: 2>} : () -> !move.buffer
    %seen_new = "move.reuse"(%seen) {type = tensor<3xf32>, lifetime = "state", strides = array<i64: 2>} : (!move.buffer) -> !move.buffer
    %13 = "move.launch"(%seen, %seen_new) {ops = array<i64>, provider = "aten", stream = 2 : i64, in_place = array<i64: 0, 0>, operandSegmentSizes = array<i32: 1, 1, 0>} : (!move.buffer, !move.buffer) -> !move.token loc("loader"("model.py":10:0))
    "move.wait"(%12) {stream = 0 : i64} : (!move.token) -> ()
    "move.result"(%loss, %both) : (!move.buffer, !move.buffer) -> ()
    "func.return"() : () -> ()
  }) {sym_name = "plan", function_type = () -> ()} : () -> ()
}) {move.phase = "placed", move.streams = ["cuda:0", "cuda:0", "cpu"]} : () -> ()
