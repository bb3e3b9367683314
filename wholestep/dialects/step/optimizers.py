"""Optimizer updates: one op per family, from a parameter, its gradient and state to the new parameter and state.

Each expands to the arithmetic of `torch.optim`'s single-tensor code, rounding where it rounds. What a schedule may
change (learning rate, betas, decay, ...) is a 0-d f64 operand; what changes the computation itself is an attribute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from ...ir.core import Op, Value
from ...ir.dialect import Attr, Operand, Result, TypeConstraint
from ...ir.types import BF16, F32, F64, ScalarType, TensorType
from .base import LABELS, Roles, StepBuilder, StepOp, step, torch_dtype

RealTensor = TypeConstraint("real tensor", ("float",))
Number = TypeConstraint("0-d float tensor", ("float",), 0)


def hyper(doc: str, optional: bool = False) -> Operand:
    """Declares a hyper-parameter: a 0-d f64 operand, so that changing it never changes the program."""
    return Operand(Number, doc, optional=optional)


def counter() -> Operand:
    """Declares the count of updates so far."""
    return Operand(Number, "updates so far")


class Arithmetic:
    """ATen's arithmetic on a parameter, as ops: computed in f32 (f64 for f64), rounded to the first tensor's type.

    Numbers are 0-d f64 values. Each method is one call of eager's update, so each rounds once, as eager does: an update
    of bf16 parameters sees 0.999 as 0.999 and not as bf16's 1.0.
    """

    def __init__(self, b: StepBuilder, element: ScalarType):
        self.b, self.compute = b, F64 if element is F64 else F32

    def wide(self, x: Value) -> Value:
        return self.b.cast_to(x, self.compute)

    def round(self, x: Value, like: Value) -> Value:
        return self.b.cast_to(x, like.type.element)

    def call(self, name: str, x: Value, *others: Value | float) -> Value:
        """`name(x, *others)` in the computing type, rounded to x's."""
        wide = [v if isinstance(v, int | float) else self.wide(v) for v in (x, *others)]
        return self.round(getattr(self.b, name)(*wide), x)

    def mul(self, x: Value, y: Value | float) -> Value:
        return self.call("mul", x, y)

    def div(self, x: Value, y: Value | float) -> Value:
        return self.call("div", x, y)

    def sqrt(self, x: Value) -> Value:
        return self.call("sqrt", x)

    def maximum(self, x: Value, y: Value) -> Value:
        return self.call("maximum", x, y)

    def lerp(self, x: Value, y: Value, weight: Value) -> Value:
        return self.call("lerp", x, y, weight)

    def add(self, x: Value, y: Value, alpha: Value | None = None) -> Value:
        """x + alpha * y."""
        if alpha is None:
            return self.round(self.b.add(self.wide(x), self.wide(y)), x)
        return self.round(self.b.axpy(self.wide(x), self.wide(y), alpha), x)

    def addcmul(self, x: Value, y: Value, z: Value, value: Value | None = None) -> Value:
        """x + value * y * z."""
        value = self.b.full(1.0, (), F64) if value is None else value
        return self.round(self.b.addcmul(self.wide(x), self.wide(y), self.wide(z), value), x)

    def addcdiv(self, x: Value, y: Value, z: Value, value: Value | None = None) -> Value:
        """x + value * y / z."""
        value = self.b.full(1.0, (), F64) if value is None else value
        return self.round(self.b.addcdiv(self.wide(x), self.wide(y), self.wide(z), value), x)

    def select(self, condition: Value, x: Value, y: Value) -> Value:
        return self.b.select(condition, x, self.round(y, x))

    def moving_square(self, average: Value, x: Value, beta: Value) -> Value:
        """beta * average + (1 - beta) * x * x, in eager's two calls."""
        return self.addcmul(self.mul(average, beta), x, x, self.b.sub(1.0, beta))

    def norm(self, x: Value, dims: tuple[int, ...], keepdim: bool = False) -> Value:
        """Euclidean norm along dimensions, accumulated in the computing type."""
        wide = self.wide(x)
        return self.round(self.b.sqrt(self.b.sum(self.b.mul(wide, wide), dims=dims, keepdim=keepdim)), x)


