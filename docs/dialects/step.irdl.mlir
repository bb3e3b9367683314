// The step dialect for mlir-opt 22, generated from its declaration: do not edit.
irdl.dialect @step {
  irdl.operation @abs {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @accumulate {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(total: %c0, part: %c1)
    irdl.results(y: %c2)
  }
  irdl.operation @adadelta {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.base "!builtin.tensor"
    %c9 = irdl.base "!builtin.tensor"
    %c10 = irdl.base "!builtin.tensor"
    %c11 = irdl.base "!builtin.tensor"
    %c12 = irdl.base "!builtin.tensor"
    %c13 = irdl.is true
    %c14 = irdl.is false
    %c15 = irdl.any_of(%c13, %c14)
    irdl.operands(parameter: %c0, gradient: %c1, step: %c2, square_avg: %c3, acc_delta: %c4, lr: %c5, rho: %c6, eps: %c7, weight_decay: %c8)
    irdl.results(new_parameter: %c9, new_step: %c10, new_square_avg: %c11, new_acc_delta: %c12)
    irdl.attributes { "maximize" = %c15 }
  }
  irdl.operation @adafactor {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.base "!builtin.tensor"
    %c9 = irdl.base "!builtin.tensor"
    %c10 = irdl.base "!builtin.tensor"
    %c11 = irdl.base "!builtin.tensor"
    %c12 = irdl.base "!builtin.tensor"
    %c13 = irdl.base "!builtin.tensor"
    %c14 = irdl.base "!builtin.tensor"
    %c15 = irdl.is true
    %c16 = irdl.is false
    %c17 = irdl.any_of(%c15, %c16)
    irdl.operands(parameter: %c0, gradient: %c1, step: %c2, row_var: optional %c3, col_var: optional %c4, variance: optional %c5, lr: %c6, beta2_decay: %c7, eps1: optional %c8, eps2: %c9, d: %c10, weight_decay: %c11)
    irdl.results(new_parameter: %c12, new_step: %c13, new_moments: variadic %c14)
    irdl.attributes { "maximize" = %c17 }
  }
  irdl.operation @adagrad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.base "!builtin.tensor"
    %c9 = irdl.base "!builtin.tensor"
    %c10 = irdl.base "!builtin.tensor"
    %c11 = irdl.is true
    %c12 = irdl.is false
    %c13 = irdl.any_of(%c11, %c12)
    irdl.operands(parameter: %c0, gradient: %c1, step: %c2, sum: %c3, lr: %c4, lr_decay: %c5, eps: %c6, weight_decay: %c7)
    irdl.results(new_parameter: %c8, new_step: %c9, new_sum: %c10)
    irdl.attributes { "maximize" = %c13 }
  }
  irdl.operation @adam {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.base "!builtin.tensor"
    %c9 = irdl.base "!builtin.tensor"
    %c10 = irdl.base "!builtin.tensor"
    %c11 = irdl.base "!builtin.tensor"
    %c12 = irdl.base "!builtin.tensor"
    %c13 = irdl.base "!builtin.tensor"
    %c14 = irdl.base "!builtin.tensor"
    %c15 = irdl.base "!builtin.tensor"
    %c16 = irdl.is true
    %c17 = irdl.is false
    %c18 = irdl.any_of(%c16, %c17)
    %c19 = irdl.is true
    %c20 = irdl.is false
    %c21 = irdl.any_of(%c19, %c20)
    irdl.operands(parameter: %c0, gradient: %c1, step: %c2, exp_avg: %c3, exp_avg_sq: %c4, max_exp_avg_sq: optional %c5, lr: %c6, beta1: %c7, beta2: %c8, eps: %c9, weight_decay: %c10)
    irdl.results(new_parameter: %c11, new_step: %c12, new_exp_avg: %c13, new_exp_avg_sq: %c14, new_max_exp_avg_sq: variadic %c15)
    irdl.attributes { "decoupled" = %c18, "maximize" = %c21 }
  }
  irdl.operation @adamax {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.base "!builtin.tensor"
    %c9 = irdl.base "!builtin.tensor"
    %c10 = irdl.base "!builtin.tensor"
    %c11 = irdl.base "!builtin.tensor"
    %c12 = irdl.base "!builtin.tensor"
    %c13 = irdl.base "!builtin.tensor"
    %c14 = irdl.is true
    %c15 = irdl.is false
    %c16 = irdl.any_of(%c14, %c15)
    irdl.operands(parameter: %c0, gradient: %c1, step: %c2, exp_avg: %c3, exp_inf: %c4, lr: %c5, beta1: %c6, beta2: %c7, eps: %c8, weight_decay: %c9)
    irdl.results(new_parameter: %c10, new_step: %c11, new_exp_avg: %c12, new_exp_inf: %c13)
    irdl.attributes { "maximize" = %c16 }
  }
  irdl.operation @adaptive_avg_pool {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "size" = %c2 }
  }
  irdl.operation @adaptive_avg_pool_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    %c3 = irdl.base "#builtin.dense_array"
    irdl.operands(dy: %c0)
    irdl.results(dx: %c1)
    irdl.attributes { "size" = %c2, "input_shape" = %c3 }
  }
  irdl.operation @add {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0, y: %c1)
    irdl.results(z: %c2)
  }
  irdl.operation @addcdiv {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0, y: %c1, z: %c2, scale: %c3)
    irdl.results(result: %c4)
  }
  irdl.operation @addcmul {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0, y: %c1, z: %c2, scale: %c3)
    irdl.results(result: %c4)
  }
  irdl.operation @all {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    %c3 = irdl.is true
    %c4 = irdl.is false
    %c5 = irdl.any_of(%c3, %c4)
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dims" = %c2, "keepdim" = %c5 }
  }
  irdl.operation @all_finite {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(xs: variadic %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @amax {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    %c3 = irdl.is true
    %c4 = irdl.is false
    %c5 = irdl.any_of(%c3, %c4)
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dims" = %c2, "keepdim" = %c5 }
  }
  irdl.operation @amin {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    %c3 = irdl.is true
    %c4 = irdl.is false
    %c5 = irdl.any_of(%c3, %c4)
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dims" = %c2, "keepdim" = %c5 }
  }
  irdl.operation @any {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    %c3 = irdl.is true
    %c4 = irdl.is false
    %c5 = irdl.any_of(%c3, %c4)
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dims" = %c2, "keepdim" = %c5 }
  }
  irdl.operation @argmax {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.integer"
    %c3 = irdl.is true
    %c4 = irdl.is false
    %c5 = irdl.any_of(%c3, %c4)
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dim" = %c2, "keepdim" = %c5 }
  }
  irdl.operation @argmin {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.integer"
    %c3 = irdl.is true
    %c4 = irdl.is false
    %c5 = irdl.any_of(%c3, %c4)
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dim" = %c2, "keepdim" = %c5 }
  }
  irdl.operation @asgd {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.base "!builtin.tensor"
    %c9 = irdl.base "!builtin.tensor"
    %c10 = irdl.base "!builtin.tensor"
    %c11 = irdl.base "!builtin.tensor"
    %c12 = irdl.base "!builtin.tensor"
    %c13 = irdl.base "!builtin.tensor"
    %c14 = irdl.base "!builtin.tensor"
    %c15 = irdl.base "!builtin.tensor"
    %c16 = irdl.is true
    %c17 = irdl.is false
    %c18 = irdl.any_of(%c16, %c17)
    irdl.operands(parameter: %c0, gradient: %c1, step: %c2, eta: %c3, mu: %c4, ax: %c5, lr: %c6, lambd: %c7, alpha: %c8, t0: %c9, weight_decay: %c10)
    irdl.results(new_parameter: %c11, new_step: %c12, new_eta: %c13, new_mu: %c14, new_ax: %c15)
    irdl.attributes { "maximize" = %c18 }
  }
  irdl.operation @atan2 {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0, y: %c1)
    irdl.results(z: %c2)
  }
  irdl.operation @attention {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.is true
    %c7 = irdl.is false
    %c8 = irdl.any_of(%c6, %c7)
    %c9 = irdl.base "#builtin.float"
    %c10 = irdl.is true
    %c11 = irdl.is false
    %c12 = irdl.any_of(%c10, %c11)
    irdl.operands(q: %c0, k: %c1, v: %c2, mask: optional %c3)
    irdl.results(out: %c4, logsumexp: %c5)
    irdl.attributes { "causal" = %c8, "scale" = %c9, "enable_gqa" = %c12 }
  }
  irdl.operation @attention_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.base "!builtin.tensor"
    %c9 = irdl.base "!builtin.tensor"
    %c10 = irdl.is true
    %c11 = irdl.is false
    %c12 = irdl.any_of(%c10, %c11)
    %c13 = irdl.base "#builtin.float"
    %c14 = irdl.is true
    %c15 = irdl.is false
    %c16 = irdl.any_of(%c14, %c15)
    irdl.operands(dout: %c0, q: %c1, k: %c2, v: %c3, out: %c4, logsumexp: %c5, mask: optional %c6)
    irdl.results(dq: %c7, dk: %c8, dv: %c9)
    irdl.attributes { "causal" = %c12, "scale" = %c13, "enable_gqa" = %c16 }
  }
  irdl.operation @attention_mask_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.is true
    %c9 = irdl.is false
    %c10 = irdl.any_of(%c8, %c9)
    %c11 = irdl.base "#builtin.float"
    %c12 = irdl.is true
    %c13 = irdl.is false
    %c14 = irdl.any_of(%c12, %c13)
    irdl.operands(dout: %c0, q: %c1, k: %c2, v: %c3, out: %c4, logsumexp: %c5, mask: optional %c6)
    irdl.results(dmask: %c7)
    irdl.attributes { "causal" = %c10, "scale" = %c11, "enable_gqa" = %c14 }
  }
  irdl.operation @avg_pool {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    %c3 = irdl.base "#builtin.dense_array"
    %c4 = irdl.base "#builtin.dense_array"
    %c5 = irdl.is true
    %c6 = irdl.is false
    %c7 = irdl.any_of(%c5, %c6)
    %c8 = irdl.is true
    %c9 = irdl.is false
    %c10 = irdl.any_of(%c8, %c9)
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "kernel" = %c2, "stride" = %c3, "padding" = %c4, "ceil_mode" = %c7, "count_include_pad" = %c10 }
  }
  irdl.operation @avg_pool_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    %c3 = irdl.base "#builtin.dense_array"
    %c4 = irdl.base "#builtin.dense_array"
    %c5 = irdl.is true
    %c6 = irdl.is false
    %c7 = irdl.any_of(%c5, %c6)
    %c8 = irdl.is true
    %c9 = irdl.is false
    %c10 = irdl.any_of(%c8, %c9)
    %c11 = irdl.base "#builtin.dense_array"
    irdl.operands(dy: %c0)
    irdl.results(dx: %c1)
    irdl.attributes { "kernel" = %c2, "stride" = %c3, "padding" = %c4, "ceil_mode" = %c7, "count_include_pad" = %c10, "input_shape" = %c11 }
  }
  irdl.operation @axpy {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0, y: %c1, scale: %c2)
    irdl.results(result: %c3)
  }
  irdl.operation @batch_norm {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.base "!builtin.tensor"
    %c9 = irdl.is true
    %c10 = irdl.is false
    %c11 = irdl.any_of(%c9, %c10)
    %c12 = irdl.base "#builtin.float"
    %c13 = irdl.base "#builtin.float"
    irdl.operands(x: %c0, weight: optional %c1, bias: optional %c2, running_mean: optional %c3, running_var: optional %c4)
    irdl.results(y: %c5, mean: %c6, rstd: %c7, running: variadic %c8)
    irdl.attributes { "training" = %c11, "momentum" = %c12, "eps" = %c13 }
  }
  irdl.operation @batch_norm_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.base "#builtin.float"
    irdl.operands(dy: %c0, x: %c1, mean: %c2, rstd: %c3, weight: optional %c4)
    irdl.results(dx: %c5, dw: %c6, db: %c7)
    irdl.attributes { "eps" = %c8 }
  }
  irdl.operation @bit_and {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0, y: %c1)
    irdl.results(z: %c2)
  }
  irdl.operation @bit_not {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @bit_or {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0, y: %c1)
    irdl.results(z: %c2)
  }
  irdl.operation @bit_xor {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0, y: %c1)
    irdl.results(z: %c2)
  }
  irdl.operation @broadcast {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "shape" = %c2 }
  }
  irdl.operation @cast {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.is f64
    %c3 = irdl.is f32
    %c4 = irdl.is bf16
    %c5 = irdl.is f16
    %c6 = irdl.is f8E4M3FN
    %c7 = irdl.is f8E5M2
    %c8 = irdl.is i64
    %c9 = irdl.is i32
    %c10 = irdl.is i16
    %c11 = irdl.is i8
    %c12 = irdl.is ui64
    %c13 = irdl.is ui32
    %c14 = irdl.is ui16
    %c15 = irdl.is ui8
    %c16 = irdl.is i1
    %c17 = irdl.is complex<f32>
    %c18 = irdl.is complex<f64>
    %c19 = irdl.any_of(%c2, %c3, %c4, %c5, %c6, %c7, %c8, %c9, %c10, %c11, %c12, %c13, %c14, %c15, %c16, %c17, %c18)
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dtype" = %c19 }
  }
  irdl.operation @ceil {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @concat {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.integer"
    irdl.operands(xs: variadic %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dim" = %c2 }
  }
  irdl.operation @constant {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "#builtin.integer"
    %c2 = irdl.base "#builtin.float"
    %c3 = irdl.any_of(%c1, %c2)
    %c4 = irdl.base "#builtin.type"
    irdl.results(y: %c0)
    irdl.attributes { "value" = %c3, "type" = %c4 }
  }
  irdl.operation @contract {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "#builtin.string"
    irdl.operands(lhs: %c0, rhs: %c1, addend: optional %c2)
    irdl.results(y: %c3)
    irdl.attributes { "spec" = %c4 }
  }
  irdl.operation @conv {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "#builtin.dense_array"
    %c5 = irdl.base "#builtin.dense_array"
    %c6 = irdl.base "#builtin.dense_array"
    %c7 = irdl.base "#builtin.dense_array"
    %c8 = irdl.is true
    %c9 = irdl.is false
    %c10 = irdl.any_of(%c8, %c9)
    %c11 = irdl.base "#builtin.dense_array"
    %c12 = irdl.base "#builtin.integer"
    irdl.operands(x: %c0, w: %c1, bias: optional %c2)
    irdl.results(y: %c3)
    irdl.attributes { "stride" = %c4, "padding" = %c5, "padding_after" = %c6, "dilation" = %c7, "transposed" = %c10, "output_padding" = %c11, "groups" = %c12 }
  }
  irdl.operation @conv_input_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "#builtin.dense_array"
    %c4 = irdl.base "#builtin.dense_array"
    %c5 = irdl.base "#builtin.dense_array"
    %c6 = irdl.base "#builtin.dense_array"
    %c7 = irdl.is true
    %c8 = irdl.is false
    %c9 = irdl.any_of(%c7, %c8)
    %c10 = irdl.base "#builtin.dense_array"
    %c11 = irdl.base "#builtin.integer"
    %c12 = irdl.base "#builtin.dense_array"
    irdl.operands(dy: %c0, w: %c1)
    irdl.results(dx: %c2)
    irdl.attributes { "stride" = %c3, "padding" = %c4, "padding_after" = %c5, "dilation" = %c6, "transposed" = %c9, "output_padding" = %c10, "groups" = %c11, "input_shape" = %c12 }
  }
  irdl.operation @conv_weight_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "#builtin.dense_array"
    %c4 = irdl.base "#builtin.dense_array"
    %c5 = irdl.base "#builtin.dense_array"
    %c6 = irdl.base "#builtin.dense_array"
    %c7 = irdl.is true
    %c8 = irdl.is false
    %c9 = irdl.any_of(%c7, %c8)
    %c10 = irdl.base "#builtin.dense_array"
    %c11 = irdl.base "#builtin.integer"
    %c12 = irdl.base "#builtin.dense_array"
    irdl.operands(x: %c0, dy: %c1)
    irdl.results(dw: %c2)
    irdl.attributes { "stride" = %c3, "padding" = %c4, "padding_after" = %c5, "dilation" = %c6, "transposed" = %c9, "output_padding" = %c10, "groups" = %c11, "weight_shape" = %c12 }
  }
  irdl.operation @cos {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @cross_entropy {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "#builtin.integer"
    %c6 = irdl.is "none"
    %c7 = irdl.is "mean"
    %c8 = irdl.is "sum"
    %c9 = irdl.any_of(%c6, %c7, %c8)
    %c10 = irdl.base "#builtin.float"
    irdl.operands(x: %c0, target: %c1, weight: optional %c2)
    irdl.results(loss: %c3, logsumexp: %c4)
    irdl.attributes { "ignore_index" = %c5, "reduction" = %c9, "label_smoothing" = %c10 }
  }
  irdl.operation @cross_entropy_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "#builtin.integer"
    %c7 = irdl.is "none"
    %c8 = irdl.is "mean"
    %c9 = irdl.is "sum"
    %c10 = irdl.any_of(%c7, %c8, %c9)
    %c11 = irdl.base "#builtin.float"
    irdl.operands(dy: %c0, x: %c1, target: %c2, logsumexp: %c3, weight: optional %c4)
    irdl.results(dx: %c5)
    irdl.attributes { "ignore_index" = %c6, "reduction" = %c10, "label_smoothing" = %c11 }
  }
  irdl.operation @cumsum {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.integer"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dim" = %c2 }
  }
  irdl.operation @detach {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @div {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.is "none"
    %c4 = irdl.is "floor"
    %c5 = irdl.is "trunc"
    %c6 = irdl.any_of(%c3, %c4, %c5)
    irdl.operands(x: %c0, y: %c1)
    irdl.results(z: %c2)
    irdl.attributes { "rounding" = %c6 }
  }
  irdl.operation @embedding {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "#builtin.integer"
    irdl.operands(weight: %c0, indices: %c1)
    irdl.results(y: %c2)
    irdl.attributes { "padding_idx" = %c3 }
  }
  irdl.operation @embedding_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "#builtin.integer"
    %c4 = irdl.base "#builtin.integer"
    irdl.operands(dy: %c0, indices: %c1)
    irdl.results(dweight: %c2)
    irdl.attributes { "rows" = %c3, "padding_idx" = %c4 }
  }
  irdl.operation @eq {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0, y: %c1)
    irdl.results(z: %c2)
  }
  irdl.operation @erf {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @exp {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @exp2 {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @expm1 {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @fetch {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @flip {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dims" = %c2 }
  }
  irdl.operation @floor {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @fused {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.symbol_ref"
    irdl.operands(inputs: variadic %c0)
    irdl.results(outputs: variadic %c1)
    irdl.attributes { "callee" = %c2 }
  }
  irdl.operation @fused_adam {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.base "!builtin.tensor"
    %c9 = irdl.base "!builtin.tensor"
    %c10 = irdl.base "!builtin.tensor"
    %c11 = irdl.base "!builtin.tensor"
    %c12 = irdl.base "!builtin.tensor"
    %c13 = irdl.base "!builtin.tensor"
    %c14 = irdl.base "!builtin.tensor"
    %c15 = irdl.is true
    %c16 = irdl.is false
    %c17 = irdl.any_of(%c15, %c16)
    irdl.operands(parameter: %c0, gradient: %c1, exp_avg: %c2, exp_avg_sq: %c3, max_exp_avg_sq: optional %c4, new_step: %c5, lr: %c6, beta1: %c7, beta2: %c8, weight_decay: %c9, eps: %c10)
    irdl.results(new_parameter: %c11, new_exp_avg: %c12, new_exp_avg_sq: %c13, new_max_exp_avg_sq: variadic %c14)
    irdl.attributes { "maximize" = %c17 }
  }
  irdl.operation @fused_adamw {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.base "!builtin.tensor"
    %c9 = irdl.base "!builtin.tensor"
    %c10 = irdl.base "!builtin.tensor"
    %c11 = irdl.base "!builtin.tensor"
    %c12 = irdl.base "!builtin.tensor"
    %c13 = irdl.base "!builtin.tensor"
    %c14 = irdl.base "!builtin.tensor"
    %c15 = irdl.is true
    %c16 = irdl.is false
    %c17 = irdl.any_of(%c15, %c16)
    irdl.operands(parameter: %c0, gradient: %c1, exp_avg: %c2, exp_avg_sq: %c3, max_exp_avg_sq: optional %c4, new_step: %c5, lr: %c6, beta1: %c7, beta2: %c8, weight_decay: %c9, eps: %c10)
    irdl.results(new_parameter: %c11, new_exp_avg: %c12, new_exp_avg_sq: %c13, new_max_exp_avg_sq: variadic %c14)
    irdl.attributes { "maximize" = %c17 }
  }
  irdl.operation @fused_sgd {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.base "!builtin.tensor"
    %c9 = irdl.is true
    %c10 = irdl.is false
    %c11 = irdl.any_of(%c9, %c10)
    %c12 = irdl.is true
    %c13 = irdl.is false
    %c14 = irdl.any_of(%c12, %c13)
    irdl.operands(parameter: %c0, gradient: %c1, momentum_buffer: optional %c2, lr: %c3, weight_decay: %c4, momentum: optional %c5, dampening: optional %c6)
    irdl.results(new_parameter: %c7, new_momentum_buffer: variadic %c8)
    irdl.attributes { "nesterov" = %c11, "maximize" = %c14 }
  }
  irdl.operation @gather {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "#builtin.integer"
    irdl.operands(x: %c0, index: %c1)
    irdl.results(y: %c2)
    irdl.attributes { "dim" = %c3 }
  }
  irdl.operation @ge {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0, y: %c1)
    irdl.results(z: %c2)
  }
  irdl.operation @gelu {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.is "none"
    %c3 = irdl.is "tanh"
    %c4 = irdl.any_of(%c2, %c3)
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "approximate" = %c4 }
  }
  irdl.operation @gelu_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.is "none"
    %c4 = irdl.is "tanh"
    %c5 = irdl.any_of(%c3, %c4)
    irdl.operands(dy: %c0, x: %c1)
    irdl.results(dx: %c2)
    irdl.attributes { "approximate" = %c5 }
  }
  irdl.operation @group_norm {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "#builtin.integer"
    %c7 = irdl.base "#builtin.float"
    irdl.operands(x: %c0, weight: optional %c1, bias: optional %c2)
    irdl.results(y: %c3, mean: %c4, rstd: %c5)
    irdl.attributes { "groups" = %c6, "eps" = %c7 }
  }
  irdl.operation @group_norm_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.base "#builtin.integer"
    irdl.operands(dy: %c0, x: %c1, mean: %c2, rstd: %c3, weight: optional %c4)
    irdl.results(dx: %c5, dw: %c6, db: %c7)
    irdl.attributes { "groups" = %c8 }
  }
  irdl.operation @grouped_contract {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.is "mk,gkn->mn"
    %c5 = irdl.is "mk,gnk->mn"
    %c6 = irdl.is "mk,mn->gkn"
    %c7 = irdl.any_of(%c4, %c5, %c6)
    irdl.operands(lhs: %c0, rhs: %c1, ends: %c2)
    irdl.results(y: %c3)
    irdl.attributes { "spec" = %c7 }
  }
  irdl.operation @gt {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0, y: %c1)
    irdl.results(z: %c2)
  }
  irdl.operation @index {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "#builtin.dense_array"
    irdl.operands(x: %c0, indices: variadic %c1)
    irdl.results(y: %c2)
    irdl.attributes { "dims" = %c3 }
  }
  irdl.operation @index_add {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "#builtin.integer"
    irdl.operands(x: %c0, index: %c1, src: %c2)
    irdl.results(y: %c3)
    irdl.attributes { "dim" = %c4 }
  }
  irdl.operation @index_put {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "#builtin.dense_array"
    %c5 = irdl.is true
    %c6 = irdl.is false
    %c7 = irdl.any_of(%c5, %c6)
    irdl.operands(x: %c0, indices: variadic %c1, values: %c2)
    irdl.results(y: %c3)
    irdl.attributes { "dims" = %c4, "accumulate" = %c7 }
  }
  irdl.operation @iota {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "#builtin.integer"
    %c2 = irdl.base "#builtin.float"
    %c3 = irdl.any_of(%c1, %c2)
    %c4 = irdl.base "#builtin.integer"
    %c5 = irdl.base "#builtin.float"
    %c6 = irdl.any_of(%c4, %c5)
    %c7 = irdl.base "#builtin.type"
    irdl.results(y: %c0)
    irdl.attributes { "start" = %c3, "stride" = %c6, "type" = %c7 }
  }
  irdl.operation @isnan {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @layer_norm {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "#builtin.integer"
    %c7 = irdl.base "#builtin.float"
    irdl.operands(x: %c0, weight: optional %c1, bias: optional %c2)
    irdl.results(y: %c3, mean: %c4, rstd: %c5)
    irdl.attributes { "trailing" = %c6, "eps" = %c7 }
  }
  irdl.operation @layer_norm_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.base "#builtin.integer"
    irdl.operands(dy: %c0, x: %c1, mean: %c2, rstd: %c3, weight: optional %c4)
    irdl.results(dx: %c5, dw: %c6, db: %c7)
    irdl.attributes { "trailing" = %c8 }
  }
  irdl.operation @layout {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "order" = %c2 }
  }
  irdl.operation @le {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0, y: %c1)
    irdl.results(z: %c2)
  }
  irdl.operation @lerp {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0, y: %c1, weight: %c2)
    irdl.results(z: %c3)
  }
  irdl.operation @log {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @log1p {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @log2 {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @log_softmax {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.integer"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dim" = %c2 }
  }
  irdl.operation @log_softmax_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "#builtin.integer"
    irdl.operands(dy: %c0, y: %c1)
    irdl.results(dx: %c2)
    irdl.attributes { "dim" = %c3 }
  }
  irdl.operation @logsumexp {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    %c3 = irdl.is true
    %c4 = irdl.is false
    %c5 = irdl.any_of(%c3, %c4)
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dims" = %c2, "keepdim" = %c5 }
  }
  irdl.operation @lt {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0, y: %c1)
    irdl.results(z: %c2)
  }
  irdl.operation @max_pool {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "#builtin.dense_array"
    %c4 = irdl.base "#builtin.dense_array"
    %c5 = irdl.base "#builtin.dense_array"
    %c6 = irdl.base "#builtin.dense_array"
    %c7 = irdl.is true
    %c8 = irdl.is false
    %c9 = irdl.any_of(%c7, %c8)
    %c10 = irdl.is true
    %c11 = irdl.is false
    %c12 = irdl.any_of(%c10, %c11)
    irdl.operands(x: %c0)
    irdl.results(values: %c1, indices: %c2)
    irdl.attributes { "kernel" = %c3, "stride" = %c4, "padding" = %c5, "dilation" = %c6, "ceil_mode" = %c9, "in_window" = %c12 }
  }
  irdl.operation @max_pool_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "#builtin.dense_array"
    %c4 = irdl.base "#builtin.dense_array"
    %c5 = irdl.base "#builtin.dense_array"
    %c6 = irdl.base "#builtin.dense_array"
    %c7 = irdl.is true
    %c8 = irdl.is false
    %c9 = irdl.any_of(%c7, %c8)
    %c10 = irdl.base "#builtin.dense_array"
    irdl.operands(dy: %c0, indices: %c1)
    irdl.results(dx: %c2)
    irdl.attributes { "kernel" = %c3, "stride" = %c4, "padding" = %c5, "dilation" = %c6, "ceil_mode" = %c9, "input_shape" = %c10 }
  }
  irdl.operation @maximum {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0, y: %c1)
    irdl.results(z: %c2)
  }
  irdl.operation @mean {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    %c3 = irdl.is true
    %c4 = irdl.is false
    %c5 = irdl.any_of(%c3, %c4)
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dims" = %c2, "keepdim" = %c5 }
  }
  irdl.operation @micro_batches {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.symbol_ref"
    %c3 = irdl.base "#builtin.integer"
    %c4 = irdl.base "#builtin.array"
    %c5 = irdl.base "#builtin.array"
    %c6 = irdl.base "#builtin.dense_array"
    irdl.operands(inputs: variadic %c0)
    irdl.results(outputs: variadic %c1)
    irdl.attributes { "callee" = %c2, "count" = %c3, "given" = %c4, "taken" = %c5, "carried" = %c6 }
  }
  irdl.operation @minimum {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0, y: %c1)
    irdl.results(z: %c2)
  }
  irdl.operation @mul {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0, y: %c1)
    irdl.results(z: %c2)
  }
  irdl.operation @muon {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.base "!builtin.tensor"
    %c9 = irdl.is true
    %c10 = irdl.is false
    %c11 = irdl.any_of(%c9, %c10)
    %c12 = irdl.base "#builtin.array"
    %c13 = irdl.base "#builtin.integer"
    %c14 = irdl.is "original"
    %c15 = irdl.is "match_rms_adamw"
    %c16 = irdl.any_of(%c14, %c15)
    irdl.operands(parameter: %c0, gradient: %c1, momentum_buffer: %c2, lr: %c3, weight_decay: %c4, momentum: %c5, eps: %c6)
    irdl.results(new_parameter: %c7, new_momentum_buffer: %c8)
    irdl.attributes { "nesterov" = %c11, "coefficients" = %c12, "iterations" = %c13, "adjust" = %c16 }
  }
  irdl.operation @nadam {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.base "!builtin.tensor"
    %c9 = irdl.base "!builtin.tensor"
    %c10 = irdl.base "!builtin.tensor"
    %c11 = irdl.base "!builtin.tensor"
    %c12 = irdl.base "!builtin.tensor"
    %c13 = irdl.base "!builtin.tensor"
    %c14 = irdl.base "!builtin.tensor"
    %c15 = irdl.base "!builtin.tensor"
    %c16 = irdl.base "!builtin.tensor"
    %c17 = irdl.is true
    %c18 = irdl.is false
    %c19 = irdl.any_of(%c17, %c18)
    %c20 = irdl.is true
    %c21 = irdl.is false
    %c22 = irdl.any_of(%c20, %c21)
    irdl.operands(parameter: %c0, gradient: %c1, step: %c2, mu_product: %c3, exp_avg: %c4, exp_avg_sq: %c5, lr: %c6, beta1: %c7, beta2: %c8, eps: %c9, weight_decay: %c10, momentum_decay: %c11)
    irdl.results(new_parameter: %c12, new_step: %c13, new_mu_product: %c14, new_exp_avg: %c15, new_exp_avg_sq: %c16)
    irdl.attributes { "decoupled" = %c19, "maximize" = %c22 }
  }
  irdl.operation @ne {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0, y: %c1)
    irdl.results(z: %c2)
  }
  irdl.operation @neg {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @nll_loss {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "#builtin.integer"
    %c5 = irdl.is "none"
    %c6 = irdl.is "mean"
    %c7 = irdl.is "sum"
    %c8 = irdl.any_of(%c5, %c6, %c7)
    irdl.operands(x: %c0, target: %c1, weight: optional %c2)
    irdl.results(loss: %c3)
    irdl.attributes { "ignore_index" = %c4, "reduction" = %c8 }
  }
  irdl.operation @nll_loss_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "#builtin.integer"
    %c5 = irdl.base "#builtin.integer"
    %c6 = irdl.is "none"
    %c7 = irdl.is "mean"
    %c8 = irdl.is "sum"
    %c9 = irdl.any_of(%c6, %c7, %c8)
    irdl.operands(dy: %c0, target: %c1, weight: optional %c2)
    irdl.results(dx: %c3)
    irdl.attributes { "classes" = %c4, "ignore_index" = %c5, "reduction" = %c9 }
  }
  irdl.operation @offload {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @opaque {
    %c0 = irdl.any
    %c1 = irdl.any
    %c2 = irdl.base "#builtin.string"
    %c3 = irdl.base "#builtin.array"
    %c4 = irdl.base "#builtin.dictionary"
    irdl.operands(xs: variadic %c0)
    irdl.results(ys: variadic %c1)
    irdl.attributes { "target" = %c2, "arguments" = %c3, "keywords" = %c4 }
  }
  irdl.operation @opaque_grad {
    %c0 = irdl.any
    %c1 = irdl.any
    %c2 = irdl.base "#builtin.string"
    %c3 = irdl.base "#builtin.array"
    %c4 = irdl.base "#builtin.dictionary"
    %c5 = irdl.base "#builtin.dense_array"
    %c6 = irdl.base "#builtin.dense_array"
    irdl.operands(xs: variadic %c0)
    irdl.results(dxs: variadic %c1)
    irdl.attributes { "target" = %c2, "arguments" = %c3, "keywords" = %c4, "wanted" = %c5, "given" = %c6 }
  }
  irdl.operation @pack_bits {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.integer"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dim" = %c2 }
  }
  irdl.operation @pad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    %c3 = irdl.base "#builtin.dense_array"
    %c4 = irdl.base "#builtin.integer"
    %c5 = irdl.base "#builtin.float"
    %c6 = irdl.any_of(%c4, %c5)
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "low" = %c2, "high" = %c3, "value" = %c6 }
  }
  irdl.operation @pow {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0, y: %c1)
    irdl.results(z: %c2)
  }
  irdl.operation @prod {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    %c3 = irdl.is true
    %c4 = irdl.is false
    %c5 = irdl.any_of(%c3, %c4)
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dims" = %c2, "keepdim" = %c5 }
  }
  irdl.operation @radam {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.base "!builtin.tensor"
    %c9 = irdl.base "!builtin.tensor"
    %c10 = irdl.base "!builtin.tensor"
    %c11 = irdl.base "!builtin.tensor"
    %c12 = irdl.base "!builtin.tensor"
    %c13 = irdl.base "!builtin.tensor"
    %c14 = irdl.is true
    %c15 = irdl.is false
    %c16 = irdl.any_of(%c14, %c15)
    %c17 = irdl.is true
    %c18 = irdl.is false
    %c19 = irdl.any_of(%c17, %c18)
    irdl.operands(parameter: %c0, gradient: %c1, step: %c2, exp_avg: %c3, exp_avg_sq: %c4, lr: %c5, beta1: %c6, beta2: %c7, eps: %c8, weight_decay: %c9)
    irdl.results(new_parameter: %c10, new_step: %c11, new_exp_avg: %c12, new_exp_avg_sq: %c13)
    irdl.attributes { "decoupled" = %c16, "maximize" = %c19 }
  }
  irdl.operation @random {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.is "uniform"
    %c4 = irdl.is "normal"
    %c5 = irdl.is "exponential"
    %c6 = irdl.any_of(%c3, %c4, %c5)
    %c7 = irdl.base "#builtin.integer"
    %c8 = irdl.base "#builtin.type"
    irdl.operands(key: %c0, number: optional %c1)
    irdl.results(y: %c2)
    irdl.attributes { "distribution" = %c6, "stream" = %c7, "type" = %c8 }
  }
  irdl.operation @reciprocal {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @relu {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @rem {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.is "floor"
    %c4 = irdl.is "trunc"
    %c5 = irdl.any_of(%c3, %c4)
    irdl.operands(x: %c0, y: %c1)
    irdl.results(z: %c2)
    irdl.attributes { "rounding" = %c5 }
  }
  irdl.operation @repeat_pixels {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "factors" = %c2 }
  }
  irdl.operation @repeat_pixels_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    irdl.operands(dy: %c0)
    irdl.results(dx: %c1)
    irdl.attributes { "factors" = %c2 }
  }
  irdl.operation @reshape {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "shape" = %c2 }
  }
  irdl.operation @rms_norm {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "#builtin.integer"
    %c5 = irdl.base "#builtin.float"
    irdl.operands(x: %c0, weight: optional %c1)
    irdl.results(y: %c2, rstd: %c3)
    irdl.attributes { "trailing" = %c4, "eps" = %c5 }
  }
  irdl.operation @rms_norm_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "#builtin.integer"
    irdl.operands(dy: %c0, x: %c1, rstd: %c2, weight: optional %c3)
    irdl.results(dx: %c4, dw: %c5)
    irdl.attributes { "trailing" = %c6 }
  }
  irdl.operation @rmsprop {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.base "!builtin.tensor"
    %c9 = irdl.base "!builtin.tensor"
    %c10 = irdl.base "!builtin.tensor"
    %c11 = irdl.base "!builtin.tensor"
    %c12 = irdl.base "!builtin.tensor"
    %c13 = irdl.base "!builtin.tensor"
    %c14 = irdl.base "!builtin.tensor"
    %c15 = irdl.is true
    %c16 = irdl.is false
    %c17 = irdl.any_of(%c15, %c16)
    irdl.operands(parameter: %c0, gradient: %c1, step: %c2, square_avg: %c3, momentum_buffer: optional %c4, grad_avg: optional %c5, lr: %c6, alpha: %c7, eps: %c8, weight_decay: %c9, momentum: optional %c10)
    irdl.results(new_parameter: %c11, new_step: %c12, new_square_avg: %c13, new_optional: variadic %c14)
    irdl.attributes { "maximize" = %c17 }
  }
  irdl.operation @round {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @row_sums {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "#builtin.integer"
    %c4 = irdl.base "#builtin.integer"
    %c5 = irdl.is f64
    %c6 = irdl.is f32
    %c7 = irdl.is bf16
    %c8 = irdl.is f16
    %c9 = irdl.is f8E4M3FN
    %c10 = irdl.is f8E5M2
    %c11 = irdl.is i64
    %c12 = irdl.is i32
    %c13 = irdl.is i16
    %c14 = irdl.is i8
    %c15 = irdl.is ui64
    %c16 = irdl.is ui32
    %c17 = irdl.is ui16
    %c18 = irdl.is ui8
    %c19 = irdl.is i1
    %c20 = irdl.is complex<f32>
    %c21 = irdl.is complex<f64>
    %c22 = irdl.any_of(%c5, %c6, %c7, %c8, %c9, %c10, %c11, %c12, %c13, %c14, %c15, %c16, %c17, %c18, %c19, %c20, %c21)
    irdl.operands(dys: variadic %c0, indices: variadic %c1)
    irdl.results(ys: variadic %c2)
    irdl.attributes { "rows" = %c3, "padding_idx" = %c4, "dtype" = %c22 }
  }
  irdl.operation @rprop {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.base "!builtin.tensor"
    %c9 = irdl.base "!builtin.tensor"
    %c10 = irdl.base "!builtin.tensor"
    %c11 = irdl.base "!builtin.tensor"
    %c12 = irdl.base "!builtin.tensor"
    %c13 = irdl.is true
    %c14 = irdl.is false
    %c15 = irdl.any_of(%c13, %c14)
    irdl.operands(parameter: %c0, gradient: %c1, step: %c2, followed: %c3, step_size: %c4, eta_minus: %c5, eta_plus: %c6, step_size_min: %c7, step_size_max: %c8)
    irdl.results(new_parameter: %c9, new_step: %c10, new_followed: %c11, new_step_size: %c12)
    irdl.attributes { "maximize" = %c15 }
  }
  irdl.operation @rsqrt {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @scatter {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "#builtin.integer"
    irdl.operands(x: %c0, index: %c1, src: %c2)
    irdl.results(y: %c3)
    irdl.attributes { "dim" = %c4 }
  }
  irdl.operation @scatter_add {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "#builtin.integer"
    irdl.operands(x: %c0, index: %c1, src: %c2)
    irdl.results(y: %c3)
    irdl.attributes { "dim" = %c4 }
  }
  irdl.operation @select {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    irdl.operands(condition: %c0, x: %c1, y: %c2)
    irdl.results(z: %c3)
  }
  irdl.operation @sgd {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "!builtin.tensor"
    %c6 = irdl.base "!builtin.tensor"
    %c7 = irdl.base "!builtin.tensor"
    %c8 = irdl.base "!builtin.tensor"
    %c9 = irdl.base "!builtin.tensor"
    %c10 = irdl.is true
    %c11 = irdl.is false
    %c12 = irdl.any_of(%c10, %c11)
    %c13 = irdl.is true
    %c14 = irdl.is false
    %c15 = irdl.any_of(%c13, %c14)
    irdl.operands(parameter: %c0, gradient: %c1, momentum_buffer: optional %c2, lr: %c3, weight_decay: %c4, momentum: optional %c5, dampening: optional %c6, fresh: optional %c7)
    irdl.results(new_parameter: %c8, new_momentum_buffer: variadic %c9)
    irdl.attributes { "nesterov" = %c12, "maximize" = %c15 }
  }
  irdl.operation @sigmoid {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @sigmoid_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(dy: %c0, x: %c1)
    irdl.results(dx: %c2)
  }
  irdl.operation @sign {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @silu {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @silu_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(dy: %c0, x: %c1)
    irdl.results(dx: %c2)
  }
  irdl.operation @sin {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @slice {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.integer"
    %c3 = irdl.base "#builtin.integer"
    %c4 = irdl.base "#builtin.integer"
    %c5 = irdl.base "#builtin.integer"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dim" = %c2, "start" = %c3, "end" = %c4, "stride" = %c5 }
  }
  irdl.operation @slice_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.integer"
    %c3 = irdl.base "#builtin.integer"
    %c4 = irdl.base "#builtin.integer"
    %c5 = irdl.base "#builtin.integer"
    %c6 = irdl.base "#builtin.integer"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dim" = %c2, "start" = %c3, "end" = %c4, "stride" = %c5, "size" = %c6 }
  }
  irdl.operation @slice_update {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "#builtin.integer"
    %c4 = irdl.base "#builtin.integer"
    %c5 = irdl.base "#builtin.integer"
    %c6 = irdl.base "#builtin.integer"
    irdl.operands(base: %c0, x: %c1)
    irdl.results(y: %c2)
    irdl.attributes { "dim" = %c3, "start" = %c4, "end" = %c5, "stride" = %c6 }
  }
  irdl.operation @softmax {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.integer"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dim" = %c2 }
  }
  irdl.operation @softmax_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "#builtin.integer"
    irdl.operands(dy: %c0, y: %c1)
    irdl.results(dx: %c2)
    irdl.attributes { "dim" = %c3 }
  }
  irdl.operation @sort {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "#builtin.integer"
    %c4 = irdl.is true
    %c5 = irdl.is false
    %c6 = irdl.any_of(%c4, %c5)
    %c7 = irdl.is true
    %c8 = irdl.is false
    %c9 = irdl.any_of(%c7, %c8)
    irdl.operands(x: %c0)
    irdl.results(values: %c1, indices: %c2)
    irdl.attributes { "dim" = %c3, "descending" = %c6, "stable" = %c9 }
  }
  irdl.operation @spread_rows {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(sums: %c0, places: %c1)
    irdl.results(y: %c2)
  }
  irdl.operation @sqrt {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @sub {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0, y: %c1)
    irdl.results(z: %c2)
  }
  irdl.operation @sum {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    %c3 = irdl.is true
    %c4 = irdl.is false
    %c5 = irdl.any_of(%c3, %c4)
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dims" = %c2, "keepdim" = %c5 }
  }
  irdl.operation @tanh {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @tanh_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    irdl.operands(dy: %c0, x: %c1)
    irdl.results(dx: %c2)
  }
  irdl.operation @topk {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "#builtin.integer"
    %c4 = irdl.base "#builtin.integer"
    %c5 = irdl.is true
    %c6 = irdl.is false
    %c7 = irdl.any_of(%c5, %c6)
    %c8 = irdl.is true
    %c9 = irdl.is false
    %c10 = irdl.any_of(%c8, %c9)
    irdl.operands(x: %c0)
    irdl.results(values: %c1, indices: %c2)
    irdl.attributes { "k" = %c3, "dim" = %c4, "largest" = %c7, "ordered" = %c10 }
  }
  irdl.operation @transpose {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "order" = %c2 }
  }
  irdl.operation @trunc {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
  }
  irdl.operation @unpack_bits {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.integer"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dim" = %c2 }
  }
  irdl.operation @upsample {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "factors" = %c2 }
  }
  irdl.operation @upsample_cells_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    irdl.operands(dy: %c0)
    irdl.results(dx: %c1)
    irdl.attributes { "factors" = %c2 }
  }
  irdl.operation @upsample_grad {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    irdl.operands(dy: %c0)
    irdl.results(dx: %c1)
    irdl.attributes { "factors" = %c2 }
  }
  irdl.operation @upsample_shares {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "!builtin.tensor"
    %c3 = irdl.base "!builtin.tensor"
    %c4 = irdl.base "!builtin.tensor"
    %c5 = irdl.base "#builtin.dense_array"
    irdl.operands(dy: %c0)
    irdl.results(before: %c1, above: %c2, left: %c3, after: %c4)
    irdl.attributes { "factors" = %c5 }
  }
  irdl.operation @variance {
    %c0 = irdl.base "!builtin.tensor"
    %c1 = irdl.base "!builtin.tensor"
    %c2 = irdl.base "#builtin.dense_array"
    %c3 = irdl.is true
    %c4 = irdl.is false
    %c5 = irdl.any_of(%c3, %c4)
    %c6 = irdl.base "#builtin.integer"
    %c7 = irdl.base "#builtin.float"
    %c8 = irdl.any_of(%c6, %c7)
    %c9 = irdl.is true
    %c10 = irdl.is false
    %c11 = irdl.any_of(%c9, %c10)
    irdl.operands(x: %c0)
    irdl.results(y: %c1)
    irdl.attributes { "dims" = %c2, "keepdim" = %c5, "correction" = %c8, "exact_zero" = %c11 }
  }
}
