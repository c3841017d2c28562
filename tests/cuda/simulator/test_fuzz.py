"""Random problems in the simulator, `--fuzz` of them over all directions: any layout, values, rung and order."""

from math import prod

from dualops.cuda import simulator
from tests.cuda.fuzz import Trial, trials
from tests.cuda.operators import DIRECTIONS, every_direction

MAX_ELEMENTS = {
    "softmax": 2000,
    "matmul": 400,
    "lion": 300,
    "rope": 600,
    "rope_tables": 300,
    "flash_attention": 400,
    "flash_attention_varlen": 400,
}
# of the problems that are asked for: a trial of attention or retention takes a second
SHARE = {
    "softmax": 1.0,
    "matmul": 0.3,
    "lion": 1.0,
    "rope": 1.0,
    "rope_tables": 1.0,
    "flash_attention": 0.2,
    "flash_attention_varlen": 0.2,
    "retention": 0.2,
    "retention_varlen": 0.2,
}
MOST_ROWS = 40  # a block each at worst, and a simulated thread takes some 20 microseconds between two barriers
SEED = 20


def rows(trial: Trial) -> int:
    """Rows that are reduced: the elements along axes other than the softmax's; of an attention, its queries."""
    shape = next(iter(trial.case.shapes.values()))
    return prod(shape) // max(shape[trial.case.params.get("axis", -1)], 1)


@every_direction
def test_random_problems(direction, fuzz_count):
    many = trials(direction, SEED, 100 * fuzz_count, MAX_ELEMENTS.get(direction.spec.name, 400))
    small = (trial for trial in many if rows(trial) <= MOST_ROWS)
    wanted = SHARE.get(direction.spec.name, 1.0) * fuzz_count / len(DIRECTIONS)
    ran, refused = 0, 0
    for trial in small:
        with simulator.order(trial.order):
            done = trial.run()
        ran, refused = ran + done, refused + (not done and trial.must_run)
        if ran >= wanted:
            break
    assert ran > 3 * refused


@every_direction
def test_the_trials_differ_in_everything(direction):
    made = list(trials(direction, SEED, 60, 400))
    for draw in ("rung", "way", "order", "special", "out_layout", "host", "narrow"):
        assert len({getattr(trial, draw) for trial in made}) > 1, draw