def coupled_decay(m: Arithmetic, op: Op, gradient: Value) -> Value:
    """gradient + weight_decay * parameter; selected, since eager skips a decay of 0 and 0 * inf is not 0."""
    decayed = m.add(gradient, op.parameter, op.weight_decay)
    return m.b.select(m.b.eq(op.weight_decay, 0.0), gradient, decayed)


def decoupled_decay(m: Arithmetic, op: Op) -> Value:
    """parameter * (1 - lr * weight_decay); a decay of 0 multiplies by 1, which is exact for every value."""
    return m.mul(op.parameter, m.b.sub(1.0, m.b.mul(op.lr, op.weight_decay)))


class OptimizerUpdate(StepOp):
    """Common rules of optimizer updates. `states` names the operands with a new value among the results, in order."""

    precision = "high"
    differentiable = False
    states: ClassVar[tuple[str, ...]] = ()
    cost: ClassVar[int] = 1  # flops per element
    parameter = Operand(RealTensor, "the parameter")
    gradient = Operand(RealTensor, "its gradient")
    new_parameter = Result(RealTensor, "the updated parameter")

    @classmethod
    def infer(cls, *types: Any, **options: Any) -> list[TensorType]:
        by_name = {f.name: t for f, t in zip(cls.operand_fields, types, strict=True)}
        return [by_name["parameter"], *(by_name[s] for s in cls.states if by_name[s] is not None)]

    @classmethod
    def state_values(cls, op: Op) -> Iterator[tuple[str, Value, Value]]:
        """(name, old value, new value) of each state the op carries."""
        present = [(s, getattr(op, s)) for s in cls.states if getattr(op, s) is not None]
        for (name, old), new in zip(present, op.results[1:], strict=True):
            yield name, old, new

    @classmethod
    def start(cls, b: StepBuilder, op: Op) -> tuple[Arithmetic, Value]:
        """The arithmetic for this parameter, and the gradient to descend, in the parameter's element type."""
        gradient = b.cast_to(op.gradient, op.parameter.type.element)
        if "maximize" in cls.attribute_fields and op.maximize:
            gradient = b.neg(gradient)
        return Arithmetic(b, op.parameter.type.element), gradient

    @staticmethod
    def flops(op: Op) -> int:
        return op.parameter.type.size * op.definition.cost  # type: ignore[attr-defined]

    @staticmethod
    def check(op: Op) -> str | None:
        if op.gradient.type.shape != op.parameter.type.shape:
            return "parameter and gradient differ in shape"
        return None

    @staticmethod
    def roles(op: Op) -> Roles | None:
        labels, shape = LABELS[: op.parameter.type.rank], op.parameter.type.shape
        if any(v.type.shape not in ((), shape) for v in op.operands):
            return None

        def spec(values: tuple[Value, ...]) -> tuple[str, ...]:
            return tuple(labels if v.type.shape == shape else "" for v in values)

        return Roles(spec(op.operands), spec(op.results))


def advance(b: StepBuilder, op: Op) -> tuple[Value, Value]:
    """The counter one higher, as it is stored and as an f64 number to compute with."""
    new = b.add(op.step, 1.0)
    return new, b.cast_to(new, F64)


def maximize_option() -> Attr:
    return Attr("bool", "ascend instead of descending", False)


