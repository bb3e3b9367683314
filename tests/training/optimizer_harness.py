"""Runs an optimizer's plan as a program, the way the runtime does, beside the real optimizer on clones."""

from __future__ import annotations

import copy

import torch

from wholestep.dialects.step import StepBuilder, tensor_type, torch_dtype
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.verify import verify
from wholestep.runtime.executor import Executable
from wholestep.training.optimizers import plan_optimizer


class CompiledOptimizer:
    """`step(gradients)` through our ops; state is installed in the optimizer itself."""

    def __init__(self, optimizer, parameters):
        self.optimizer, self.parameters = optimizer, parameters
        self.compiles = 0
        self.plan = None
        self.build()

    def build(self):
        self.compiles += 1
        self.plan = plan = plan_optimizer(self.optimizer, self.parameters, self.plan)
        self.structure = plan.structure()
        names = list(plan.parameters)
        self.slots = list({slot.source: slot for name in names for slot in plan.slots(name)}.values())
        index = {slot.source: 2 * len(names) + i for i, slot in enumerate(self.slots)}
        types = [tensor_type(self.parameters[n]) for n in names]
        self.module = module()
        self.function = add_function(self.module, "update", [*types, *types, *(s.type for s in self.slots)])
        block = self.function.regions[0].block
        b = StepBuilder(block, phase="update")
        results, self.targets = [], []
        for i, name in enumerate(names):
            inputs = [block.arguments[index[s.source]] for s in plan.slots(name)]
            new, states = plan.emit(b, name, block.arguments[i], block.arguments[len(names) + i], inputs)
            results += [new, *(v for _, v in states)]
            self.targets += [("parameter", name), *(s.source for s, _ in states)]
        finish_function(self.function, results)
        verify(self.module)
        self.run = Executable(self.function)

    @torch.no_grad()
    def step(self, gradients):
        if self.plan.structure() != self.structure:
            self.build()
        names = list(self.plan.parameters)
        inputs = [self.parameters[n].detach() for n in names] + [gradients[n] for n in names]
        for slot in self.slots:
            value = self.plan.read(slot)
            if not isinstance(value, torch.Tensor) or slot.kind == "hyper":
                value = torch.as_tensor(value, dtype=torch_dtype(slot.type.element)).reshape(slot.type.shape)
            inputs.append(value)
        missing = {n: self.plan.initialise(n) for n in names}
        results = self.run(inputs)
        for name, state in missing.items():
            if state:
                self.optimizer.state[self.parameters[name]].update(state)
        for target, value in zip(self.targets, results, strict=True):
            if target[0] == "parameter":
                self.parameters[target[1]].copy_(value)
            else:
                _, name, key = target
                entry = self.optimizer.state[self.parameters[name]]
                if isinstance(entry[key], torch.Tensor):
                    assert entry[key].dtype == value.dtype and entry[key].shape == value.shape
                    entry[key].copy_(value)
                else:
                    entry[key] = type(entry[key])(value.item())
        self.plan.finish()


def random_parameters(shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        f"p{i}": torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for i, shape in enumerate(shapes)
    }


def random_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(1000 + seed)
    draw = {n: torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in parameters.items()}
    return {n: g.to(parameters[n].dtype) for n, g in draw.items()}


def clone_parameters(parameters):
    return {n: torch.nn.Parameter(p.detach().clone()) for n, p in parameters.items()}


def clone_optimizer(optimizer, parameters, others):
    """A copy of the optimizer that owns `others`, state included."""
    clone = copy.deepcopy(optimizer, {id(p): others[n] for n, p in parameters.items()})
    for name, value in vars(optimizer).items():  # torch copies the state and groups only
        vars(clone).setdefault(name, value)
    return clone


def assert_near(actual, expected, tolerance, what):
    """Relative to the largest element: single elements may have cancelled."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    a, e = actual.detach().double(), expected.detach().double()
    scale = e.abs().max().item() if e.numel() else 0.0
    error = (a - e).abs().max().item() if e.numel() else 0.0
    assert torch.equal(a.isnan(), e.isnan()), f"{what}: NaN differs"
    assert error <= tolerance * scale or error == 0.0, f"{what}: off by {error:.3e} of {scale:.3e}"


def assert_same_training(ours, eager, our_optimizer, eager_optimizer, tolerance):
    for name, parameter in eager.items():
        assert_near(ours[name], parameter, tolerance, name)
        mine, theirs = our_optimizer.state.get(ours[name], {}), eager_optimizer.state.get(parameter, {})
        assert list(mine) == list(theirs), f"{name}: state {list(mine)} instead of {list(theirs)}"
        for key, value in theirs.items():
            if isinstance(value, torch.Tensor):
                assert mine[key].device == value.device and mine[key].stride() == value.stride()
                assert_near(mine[key], value, tolerance, f"{name}.{key}")
            else:
                assert type(mine[key]) is type(value) and mine[key] == value, f"{name}.{key}"


def train_both(make, shapes, dtype=torch.float64, steps=6, tolerance=None, before=None, warm=0, seed=0):
    """Trains clones with the real optimizer and with ours and compares everything after each step."""
    tolerance = tolerance if tolerance is not None else {torch.float64: 1e-12, torch.float32: 1e-6}[dtype]
    eager = random_parameters(shapes, dtype, seed)
    eager_optimizer = make(list(eager.values()))
    for i in range(warm):  # eager steps first: we resume from existing state
        for name, g in random_gradients(eager, 500 + i).items():
            eager[name].grad = g
        eager_optimizer.step()
    ours = clone_parameters(eager)
    our_optimizer = clone_optimizer(eager_optimizer, eager, ours)
    compiled = CompiledOptimizer(our_optimizer, ours)
    for i in range(steps):
        if before is not None:
            before(i, eager_optimizer)
            before(i, our_optimizer)
        gradients = random_gradients(eager, i)
        for name, g in gradients.items():
            eager[name].grad = g.clone()
        eager_optimizer.step()
        compiled.step({n: g.clone() for n, g in gradients.items()})
        assert_same_training(ours, eager, our_optimizer, eager_optimizer, tolerance)
    our_optimizer.load_state_dict(our_optimizer.state_dict())
    eager_optimizer.load_state_dict(our_optimizer.state_dict())
    return compiled
