"""The cost model: estimated times of Configs, for a GPU that may be absent, and a problem's Configs ranked by them.

architectures.py       the rates and sizes of each GPU, as data
model.py               from a kernel's work to its time: units, waits, waves, memory
attention_work.py      what attention's kernels do in a step;  attention.py: its Configs
matmul.py, retention.py
                       their Configs, and what their kernels do in a step
candidates.py          what is ranked, and compiled on request
problems.py            problems by their sizes
ranking.py             `estimate`

README.md explains how to read an estimate, what it is based on, and how much it differs from measured times.
"""

from .. import cuda as cuda  # first, since it imports `estimate` from ranking.py
from .architectures import ARCHITECTURES as ARCHITECTURES, Architecture as Architecture, architecture as architecture
from .candidates import Ranking as Ranking, build as build
from .problems import SIZES as SIZES, problem_of as problem_of
from .ranking import estimate as estimate, rankings as rankings