@step.op
class Sgd(OptimizerUpdate):
    """Gradient descent with momentum, Nesterov momentum and weight decay. Without a buffer there is no momentum.

    Eager starts the buffer as a copy of the first gradient, undampened: `fresh` is 1 on a parameter's first update (its
    buffer is then zeros) and 0 after it.
    """

    states = ("momentum_buffer",)
    cost = 6
    momentum_buffer = Operand(RealTensor, "running sum of gradients", optional=True)
    lr = hyper("learning rate")
    weight_decay = hyper("weight decay, added to the gradient")
    momentum = hyper("share of the buffer kept", optional=True)
    dampening = hyper("share of the gradient left out of the buffer", optional=True)
    fresh = Operand(Number, "1 on the parameter's first update, else 0", optional=True)
    new_momentum_buffer = Result(RealTensor, "the new buffer, with momentum", variadic=True)
    nesterov = Attr("bool", "look one momentum step ahead", False)
    maximize = maximize_option()

    @staticmethod
    def check(op):
        parts = (op.momentum_buffer, op.momentum, op.dampening, op.fresh)
        if any(p is None for p in parts) and any(p is not None for p in parts):
            return "momentum_buffer, momentum, dampening and fresh come together"
        return OptimizerUpdate.check(op)

    @staticmethod
    def expand(b, op):
        m, gradient = Sgd.start(b, op)
        gradient = coupled_decay(m, op, gradient)
        states = []
        if op.momentum_buffer is not None:
            first = b.ne(op.fresh, 0.0)
            keep = b.select(first, 0.0, op.momentum)
            take = b.select(first, 1.0, b.sub(1.0, op.dampening))
            buffer = m.add(m.mul(op.momentum_buffer, keep), gradient, take)
            states.append(buffer)
            gradient = m.add(gradient, buffer, op.momentum) if op.nesterov else buffer
        return [m.add(op.parameter, gradient, b.neg(op.lr)), *states]


@step.op
class Adam(OptimizerUpdate):
    """Adam; AdamW where the weight decay is decoupled; AMSGrad where the running maximum is given."""

    states = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    cost = 16
    step = counter()
    exp_avg = Operand(RealTensor, "average of gradients")
    exp_avg_sq = Operand(RealTensor, "average of squared gradients")
    max_exp_avg_sq = Operand(RealTensor, "largest average so far (AMSGrad)", optional=True)
    lr = hyper("learning rate")
    beta1 = hyper("decay of the average")
    beta2 = hyper("decay of the squared average")
    eps = hyper("added to the denominator")
    weight_decay = hyper("weight decay")
    new_step = Result(Number)
    new_exp_avg = Result(RealTensor)
    new_exp_avg_sq = Result(RealTensor)
    new_max_exp_avg_sq = Result(RealTensor, "with AMSGrad", variadic=True)
    decoupled = Attr("bool", "decay the parameter, not the gradient (AdamW)", False)
    maximize = maximize_option()

    @staticmethod
    def expand(b, op):
        m, gradient = Adam.start(b, op)
        count, t = advance(b, op)
        parameter = op.parameter
        if op.decoupled:
            parameter = decoupled_decay(m, op)
        else:
            gradient = coupled_decay(m, op, gradient)
        average = m.lerp(op.exp_avg, gradient, b.sub(1.0, op.beta1))
        square = m.moving_square(op.exp_avg_sq, gradient, op.beta2)
        step_size = b.div(op.lr, b.sub(1.0, b.pow(op.beta1, t)))
        correction = b.sqrt(b.sub(1.0, b.pow(op.beta2, t)))
        extra = []
        top = square
        if op.max_exp_avg_sq is not None:
            top = m.maximum(op.max_exp_avg_sq, square)
            extra.append(top)
        denominator = m.add(m.div(m.sqrt(top), correction), op.eps)
        new = m.addcdiv(parameter, average, denominator, b.neg(step_size))
        return [new, count, average, square, *extra]


