"""A provider that runs regions by the reference of the loop dialect: fusion can be tested without a compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from wholestep.backends.providers import Offer, Provider, Region, forget_provider, register_provider
from wholestep.dialects.loop.reference import run


class Loops(Provider):
    """Point by point, in float64."""

    name = "loops"

    def claims(self, region: Region) -> str:
        return "" if region.kernel is not None else "it has no loop form"

    def offers(self, region: Region) -> list[Offer]:
        return [Offer("loops", f"loops {region.key}", made=region)]

    def build(self, offers, report=None):
        return {o.key: launcher(o.made) for o in offers}


def launcher(region: Region):
    count = len(region.operands)
    return lambda *tensors: run(region.kernel, tensors[:count], tensors[count : count + len(region.results)])


@pytest.fixture
def loops() -> Iterator[type[Loops]]:
    """The provider "loops" is known while a test runs."""
    yield register_provider(Loops)
    forget_provider("loops")
