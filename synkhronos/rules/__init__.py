"""Training rules: how ranks that make local updates combine their parameters.

A rule is a frozen dataclass. Its methods are pure functions of flat vectors: 1-d float arrays of one dtype, which the
results keep. The attribute ``engine`` names the way in which ranks exchange vectors:

``"average"``  all members of a group exchange at step numbers that are known beforehand: see `Average`
``"centre"``   each rank exchanges with a centre in shared memory, at its own pace: see `Centre`
``"gossip"``   each rank sends to random other ranks: see `Gossip`
``"none"``     a collective in every step: `BSP`

To write a rule, derive a class from `Average`:

1. `Average.begin` returns the state of one rank as a dict, of which the other methods replace entries.
2. `Average.before` returns the vector to average over the members. Default: a copy of the parameters.
3. `Average.after` gets this vector as ``sent``, the mean over the members as ``received``, and the number of steps made
   in between as ``age``. It returns the new parameters.
4. Settings are fields of a frozen dataclass. ``__post_init__`` checks them, and calls that of `Average`.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Halfway(synk.rules.Average):
...     share: float = 0.5
...     def after(self, x, sent, received, age, state):
...         return x + self.share * (received - x)
>>> rule = Halfway(every=10)
>>> rule.after(np.array([4.0]), np.array([4.0]), np.array([2.0]), 0, {})
array([3.])
"""

from synkhronos.rules.averages import BMUF, DASO, DiLoCo, Hierarchical, LocalSGD, Outer, SlowMo
from synkhronos.rules.base import BSP, Average, Rule
from synkhronos.rules.pairs import ASGD, EAMSGD, EASGD, Centre, GoSGD, Gossip

__all__ = [
    "ASGD",
    "BMUF",
    "BSP",
    "DASO",
    "EAMSGD",
    "EASGD",
    "Average",
    "Centre",
    "DiLoCo",
    "GoSGD",
    "Gossip",
    "Hierarchical",
    "LocalSGD",
    "Outer",
    "Rule",
    "SlowMo",
]