@step.op
class Adamax(OptimizerUpdate):
    """Adam by the infinity norm."""

    states = ("step", "exp_avg", "exp_inf")
    cost = 12
    step = counter()
    exp_avg = Operand(RealTensor, "average of gradients")
    exp_inf = Operand(RealTensor, "decaying maximum of gradients")
    lr = hyper("learning rate")
    beta1 = hyper("decay of the average")
    beta2 = hyper("decay of the maximum")
    eps = hyper("added to the gradient's size")
    weight_decay = hyper("weight decay, added to the gradient")
    new_step = Result(Number)
    new_exp_avg = Result(RealTensor)
    new_exp_inf = Result(RealTensor)
    maximize = maximize_option()

    @staticmethod
    def expand(b, op):
        m, gradient = Adamax.start(b, op)
        count, t = advance(b, op)
        gradient = coupled_decay(m, op, gradient)
        average = m.lerp(op.exp_avg, gradient, b.sub(1.0, op.beta1))
        largest = m.maximum(m.mul(op.exp_inf, op.beta2), m.add(b.abs(gradient), op.eps))
        rate = b.div(op.lr, b.sub(1.0, b.pow(op.beta1, t)))
        return [m.addcdiv(op.parameter, average, largest, b.neg(rate)), count, average, largest]


@step.op
class Nadam(OptimizerUpdate):
    """Adam with Nesterov momentum."""

    states = ("step", "mu_product", "exp_avg", "exp_avg_sq")
    cost = 20
    step = counter()
    mu_product = Operand(Number, "product of the momentum schedule so far")
    exp_avg = Operand(RealTensor, "average of gradients")
    exp_avg_sq = Operand(RealTensor, "average of squared gradients")
    lr = hyper("learning rate")
    beta1 = hyper("decay of the average")
    beta2 = hyper("decay of the squared average")
    eps = hyper("added to the denominator")
    weight_decay = hyper("weight decay")
    momentum_decay = hyper("speed of the momentum schedule")
    new_step = Result(Number)
    new_mu_product = Result(Number)
    new_exp_avg = Result(RealTensor)
    new_exp_avg_sq = Result(RealTensor)
    decoupled = Attr("bool", "decay the parameter, not the gradient", False)
    maximize = maximize_option()

    @staticmethod
    def expand(b, op):
        m, gradient = Nadam.start(b, op)
        count, t = advance(b, op)
        parameter = op.parameter
        if op.decoupled:
            parameter = decoupled_decay(m, op)
        else:
            gradient = coupled_decay(m, op, gradient)

        def momentum(at):
            return b.mul(op.beta1, b.sub(1.0, b.mul(b.pow(0.96, b.mul(at, op.momentum_decay)), 0.5)))

        mu, mu_next = momentum(t), momentum(b.add(t, 1.0))
        product = Arithmetic(b, op.mu_product.type.element).mul(op.mu_product, mu)
        wide = b.cast_to(product, F64)
        average = m.lerp(op.exp_avg, gradient, b.sub(1.0, op.beta1))
        square = m.moving_square(op.exp_avg_sq, gradient, op.beta2)
        denominator = m.add(m.sqrt(m.div(square, b.sub(1.0, b.pow(op.beta2, t)))), op.eps)
        rate = b.neg(op.lr)
        by_gradient = b.div(b.mul(rate, b.sub(1.0, mu)), b.sub(1.0, wide))
        by_average = b.div(b.mul(rate, mu_next), b.sub(1.0, b.mul(wide, mu_next)))
        new = m.addcdiv(m.addcdiv(parameter, gradient, denominator, by_gradient), average, denominator, by_average)
        return [new, count, product, average, square]


@step.op
class Radam(OptimizerUpdate):
    """Adam whose adaptive rate is rectified while few gradients have been seen."""

    states = ("step", "exp_avg", "exp_avg_sq")
    cost = 18
    step = counter()
    exp_avg = Operand(RealTensor, "average of gradients")
    exp_avg_sq = Operand(RealTensor, "average of squared gradients")
    lr = hyper("learning rate")
    beta1 = hyper("decay of the average")
    beta2 = hyper("decay of the squared average")
    eps = hyper("added to the denominator")
    weight_decay = hyper("weight decay")
    new_step = Result(Number)
    new_exp_avg = Result(RealTensor)
    new_exp_avg_sq = Result(RealTensor)
    decoupled = Attr("bool", "decay the parameter, not the gradient", False)
    maximize = maximize_option()

    @staticmethod
    def expand(b, op):
        m, gradient = Radam.start(b, op)
        count, t = advance(b, op)
        parameter = op.parameter
        if op.decoupled:
            parameter = decoupled_decay(m, op)
        else:
            gradient = coupled_decay(m, op, gradient)
        average = m.lerp(op.exp_avg, gradient, b.sub(1.0, op.beta1))
        square = m.moving_square(op.exp_avg_sq, gradient, op.beta2)
        power = b.pow(op.beta2, t)
        correction = b.sub(1.0, power)
        longest = b.sub(b.div(2.0, b.sub(1.0, op.beta2)), 1.0)
        length = b.sub(longest, b.div(b.mul(b.mul(t, 2.0), power), correction))
        above = b.mul(b.mul(b.sub(length, 4.0), b.sub(length, 2.0)), longest)
        below = b.mul(b.mul(b.sub(longest, 4.0), b.sub(longest, 2.0)), length)
        rectifier = b.sqrt(b.div(above, below))
        plain = m.mul(m.div(average, b.sub(1.0, b.pow(op.beta1, t))), op.lr)
        scale = m.mul(m.call("reciprocal", m.add(m.sqrt(square), op.eps)), b.sqrt(correction))
        rectified = m.mul(m.mul(plain, scale), rectifier)
        update = m.select(b.gt(length, 5.0), rectified, plain)
        return [m.call("sub", parameter, update), count, average, square]


@step.op
class Rmsprop(OptimizerUpdate):
    """Gradient divided by its running root mean square; centered and with momentum where that state is given."""

    states = ("step", "square_avg", "momentum_buffer", "grad_avg")
    cost = 14
    step = counter()
    square_avg = Operand(RealTensor, "average of squared gradients")
    momentum_buffer = Operand(RealTensor, "running sum of updates", optional=True)
    grad_avg = Operand(RealTensor, "average of gradients (centered)", optional=True)
    lr = hyper("learning rate")
    alpha = hyper("decay of the averages")
    eps = hyper("added to the denominator")
    weight_decay = hyper("weight decay, added to the gradient")
    momentum = hyper("share of the buffer kept", optional=True)
    new_step = Result(Number)
    new_square_avg = Result(RealTensor)
    new_optional = Result(RealTensor, "the new momentum_buffer, then grad_avg, where given", variadic=True)
    maximize = maximize_option()

    @staticmethod
    def expand(b, op):
        m, gradient = Rmsprop.start(b, op)
        count, _ = advance(b, op)
        gradient = coupled_decay(m, op, gradient)
        square = m.moving_square(op.square_avg, gradient, op.alpha)
        mean, spread = None, square
        if op.grad_avg is not None:
            mean = m.lerp(op.grad_avg, gradient, b.sub(1.0, op.alpha))
            spread = m.round(b.sub(m.wide(square), b.mul(m.wide(mean), m.wide(mean))), square)
        denominator = m.add(m.sqrt(spread), op.eps)
        rate = b.neg(op.lr)
        extra = []
        if op.momentum_buffer is not None:
            buffer = m.addcdiv(m.mul(op.momentum_buffer, op.momentum), gradient, denominator)
            extra.append(buffer)
            new = m.add(op.parameter, buffer, rate)
        else:
            new = m.addcdiv(op.parameter, gradient, denominator, rate)
        if mean is not None:
            extra.append(mean)
        return [new, count, square, *extra]


@step.op
class Adagrad(OptimizerUpdate):
    """Gradient divided by the root of the sum of all its squares."""

    states = ("step", "sum")
    cost = 8
    step = counter()
    sum = Operand(RealTensor, "sum of squared gradients")
    lr = hyper("learning rate")
    lr_decay = hyper("decay of the learning rate")
    eps = hyper("added to the denominator")
    weight_decay = hyper("weight decay, added to the gradient")
    new_step = Result(Number)
    new_sum = Result(RealTensor)
    maximize = maximize_option()

    @staticmethod
    def expand(b, op):
        m, gradient = Adagrad.start(b, op)
        count, t = advance(b, op)
        gradient = coupled_decay(m, op, gradient)
        rate = b.div(op.lr, b.add(b.mul(b.sub(t, 1.0), op.lr_decay), 1.0))
        total = m.addcmul(op.sum, gradient, gradient)
        new = m.addcdiv(op.parameter, gradient, m.add(m.sqrt(total), op.eps), b.neg(rate))
        return [new, count, total]


@step.op
class Adadelta(OptimizerUpdate):
    """Updates scaled by the ratio of the sizes of past updates and gradients."""

    states = ("step", "square_avg", "acc_delta")
    cost = 16
    step = counter()
    square_avg = Operand(RealTensor, "average of squared gradients")
    acc_delta = Operand(RealTensor, "average of squared updates")
    lr = hyper("learning rate")
    rho = hyper("decay of the averages")
    eps = hyper("added under both roots")
    weight_decay = hyper("weight decay, added to the gradient")
    new_step = Result(Number)
    new_square_avg = Result(RealTensor)
    new_acc_delta = Result(RealTensor)
    maximize = maximize_option()

    @staticmethod
    def expand(b, op):
        m, gradient = Adadelta.start(b, op)
        count, _ = advance(b, op)
        gradient = coupled_decay(m, op, gradient)
        square = m.moving_square(op.square_avg, gradient, op.rho)
        below = m.sqrt(m.add(square, op.eps))
        delta = m.mul(m.div(m.sqrt(m.add(op.acc_delta, op.eps)), below), gradient)
        deltas = m.moving_square(op.acc_delta, delta, op.rho)
        return [m.add(op.parameter, delta, b.neg(op.lr)), count, square, deltas]


@step.op
class Adafactor(OptimizerUpdate):
    """Adam with the second moment factored into rows and columns, and updates clipped by their root mean square.

    Matrices (and stacks of them) carry `row_var` and `col_var`, vectors `variance`. Without `eps1` the machine epsilon
    of the parameter's element type stands for it.
    """

    states = ("step", "row_var", "col_var", "variance")
    cost = 16
    step = counter()
    row_var = Operand(RealTensor, "average of squared gradients along rows", optional=True)
    col_var = Operand(RealTensor, "average of squared gradients along columns", optional=True)
    variance = Operand(RealTensor, "average of squared gradients of a vector", optional=True)
    lr = hyper("learning rate, an upper bound")
    beta2_decay = hyper("exponent of the averages' decay")
    eps1 = hyper("smallest root of a second moment", optional=True)
    eps2 = hyper("smallest parameter scale")
    d = hyper("clipping threshold")
    weight_decay = hyper("decoupled weight decay")
    new_step = Result(Number)
    new_moments = Result(RealTensor, "the new row_var and col_var, or the new variance", variadic=True)
    maximize = maximize_option()

    @staticmethod
    def check(op):
        factored = (op.row_var is not None, op.col_var is not None, op.variance is None)
        if len(set(factored)) != 1:
            return "a matrix carries row_var and col_var, a vector carries variance"
        return OptimizerUpdate.check(op)

    @staticmethod
    def expand(b, op):
        m, gradient = Adafactor.start(b, op)
        count, t = advance(b, op)
        element, rank, size = op.parameter.type.element, op.parameter.type.rank, op.parameter.type.size
        eps1 = op.eps1 if op.eps1 is not None else b.full(torch.finfo(torch_dtype(element)).eps, (), F64)
        everything, root = tuple(range(rank)), float(size**0.5)
        weight = b.pow(t, op.beta2_decay)
        bound = b.minimum(op.lr, b.reciprocal(b.sqrt(t)))
        scale = b.div(b.cast_to(m.norm(op.parameter, everything), F64), root)
        alpha = b.mul(b.maximum(op.eps2, scale), bound)
        parameter = decoupled_decay(m, op)
        if op.row_var is not None:

            def moment(state, dim):
                norm = m.norm(gradient, (dim,), keepdim=True)
                mean = m.div(m.mul(norm, norm), float(gradient.type.shape[dim]))
                return m.lerp(state, mean, weight)

            rows, columns = moment(op.row_var, rank - 1), moment(op.col_var, rank - 2)
            moments = [rows, columns]
            mean = m.round(b.mean(m.wide(rows), dims=(rank - 2,), keepdim=True), rows)
            estimate = m.div(m.mul(rows, columns), m.maximum(mean, eps1))
        else:
            estimate = m.lerp(op.variance, m.mul(gradient, gradient), weight)
            moments = [estimate]
        update = m.mul(m.call("rsqrt", m.maximum(estimate, b.mul(eps1, eps1))), gradient)
        size_of_update = b.div(b.cast_to(m.norm(update, everything), F64), b.mul(op.d, root))
        rate = b.div(b.neg(alpha), b.maximum(size_of_update, 1.0))
        return [m.add(parameter, update, rate), count, *moments]


@step.op
class Asgd(OptimizerUpdate):
    """Averaged gradient descent: `ax` is the average of the parameters."""

    states = ("step", "eta", "mu", "ax")
    cost = 9
    step = counter()
    eta = Operand(Number, "the learning rate of this update")
    mu = Operand(Number, "the weight of the parameters in the average")
    ax = Operand(RealTensor, "average of the parameters")
    lr = hyper("learning rate")
    lambd = hyper("decay term")
    alpha = hyper("power of the learning rate's decay")
    t0 = hyper("update at which averaging starts")
    weight_decay = hyper("weight decay, added to the gradient")
    new_step = Result(Number)
    new_eta = Result(Number)
    new_mu = Result(Number)
    new_ax = Result(RealTensor)
    maximize = maximize_option()

    @staticmethod
    def expand(b, op):
        m, gradient = Asgd.start(b, op)
        count, t = advance(b, op)
        gradient = coupled_decay(m, op, gradient)
        eta = b.cast_to(op.eta, F64)
        decayed = m.mul(op.parameter, b.sub(1.0, b.mul(op.lambd, eta)))
        new = m.add(decayed, gradient, b.neg(eta))
        moved = m.add(op.ax, m.mul(m.call("sub", new, op.ax), op.mu))
        average = m.select(b.eq(op.mu, 1.0), m.round(new, op.ax), moved)
        growth = b.add(b.mul(b.mul(op.lambd, op.lr), t), 1.0)
        new_eta = m.round(b.div(op.lr, b.pow(growth, op.alpha)), op.eta)
        new_mu = m.round(b.reciprocal(b.maximum(b.sub(t, op.t0), 1.0)), op.mu)
        return [new, count, new_eta, new_mu, average]


@step.op
class Rprop(OptimizerUpdate):
    """A step size per element, grown while the gradient keeps its sign and shrunk when it turns."""

    states = ("step", "followed", "step_size")
    cost = 12
    step = counter()
    followed = Operand(RealTensor, "the gradient followed last (`prev` in torch's state)")
    step_size = Operand(RealTensor, "step size per element")
    eta_minus = hyper("factor when the sign turns")
    eta_plus = hyper("factor when the sign stays")
    step_size_min = hyper("smallest step size")
    step_size_max = hyper("largest step size")
    new_step = Result(Number)
    new_followed = Result(RealTensor)
    new_step_size = Result(RealTensor)
    maximize = maximize_option()

    @staticmethod
    def expand(b, op):
        m, gradient = Rprop.start(b, op)
        count, _ = advance(b, op)
        element = gradient.type.element
        minus, plus = b.cast_to(op.eta_minus, element), b.cast_to(op.eta_plus, element)
        factor = b.sign(m.mul(gradient, op.followed))
        factor = b.select(b.gt(factor, 0.0), plus, factor)
        factor = b.select(b.lt(factor, 0.0), minus, factor)
        factor = b.select(b.eq(factor, 0.0), 1.0, factor)
        size = m.call("minimum", m.maximum(m.mul(op.step_size, factor), op.step_size_min), op.step_size_max)
        followed = b.select(b.eq(factor, minus), 0.0, gradient)
        new = m.call("sub", op.parameter, m.mul(b.sign(followed), size))
        return [new, count, m.round(followed, op.followed), size]


@step.op
class Muon(OptimizerUpdate):
    """Momentum whose update is made orthogonal by Newton-Schulz iterations in bf16, then decoupled weight decay.

    The iterations run through ATen's `addmm`, whose one rounding per call is what eager's numbers rest on; their
    coefficients are therefore attributes.
    """

    states = ("momentum_buffer",)
    momentum_buffer = Operand(RealTensor, "average of gradients")
    lr = hyper("learning rate")
    weight_decay = hyper("decoupled weight decay")
    momentum = hyper("decay of the average")
    eps = hyper("smallest norm")
    new_momentum_buffer = Result(RealTensor)
    nesterov = Attr("bool", "look one momentum step ahead", True)
    coefficients = Attr("list", "the three coefficients of the quintic iteration")
    iterations = Attr("int", "Newton-Schulz iterations", 5)
    adjust = Attr("str", "how the learning rate follows the shape", "original", choices=("original", "match_rms_adamw"))

    @staticmethod
    def check(op):
        if op.parameter.type.rank != 2:
            return "Muon updates matrices only"
        return OptimizerUpdate.check(op)

    @staticmethod
    def flops(op):
        rows, columns = sorted(op.parameter.type.shape)
        return op.iterations * (4 * rows * rows * columns + 2 * rows**3) + 8 * rows * columns

    @staticmethod
    def roles(op):
        return None

    @staticmethod
    def expand(b, op):
        m, gradient = Muon.start(b, op)
        buffer = m.lerp(op.momentum_buffer, gradient, b.sub(1.0, op.momentum))
        update = m.lerp(gradient, buffer, op.momentum) if op.nesterov else buffer
        rows, columns = op.parameter.type.shape
        if op.adjust == "original":
            ratio = max(1.0, rows / columns) ** 0.5
        else:
            ratio = 0.2 * max(rows, columns) ** 0.5
        update = orthogonal(b, update, op.coefficients, op.iterations, op.eps)
        decayed = decoupled_decay(m, op)
        return [m.add(decayed, b.cast_to(update, decayed.type.element), b.neg(b.mul(op.lr, ratio))), buffer]


def orthogonal(b: StepBuilder, x: Value, coefficients: list[float], iterations: int, eps: Value) -> Value:
    """Roughly the nearest semi-orthogonal matrix: Newton-Schulz iterations in bf16, as `torch.optim.Muon` runs them."""
    first, second, third = coefficients
    x = b.cast_to(x, BF16)
    tall = x.type.shape[0] > x.type.shape[1]
    if tall:
        x = b.swap(x)
    norm = aten(b, "linalg_vector_norm.default", [x], [{"tensor": 0}, 2.0], TensorType((), BF16))
    x = b.div(x, b.maximum(norm, b.cast_to(eps, BF16)))
    for _ in range(iterations):
        gram = b.contract(x, x, spec="mk,nk->mn")
        square = addmm(b, gram, gram, gram, beta=second, alpha=third)
        x = addmm(b, x, square, x, beta=first, alpha=1.0)
    return b.swap(x) if tall else x


def addmm(b: StepBuilder, addend: Value, lhs: Value, rhs: Value, beta: float, alpha: float) -> Value:
    """beta * addend + alpha * lhs @ rhs, rounded once."""
    tensors = [{"tensor": 0}, {"tensor": 1}, {"tensor": 2}]
    return aten(b, "addmm.default", [addend, lhs, rhs], tensors, addend.type, {"beta": beta, "alpha": alpha})


def aten(
    b: StepBuilder,
    name: str,
    operands: list[Value],
    arguments: list[Any],
    result: TensorType,
    keywords: dict[str, Any] | None = None,
) -> Value:
    """One call of an ATen operator as it is."""
    keywords = keywords or {}
    return b.opaque(operands, result_types=[result], target=f"aten.{name}", arguments=arguments, keywords=keywords)
